"""The benchmark and the replica of ``validate --against``, from its flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...sim import Settings, settings
from ...sim.spec import model
from ...sim.types.errors import SettingError, TraceError, UserError
from ...traces import Measured, check_fits, measured, read
from ...traces.clients.load import ClientLoad
from ..runs.unread import refuse_flags
from ..sglang_server.start import read_line, read_start_log, started
from ..vllm_serve.line import version
from ..vllm_serve.start import Started, with_release
from .replay import BenchmarkOfRequests, SummarisedBenchmark, benchmark_of
from .server_metrics import ServerMetrics, read_metrics, server_of_policy
from .statements import Statement, of_benchmark, of_metrics, of_start

#: Default policy if neither a line nor a flag names one: the server of the benchmark.
POLICY = "vllm-v1"


@dataclass(frozen=True)
class Server:
    """The user's description of the server.

    Attributes:
        serve: Its command line, or a file with it; None if flags describe the server.
        model, gpu, vllm, startup_log: As for ``fragmeter plan``.
        given: Settings given as flags, which override the line.
    """

    serve: str | None
    model: str | None
    gpu: str | None
    vllm: str | None
    startup_log: str | None
    given: dict[str, Any]


def benchmark(path: Path, metrics: Path | None, chosen: Settings) -> BenchmarkOfRequests | SummarisedBenchmark:
    """A real server's benchmark, checked to be feasible on a replica with these settings.

    Raises:
        UserError: A file cannot be read or has invalid content, or a request is longer than the model.
    """
    trace = read(path)
    seen = measured(path, trace)
    untimed = isinstance(seen, Measured) and trace.arrival_ticks is None
    if untimed and (seen.request_rate is None or seen.duration_s is None):
        remedy = (
            "is missing, and so is the request rate; benchmark with a later vllm bench serve, or with a request rate"
        )
        raise TraceError(path, None, "start_times", None, remedy)
    check_fits(trace, chosen.max_model_len or model(chosen.model).max_model_len, path)
    return benchmark_of(trace, seen, None if metrics is None else read_metrics(metrics))


def started_line(server: Server) -> Started | None:
    """The server's command line as it starts; None if flags describe the server.

    Raises:
        UserError: The line or the log cannot be read, or there is no GPU.
    """
    if server.serve is None:
        return None
    if server.gpu is None:
        raise SettingError("gpu", None, "is missing; give the server's GPU")
    line = read_line(server.serve, None if server.vllm is None else version(server.vllm))
    log = None if server.startup_log is None else read_start_log(line, server.startup_log)
    return started(line, server.gpu, server.model, log)


def replica(server: Server, answer: Started | None, model_id: str | None) -> Settings:
    """The settings of the replica.

    Args:
        answer: Result of ``started_line``.
        model_id: The model in the benchmark file, used if the user names none.

    Raises:
        UserError: The description is incomplete, the server cannot start, or a setting is invalid.
    """
    if answer is None:
        return _by_flags(server, model_id)
    refused = answer.refusal()
    if refused is not None:
        raise UserError(f"serve: it does not start by the estimated memory: {refused.text} Paste its --startup-log.")
    _require_one(server.given.get("data_parallel_size") or answer.replicas)
    answer.require_simulated()
    return settings(**{**with_release(answer.settings(), answer.line).as_dict(), **server.given})


def statements(
    server: Server,
    answer: Started | None,
    path: Path,
    seen: ClientLoad,
    metrics: Path | None,
    by_server: ServerMetrics | None,
) -> Iterator[Statement]:
    """What the line, or the flags, of the server, its log, its metrics and the benchmark of ``path`` say.

    Args:
        answer: Result of ``started_line``.
    """
    if answer is not None:
        yield from of_start(answer, server.startup_log, None)
    else:
        if (simulated := server_of_policy(str(server.given.get("policy", POLICY)))) is not None:
            yield Statement("--policy", "server", simulated)
        if server.model is not None:
            yield Statement("--model", "model", server.model)
    if metrics is not None and by_server is not None:
        yield from of_metrics(metrics.name, by_server)
    yield from of_benchmark(path, seen, by_server)


def _require_one(engines: int) -> None:
    """Refuse several engines: those that share experts wait for each other, so that one alone is not the server."""
    if engines > 1:
        raise SettingError("--data-parallel-size", engines, "one replica is simulated; benchmark one")


def _by_flags(server: Server, model_id: str | None) -> Settings:
    refuse_flags("applies only to a vllm serve line; give --serve", vllm=server.vllm, startup_log=server.startup_log)
    if server.gpu is None:
        raise SettingError(
            "gpu", None, "is missing; give the server's GPU with --gpu, or its command line with --serve"
        )
    shape: dict[str, Any] = {"model": server.model}
    if server.model is None:
        if model_id is None:
            raise SettingError("model", None, "is missing, and the benchmark names none; give --model")
        shape = {"model": model(model_id).name}
    found = settings(**{"policy": POLICY, **shape, **server.given})
    _require_one(found.data_parallel_size)
    return found
