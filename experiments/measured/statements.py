"""What a line, a log, metrics, a probe and a benchmark say of one server, and where they contradict each other.

Each source makes statements: a value for a name. A name with several values is a contradiction: one of the sources is of another server,
or of another run of it. A line that leaves a flag out states the default of its release, or of any release if nothing says which it
is; a log lists the arguments that are no defaults, and so states the default of each other one.

Two names of a model are the same where their last parts are, where the line serves it by that name (``--served-model-name``), or where
both have the facts of one model, number formats included. A path in the hub's cache is its repository, and what another path holds is
not known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ...sim.recording.probe import read_probe
from ...sim.spec import gpu_names, model
from ...sim.spec.gpu import GIB
from ...sim.spec.releases import all_releases, release
from ...sim.spec.startup.capacity import capacity, stage_memories
from ...sim.spec.startup.launch import BLOCK_SIZE, batch_defaults
from ...sim.types.errors import UserError
from ...traces import MeasuredSummary
from ...traces.clients.load import ClientLoad
from ..vllm_serve.checks import undivided
from ..vllm_serve.flags import releases, text_of_release
from ..vllm_serve.line import pasted
from ..vllm_serve.log import StartupLog, read_log
from ..vllm_serve.start import Started
from .scrapes import VLLM
from .server_metrics import ServerMetrics

LINE = "the line"
_GPU, _WEIGHTS = "GiB of a GPU", "GiB of weights"
#: Share by which a size may differ: cards of one name by their reserved memory, weights by their padding.
_NEARLY = {_GPU: 0.03, _WEIGHTS: 0.1}
#: What a log says of the KV cache twice, and by how many GiB four rounded parts and another program on the card may differ.
_KV_CACHE, _ROUNDED = "GiB of KV cache", 0.1
#: Share of the card's memory beyond an interval from which on the line and the log are not of one server.
_FAR = 0.04
#: Value of a setting that a source leaves at its default, whatever that is.
DEFAULT = "the default"
#: Arguments that a log names where they are no defaults, and that the line has or leaves out, by the names of their statements. vLLM
#: raises the block size of some models, so that the argument is not what the metrics say.
_ARGUMENTS = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "block_size": "--block-size",
}
#: Variables that hide GPUs from a server; their values are lists.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Flags that change the longest sequence of a model.
_LENGTHS = {"max-model-len", "hf-overrides", "rope-scaling", "rope-theta", "disable-sliding-window"}
#: Formats of the KV cache by other names of them; ``auto`` is 16 bit, unless the checkpoint has another.
_KV_DTYPES = {"bfloat16": "auto", "float16": "auto", "half": "auto", "fp8_e4m3": "fp8"}
#: Flags of servers on several nodes: a deployment then requests the GPUs of one.
_NODES = {
    "nnodes",
    "node-rank",
    "headless",
    "data-parallel-size-local",
    "data-parallel-start-rank",
    "data-parallel-rank",
}
#: A repository in the cache of the Hugging Face hub.
_CACHED = re.compile(r"(?:^|/)models--(?:.+--)?([^/]+)/snapshots/")
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
#: vLLM's line with the configuration of its engine, and that with the arguments that are no defaults.
_CONFIG, _GIVEN = re.compile(r"LLM engine \(v[^)]*\) with config: (.*)"), re.compile(r"non-default args: (\{.*\})")
_FIELDS = ("max_seq_len", *_RANKS, "kv_cache_dtype", "enable_prefix_caching")
#: Labels of the metrics' ``cache_config_info`` by name.
_LABELS = {
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "kv_cache_dtype": "cache_dtype",
}


class Statement(NamedTuple):
    """What one source says.

    Attributes:
        source: Name of the source.
        name: Name of a setting, as in Python.
        value: A number, a switch or a text.
        served: Names by which clients know a model.
        by_clients: Whether a model has the name by which clients know it.
        also: Other values with which it agrees: defaults of releases that the line may be of, and ``DEFAULT``.
    """

    source: str
    name: str
    value: object
    served: tuple[str, ...] = ()
    by_clients: bool = False
    also: tuple[object, ...] = ()


def contradictions(statements: Iterable[Statement]) -> list[str]:
    """A sentence for each name that sources give different values, in the order in which the names occur."""
    by_name: dict[str, list[Statement]] = {}
    for each in statements:
        by_name.setdefault(each.name, []).append(each)
    return [
        _sentence(name, said) for name, said in by_name.items() if any(not _agree(said[0], each) for each in said[1:])
    ]


def _sentence(name: str, said: list[Statement]) -> str:
    return f"Contradiction: {name} is " + ", ".join(f"{each.value} by {each.source}" for each in said) + "."


def _agree(one: Statement, other: Statement) -> bool:
    if one.name == "model":
        return _same_model(one, other)
    if one.name == "in_flight":
        # The first states a limit.
        return float(str(other.value)) <= float(str(one.value))
    if one.name == "gpus" and other.source in _VISIBLE:
        return int(str(other.value)) >= int(str(one.value))
    if one.name == _KV_CACHE:
        sizes = [[float(str(size)) for size in (each.value, *each.also)] for each in (one, other)]
        return any(abs(first - second) <= _ROUNDED for first in sizes[0] for second in sizes[1])
    if one.name in _NEARLY:
        return abs(float(str(other.value)) / float(str(one.value)) - 1) <= _NEARLY[one.name]
    if one.name == "gpu":
        return _same_card(str(one.value), str(other.value))
    if one.name == "kv_cache_dtype":
        return _kv_dtype(one.value) == _kv_dtype(other.value)
    first, second = ({_plain(value) for value in (each.value, *each.also)} for each in (one, other))
    return bool(first & second)


def _same_card(preset: str, named: str) -> bool:
    """Whether a card may have that name of Ray's, such as ``A100-80G``; so may a card of the user's, and any for a name of no preset."""

    def fits(each: str) -> bool:
        return re.fullmatch(rf"{re.escape(named.lower())}b?(-.*)?", each) is not None

    return fits(preset) or preset not in gpu_names() or not any(map(fits, gpu_names()))


def _plain(value: object) -> object:
    """A value that compares by its meaning: ``"True"`` is True, ``"0.90"`` is 0.9."""
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _kv_dtype(value: object) -> str:
    text = str(value).lower().removeprefix("torch.")
    return _KV_DTYPES.get(text, text)


def _same_model(one: Statement, other: Statement) -> bool:
    aliases = (
        one.by_clients or other.by_clients or any(str(said.value).startswith(("/", ".", "~")) for said in (one, other))
    )
    names, others = (
        {_last_part(name) for name in (str(said.value), *(said.served if aliases else ()))} for said in (one, other)
    )
    if names & others:
        return True
    try:
        first, second = model(str(one.value)), model(str(other.value))
    except UserError:
        return False
    formats = [(each.quantization, each.named_format, each.max_model_len) for each in (first, second)]
    return first.has_layers_of(second) and formats[0] == formats[1]


def _last_part(name: str) -> str:
    """The name of a model without its folders or its organisation, in lower case."""
    cached = _CACHED.search(name)
    return Path((name if cached is None else cached[1]).lower()).name


def of_start(answer: Started, given: str | None, log: StartupLog | None) -> Iterator[Statement]:
    """What a command line says, and its start-up log; of another server than vLLM the line alone.

    Args:
        given, log: The log, or the name of its file, and what was read of it; None without one.
    """
    yield from of_line(answer)
    if answer.line.server == VLLM and given is not None:
        yield from of_log(given)
    if answer.line.server == VLLM and log is not None:
        yield from of_sizes(answer, log)


def of_line(answer: Started) -> Iterator[Statement]:
    """What a command line says, as it starts; of another server than vLLM what it serves and the ranks."""
    line, launch = answer.line, answer.launch
    yield Statement(LINE, "server", line.server)
    yield Statement(LINE, "model", line.model, tuple(line.served_model_names))
    yield Statement(LINE, "tensor_parallel_size", launch.tensor_parallel)
    yield Statement(LINE, "pipeline_parallel_size", launch.deployment.pipeline_parallel)
    yield Statement(LINE, "data_parallel_size", answer.replicas)
    if line.server != VLLM:
        return
    if line.version is not None:
        yield Statement(LINE, "vllm", text_of_release(line.version))
    caching = f"{LINE}" if "enable-prefix-caching" in line.flags else f"{LINE} (by default)"
    yield Statement(caching, "enable_prefix_caching", launch.enable_prefix_caching)
    yield from _gpus(answer)
    yield from _sizes(answer)
    yield from _kv_cache(answer)
    if "max-model-len" in line.flags:
        yield Statement(LINE, "max_model_len", launch.max_model_len)
    elif not _LENGTHS & set(line.named):
        yield Statement(f"{LINE} (by default)", "max_model_len", launch.max_model_len)
    yield from _arguments(answer)


def _sizes(answer: Started) -> Iterator[Statement]:
    """Sizes that depend on the card and the checkpoint alone."""
    launch = answer.launch
    yield Statement("--gpu", _GPU, round(launch.gpu.memory_bytes / GIB, 2))
    if undivided(launch) is None:
        weights = max(stage.weights.likely for stage in stage_memories(launch))
        yield Statement(f"{LINE} (computed)", _WEIGHTS, round(weights / GIB, 2))


def _gpus(answer: Started) -> Iterator[Statement]:
    """GPUs that the server takes, and those that its deployment and its variables give it."""
    line = answer.line
    if _NODES & set(line.named):
        return
    visible = {name: line.environment[name] for name in _VISIBLE if "$" not in line.environment.get(name, "$")}
    if line.gpus is not None or visible:
        yield Statement(LINE, "gpus", answer.launch.num_gpus * answer.replicas)
    if line.gpus is not None:
        yield Statement("its deployment", "gpus", line.gpus)
    if line.accelerator is not None:
        yield Statement("--gpu", "gpu", answer.launch.gpu.name)
        yield Statement("its deployment", "gpu", line.accelerator)
    # Ray starts ranks on other machines, which have variables of their own.
    if "distributed-executor-backend" not in line.named:
        for name, text in visible.items():
            yield Statement(name, "gpus", len([each for each in text.split(",") if each.strip() not in ("", "-1")]))


def _arguments(answer: Started) -> Iterator[Statement]:
    """Arguments of the line, and those that it leaves at the default of its release."""
    line, launch = answer.line, answer.launch
    known = [entry for entry in all_releases() if line.version is None or entry == release(line.version)]
    batches = [batch_defaults(launch.gpu, entry) for entry in known]
    defaults: dict[str, tuple[object, ...]] = {
        "gpu_memory_utilization": tuple(entry.gpu_memory_utilization for entry in known),
        "max_num_seqs": tuple(seqs for _, seqs in batches),
        "max_num_batched_tokens": tuple(tokens for tokens, _ in batches),
        "num_gpu_blocks_override": (None,),
        "block_size": (BLOCK_SIZE,),
    }
    named = text_of_release(line.version or releases()[-1])
    for field, name in _ARGUMENTS.items():
        flag = field.replace("_", "-")
        by_default = defaults[field]
        if flag not in line.flags:
            value = getattr(launch, field)
            yield Statement(f"{LINE} (by default of vLLM {named})", name, value, also=(DEFAULT, *by_default))
            continue
        given = line.share(flag, 1.0) if field == "gpu_memory_utilization" else line.whole(flag)
        yield Statement(LINE, name, given, also=(DEFAULT,) if given in by_default else ())
        # Blocks of states and of latent vectors are those that their kernels run.
        if field == "block_size" and launch.model.latent is None and not launch.model.state_layers:
            yield Statement(LINE, "block_size", given)


def _kv_cache(answer: Started) -> Iterator[Statement]:
    """The format of the KV cache, unless the checkpoint or the card chooses it."""
    launch, written = answer.launch, answer.line.text("kv-cache-dtype", "auto")
    if written != "auto":
        yield Statement(LINE, "kv_cache_dtype", written)
    elif launch.deployment.kv_dtype == "bf16":
        yield Statement(f"{LINE} (by default)", "kv_cache_dtype", "auto")


def of_log(given: str) -> Iterator[Statement]:
    """What a start-up log says of the server's configuration; its sizes are read by ``read_log``.

    Args:
        given: The log, or the name of its file.
    """
    source, text = "the start-up log", pasted(given, "startup_log")
    log: StartupLog = read_log(given)
    if log.version is not None:
        yield Statement(source, "vllm", text_of_release(log.version[:2]))
    for name, size in ((_GPU, log.parts.total), (_WEIGHTS, log.parts.weights)):
        if size is not None:
            yield Statement(source, name, size)
    yield from _twice(log)
    if log.parts.utilization is not None:
        yield Statement(source, _ARGUMENTS["gpu_memory_utilization"], log.parts.utilization)
    config, arguments = _CONFIG.search(text), _GIVEN.search(text)
    named = {} if arguments is None else _literal(arguments[1])
    if config is not None:
        for name, value in _configured(config[1], named):
            yield Statement(source, name, value, _served(config[1]) if name == "model" else ())
    for argument, name in _ARGUMENTS.items():
        value = named.get(argument)
        if value is not None:
            yield Statement(source, name, value)
        elif named:
            yield Statement(source, name, DEFAULT)


def of_sizes(answer: Started, log: StartupLog) -> Iterator[Statement]:
    """What the sizes of a log are beside the line, where both cannot be: tokens that its KV cache does not hold, and a KV cache that is
    beyond the computed interval by more than a share of the card."""
    launch = replace(answer.launch, corrections=())
    if undivided(launch) is not None:
        return
    stage = capacity(launch).stage
    apart = None if answer.uncounted else log.disagreeing(launch)
    if apart is not None:
        one, other = ([each.start, max(each.start, each.stop - 1)] for each in apart)
        first = "the GiB of the start-up log" if log.memory_bytes is not None else "its concurrency"
        yield Statement(first, "blocks of the KV cache", _interval(one))
        yield Statement("its tokens and concurrency, with this line", "blocks of the KV cache", _interval(other))
    if log.memory_bytes is None:
        return
    low, _, high = stage.kv_cache
    if max(low - log.memory_bytes, log.memory_bytes - high) > _FAR * stage.total_bytes:
        yield Statement(f"{LINE} (computed)", "GiB of KV cache on a GPU", f"{low / GIB:.2f} to {high / GIB:.2f}")
        yield Statement("the start-up log", "GiB of KV cache on a GPU", f"{log.memory_bytes / GIB:.2f}")


def _interval(ends: list[int]) -> str:
    return " to ".join(f"{end:,}" for end in dict.fromkeys(ends))


def _twice(log: StartupLog) -> Iterator[Statement]:
    """The KV cache that the parts of a log leave, with and without its estimate of CUDA graphs, and the one that it states."""
    left = log.parts.left()
    if left is not None and log.memory_bytes is not None:
        less = round(left - (log.parts.graphs_estimated or 0.0), 2)
        yield Statement("the parts of the start-up log", _KV_CACHE, round(left, 2), also=(less,))
        yield Statement("its line with the KV cache", _KV_CACHE, round(log.memory_bytes / GIB, 2))


def _configured(config: str, given: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Name of a flag and its value as text, for each setting in the line "Initializing a V1 LLM engine" of a start-up log.

    Args:
        config: The configuration in that line, ``model='...', dtype=..., max_seq_len=...``.
        given: Flags that the log says the user gave, by name.
    """
    if (named := re.search(r"\bmodel='([^']*)'", config)) is not None:
        yield "model", named[1]
    for field in _FIELDS:
        value = re.search(rf"\b{field}=([^,\s]+)", config)
        if value is None or value[1] == "None":
            continue
        if field != "data_parallel_size":
            yield "max_model_len" if field == "max_seq_len" else field, value[1]
        # An engine of a model without experts counts itself alone, whatever the flag says.
        elif value[1] != "1" or given:
            yield field, value[1] if value[1] != "1" else given.get(field, 1)


def _served(config: str) -> tuple[str, ...]:
    served = re.search(r"\bserved_model_name=([^,]*)", config)
    return () if served is None else (served[1],)


def _literal(text: str) -> Mapping[str, Any]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def of_metrics(source: str, seen: ServerMetrics) -> Iterator[Statement]:
    """What a server's metrics say of its configuration.

    Args:
        source: Name of the file or the address.
    """
    yield Statement(source, "server", seen.server)
    if seen.model_name is not None:
        yield Statement(source, "model", seen.model_name, by_clients=True)
    for name, label in _LABELS.items():
        value = seen.config.get(label)
        # Without an override it is None, and the line's is so, too.
        if value not in (None, "") and (value != "None" or name == "num_gpu_blocks_override"):
            yield Statement(source, name, value)
    if seen.block_size is not None:
        yield Statement(source, "block_size", seen.block_size)
    if seen.num_engines > seen.num_replicas:
        yield Statement(source, "data_parallel_size", seen.num_engines // seen.num_replicas)


def of_probe(path: str | PathLike[str]) -> Iterator[Statement]:
    """What a recording of ``fragmeter.probe`` says of the server."""
    source, header = Path(path).name, read_probe(path).header
    yield Statement(source, "model", header["model"])
    yield Statement(source, "vllm", ".".join(str(header["vllm"]).split(".")[:2]))
    yield Statement(source, "max_model_len", header["max_model_len"])


def of_benchmark(path: str | PathLike[str], seen: ClientLoad, metrics: ServerMetrics | None) -> Iterator[Statement]:
    """What a benchmark says of the server and of its clients.

    Args:
        metrics: The server's, with requests in flight that are compared with the limit of the clients.
    """
    source = Path(path).name
    if seen.server is not None:
        yield Statement(source, "server", seen.server)
    if seen.model_id is not None:
        yield Statement(source, "model", seen.model_id, by_clients=True)
    if isinstance(seen, MeasuredSummary):
        for name, value in seen.states.items():
            yield Statement(source, name, value)
    if seen.max_concurrency is not None and metrics is not None and metrics.most_in_flight is not None:
        yield Statement(f"{source} (at most)", "in_flight", seen.max_concurrency)
        yield Statement("the metrics (at some time)", "in_flight", round(metrics.most_in_flight))
