"""Fits the constants of a server (``sim.cost.server``) to what was measured on it.

The step's constant brings simulated TPOTs to the measured ones; under asynchronous scheduling it is ``step_us``, as the
host's work is hidden, else ``host_us``. The time outside of the engine then is what TTFT lacks. Neither is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import expm1, isfinite, log
from typing import Any, NamedTuple, cast, get_args

from ...sim import Settings, simulate
from ...sim.config.unread import only_read
from ...sim.cost import ServedCost, Server, ServerConstants, ServerFit
from ...sim.cost.server import Metric, OperationCost
from ...sim.engine.replica import build, server_settings
from ...sim.types import ticks
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from .knobs import CLOSE, MOST_CORRECTIONS
from .replay import Benchmark, Replayed

#: Runs for the step's constant, at most; and the least correction of the time outside of the engine, in ms.
MOST_RUNS, LEAST_MS = 8, 0.05
#: Least share of requests that hardly waited, for a time outside of the engine.
LEAST_SHARE = 0.1
_RECORDED = get_args(Metric)


class Deviation(NamedTuple):
    """Measured beside simulated.

    Attributes:
        tpot: Logarithm of measured over simulated TPOT.
        tpot_us: Simulated TPOT.
        late_ms: Measured minus simulated TTFT of requests that hardly waited; None if too few did: TTFT is then queueing,
            and says nothing about the time outside of the engine.
    """

    tpot: float
    tpot_us: float
    late_ms: float | None


def fitted_constants(
    look: Callable[[ServerConstants], Deviation], asynchronous: bool, closed_loop: bool = False
) -> ServerConstants:
    """The constants with which simulated TPOT and TTFT are the measured ones.

    Args:
        look: Simulates with constants.
        asynchronous: Whether the server schedules asynchronously.
        closed_loop: Whether the time outside of the engine changes the load.
    """
    step = partial(replace, ServerConstants(), step_us=0.0)
    name = "step_us" if asynchronous else "host_us"
    at, seen = 0.0, look(step(**{name: 0.0}))
    tried = [(at, seen)]
    per_us = 1 / max(seen.tpot_us, 1e-3)
    for _ in range(MOST_RUNS - 1):
        if abs(seen.tpot) < CLOSE or not (at or seen.tpot > 0):
            break
        at = max(0.0, at + (expm1(seen.tpot) if len(tried) == 1 else seen.tpot) / per_us)
        before, seen = seen, look(step(**{name: at}))
        more = at - tried[-1][0]
        tried.append((at, seen))
        # A longer step gives a smaller ratio; any other result is noise of single requests.
        if more and (slope := (before.tpot - seen.tpot) / more) > 0:
            per_us = slope
    at, seen = min(tried, key=lambda one: abs(one[1].tpot))
    found = step(**{name: at}, outside_ms=max(0.0, seen.late_ms or 0.0))
    for _ in range(MOST_CORRECTIONS if closed_loop else 0):
        late_ms = look(found).late_ms
        if late_ms is None or abs(late_ms) < LEAST_MS:
            break
        found = replace(found, outside_ms=max(0.0, found.outside_ms + late_ms))
    return replace(found, outside_ms=round(found.outside_ms, 3), **{name: round(at, 1)})


def served(settings: Settings, constants: ServerConstants, source: str = "") -> ServedCost:
    """The step times of a replica with these constants.

    Raises:
        SettingError: The settings have constants already, a factor on the step time, or a cost model without operations.
    """
    for field in ("server", "step_scale"):
        if getattr(settings, field) is not None:
            raise SettingError(field, getattr(settings, field), "is fitted anew; leave it out")
    ranks = settings.value("decode_context_parallel_size")
    if ranks > 1:
        raise SettingError(
            "decode_context_parallel_size", ranks, "is not among the settings of constants; leave it out"
        )
    replica = build(settings)
    inner = replica.cost.inner if isinstance(replica.cost, ServedCost) else replica.cost
    if not hasattr(inner, "overhead_ticks"):
        remedy = "has no operations beside which a server takes time; use --cost fitted, roofline or a calibration"
        raise SettingError("cost", settings.cost or replica.cost.name, remedy)
    about = server_settings(settings) | {"cost": settings.cost or replica.cost.name}
    server = Server(1, "server", source, cast(dict[str, Any], about), constants)
    return ServedCost(cast(OperationCost, inner), server, replica.policy.schedules_ahead)


def replay_served(benchmark: Benchmark, settings: Settings, constants: ServerConstants) -> Replayed:
    """A benchmark's requests on a server with constants."""
    work = benchmark.workload(0)
    return Replayed(simulate(only_read(settings, work), work, served(settings, constants)))


def fitted_to(benchmark: Benchmark, settings: Settings) -> ServerConstants:
    """The constants of the server of a benchmark."""

    def look(constants: ServerConstants) -> Deviation:
        replayed = replay_served(benchmark, settings, constants)
        ratio = benchmark.tpot_ratio(replayed)
        tpot_us = replayed.values()["mean_tpot_ms"] * 1e3
        return Deviation(log(ratio) if ratio else 0.0, tpot_us, _late_ms(benchmark, replayed, tpot_us / 1e3))

    asynchronous = build(settings).policy.schedules_ahead
    return fitted_constants(look, asynchronous, benchmark.measured.max_concurrency is not None)


def _late_ms(benchmark: Benchmark, replayed: Replayed, tpot_ms: float) -> float | None:
    """Median of measured minus simulated TTFT, over the requests that waited for two steps at most."""
    times, outside = replayed.times, replayed.run.replica.outside_ticks
    waited_ms = (times.first_scheduled_ticks - times.arrival_ticks - outside) / ticks.PER_MS
    soon = waited_ms <= 2 * tpot_ms
    if not len(soon) or soon.mean() < LEAST_SHARE:
        return None
    late_s = benchmark.median_late_s(replayed, soon)
    return None if late_s is None else late_s * 1e3


def server_fit(
    benchmark: Benchmark, sha256: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> ServerFit:
    """The record of a fit.

    Args:
        sha256: Of the benchmark's file.
        before, after: Rows of ``compared``, without the constants and with them; errors without a value are left out.
    """
    of_metrics = (
        {row["metric"]: row["error"] for row in rows if row["metric"] in _RECORDED and row["error"] is not None}
        for rows in (before, after)
    )
    errors = ({name: round(error, 6) for name, error in each.items() if isfinite(error)} for each in of_metrics)
    seen = benchmark.measured
    return ServerFit(sha256, len(benchmark.trace), benchmark.sent_rate, seen.max_concurrency, *errors)


def server_document(settings: Settings, constants: ServerConstants, source: str, fit: ServerFit) -> dict[str, Any]:
    """The content of a file of constants."""
    server = not_none(served(settings, constants, source).server)
    return {
        "schema_version": server.schema_version,
        "kind": server.kind,
        "source": source,
        "server": server.server,
        "constants": asdict(constants),
        "fit": asdict(fit),
    }
