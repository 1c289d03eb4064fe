"""What a line, a log, metrics, a probe and a benchmark say of one server, and where they contradict each other.

Each source makes statements: a value for a name. A name with several values is a contradiction: one of the sources is of another server,
or of another run of it. Defaults of the line are statements only where a source of the server itself can be compared with
them: ranks, and whether prefixes are cached.

Two names of a model are the same where their last parts are, where the line serves it by that name (``--served-model-name``), or where
both have the facts of one model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ...sim.recording.probe import read_probe
from ...sim.spec import model
from ...sim.types.errors import UserError
from ...traces import Measured
from ..vllm_serve.flags import text_of_release
from ..vllm_serve.line import pasted
from ..vllm_serve.log import StartupLog, read_log
from ..vllm_serve.start import Started
from .server_metrics import ServerMetrics

LINE = "the line"
#: Settings of the line that other sources state, by their flags.
_FLAGS = {
    "gpu_memory_utilization": "gpu-memory-utilization",
    "max_model_len": "max-model-len",
    "max_num_seqs": "max-num-seqs",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "num_gpu_blocks_override": "num-gpu-blocks-override",
    "kv_cache_dtype": "kv-cache-dtype",
}
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
    """

    source: str
    name: str
    value: object
    served: tuple[str, ...] = ()
    by_clients: bool = False


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
    first, second = (_plain(each.value) for each in (one, other))
    return first == second


def _plain(value: object) -> object:
    """A value that compares by its meaning: ``"True"`` is True, ``"0.90"`` is 0.9."""
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _same_model(one: Statement, other: Statement) -> bool:
    aliases = one.by_clients or other.by_clients
    names, others = (
        {Path(name.lower()).name for name in (str(said.value), *(said.served if aliases else ()))}
        for said in (one, other)
    )
    if names & others:
        return True
    try:
        return model(str(one.value)).has_layers_of(model(str(other.value)))
    except UserError:
        return False


def of_line(answer: Started) -> Iterator[Statement]:
    """What a command line says, as it starts."""
    line, launch = answer.line, answer.launch
    yield Statement(LINE, "model", line.model, tuple(line.served_model_names))
    if line.version is not None:
        yield Statement(LINE, "vllm", text_of_release(line.version))
    yield Statement(LINE, "tensor_parallel_size", launch.tensor_parallel)
    yield Statement(LINE, "pipeline_parallel_size", launch.deployment.pipeline_parallel)
    yield Statement(LINE, "data_parallel_size", answer.replicas)
    caching = f"{LINE}" if "enable-prefix-caching" in line.flags else f"{LINE} (by default)"
    yield Statement(caching, "enable_prefix_caching", launch.enable_prefix_caching)
    if line.gpus is not None:
        yield Statement(LINE, "gpus", launch.num_gpus * answer.replicas)
        yield Statement("its deployment", "gpus", line.gpus)
    if "block-size" in line.flags:
        yield Statement(LINE, "block_size", launch.rank_block_tokens)
    for name, flag in _FLAGS.items():
        if flag in line.flags:
            value = line.whole(flag) if name.startswith(("max_num", "num_")) else line.flags[flag]
            yield Statement(LINE, name, launch.max_model_len if name == "max_model_len" else value)


def of_log(given: str) -> Iterator[Statement]:
    """What a start-up log says of the server's configuration; its sizes are read by ``read_log``.

    Args:
        given: The log, or the name of its file.
    """
    source, text = "the start-up log", pasted(given, "startup_log")
    log: StartupLog = read_log(given)
    if log.version is not None:
        yield Statement(source, "vllm", text_of_release(log.version[:2]))
    if (config := _CONFIG.search(text)) is not None:
        if (model_name := re.search(r"\bmodel='([^']*)'", config[1])) is not None:
            served = re.search(r"\bserved_model_name=([^,]*)", config[1])
            yield Statement(source, "model", model_name[1], (served[1],) if served else ())
        for field in _FIELDS:
            if (value := re.search(rf"\b{field}=([^,\s]+)", config[1])) is not None:
                yield Statement(source, "max_model_len" if field == "max_seq_len" else field, value[1])
    if (arguments := _GIVEN.search(text)) is not None:
        known = _literal(arguments[1])
        for name in ("block_size", *(each for each in _FLAGS if each not in ("max_model_len", "kv_cache_dtype"))):
            if known.get(name) is not None:
                yield Statement(source, name, known[name])


def _literal(text: str) -> Mapping[str, Any]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def of_metrics(path: str | PathLike[str], seen: ServerMetrics) -> Iterator[Statement]:
    """What a server's metrics say of its configuration."""
    source = Path(path).name
    if seen.model_name is not None:
        yield Statement(source, "model", seen.model_name, by_clients=True)
    for name, label in _LABELS.items():
        value = seen.config.get(label)
        if value not in (None, "", "None"):
            yield Statement(source, name, value)
    if seen.block_size is not None:
        yield Statement(source, "block_size", seen.block_size)
    if seen.num_engines > 1:
        yield Statement(source, "data_parallel_size", seen.num_engines)


def of_probe(path: str | PathLike[str]) -> Iterator[Statement]:
    """What a recording of ``fragmeter.probe`` says of the server."""
    source, header = Path(path).name, read_probe(path).header
    yield Statement(source, "model", header["model"])
    yield Statement(source, "vllm", ".".join(str(header["vllm"]).split(".")[:2]))
    yield Statement(source, "max_model_len", header["max_model_len"])


def of_benchmark(path: str | PathLike[str], seen: Measured, metrics: ServerMetrics | None) -> Iterator[Statement]:
    """What a benchmark says of the server and of its clients.

    Args:
        metrics: The server's, with requests in flight that are compared with the limit of the clients.
    """
    source = Path(path).name
    if seen.model_id is not None:
        yield Statement(source, "model", seen.model_id, by_clients=True)
    if seen.max_concurrency is not None and metrics is not None and metrics.most_in_flight is not None:
        yield Statement(f"{source} (at most)", "in_flight", seen.max_concurrency)
        yield Statement("the metrics (at some time)", "in_flight", round(metrics.most_in_flight))
