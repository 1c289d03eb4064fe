"""The flags of ``vllm serve`` by release, as vLLM's own parsers have them, and what becomes of each here.

``facts/flags.json`` is written by ``tests/real_vllm/flags.py`` from the parser of the newest release and the sources of older ones, from
0.8 on. Each flag is simulated, or has no effect on memory, scheduling and step times, or is not simulated, with the reason. What is
not simulated and takes memory, or changes which tokens are there, changes the answer to whether a line starts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...sim.spec.kernels import EXPERTS_VARIABLES

Release = tuple[int, int]
#: Flags with their first and last releases and kinds, and their other spellings.
FILE = Path(__file__).with_name("facts") / "flags.json"

#: Flags that are simulated.
READ = frozenset(
    """
    all2all-backend async-scheduling attention-backend attention-config block-size cpu-offload-gb data-parallel-size decode-context-parallel-size disable-hybrid-kv-cache-manager dtype
    enable-chunked-prefill enable-eplb enable-expert-parallel enable-lora enable-prefix-caching enforce-eager eplb-config eplb-window-size gpu-memory-utilization
    hf-config-path
    kv-cache-dtype kv-cache-memory-bytes kv-offloading-backend kv-offloading-size language-model-only
    limit-mm-per-prompt
    long-prefill-token-threshold long-prefill-token-threshold-adaptive mamba-block-size mamba-cache-dtype mamba-cache-mode
    mamba-ssm-cache-dtype lora-target-modules max-lora-rank max-loras max-model-len max-num-active-seqs max-num-batched-tokens
    max-num-seqs model moe-backend num-gpu-blocks-override num-redundant-experts pipeline-parallel-size prefill-schedule-interval quantization
    scheduler-reserve-full-isl spec-method spec-model spec-tokens speculative-config tensor-parallel-size watermark
    """.split()
)

#: Flags that are not simulated and change the KV cache, or what is served from it, by reason.
_CHANGES_MEMORY = {
    "a draft model takes memory and slots": "speculative-model num-speculative-tokens ngram-prompt-lookup-max",
    "adapters take memory": """lora-dtype lora-extra-vocab-size
        max-lora-cls-labels fully-sharded-loras enable-lora-bias enable-mixed-moe-lora-format
        enable-moe-shared-loras enable-tower-connector-lora long-lora-scaling-factors qlora-adapter-name-or-path
        specialize-active-lora default-mm-loras enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token prompt-adapters""",
    "weights on the host leave more for the KV cache": """cpu-offload-params offload-backend offload-group-size
        offload-num-in-group offload-params offload-prefetch-step""",
    "a KV cache that is moved or kept elsewhere": "kv-transfer-config",
    "ranks that divide the tokens of a prompt": "prefill-context-parallel-size",
    "changes to the model's configuration": "hf-overrides model-class-overrides",
    "an encoder takes memory": """mm-processor-kwargs mm-encoder-tp-mode mm-encoder-attn-backend
        mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
        mm-encoder-fp8-scale-save-path mm-encoder-only mm-ipc-gpu-memory-gb mm-device-do-normalize mm-processor-device
        skip-mm-profiling video-pruning-method video-pruning-rate ec-manager-config ec-transfer-config
        enable-multimodal-encoder-data-parallel""",
    "longer positions; give --max-model-len": "rope-scaling rope-theta",
    "layers with a KV cache of 16 bit": "kv-cache-dtype-skip-layers",
    "number formats of weights by layer": "quantization-config",
    "states kept at other ends of blocks": """enable-mamba-fine-grained-prefix-cache
        enable-mamba-shared-prefix-checkpoint prefix-cache-retention-interval use-replayssm replayssm-buffer-len""",
    "pooling models": """runner task convert pooler-config override-pooler-config use-gpu-for-pooling-score
        enable-flash-late-interaction""",
    "diffusion models": "diffusion-config",
    "tables of n-grams take memory": "engram-config",
    "an allocator of its own": """enable-sleep-mode enable-cumem-allocator enable-nccl-comm-suspend sleep-mode-backend
        sleep-mode-offload-cudagraph sleep-preserve-parameter-names""",
    "sequences of up to the window alone": "disable-sliding-window",
    "windows that are computed again": "swa-bounded-replay",
    "other defaults of --max-num-seqs and --max-num-batched-tokens": "performance-mode",
    "a buffer of tokens for each request": "enable-trace-replay",
}
#: Flags that are not simulated and leave the KV cache as it is: they change times, or the order of requests, by reason.
_CHANGES_TIMES = {
    "ranks that divide a sequence gather queries and add up outputs, as by default": "dcp-comm-backend dcp-q-replicate",
    "the facts are those of the preset, or of the repository's main branch": "revision",
    "adapters take time": "lora-modules max-cpu-loras",
    "steps take the time of vLLM's own CUDA graphs; their memory is counted": """compilation-config cudagraph-capture-sizes cuda-graph-sizes max-cudagraph-capture-size
        optimization-level""",
    "two batches at once": "enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size",
    "kernels are those that vLLM chooses": """kernel-config
        model-impl override-attention-dtype enable-flashinfer-autotune enable-batch-sharded-sampling
        enable-bf16x3-router-gemm enable-hc-sp gdn-prefill-backend ir-op-priority kda-decode-backend kda-prefill-backend
        linear-backend mamba-backend mamba-ssu-algorithm mamba-cache-philox-rounds enable-mamba-cache-stochastic-rounding
        monokernel sparse-indexer-topk-backend use-fp64-gumbel""",
    "all-reduces are vLLM's own": "disable-custom-all-reduce",
    "engines that wait for each other": "disable-nccl-for-dp-synchronization dp-sync-interval",
    "more than 8 GPUs are several nodes, fewer are one": "nnodes",
    "the host's time is that of vLLM's default": """distributed-executor-backend disable-async-output-proc numa-bind
        numa-bind-cpus numa-bind-nodes enable-shm-tensor-arena""",
    "time outside of the engine": "api-server-count",
    "every token is sent by itself": "stream-interval",
    "layers that skip a prompt's tokens": "kv-sharing-fast-prefill",
    "hits of the prefix cache in other units": "prefix-match-unit",
    "a scheduler of its own": "scheduler-cls",
    "another scheduler of the V0 engine": "num-lookahead-slots scheduler-delay-factor num-scheduler-steps multi-step-stream-outputs",
    "priorities of requests": "scheduling-policy",
    "requests that the API server rejects": "max-num-queued-reqs max-num-queued-tokens",
    "a smaller budget of a step than --max-num-batched-tokens": "max-num-scheduled-tokens",
}
#: Flags without an effect on memory, scheduling or step times.
IGNORED = frozenset(
    """
    additional-config aggregate-engine-logging allow-credentials allow-deprecated-quantization allowed-headers
    allowed-local-media-path allowed-media-domains allowed-methods allowed-origins anthropic-disabled-thinking-effort api-key
    aux-output-config calculate-kv-scales chat-template chat-template-content-format code-revision
    cohere-format cohere-is-reasoning-model collect-detailed-traces config-format cp-kv-cache-interleave-size
    cpu-distributed-timeout-seconds cudagraph-metrics custom-histogram-buckets data-parallel-address data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port
    dcp-kv-cache-interleave-size default-chat-template-kwargs device device-ids disable-access-log-for-endpoints
    disable-cascade-attn disable-chunked-mm-input disable-fastapi-docs disable-frontend-multiprocessing disable-log-requests
    disable-log-stats disable-mm-preprocessor-cache disable-uvicorn-access-log distributed-timeout-seconds download-dir
    dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s elastic-ep-max-dp-size
    enable-auto-tool-choice enable-elastic-ep enable-ep-weight-filter enable-fault-tolerance enable-force-include-usage
    enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details
    enable-mfu-metrics enable-mm-embeds enable-offline-docs enable-per-request-metrics enable-prompt-embeds
    enable-prompt-tokens-details enable-reasoning enable-request-id-headers enable-return-routed-experts enable-scale-out enable-server-load-tracking enable-ssl-refresh
    enable-tokenizer-info-endpoint exclude-tools-when-tool-choice-none expand-tools-even-if-tool-choice-none
    eplb-log-balancedness eplb-step-interval expert-placement-strategy fail-on-environ-validation fault-tolerance-config fingerprint-mode fingerprint-value
    generation-config grpc grpc-port guided-decoding-backend guided-decoding-disable-additional-properties
    guided-decoding-disable-any-whitespace guided-decoding-disable-fallback h11-max-header-count
    h11-max-incomplete-event-size headless hf-token host ignore-patterns interleave-mm-strings io-processor-plugin
    jit-monitor-mode jit-monitor-verbose kv-cache-metrics kv-cache-metrics-sample kv-events-config load-format
    log-config-file log-error-stack log-level logging-config logits-processor-pattern logits-processors logprobs-mode
    master-addr master-port max-log-len max-logprobs max-long-partial-prefills max-num-partial-prefills
    max-parallel-loading-workers max-seq-len-to-capture media-io-kwargs middleware mm-hasher-algorithm
    mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-tensor-ipc model-loader-extra-config node-rank
    otlp-traces-endpoint override-generation-config override-neuron-config
    per-request-spec-decode-metrics port preemption-mode prefix-caching-hash-algo profiler-config pt-load-map-location
    ray-workers-use-nsight reasoning-config reasoning-effort-map reasoning-parser reasoning-parser-plugin
    renderer-num-workers response-role return-sampling-mask return-tokens-as-token-ids root-path safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads seed served-model-name show-hidden-metrics-for-version
    shutdown-timeout skip-tokenizer-init sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers
    ssl-keyfile structured-outputs-config swap-space tokenizer tokenizer-mode tokenizer-pool-extra-config
    tokenizer-pool-size tokenizer-pool-type tokenizer-revision tokens-only tool-call-parser tool-parser-plugin tool-server
    tool-strict-level trust-remote-code trust-request-chat-template trust-request-mm-kwargs uds use-tqdm-on-load
    use-v2-block-manager uvicorn-log-level watchdog-config watermark-config weight-transfer-config worker-cls
    worker-extension-cls
    """.split()
)
#: The reason of each flag that is not simulated, and those of them that change memory.
NOT_SIMULATED = {
    name: why for group in (_CHANGES_MEMORY, _CHANGES_TIMES) for why, names in group.items() for name in names.split()
}
CHANGES_MEMORY = frozenset(name for names in _CHANGES_MEMORY.values() for name in names.split())
#: Values with which one of them changes nothing.
UNCHANGED = {
    "runner": ("auto", "generate"), "task": ("auto", "generate"), "convert": ("auto", "none"),
    "performance-mode": ("balanced", "throughput"),
}  # fmt: skip

#: Environment variables that are simulated, and those that are not and change the answer, by reason.
READ_VARIABLES = frozenset(
    """
    VLLM_ALL2ALL_BACKEND VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ATTENTION_BACKEND VLLM_DEEPEP_BUFFER_SIZE_MB
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_PP_LAYER_PARTITION VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_V1
    """.split()
) | frozenset(EXPERTS_VARIABLES)
_VARIABLES = {
    "a KV cache of whole heads in place of latent vectors": "VLLM_MLA_DISABLE",
    "a server on a CPU": "VLLM_CPU_KVCACHE_SPACE VLLM_TARGET_DEVICE",
    "another model runner": "VLLM_USE_V2_MODEL_RUNNER",
    "buffers of its kernels take memory": """VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_FUSED_MOE_CHUNK_SIZE VLLM_MOE_DP_CHUNK_SIZE VLLM_USE_NCCL_SYMM_MEM""",
    "embeddings on every rank": "VLLM_REPLICATE_EMBED",
    "windows without the hybrid KV cache manager": "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
}
VARIABLES = {name: why for why, names in _VARIABLES.items() for name in names.split()}
#: Those that leave the KV cache as it is and change times, by reason.
_VARIABLES_OF_TIMES = {
    "kernels are those that vLLM chooses": """VLLM_DISABLED_KERNELS VLLM_USE_TRITON_AWQ VLLM_NVFP4_GEMM_BACKEND
        VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD VLLM_BATCH_INVARIANT
        VLLM_USE_HW_AGNOSTIC VLLM_GDN_DECODE_KERNEL VLLM_USE_FLASHINFER_MOE_INT4""",
    "all-reduces are vLLM's own": """VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER
        VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_DISABLE_PYNCCL VLLM_SKIP_P2P_CHECK""",
    "its own copies between GPU and host": "VLLM_USE_SIMPLE_KV_OFFLOAD",
}
VARIABLES_OF_TIMES = {name: why for why, names in _VARIABLES_OF_TIMES.items() for name in names.split()}

#: Flags of releases before 0.8, all with a value.
_OLDER = ("ngram-prompt-lookup-max", "num-speculative-tokens", "speculative-model")


class Flag(NamedTuple):
    """A flag of vLLM's parser.

    Attributes:
        first, last: Releases that have it; None for one before 0.8, and for the newest.
        kind: "switch", "value", or "values" for all words up to the next flag.
    """

    first: Release | None
    last: Release | None
    kind: str

    def is_of(self, release: Release) -> bool:
        """Whether a release has it; those before the oldest that was read are taken for that one."""
        return (self.first is None or self.first <= max(release, releases()[0])) and (
            self.last is None or release <= self.last
        )

    @property
    def range_text(self) -> str:
        """The releases that have it, as text."""
        since = None if self.first in (None, releases()[0]) else f"since {text_of_release(self.first)}"
        until = None if self.last is None else f"up to {text_of_release(self.last)}"
        return ", ".join(filter(None, (since, until))) or "of all releases"


def text_of_release(release: Release | None) -> str:
    """A release as ``0.16``; empty for None."""
    return "" if release is None else ".".join(map(str, release))


@cache
def _content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


@cache
def releases() -> list[Release]:
    """The releases that were read, the oldest first."""
    return [_release(each) for each in _content()["releases"]]


@cache
def flags() -> dict[str, Flag]:
    """All flags by name."""
    oldest = releases()[0]
    found = {
        name: Flag(_release(first), None if last is None else _release(last), kind)
        for name, (first, last, kind) in _content()["flags"].items()
    }
    return found | {name: Flag(None, oldest, "value") for name in _OLDER}


@cache
def spellings() -> dict[str, str]:
    """Flags by their other spellings, such as ``tp``."""
    found: dict[str, str] = _content()["spellings"]
    return found


def _release(text: object) -> Release:
    major, minor = str(text).split(".")
    return int(major), int(minor)
