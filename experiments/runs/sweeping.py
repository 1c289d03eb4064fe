"""Run the points of a sweep, each once, and store the results as they finish."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...sim import Run, Settings, Workload, simulate, summary
from ...sim.config.unread import only_read
from ...sim.metrics.objectives import Objectives
from ...sim.types.errors import SettingError, SimulationFault, UserError
from .grid import Point
from .near_saturation import ServedLoad, saturation, times_of
from .output import track
from .parallel import WORTH_WORKERS_S, Workers, as_they_finish
from .points import Store, Workloads, key
from .unread import Unread

#: Requests of a mean point that take a good part of a second in any case.
_HEAVY_REQUESTS = 50_000
#: CPU time of a request with and without leaps, in us: less than half of what vllm-sosp23 takes, the fastest one measured.
_LEAST_US = {True: 1, False: 100}


@dataclass(frozen=True)
class Outcome:
    """Result of a point: a summary, or the reason why it cannot be run.

    Errors are text, because their classes may not survive the transfer from another process.
    """

    key: str
    summary: dict[str, Any] | None = None
    error: str | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Swept:
    """A point, the hash of its requests, and its result."""

    point: Point
    work_sha256: str
    outcome: Outcome


def sweep_points(
    points: Sequence[Point],
    workers: Workers,
    store: Store | None = None,
    goal: Objectives | None = None,
) -> list[Swept]:
    """Run the points that are not in the store, and store each one that finishes.

    Args:
        goal: Objectives of every request; summaries then have the rate of requests that meet them.

    Raises:
        UserError: Requests that cannot be made, or a setting that no point reads, before anything is run.
        SimulationFault: A point fails because of an internal fault.
    """
    workloads, unread = Workloads(), Unread()
    hashes, keys, requests = [], [], {}
    for point in points:
        work = workloads.of(point.inputs)
        unread.see(point.inputs, work)
        hashes.append(work.sha256())
        keys.append(key(point.inputs, work, goal))
        requests[keys[-1]] = len(work)
    unread.refuse()
    outcomes = {name: Outcome(name, summary) for name in keys if store and (summary := store.find(name)) is not None}
    missing = {name: point for name, point in zip(keys, points, strict=True) if name not in outcomes}
    light = _light([(requests[name], point.inputs.settings.leap) for name, point in missing.items()])
    for outcome in track(_run(missing, workloads, workers, goal, light), "points", len(missing)):
        point = missing[outcome.key]
        if outcome.fault:
            error = SimulationFault(f"{point.axis_values}: {outcome.fault.splitlines()[-1]}")
            error.add_note(outcome.fault)
            raise error
        if store and outcome.summary is not None:
            store.keep(outcome.key, point.inputs, outcome.summary)
        outcomes[outcome.key] = outcome
    swept = zip(points, hashes, keys, strict=True)
    return [Swept(point, work_sha256, outcomes[name]) for point, work_sha256, name in swept]


def _light(points: Sequence[tuple[int, bool]]) -> bool:
    """Whether points may be too short for the start of workers, from their requests and whether their runs leap."""
    mean = sum(requests for requests, _ in points) / max(1, len(points))
    least_us = sum(requests * _LEAST_US[leap] for requests, leap in points)
    return mean < _HEAVY_REQUESTS and least_us < WORTH_WORKERS_S * 1e6


def _run(
    points: Mapping[str, Point], workloads: Workloads, workers: Workers, goal: Objectives | None, light: bool
) -> Iterator[Outcome]:
    jobs = ((name, point.inputs.settings, workloads.of(point.inputs), goal) for name, point in points.items())
    return as_they_finish(run_point, jobs, len(points), workers, light)


def run_point(name: str, settings: Settings, work: Workload, goal: Objectives | None = None) -> Outcome:
    """Serve a workload to its end and summarize it, with the class of its load, and the range of its latency near saturation.

    Unread settings are not refused; errors are returned, never raised.
    """
    outcome = _outcome(name, settings, work, goal)
    if len(work) >= _HEAVY_REQUESTS:
        # A run refers to itself in circles, and Python's collector counts objects, not their bytes.
        gc.collect()
    return outcome


def _outcome(name: str, settings: Settings, work: Workload, goal: Objectives | None) -> Outcome:
    try:
        if settings.data_parallel_size > 1:
            remedy = "a sweep simulates one replica; use fragmeter simulate or plan"
            raise SettingError("data_parallel_size", settings.data_parallel_size, remedy)
        run = simulate(only_read(settings, work), work, logs_contents=False)
        return Outcome(name, summary(run, goal) | _load(run, work))
    except UserError as error:
        return Outcome(name, error=str(error))
    except Exception:
        return Outcome(name, fault=traceback.format_exc())


def _load(run: Run, work: Workload) -> dict[str, Any]:
    load, near = saturation(
        run.settings, ServedLoad.of(run, work), lambda changed: times_of(simulate(changed, work, logs_contents=False))
    )
    return {"load": load} | ({} if near is None else {"near_saturation": asdict(near)})
