"""The flags of ``vllm serve``, by what they mean for memory: as of vLLM 0.33, with names that have gone since 0.8."""

from __future__ import annotations

#: Flags that are read, and whether they take a value.
READ = {
    "model": True,
    "hf-config-path": True,
    "max-model-len": True,
    "tensor-parallel-size": True,
    "pipeline-parallel-size": True,
    "data-parallel-size": True,
    "dtype": True,
    "quantization": True,
    "kv-cache-dtype": True,
    "gpu-memory-utilization": True,
    "kv-cache-memory-bytes": True,
    "num-gpu-blocks-override": True,
    "block-size": True,
    "max-num-seqs": True,
    "max-num-batched-tokens": True,
    "enforce-eager": False,
    "enable-prefix-caching": False,
    "enable-chunked-prefill": False,
    "disable-hybrid-kv-cache-manager": False,
}

SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
    "kv-cache-memory": "kv-cache-memory-bytes",
    "O": "optimization-level",
    "cc": "compilation-config",
    "sc": "speculative-config",
    "dcp": "decode-context-parallel-size",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "r": "node-rank",
}

#: What these change is not reckoned: name, whether a value follows, what it is.
NOT_SIMULATED = {
    "speculative-config": (True, "a draft model takes memory and slots"),
    "speculative-model": (True, "a draft model takes memory and slots"),
    "num-speculative-tokens": (True, "a draft model takes memory and slots"),
    "enable-lora": (False, "adapters take memory"),
    "max-loras": (True, "adapters take memory"),
    "max-lora-rank": (True, "adapters take memory"),
    "max-cpu-loras": (True, "adapters take memory"),
    "lora-modules": (True, "adapters take memory"),
    "cpu-offload-gb": (True, "weights on the host leave more for the KV cache"),
    "kv-offloading-size": (True, "a KV cache on the host"),
    "kv-offloading-backend": (True, "a KV cache on the host"),
    "kv-transfer-config": (True, "a KV cache that is moved or kept elsewhere"),
    "decode-context-parallel-size": (True, "ranks that divide the tokens of a sequence"),
    "prefill-context-parallel-size": (True, "ranks that divide the tokens of a sequence"),
    "hf-overrides": (True, "changes to the model's configuration"),
    "limit-mm-per-prompt": (True, "an encoder takes memory"),
    "mm-processor-kwargs": (True, "an encoder takes memory"),
    "mm-encoder-tp-mode": (True, "an encoder takes memory"),
    "mm-processor-cache-gb": (True, "an encoder takes memory"),
    "rope-scaling": (True, "longer positions; give --max-model-len"),
    "kv-cache-dtype-skip-layers": (True, "layers with a KV cache of 16 bit"),
    "runner": (True, "pooling models"),
    "task": (True, "pooling models"),
    "convert": (True, "pooling models"),
    "compilation-config": (True, "other CUDA graphs"),
    "cudagraph-capture-sizes": (True, "other CUDA graphs"),
    "max-cudagraph-capture-size": (True, "other CUDA graphs"),
    "optimization-level": (True, "other CUDA graphs"),
    "performance-mode": (True, "other defaults of --max-num-seqs and --max-num-batched-tokens"),
    "enable-dbo": (False, "two batches at once"),
    "enable-eplb": (False, "copies of experts take memory"),
    "num-redundant-experts": (True, "copies of experts take memory"),
    "enable-sleep-mode": (False, "an allocator of its own"),
}

#: Flags with a value that change neither memory nor what is scheduled.
IGNORED = set(
    """
    additional-config allowed-headers allowed-local-media-path allowed-media-domains allowed-methods allowed-origins
    api-key api-server-count attention-backend attention-config block-log-stats-interval chat-template
    chat-template-content-format code-revision collect-detailed-traces config-format data-parallel-address
    data-parallel-backend data-parallel-rank data-parallel-rpc-port data-parallel-size-local
    data-parallel-start-rank default-chat-template-kwargs default-mm-loras device distributed-executor-backend
    download-dir all2all-backend expert-placement-strategy generation-config grace-period guided-decoding-backend
    hf-token host ignore-patterns kernel-config kv-events-config load-format log-config-file logits-processor-pattern
    logits-processors logprobs-mode long-prefill-token-threshold mamba-block-size mamba-cache-dtype
    mamba-cache-mode mamba-ssm-cache-dtype master-addr master-port max-log-len max-logprobs
    max-long-partial-prefills max-num-partial-prefills max-parallel-loading-workers max-seq-len-to-capture
    middleware model-impl model-loader-extra-config moe-backend nnodes node-rank ngram-prompt-lookup-max
    num-scheduler-steps observability-config otlp-traces-endpoint override-attention-dtype
    override-generation-config port preemption-mode prefix-caching-hash-algo prefix-match-unit pt-load-map-location
    ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin response-role revision root-path
    safetensors-load-strategy scheduler-cls scheduling-policy seed served-model-name show-hidden-metrics-for-version
    shutdown-timeout ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile stream-interval
    structured-outputs-config swap-space tokenizer tokenizer-mode tokenizer-revision tool-call-parser
    tool-parser-plugin tool-server uds uvicorn-log-level v1-scheduler worker-cls worker-extension-cls
    """.split()
)

#: Flags without a value that change neither.
IGNORED_SWITCHES = set(
    """
    allow-credentials allow-deprecated-quantization async-scheduling calculate-kv-scales data-parallel-external-lb
    data-parallel-hybrid-lb disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing disable-log-requests
    disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
    enable-auto-tool-choice enable-expert-parallel enable-force-include-usage enable-log-outputs enable-log-requests
    enable-logging-iteration-details enable-mfu-metrics enable-offline-docs enable-prompt-embeds
    enable-prompt-tokens-details enable-request-id-headers enable-response-messages enable-return-routed-experts
    enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    exclude-tools-when-tool-choice-none flashinfer-autotune enable-flashinfer-autotune headless
    interleave-mm-strings kv-cache-metrics language-model-only log-error-stack return-tokens-as-token-ids
    skip-mm-profiling skip-tokenizer-init trust-remote-code trust-request-chat-template use-tqdm-on-load
    use-v2-block-manager
    """.split()
)

#: Flags that take every word up to the next flag.
MANY = {
    "allowed-headers",
    "api-key",
    "cudagraph-capture-sizes",
    "default-mm-loras",
    "disable-access-log-for-endpoints",
    "kv-cache-dtype-skip-layers",
    "logits-processors",
    "lora-modules",
    "middleware",
    "served-model-name",
}

VALUED = IGNORED | {name for name, takes in READ.items() if takes}
VALUED |= {name for name, (takes, _) in NOT_SIMULATED.items() if takes}
SWITCHES = {name for name in READ if name not in VALUED} | IGNORED_SWITCHES | (NOT_SIMULATED.keys() - VALUED)
KNOWN = sorted(VALUED | SWITCHES | {"config"})
