"""Latency near saturation, as a range: there a small error of the step times moves it out of proportion.

A load is checked where its requests wait, before their first step, for a tenth of their time or more, or for half of mean TTFT:
where outputs are long, waiting multiplies TTFT and is a small part of the whole. It is served again with steps that are 5 %
shorter and 5 % longer. If mean TTFT or mean end-to-end latency differs by more than half of its value,
both ends are reported. Loads of many requests are not served again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...sim.cluster import ClusterRun, cluster_times
from ...sim.engine.run import Run
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types.ticks import PER_MS
from .serving import Load, serve
from .slo_check import compiled_cost

#: Change of the step time, and relative difference from which latency is a range.
CHANGE, _MOVED = 0.05, 0.5
#: Waiting from which a load is checked, as a share of mean end-to-end latency, and of mean TTFT.
_OF_E2EL, _OF_TTFT = 0.1, 0.5
#: Most requests of a load that is served again.
MOST_REQUESTS = 5_000
_METRICS = {"mean_ttft_ms": "mean TTFT", "mean_e2el_ms": "mean end-to-end latency"}


@dataclass(frozen=True)
class LatencyRange:
    """Latencies with steps that are 5 % shorter, and 5 % longer, in ms.

    Attributes:
        shorter, longer: By ``mean_ttft_ms`` and ``mean_e2el_ms``.
    """

    shorter: Mapping[str, float]
    longer: Mapping[str, float]

    def text(self) -> str:
        """One line."""
        ranges = ", ".join(
            f"{label} {self.shorter[name]:,.0f} to {self.longer[name]:,.0f} ms" for name, label in _METRICS.items()
        )
        return f"Near saturation: with steps {CHANGE:.0%} shorter and longer, {ranges}."

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {"step_time_change": CHANGE, "shorter": dict(self.shorter), "longer": dict(self.longer)}


def latency_range(load: Load, run: Run | ClusterRun) -> LatencyRange | None:
    """The range of a finished run; None where latency is not near saturation, or the load is too large to be served again."""
    if len(load.work) > MOST_REQUESTS or not load.work.arrival_ticks.any() or not _waits(run):
        return None
    found = _means(run)
    shorter, longer = (_means(serve(_with_steps(load, factor))) for factor in (1 - CHANGE, 1 + CHANGE))
    if all(abs(longer[name] - shorter[name]) <= _MOVED * found[name] for name in _METRICS):
        return None
    return LatencyRange(shorter, longer)


def _waits(run: Run | ClusterRun) -> bool:
    times = _times(run)
    if not len(times.index):
        return False
    waited_ms = (times.first_scheduled_ticks - times.arrival_ticks).mean() / PER_MS
    return bool(waited_ms >= min(_OF_E2EL * times.e2el_ms.mean(), _OF_TTFT * times.ttft_ms.mean()))


def _means(run: Run | ClusterRun) -> dict[str, float]:
    times = _times(run)
    return {"mean_ttft_ms": float(times.ttft_ms.mean()), "mean_e2el_ms": float(times.e2el_ms.mean())}


def _times(run: Run | ClusterRun) -> RequestTimes:
    return cluster_times(run) if isinstance(run, ClusterRun) else request_times(run)


def _with_steps(load: Load, factor: float) -> Load:
    settings = load.inputs.settings
    scale = getattr(compiled_cost(settings), "scale", 1.0)
    changed = replace(settings, step_scale=round(scale * factor, 6))
    return replace(load, inputs=replace(load.inputs, settings=changed))
