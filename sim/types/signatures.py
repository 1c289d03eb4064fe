"""Signatures of the field's files: what a file is, where it is read, and what to do with it elsewhere.

    head of a file -> the first signature that fits -> what it is -> read, or one line: is X, not Y; what to run

Files that a place reads are looked up first there, then all others in the order of ``SIGNATURES``: the specific before the general.
A file that none of them fits is unknown, and its reader says what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike, fspath

from .file_head import FileHead

#: Bytes that usually suffice to recognise a file.
FIRST_BYTES = 2**13
#: What is expected at each place that takes a file; a ``table`` is a trace with columns that the user names.
EXPECTED = {
    "trace": "a trace of requests",
    "table": "a trace of requests",
    "benchmark": "the result of a benchmark client",
    "rate_curve": "a CSV of start_s and request_rate",
    "metrics": "a server's response from /metrics",
    "startup_log": "a start-up log of vLLM or SGLang",
    "serve": "a server's line or a deployment file",
    "model": "a model's config.json",
    "gpu": "the data sheet of a GPU as JSON",
    "tokenizer": "a tokenizer.json",
    "probe": "a recording of fragmeter.probe",
    "prices": "prices of GPUs",
    "story": "a story as TOML",
    "check": "objectives as TOML",
    "cost": "step costs as JSON",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """How a file is recognised.

    Attributes:
        text: The mark in words, for the documentation.
        fits: Whether a file has it.
    """

    text: str
    fits: Callable[[FileHead], bool]


def begins(*magic: bytes, words: str, at: int = 0) -> Mark:
    """The file has one of these byte strings at its beginning, or at offset ``at``."""
    return Mark(words, lambda head: head.content[at:].startswith(magic))


def named(*endings: str) -> Mark:
    """The file's name ends with one of these."""
    return Mark(" or ".join(f"`{ending}`" for ending in endings), lambda head: head.name.lower().endswith(endings))


def columns(*names: str) -> Mark:
    """The first line of a CSV has all of these columns."""
    return Mark(", ".join(f"`{name}`" for name in names), lambda head: head.columns.issuperset(names))


def keys(*paths: str) -> Mark:
    """The first JSON object has all of these keys; ``a.b`` is the key ``b`` within ``a``."""
    return Mark(", ".join(f"`{path}`" for path in paths), lambda head: head.keys.issuperset(paths))


def lines(pattern: str, words: str) -> Mark:
    """A text that is no JSON matches a regular expression; ``^`` is the beginning of a line."""
    found = re.compile(pattern, re.MULTILINE)
    return Mark(words, lambda head: not head.is_json and found.search(head.text) is not None)


def either(*marks: Mark) -> Mark:
    """At least one of several marks."""
    return Mark("; or ".join(mark.text for mark in marks), lambda head: any(mark.fits(head) for mark in marks))


def both(*marks: Mark) -> Mark:
    """All of several marks."""
    return Mark("; and ".join(mark.text for mark in marks), lambda head: all(mark.fits(head) for mark in marks))


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of file.

    Attributes:
        what: What it is, with an article.
        mark: How it is recognised.
        use: What to do with it at a place that does not read it.
        read_as: Places that read it, keys of ``EXPECTED``.
        form: Title of its form in ``traces``, for tables and rows of JSON with names of their own.
    """

    what: str
    mark: Mark
    use: str
    read_as: frozenset[str] = frozenset()
    form: str = ""

    def remedy(self, place: str) -> str:
        """What to say of it at a place that does not read it."""
        return f"is {self.what}, not {EXPECTED[place]}; {self.use}"


def _read(what: str, mark: Mark, use: str, *read_as: str, form: str = "") -> Signature:
    return Signature(what, mark, use, frozenset(read_as), form)


_TRACE, _BENCHMARK = "give it as --trace", "give it as --against, --bench or --trace"
_RAW = "download the file itself"
_CLIENT = "give the client's list of requests, or any CSV of prompt_tokens,output_tokens"
_NO_REQUESTS = "it has no requests; give a CSV of arrival_s,prompt_tokens,output_tokens"
_SCRAPE = "save the server's own: while sleep 1; do date +%s; curl -s localhost:8000/metrics; done > metrics.txt"
_RESULT = "it is a result; give the trace, the line or the settings that it was made from"
_TRTLLM = "simulate --policy trtllm-no-evict with its model, --max-num-seqs and --num-gpu-blocks-override"
_UNPACK = "unpack it and give the file in it"
_BESIDE = "as a model give the config.json that lies beside it"
#: What may stand in front of a program's name.
_BEFORE = r"^\s*(?:\S+=\S+ +|sudo +|exec +|nohup +|\$ +)*"
_DOCKER = lines(r"^\s*(sudo +)?docker +run\s", "`docker run`")
#: Names of prompt and output lengths in tables and logs of requests: of our own form, of the SOSP'23 pairs, of Mooncake, and of OpenAI's,
#: Anthropic's, LiteLLM's and OpenTelemetry's logs, where they may be keys of ``usage``.
PROMPT_NAMES = (
    "prompt_tokens", "input", "input_length", "input_tokens", "usage.prompt_tokens", "usage.input_tokens", "gen_ai.usage.input_tokens",
)  # fmt: skip
OUTPUT_NAMES = (
    "output_tokens", "output", "output_length", "completion_tokens", "usage.completion_tokens", "usage.output_tokens",
    "gen_ai.usage.output_tokens",
)  # fmt: skip

#: Formats that readers of traces read; ``traces.readers.recognise`` reads them.
TRACES = (
    _read("a recording of fragmeter.probe", keys("fragmeter_probe"), "give it as --trace or --probe", "trace", "table", "probe", form="fragmeter.probe"),
    _read("a load of traces synth", keys("fragmeter_load"), "give it to simulate --trace or traces sample", "trace", "table", form="load"),
    _read("Azure's LLM inference trace", columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _TRACE, "trace", form="Azure LLM inference"),
    _read("a BurstGPT trace", columns("Timestamp", "Request tokens", "Response tokens"), _TRACE, "trace", form="BurstGPT"),
    _read("a trace of Vidur", columns("num_prefill_tokens", "num_decode_tokens"), _TRACE, "trace", form="Vidur"),
    _read("a trace of Splitwise's simulator", columns("prompt_size", "token_size"), _TRACE, "trace", form="Splitwise"),
    _read("a Qwen-Bailian trace", keys("chat_id", "parent_chat_id", "input_length"), _TRACE, "trace", form="Qwen-Bailian"),
    _read("a RAGPulse trace", keys("timestamp", "input_length", "output_length", "hash_ids.sys_prompt"), _TRACE, "trace", form="RAGPulse"),
    _read("a Mooncake or timed_trace file", keys("timestamp", "input_length", "output_length"), _TRACE, "trace", form="Mooncake"),
    _read("an export of AIPerf", keys("metadata.request_start_ns"), _BENCHMARK, "trace", "benchmark", form="AIPerf"),
    _read(
        "a summary of AIPerf", either(keys("aiperf_version"), keys("input_config", "request_throughput")), _BENCHMARK, "trace", "benchmark",
        form="AIPerf, a summary",
    ),
    _read(
        "a result of SGLang's bench_serving",
        # What the server says of itself comes before the totals, and may be long.
        either(keys("total_output_tokens_retokenized", "request_rate"), keys("sharegpt_output_len", "request_rate")), _BENCHMARK,
        "trace", "benchmark", form="SGLang bench_serving",
    ),
    _read(
        "a result of vllm bench serve", either(keys("input_lens"), keys("request_throughput", "total_input_tokens")),
        _BENCHMARK, "trace", "benchmark", form="vllm bench serve",
    ),
    _read("a report of GuideLLM", keys("benchmarks"), _BENCHMARK, "trace", "benchmark", form="GuideLLM"),
    _read("conversations of ShareGPT", either(keys("conversations.value"), keys("conversation.value")), _TRACE, "trace"),
    _read("a summary of inference-perf", keys("load_summary"), _BENCHMARK, "trace", "benchmark", form="inference-perf, a summary"),
    _read("a result of InferenceX", keys("tput_per_gpu"), _BENCHMARK, "trace", "benchmark", form="InferenceX"),
    _read(
        "a report of inference-perf's requests", either(*(keys("start_time", "end_time", name) for name in ("info", "request"))),
        _BENCHMARK, "trace", "benchmark", form="inference-perf",
    ),
    _read("spans of OpenTelemetry or Jaeger", either(keys("resourceSpans"), keys("startTimeUnixNano", "attributes"), keys("data.spans")), _TRACE, "trace"),
    _read("observations of Langfuse", either(*(keys(f"{within}startTime", f"{within}usageDetails") for within in ("", "data.", "observations."))), _TRACE, "trace"),
    _read("a batch of requests or of answers", keys("custom_id"), _TRACE, "trace"),
    _read(
        "conversations of vLLM's multi-turn benchmark",
        either(keys("id", "messages.role", "messages.content"), keys("filetype", "num_conversations", "prompt_input")), _TRACE, "trace",
    ),
    _read("a session of an agent", keys("requests.hash_ids", "block_size"), _TRACE, "trace"),
    _read(
        "a table or log of requests", Mark(
            "a length of prompts (`" + "`, `".join(PROMPT_NAMES) + "`) and one of outputs (`" + "`, `".join(OUTPUT_NAMES) + "`)",
            lambda head: all(any(name in head.columns | head.keys for name in names) for names in (PROMPT_NAMES, OUTPUT_NAMES)),
        ), _TRACE, "trace",
    ),
    _read("a Parquet file", begins(b"PAR1", words="`PAR1`"), _TRACE, "trace"),
    _read("a pickle", begins(b"\x80", words="byte 0x80"), _TRACE, "trace"),
)  # fmt: skip

#: Outputs of servers and of tools that watch them.
SERVERS = (
    _read(
        "a start-up log of vLLM",
        lines(
            r"vLLM API server version|LLM engine \(v|GPU KV cache size: |Available KV cache memory: |# (GPU|CUDA) blocks: "
            r"|Maximum concurrency for |Model loading took |^(\(.*\) )?(INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d ",
            "vLLM's lines, such as `GPU KV cache size`",
        ),
        "give it as --startup-log beside --serve, or to diagnose as --log", "startup_log",
    ),
    _read(
        "a log of SGLang", lines(r"server_args=ServerArgs\(|max_total_num_tokens=\d|KV Cache is allocated", "`server_args=ServerArgs(` or `max_total_num_tokens=`"),
        "give it as --startup-log beside --serve, or to diagnose as --log", "startup_log",
    ),
    _read("a log of TensorRT-LLM", lines(r"\[TensorRT-LLM\]|\[TRT-LLM\]", "`[TensorRT-LLM]`, `[TRT-LLM]`"), _TRTLLM),
    _read(
        "a log of llama.cpp", lines(r"^(llama_model_loader|llama_kv_cache\w*|llama_context|print_info|srv +\w+):", "`llama_model_loader:`"),
        "simulate --policy llama-cpp with its n_ctx and its slots",
    ),
    _read(
        "metrics of vLLM", lines(r"^(# (HELP|TYPE) )?vllm:\w+[{ ]", "`vllm:`"),
        "give it as --metrics to diagnose or validate", "metrics",
    ),
    _read(
        "metrics of SGLang", lines(r"^(# (HELP|TYPE) )?sglang:\w+[{ ]", "`sglang:`"),
        "give it as --metrics to validate --policy sglang --against its benchmark", "metrics",
    ),
    _read(
        "metrics of llama.cpp's server", lines(r"^(# (HELP|TYPE) )?llamacpp:\w+[{ ]", "`llamacpp:`"),
        "give it as --metrics to validate --policy llama-cpp --against its benchmark", "metrics",
    ),
    _read(
        "metrics of Text Generation Inference", lines(r"^(# (HELP|TYPE) )?tgi_\w+[{ ]", "`tgi_`"),
        f"they do not show the KV cache; {_CLIENT}",
    ),
    _read(
        "metrics of TensorRT-LLM or Triton", lines(r"^(# (HELP|TYPE) )?(nv_|trtllm_)\w+[{ ]", "`nv_`, `trtllm_`"),
        _TRTLLM,
    ),
    _read(
        "metrics of something else than an LLM server", lines(r"^# TYPE [\w:]+ (counter|gauge|histogram|summary|untyped)", "`# TYPE`"),
        _SCRAPE,
    ),
    _read("the answer to a Prometheus query", keys("data.resultType", "data.result"), "give it to diagnose as --prometheus"),
    _read("a dashboard of Grafana", keys("panels", "schemaVersion"), _SCRAPE),
    _read(
        "an output of nvidia-smi", lines(r"\A[^\n]*\[(%|MiB|W|MHz)\]|^\| NVIDIA-SMI |\A# gpu +pwr", "units in the header, or its box"),
        "it does not show requests or the KV cache; " + _SCRAPE,
    ),
    _read("a trace of kernels by a profiler", keys("traceEvents"), _NO_REQUESTS),
    _read("a report of NVIDIA Nsight", named(".nsys-rep", ".qdrep", ".ncu-rep"), _NO_REQUESTS),
    _read("metrics of OpenTelemetry", keys("resourceMetrics"), _SCRAPE),
)  # fmt: skip

#: Command lines and deployments.
DEPLOYMENTS = (
    _read(
        "a Kubernetes object", lines(r"^apiVersion:\s*\S", "`apiVersion:`"), "give it as --serve", "serve",
    ),
    _read("a docker compose file", lines(r"^services:\s*$", "`services:`"), "give it as --serve", "serve"),
    _read(
        "a configuration of inference-perf", both(lines(r"^load:\s*$", "`load:`"), lines(r"^(api|server|data):", "`api:`, `server:` or `data:`")),
        "run it and give its report",
    ),
    _read(
        "a vllm serve line",
        either(
            lines(rf"{_BEFORE}(vllm +serve\s|python3? +-m +vllm\.entrypoints)", "a line with `vllm serve` or `-m vllm.entrypoints`"),
            both(_DOCKER, lines(r"\bvllm/vllm-openai", "`vllm/vllm-openai`")),
        ),
        "give it as --serve", "serve",
    ),
    _read(
        "a command line of SGLang",
        either(
            lines(rf"{_BEFORE}(python3? +-m +sglang\.launch_server\b|sglang +serve\s)", "`sglang.launch_server`"),
            both(_DOCKER, lines(r"\blmsysorg/sglang", "`lmsysorg/sglang`")),
        ),
        "give it as --serve", "serve",
    ),
    _read(
        "a command line of TensorRT-LLM",
        either(
            lines(rf"{_BEFORE}trtllm-(serve|build)\s", "`trtllm-serve`"),
            both(_DOCKER, lines(r"\btrtllm-serve\s", "`trtllm-serve`")),
        ),
        _TRTLLM,
    ),
    _read(
        "a command line of TGI",
        either(
            lines(rf"{_BEFORE}text-generation-launcher\s", "`text-generation-launcher`"),
            both(_DOCKER, lines(r"/text-generation-inference:", "`text-generation-inference`")),
        ),
        "simulate --policy tgi with its model, --max-num-batched-tokens and --num-gpu-blocks-override",
    ),
    _read(
        "a command line of llama.cpp's server",
        either(
            lines(rf"{_BEFORE}(\S*/)?llama-server(\.exe)?\s", "`llama-server`"),
            both(_DOCKER, lines(r"/llama\.cpp:(server|full)|\sllama-server\s", "`llama.cpp:server`")),
        ),
        "give it as --serve to plan, which prints the command that simulates it", "serve",
    ),
)  # fmt: skip

#: Files of models and of GPUs.
MODELS = (
    _read("the data sheet of a GPU", keys("memory_bytes", "memory_gb_per_s", "fp16_tflops"), "give it as --gpu", "gpu"),
    _read(
        "a model's config.json", both(keys("model_type"), either(*(keys(name) for name in (
            "architectures", "hidden_size", "num_hidden_layers", "text_config", "n_layer", "vocab_size")))),
        "give it, or its folder, as --model", "model",
    ),
    _read("a generation_config.json", keys("_from_model_config"), _BESIDE),
    _read("a generation_config.json", both(keys("eos_token_id", "transformers_version"), either(keys("do_sample"), keys("temperature"))), _BESIDE),
    _read("a tokenizer.json", keys("added_tokens", "normalizer"), f"give it as --tokenizer; {_BESIDE}", "tokenizer"),
    _read("a tokenizer_config.json", keys("tokenizer_class"), _BESIDE),
    _read("the index of a safetensors checkpoint", keys("weight_map"), _BESIDE),
    _read("a file of safetensors", named(".safetensors"), _BESIDE),
    _read("ModelOpt's hf_quant_config.json", keys("quantization.quant_algo"), "give the folder that it lies in"),
    _read("a LoRA adapter's configuration", keys("peft_type"), "give the config.json of its base model"),
    _read("weights as GGUF", begins(b"GGUF", words="`GGUF`"), "give the config.json of its original model"),
)  # fmt: skip

#: fragmeter's own outputs.
OWN = (
    _read("a run.json of fragmeter", keys("schema_version", "versions.fragmeter"), "give its folder to report or compare"),
    _read(
        "a summary of a fragmeter run", keys("duration", "request_throughput_while_arriving"),
        "give its folder to report or compare",
    ),
    _read("a sweep of fragmeter", keys("grid", "points", "failed", "rows"), _RESULT),
    _read("a diagnosis of fragmeter", keys("diagnosis", "state", "causes"), _RESULT),
    _read("a plan of fragmeter", keys("model", "gpu", "num_gpus", "replicas", "kv_cache_dtype"), _RESULT),
    _read("the marker of a fragmeter result", both(named("fragmeter.json"), keys("schema_version", "kind")), _RESULT),
)  # fmt: skip

#: Data sets and results that do not say what each request was, or say it in columns of their own.
DATA = (
    _read(
        "individual responses of LLMPerf", keys("number_input_tokens", "number_output_tokens"),
        "add --columns prompt=number_input_tokens,output=number_output_tokens",
    ),
    _read("a summary of LLMPerf", keys("mean_input_tokens", "num_concurrent_requests"), "give the file of its individual responses"),
    _read(
        "a load of LLMServingSim", keys("input_toks", "output_toks"),
        "add --columns arrival=arrival_time_ns,prompt=input_toks,output=output_toks --time-unit ns",
    ),
    _read(
        "request metrics of Vidur", columns("Request Id", "request_num_prefill_tokens", "request_num_decode_tokens"),
        "add --columns prompt=request_num_prefill_tokens,output=request_num_decode_tokens",
    ),
    _read(
        "a workload of AIBrix", either(keys("timestamp", "requests.Prompt Length"), keys("timestamp", "requests.prompt_length")),
        "write its requests one a line, as jq -c '.timestamp as $t | .requests[] + {timestamp: $t}' does, and name them by --columns",
    ),
    _read(
        "a trace of prompts alone (ServeGen's offline traces a to c)", keys("request_id", "input_length", "hash_ids"),
        "it has no lengths of outputs: add output_length to each line",
    ),
    _read(
        "conversations with roles (LMSYS, WildChat, OpenAI's messages)",
        either(*(keys(f"{name}.role", f"{name}.content") for name in ("conversation", "conversations", "messages"))),
        "write them as ShareGPT's [{\"conversations\": [{\"from\": role, \"value\": content}]}]",
    ),
    _read("a file of genai-perf", keys("experiments", "service_kind"), "it has no token counts: give AIPerf's profile_export.jsonl"),
    _read("statistics of Locust", columns("Type", "Name", "Request Count"), _CLIENT),
    _read("a history of Locust", columns("Timestamp", "User Count"), _CLIENT),
    _read("a summary of k6", keys("metrics.http_req_duration"), _CLIENT),
    _read("an output of k6", either(keys("metric", "data.time", "data.value"), keys("metric", "data.contains", "data.thresholds")), _CLIENT),
    _read("a summary of MLPerf's load generator", lines(r"^MLPerf Results Summary", "`MLPerf Results Summary`"), _CLIENT),
    _read("a log of MLPerf", lines(r"^:::MLLOG ", "`:::MLLOG`"), _CLIENT),
    _read("an accuracy log of MLPerf", keys("seq_id", "qsl_idx"), _CLIENT),
    _read("a Jupyter notebook", keys("cells", "nbformat"), _RAW),
)  # fmt: skip

#: Files around the one that is meant.
WRAPPINGS = (
    _read("a Git LFS pointer", begins(b"version https://git-lfs", words="`version https://git-lfs`"), "fetch the file that it stands for: git lfs pull"),
    _read("an HTML page", lines(r"(?i)\A\s*<(!doctype html|html|head)", "`<!doctype html`, `<html`"), f"{_RAW}, as by the button Raw"),
    _read("an XML file", begins(b"<?xml", words="`<?xml`"), _NO_REQUESTS),
    _read(
        "an Excel workbook", Mark("a zip with `xl/`", lambda head: head.content.startswith(b"PK") and b"xl/" in head.content),
        "save its sheet as CSV",
    ),
    _read("a zip archive", begins(b"PK\x03\x04", words="`PK`"), _UNPACK),
    _read("a tar archive", begins(b"ustar", words="`ustar` at byte 257", at=257), _UNPACK),
    _read("a gzip file", begins(b"\x1f\x8b", words="bytes 1f 8b"), _UNPACK),
    _read("a Zstandard file", begins(b"\x28\xb5\x2f\xfd", words="bytes 28 b5 2f fd"), _UNPACK),
    _read("a bzip2 file", begins(b"BZh", words="`BZh`"), _UNPACK),
    _read("an xz file", begins(b"\xfd7zXZ", words="`7zXZ`"), _UNPACK),
    _read("a 7z archive", begins(b"7z\xbc\xaf", words="`7z`"), _UNPACK),
    _read("a SQLite database", begins(b"SQLite format 3", words="`SQLite format 3`"), "export its table of requests: sqlite3 -csv -header FILE 'select ...'"),
    _read("an HDF5 file", begins(b"\x89HDF", words="`HDF`"), "export its requests as CSV"),
    _read("an Arrow file", begins(b"ARROW1", words="`ARROW1`"), "write it as Parquet"),
    _read("a PDF", begins(b"%PDF", words="`%PDF`"), _NO_REQUESTS),
    _read("a picture", begins(b"\x89PNG", b"\xff\xd8\xff", words="`PNG`, JPEG"), _NO_REQUESTS),
)  # fmt: skip

#: All kinds of files, the specific before the general.
SIGNATURES: tuple[Signature, ...] = (*WRAPPINGS, *TRACES, *OWN, *MODELS, *SERVERS, *DATA, *DEPLOYMENTS)


def recognised(head: FileHead, place: str | None = None) -> Signature | None:
    """What a file is; None if it is none of the known kinds.

    Args:
        place: Where it is given, a key of ``EXPECTED``: kinds that are read there come first.
    """
    first = () if place is None else (each for each in SIGNATURES if place in each.read_as)
    # The user may name columns in any text.
    return _first(head, first) or _first(head, WRAPPINGS if place == "table" else SIGNATURES)


def _first(head: FileHead, among: Iterable[Signature]) -> Signature | None:
    return next((each for each in among if each.mark.fits(head)), None)


def remedy(content: bytes, path: str | PathLike[str], place: str) -> str | None:
    """What to say of a file that is a known kind, and not one that is read at a place: "is X, not Y; what to run".

    Args:
        content: Its first bytes, uncompressed.
        place: A key of ``EXPECTED``.

    Returns:
        None for a file that is read there, or is unknown.
    """
    found = recognised(FileHead(content, fspath(path)), place)
    if found is None or place in found.read_as:
        return None
    return found.remedy(place)
