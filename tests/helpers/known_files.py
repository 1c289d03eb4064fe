"""A small sample of each kind of file of ``sim.types.signatures``, and files of no known kind."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile


def _zipped(name: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(name, "a,b\n1,2\n")
    return target.getvalue()


def _tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("trace.csv"))
    return target.getvalue()


_VLLM_LOG = """\
(APIServer pid=71) INFO 11-20 10:00:01 [api_server.py:1839] vLLM API server version 0.16.0
(EngineCore_DP0 pid=90) INFO 11-20 10:00:41 [gpu_worker.py:391] Available KV cache memory: 52.11 GiB
(EngineCore_DP0 pid=90) INFO 11-20 10:00:41 [kv_cache_utils.py:1305] GPU KV cache size: 426,880 tokens
"""
_SGLANG_LOG = """\
[2026-11-20 10:00:01] server_args=ServerArgs(model_path='m', tp_size=1)
[2026-11-20 10:00:41 TP0] max_total_num_tokens=471258, chunked_prefill_size=8192
"""
_TRTLLM_LOG = "[TensorRT-LLM] TensorRT-LLM version: 1.0.0\n[TRT-LLM] [I] Max KV cache blocks per sequence: 2048\n"
_LLAMA_LOG = "llama_model_loader: loaded meta data with 30 key-value pairs\nprint_info: n_ctx_train = 131072\n"
_K6 = {"metrics": {"http_req_duration": {"avg": 1.2, "p(95)": 3.4}}, "root_group": {}}
_CHROME = {"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2}]}
_PROMETHEUS = {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "2"]]}]}}
_GPU = {"name": "x", "memory_bytes": 1, "memory_gb_per_s": 1, "fp16_tflops": 1, "pcie_gb_per_s": 1, "source": "s"}
_LLMPERF = [{"ttft_s": 0.1, "end_to_end_latency_s": 1.0, "number_output_tokens": 10, "number_input_tokens": 100}]
_INFERENCE_PERF = "api:\n  type: completion\ndata:\n  type: random\nload:\n  type: constant\n"
_OTLP = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "gen_ai.client.token.usage"}]}]}]}
_COMPOSE = "services:\n  vllm:\n    image: vllm/vllm-openai:v0.16.0\n"
_KUBERNETES = "apiVersion: apps/v1\nkind: Deployment\nspec: {}\n"
_LOCUST = "Type,Name,Request Count,Failure Count,Median Response Time\nPOST,/v1,10,0,5\n"
_MLPERF = "================================================\nMLPerf Results Summary\n================\nSUT name : x\n"
_AIBRIX = '{"timestamp": 0, "requests": [{"Prompt Length": 5, "Output Length": 6, "prompt": "x"}]}\n'
_VIDUR_METRICS = "Request Id,request_e2e_time,request_num_prefill_tokens,request_num_decode_tokens\n0,1.0,5,6\n"
_SGLANG_RESULT = '{"backend": "sglang", "request_rate": 4.0, "total_output_tokens_retokenized": 9, "input_lens": [5]}\n'
_TRTLLM_LINE = "trtllm-serve meta-llama/Llama-3.1-8B --port 8000\n"
_SGLANG_LINE = "CUDA_VISIBLE_DEVICES=0 python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B\n"
_SERVEGEN = '{"request_id": 0, "type": "text", "input_length": 46, "hash_ids": [1, 2, 3]}\n'
_LMSYS = '{"conversation_id": "a", "model": "m", "conversation": [{"content": "Hi", "role": "user"}], "turn": 1}\n'
_K6_LINES = '{"type":"Metric","data":{"name":"http_reqs","type":"counter","contains":"default","thresholds":[]},"metric":"http_reqs"}\n'
_GENERATION = {"bos_token_id": 1, "do_sample": True, "eos_token_id": 2, "transformers_version": "4.40.0"}
_RAGPULSE = {"timestamp": "0", "input_length": 7, "output_length": 9, "hash_ids": {"sys_prompt": [8]}}
_TIMED = {"timestamp": 0, "input_length": 7, "output_length": 9, "hash_ids": [1]}
_BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 7, "output_length": 9}

#: What a file is, its name, and its content.
SAMPLES: tuple[tuple[str, str, str | bytes], ...] = (
    ("a recording of fragmeter.probe", "probe.jsonl", '{"fragmeter_probe": 3, "vllm": "0.16.0"}\n'),
    ("a load of traces synth", "load.json", '{"fragmeter_load": 1, "name": "x"}\n'),
    ("Azure's LLM inference trace", "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"),
    ("a BurstGPT trace", "b.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"),
    ("a trace of Vidur", "v.csv", "num_prefill_tokens,num_decode_tokens\n5,6\n"),
    ("a trace of Splitwise's simulator", "s.csv", "request_id,arrival_timestamp,prompt_size,token_size\n0,0.1,5,6\n"),
    ("a Qwen-Bailian trace", "q.jsonl", json.dumps(_BAILIAN)),
    ("a RAGPulse trace", "r.jsonl", json.dumps(_RAGPULSE)),
    ("a Mooncake or timed_trace file", "m.jsonl", json.dumps(_TIMED)),
    ("an export of AIPerf", "a.jsonl", '{"metadata": {"request_start_ns": 1}, "metrics": {}}\n'),
    ("a result of SGLang's bench_serving", "bench.jsonl", _SGLANG_RESULT),
    ("a result of vllm bench serve", "bench.json", '{"date": "x", "input_lens": [5], "output_lens": [6]}'),
    ("a report of GuideLLM", "benchmarks.json", '{"benchmarks": [{"requests": {}}]}'),
    ("conversations of ShareGPT", "s.json", '[{"id": "a", "conversations": [{"from": "human", "value": "Hi"}]}]'),
    ("a summary of AIPerf", "profile_export_aiperf.json", '{"aiperf_version": "0.6.0", "request_latency": {"avg": 5.0}}'),
    ("a summary of inference-perf", "summary_lifecycle_metrics.json", '{"load_summary": {"count": 5}, "successes": {}}'),
    ("a result of InferenceX", "agg.json", '{"hw": "h200", "tput_per_gpu": 5.0, "conc": 4}'),
    ("a report of inference-perf's requests", "per_request.json", '[{"start_time": 1.0, "end_time": 2.0, "info": {}}]'),
    ("spans of OpenTelemetry or Jaeger", "spans.json", '{"resourceSpans": [{"scopeSpans": [{"spans": []}]}]}'),
    ("observations of Langfuse", "o.json", '{"data": [{"id": "a", "startTime": "2026", "usageDetails": {"input": 5}}]}'),
    ("a batch of requests or of answers", "batch.jsonl", '{"custom_id": "a", "method": "POST", "url": "/v1", "body": {}}\n'),
    (
        "conversations of vLLM's multi-turn benchmark", "s.json",
        '[{"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]',
    ),
    (
        "conversations of vLLM's multi-turn benchmark", "generate_multi_turn.json",
        '{"filetype": "generate_conversations", "num_conversations": 2, "text_files": [], "prompt_input": {"num_turns":'
        ' {"distribution": "constant", "value": 4}, "prefix_num_tokens": {"distribution": "constant", "value": 10}, "num_tokens":'
        ' {"distribution": "constant", "value": 5}}, "prompt_output": {"num_tokens": {"distribution": "constant", "value": 5}}}',
    ),
    ("a session of an agent", "s.json", '{"id": "a", "block_size": 64, "requests": [{"t": 0.0, "hash_ids": [1]}]}'),
    ("a table or log of requests", "t.csv", "prompt_tokens,output_tokens\n5,6\n"),
    ("a table or log of requests", "t.jsonl", '{"id": "x", "usage": {"prompt_tokens": 5, "completion_tokens": 6}}\n'),
    ("a Parquet file", "t.parquet", b"PAR1\x15\x04"),
    ("a pickle", "t.pkl", b"\x80\x04]."),
    ("a run.json of fragmeter", "run.json", '{"schema_version": 2, "versions": {"fragmeter": "0.2.0"}}'),
    ("a summary of a fragmeter run", "summary.json", '{"duration": 1.0, "request_throughput_while_arriving": 2.0}'),
    ("a sweep of fragmeter", "sweep.json", '{"grid": {"seed": ["1"]}, "points": 1, "failed": 0, "rows": []}'),
    ("a diagnosis of fragmeter", "d.json", '{"diagnosis": "Healthy", "state": "healthy", "causes": []}'),
    ("a plan of fragmeter", "p.json", '{"model": "m", "gpu": "g", "num_gpus": 1, "replicas": 1, "kv_cache_dtype": "auto"}'),
    ("the marker of a fragmeter result", "fragmeter.json", '{"schema_version": 1, "kind": "sweep"}'),
    ("the data sheet of a GPU", "gpu.json", json.dumps(_GPU)),
    ("a model's config.json", "config.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'),
    ("a generation_config.json", "generation_config.json", json.dumps(_GENERATION)),
    ("a generation_config.json", "generation_config.json", '{"_from_model_config": true, "eos_token_id": 2}'),
    ("a tokenizer.json", "tokenizer.json", '{"version": "1.0", "added_tokens": [{"id": 0}], "normalizer": null}'),
    ("a tokenizer_config.json", "tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
    ("the index of a safetensors checkpoint", "i.json", '{"metadata": {"total_size": 1}, "weight_map": {"a": "b"}}'),
    ("a file of safetensors", "model.safetensors", b'\x10\0\0\0\0\0\0\0{"a": 1}'),
    ("ModelOpt's hf_quant_config.json", "hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'),
    ("a LoRA adapter's configuration", "adapter_config.json", '{"peft_type": "LORA", "r": 16}'),
    ("weights as GGUF", "m.gguf", b"GGUF\3\0\0\0"),
    ("a start-up log of vLLM", "server.log", _VLLM_LOG),
    ("a log of SGLang", "server.log", _SGLANG_LOG),
    ("a log of TensorRT-LLM", "server.log", _TRTLLM_LOG),
    ("a log of llama.cpp", "server.log", _LLAMA_LOG),
    ("metrics of vLLM", "metrics.txt", '# TYPE python_info gauge\nvllm:num_requests_running{engine="0"} 1.0\n'),
    ("metrics of SGLang", "metrics.txt", '1700000000\nsglang:num_running_reqs{model_name="m"} 1.0\n'),
    ("metrics of llama.cpp's server", "metrics.txt", "# HELP llamacpp:requests_processing x\nllamacpp:requests_processing 1\n"),
    ("metrics of Text Generation Inference", "metrics", "# TYPE tgi_queue_size gauge\ntgi_queue_size 0\n"),
    ("metrics of TensorRT-LLM or Triton", "metrics", "# TYPE nv_trt_llm_kv_cache_block_metrics gauge\nnv_x{a=\"b\"} 0\n"),
    ("metrics of something else than an LLM server", "metrics", "# TYPE node_load1 gauge\nnode_load1 0.5\n"),
    ("the answer to a Prometheus query", "query.json", json.dumps(_PROMETHEUS)),
    ("a dashboard of Grafana", "dashboard.json", '{"panels": [], "schemaVersion": 39}'),
    ("an output of nvidia-smi", "gpu.csv", "timestamp, utilization.gpu [%], memory.used [MiB]\n2026/11/20, 5 %, 6 MiB\n"),
    ("an output of nvidia-smi", "gpu.txt", "Thu Nov 20\n+------+\n| NVIDIA-SMI 580.1  Driver Version: 580.1 |\n"),
    ("a trace of kernels by a profiler", "trace.json", json.dumps(_CHROME)),
    ("a report of NVIDIA Nsight", "report1.nsys-rep", b"\0\1\2"),
    ("metrics of OpenTelemetry", "otlp.json", json.dumps(_OTLP)),
    ("individual responses of LLMPerf", "x_individual_responses.json", json.dumps(_LLMPERF)),
    ("a summary of LLMPerf", "x_summary.json", '{"version": "1", "mean_input_tokens": 550, "num_concurrent_requests": 1}'),
    ("a load of LLMServingSim", "l.jsonl", '{"input_toks": 5, "output_toks": 6, "arrival_time_ns": 0}\n'),
    ("request metrics of Vidur", "request_metrics.csv", _VIDUR_METRICS),
    ("a workload of AIBrix", "w.jsonl", _AIBRIX),
    ("a trace of prompts alone (ServeGen's offline traces a to c)", "trace_a.jsonl", _SERVEGEN),
    ("conversations with roles (LMSYS, WildChat, OpenAI's messages)", "lmsys.jsonl", _LMSYS),
    ("conversations with roles (LMSYS, WildChat, OpenAI's messages)", "chat.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}\n'),
    ("a file of genai-perf", "profile.json", '{"experiments": [{"requests": []}], "version": "", "service_kind": "openai"}'),
    ("statistics of Locust", "x_stats.csv", _LOCUST),
    ("a history of Locust", "x_stats_history.csv", "Timestamp,User Count,Type,Name,Requests/s\n1,2,,Aggregated,0.5\n"),
    ("a summary of k6", "k6.json", json.dumps(_K6)),
    ("an output of k6", "k6.jsonl", _K6_LINES),
    ("an output of k6", "k6.jsonl", '{"type":"Point","data":{"time":"2026","value":1},"metric":"http_reqs"}\n'),
    ("a summary of MLPerf's load generator", "mlperf_log_summary.txt", _MLPERF),
    ("a log of MLPerf", "mlperf_log_detail.txt", ':::MLLOG {"key": "loadgen_version", "value": "5.0"}\n'),
    ("an accuracy log of MLPerf", "mlperf_log_accuracy.json", '[\n{ "seq_id" : 0, "qsl_idx" : 5, "data" : "00" }]'),
    ("a Jupyter notebook", "n.ipynb", '{"cells": [], "nbformat": 4}'),
    ("a Kubernetes object", "deployment.yaml", _KUBERNETES),
    ("a docker compose file", "compose.yaml", _COMPOSE),
    ("a configuration of inference-perf", "config.yml", _INFERENCE_PERF),
    ("a vllm serve line", "serve.sh", "#!/bin/bash\nexport A=b\nvllm serve meta-llama/Llama-3.1-8B --port 8000\n"),
    ("a vllm serve line", "run.sh", "docker run --gpus all \\\n  vllm/vllm-openai:v0.16.0 --model m\n"),
    ("a command line of SGLang", "serve.sh", _SGLANG_LINE),
    ("a command line of SGLang", "run.sh", "docker run --gpus all lmsysorg/sglang:latest python3 -m sglang.launch_server --model m\n"),
    ("a command line of TensorRT-LLM", "serve.sh", _TRTLLM_LINE),
    ("a command line of TGI", "serve.sh", "text-generation-launcher --model-id m --num-shard 2\n"),
    ("a command line of TGI", "run.sh", "docker run ghcr.io/huggingface/text-generation-inference:3.3 --model-id m\n"),
    ("a command line of llama.cpp's server", "serve.sh", "LLAMA_ARG_PORT=1 ./build/bin/llama-server -m x-Q4_K_M.gguf -c 4096\n"),
    ("a command line of llama.cpp's server", "run.sh", "docker run ghcr.io/ggml-org/llama.cpp:server-cuda -m x-Q8_0.gguf\n"),
    ("a Git LFS pointer", "t.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n"),
    ("an HTML page", "t.csv", "\n<!DOCTYPE html>\n<html><body>prompt_tokens,output_tokens</body></html>\n"),
    ("an XML file", "t.xml", "<?xml version='1.0'?><a/>"),
    ("an Excel workbook", "t.xlsx", _zipped("xl/workbook.xml")),
    ("a zip archive", "t.zip", _zipped("t.csv")),
    ("a tar archive", "t.tar", _tar()),
    ("a gzip file", "t.gz", gzip.compress(b"a,b\n")),
    ("a Zstandard file", "t.zst", b"\x28\xb5\x2f\xfd\x20"),
    ("a bzip2 file", "t.bz2", b"BZh91AY"),
    ("an xz file", "t.xz", b"\xfd7zXZ\0"),
    ("a 7z archive", "t.7z", b"7z\xbc\xaf\x27\x1c"),
    ("a SQLite database", "t.sqlite", b"SQLite format 3\0"),
    ("an HDF5 file", "t.h5", b"\x89HDF\r\n"),
    ("an Arrow file", "t.arrow", b"ARROW1\0\0"),
    ("a PDF", "t.pdf", b"%PDF-1.7"),
    ("a picture", "t.png", b"\x89PNG\r\n"),
)  # fmt: skip

#: Files of no known kind, with words of known ones in their values.
UNKNOWN: tuple[tuple[str, str], ...] = (
    ("a.csv", "colour,weight,price\nred,5,6\n"),
    ("a.csv", 'name,text\n5,"run vllm serve m; GPU blocks, apiVersion, vllm:x 1"\n'),
    ("a.json", '{"colour": "red", "weight": [1, 2], "note": "vllm serve m and GPU KV cache size: 5 tokens"}'),
    ("a.json", '[{"colour": "red"}, {"prompt_tokens": 5, "output_tokens": 6}]'),
    ("a.jsonl", '{"resourceType": 1}\n{"traceEvents": 2}\n'),
    ("a.txt", "Dear all,\nwe run vllm serve on each node, with services: none.\n"),
    ("a.yaml", "colour: red\nweights:\n  - 5\n"),
    ("a.toml", "[service]\nname = 'x'\n"),
)
