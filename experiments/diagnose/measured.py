"""What a live server says of itself: its metrics, or the file of its probe, and a benchmark of its clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import numpy as np

from ...sim.recording.probe import read_probe
from ...sim.spec.speculative import with_acceptance
from ...sim.types.ticks import PER_SECOND
from ...traces import measured, read
from ..measured.knobs import fitted_scale
from ..measured.replay import BenchmarkOfRequests, benchmark_of, replay
from ..measured.scrapes import VLLM, Readings
from ..measured.server_metrics import ServerMetrics, served_load
from ..runs.slo_check import Goal
from ..vllm_serve.line import ServeLine
from ..vllm_serve.log import StartupLog
from .server import Server, server_of

#: Difference of the step time from which on steps are scaled to a benchmark.
_CALIBRATES = 0.02


@dataclass(frozen=True)
class ClientLatencies:
    """What a benchmark measured, in ms; None for what its client does not write.

    Attributes:
        attained: Share of the requests that meet the objectives; None without objectives.
    """

    p90_ttft_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    attained: float | None = None


def seen_by_server(readings: Readings | None, probe: Path | None, has_requests: bool) -> ServerMetrics | None:
    """The server's own metrics, of its busiest engine; from its probe if there are none.

    Args:
        has_requests: Whether the requests of the load are those of a file, which went to all engines.

    Raises:
        UserError: A file cannot be read.
    """
    if readings is not None:
        return served_load(readings, one_engine=has_requests)
    return None if probe is None else _of_probe(probe)


def _of_probe(path: Path) -> ServerMetrics:
    run = read_probe(path)
    done = [each for each in run.requests if each.token_ns]
    levels, durations = run.buckets(), np.diff([*(step.begin_ns for step in run.steps), run.steps[-1].end_ns])
    whole = np.sum(list(levels.values()), axis=0)
    used = 1 - (levels["free"] + levels["cached"]) / np.maximum(whole, 1)
    # As metrics are read: without the drain after the last arrival.
    last_ns = max((each.arrival_ns for each in run.requests), default=0)
    busy = np.array([bool(step.tokens) and step.begin_ns <= last_ns for step in run.steps])
    looked_up = sum(each.prompt_tokens for each in done)
    return ServerMetrics(
        num_scrapes=len(run.steps),
        num_gpu_blocks=run.header["num_gpu_blocks"],
        block_size=run.block_size,
        kv_usage=(float(np.average(used[busy], weights=durations[busy])), float(used.max())) if busy.any() else None,
        preemptions=float(len(run.preemptions)),
        hit_rate=sum(each.hit_tokens[0] for each in done if each.hit_tokens) / looked_up if looked_up else None,
        first_tokens=float(len(done)),
    )


def as_measured(line: ServeLine, metrics: ServerMetrics | None, block_size: int) -> ServeLine:
    """The line with the block size, the prefix caching and the accepted drafts of the server's metrics, where it does not say them and
    its blocks would have ``block_size`` tokens."""
    if metrics is None or metrics.server != VLLM:
        return line
    found = dict(line.flags)
    if metrics.block_size not in (None, block_size):
        found.setdefault("block-size", str(metrics.block_size))
    caching = metrics.config.get("enable_prefix_caching", "").lower()
    if caching in ("true", "false"):
        found.setdefault("enable-prefix-caching", caching == "true")
    if "speculative-config" in found:
        found["speculative-config"] = with_acceptance(line.text("speculative-config", ""), metrics.acceptance_rates)
    return replace(line, flags=found)


def as_served(
    server: Server,
    line: ServeLine,
    gpu: str,
    model: str | None,
    log: StartupLog | None,
    seen: ServerMetrics | None,
    *,
    has_metrics: bool,
) -> Server:
    """The server of a line with what it says of itself: by its metrics block size and caching, and the size of its KV cache.

    Args:
        line, gpu, model, log: What ``server`` was made of.
        seen: Metrics, or what a probe has of them.
        has_metrics: Whether they are metrics.
    """
    if has_metrics:
        line = as_measured(line, seen, server.launch.rank_block_tokens)
        server = server_of(line, gpu, model, log, server.cost)
    # A given number of blocks says nothing of the memory that the server has.
    if log is None and line.pool_flag not in line.flags:
        server = server_of(line, gpu, model, pool_of(seen, server.launch.rank_block_tokens), server.cost)
    return replace(server, pool_origin=pool_origin(line, log, seen, has_metrics))


def pool_of(metrics: ServerMetrics | None, block_size: int) -> StartupLog | None:
    """The size of the KV cache by the server's metrics, as its log would say it, in blocks of ``block_size`` tokens."""
    if metrics is None or metrics.num_gpu_blocks is None:
        return None
    blocks = metrics.num_gpu_blocks * (metrics.block_size or block_size) // block_size
    return StartupLog(num_blocks=blocks)


def pool_origin(line: ServeLine, log: StartupLog | None, seen: ServerMetrics | None, has_metrics: bool) -> str:
    """What says the size of the KV cache: a key of ``POOL_ORIGINS``.

    Args:
        seen: Metrics, or what a probe has of them.
        has_metrics: Whether they are metrics.
    """
    if log is not None:
        return "log"
    if line.pool_flag in line.flags:
        return "flag"
    if seen is None or seen.num_gpu_blocks is None:
        return "computed"
    return "metrics" if has_metrics else "probe"


def calibrated(server: Server, bench: Path, goal: Goal | None) -> tuple[Server, ClientLatencies]:
    """The server with steps as long as its benchmark says, and what the benchmark measured.

    Raises:
        UserError: The benchmark cannot be read or served.
    """
    trace = read(bench)
    benchmark = benchmark_of(trace, measured(bench, trace))
    chosen = server.settings()
    scale, _ = fitted_scale(benchmark, chosen, replay(benchmark, chosen))
    values = benchmark.values()
    p90_ttft_ms, attained = values.get("p90_ttft_ms"), None
    if isinstance(benchmark, BenchmarkOfRequests):
        p90_ttft_ms = float(np.percentile(benchmark.measured.ttft_s, 90)) * 1e3
        attained = None if goal is None else _attained(benchmark, goal)
    latencies = ClientLatencies(p90_ttft_ms, values.get("p99_itl_ms"), values.get("mean_e2el_ms"), attained)
    return replace(server, step_scale=scale) if abs(log(scale)) >= _CALIBRATES else server, latencies


def _attained(benchmark: BenchmarkOfRequests, goal: Goal) -> float:
    """The share of a benchmark's requests that meet the objectives."""
    first, finish = (
        np.rint(each * PER_SECOND).astype(np.int64) for each in (benchmark.measured.ttft_s, benchmark.measured.e2el_s)
    )
    missed = goal.objectives.missed(np.zeros(len(first), dtype=np.int64), first, finish, benchmark.trace.output_tokens)
    return 1 - float(np.logical_or.reduce(list(missed.values())).mean())
