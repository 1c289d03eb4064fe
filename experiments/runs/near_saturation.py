"""The load of a finished run, and its latency near saturation as a range.

    light      requests hardly wait, and fewer than 0.8 of the places of ``max_num_seqs`` are taken in the mean
    busy       requests wait, before their first step, for a tenth of their time, or more places are taken, or latency is near
               saturation
    overload   requests wait for more than 5 s in the mean

Near saturation a small error of the step times moves latency out of proportion. A load is checked where one in ten requests waits
for more than two steps, and waiting is a tenth of the whole time or half of mean TTFT: where outputs are long, waiting multiplies TTFT
and is a small part of the whole. It is served again with steps that are 5 % shorter and 5 % longer. If mean TTFT, TPOT or
end-to-end latency differs by more than half of its value, both ends are reported. Loads of many requests are not served again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from ...sim import Run, Settings, Workload
from ...sim.cluster import ClusterRun, cluster_times
from ...sim.metrics.registry import METRICS
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types.bounds import LEAST_SCALE, MOST_SCALE
from ...sim.types.ticks import PER_MS
from .serving import Load, serve
from .slo_check import compiled_cost

LoadClass = Literal["light", "busy", "overload"]
#: Change of the step time, and relative difference from which latency is a range.
CHANGE, _MOVED = 0.05, 0.5
#: Mean waiting from which a load is checked, as a share of mean end-to-end latency, and of mean TTFT; and mean TPOTs, as a
#: request comes in the middle of a step.
_OF_E2EL, _OF_TTFT, _STEPS = 0.1, 0.5, 2
#: Share of the places from which a load is busy, and mean waiting from which it is overload.
MANY_PLACES, LONG_MS = 0.8, 5_000
#: Most requests of a load that is served again.
MOST_REQUESTS = 5_000
RANGED = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")


@dataclass(frozen=True)
class LatencyRange:
    """Latencies with steps that are 5 % shorter, and 5 % longer, in ms.

    Attributes:
        shorter, longer: By the paths of ``RANGED``.
    """

    shorter: Mapping[str, float]
    longer: Mapping[str, float]

    @classmethod
    def mean(cls, summaries: Sequence[Mapping[str, Any]]) -> LatencyRange | None:
        """The mean over the summaries of several runs; None if none has a range. A run without one counts with its own latency."""
        if not any("near_saturation" in each for each in summaries):
            return None
        ends = [[each.get("near_saturation", {}).get(end, each) for each in summaries] for end in ("shorter", "longer")]
        return cls(*({name: fmean(each[name] for each in of_runs) for name in RANGED} for of_runs in ends))

    def ends(self, metric: str) -> str:
        """Both ends of a metric as text, without the unit."""
        return " to ".join(METRICS[metric].text(end[metric]) for end in (self.shorter, self.longer))

    def is_wide(self, metric: str) -> bool:
        """Whether the ends of a metric differ by more than half of their mean."""
        low, high = self.shorter[metric], self.longer[metric]
        return abs(high - low) > _MOVED * (low + high) / 2

    def text(self) -> str:
        """One line."""
        ranges = ", ".join(f"{METRICS[path].label} {self.ends(path)} ms" for path in RANGED)
        return f"Near saturation: with steps {CHANGE:.0%} shorter and longer, {ranges}."

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {"step_time_change": CHANGE, "shorter": dict(self.shorter), "longer": dict(self.longer)}


@dataclass(frozen=True, eq=False)
class ServedLoad:
    """A served workload.

    Attributes:
        work, times: The requests, and the times of those that were served.
        places: Sequences that run at once, at most.
        outside_ticks: Time of a request outside of the engine.
    """

    work: Workload
    times: RequestTimes
    places: int
    outside_ticks: int

    @classmethod
    def of(cls, run: Run | ClusterRun, work: Workload, replicas: int = 1) -> ServedLoad:
        """That of a finished run.

        Args:
            work: The requests as they were given: those of a run in a closed loop have the times at which they were sent.
            replicas: Replicas that served like this one, each a part of the requests.
        """
        one, replicas = (run.runs[0], len(run.runs)) if isinstance(run, ClusterRun) else (run, replicas)
        places = replicas * one.replica.policy.limits.max_num_seqs
        return cls(work, times_of(run), places, one.replica.outside_ticks)

    @property
    def load_class(self) -> LoadClass:
        """The class of the load. The users of a closed loop may take all places without a wait."""
        if not len(self.times.index):
            return "light"
        if self._waited_ms > LONG_MS:
            return "overload"
        full = self.work.users is None and self._running >= MANY_PLACES * self.places
        return "busy" if full or self._waited_ms >= _OF_E2EL * _means(self.times)["mean_e2el_ms"] else "light"

    @property
    def waits(self) -> bool:
        """Whether requests wait, so that latency may be near saturation."""
        if not len(self.times.index):
            return False
        mean = _means(self.times)
        least_ms = min(_OF_E2EL * mean["mean_e2el_ms"], _OF_TTFT * mean["mean_ttft_ms"])
        longest_ms = (float(np.percentile(self._waits, 90)) - self.outside_ticks) / PER_MS
        return self._waited_ms >= least_ms and longest_ms >= _STEPS * mean["mean_tpot_ms"]

    @property
    def _waits(self) -> np.ndarray:
        """Ticks before the first step, int64 [served]."""
        return self.times.first_scheduled_ticks - self.times.arrival_ticks

    @property
    def _waited_ms(self) -> float:
        """Mean time in the engine before the first step."""
        return (float(self._waits.mean()) - self.outside_ticks) / PER_MS

    @property
    def _running(self) -> float:
        """Sequences in the server, in the mean, by Little's law."""
        times = self.times
        served_ms = (times.finish_ticks.max() - times.arrival_ticks.min()) / PER_MS
        return float(np.dot(times.e2el_ms, self.work.num_sequences[times.index]) / served_ms)


class Saturation(NamedTuple):
    """How near a served load is to saturation.

    Attributes:
        load: The class of the load; "busy" at least where latency is near saturation.
        near: The range of latency near saturation; None elsewhere.
    """

    load: LoadClass
    near: LatencyRange | None


def saturation_of(load: Load, run: Run | ClusterRun) -> Saturation:
    """``saturation`` of a finished run."""

    def again(settings: Settings) -> RequestTimes:
        return times_of(serve(replace(load, inputs=replace(load.inputs, settings=settings))))

    return saturation(load.inputs.settings, ServedLoad.of(run, load.work), again)


def saturation(
    settings: Settings, served: ServedLoad, again: Callable[[Settings], RequestTimes], most: int | None = None
) -> Saturation:
    """How near a load is to saturation; a load that is too large to be served again has no range.

    Args:
        again: Serves the same load with other settings.
        most: Requests of a load that is served again, by default ``MOST_REQUESTS``.
    """
    fits = len(served.work) <= (MOST_REQUESTS if most is None else most)
    near = _range(settings, served, again) if fits and served.work.arrival_ticks.any() and served.waits else None
    return Saturation("busy" if near and served.load_class == "light" else served.load_class, near)


def _range(settings: Settings, served: ServedLoad, again: Callable[[Settings], RequestTimes]) -> LatencyRange | None:
    found = _means(served.times)
    changed = [with_steps(settings, factor) for factor in (1 - CHANGE, 1 + CHANGE)]
    if None in changed:
        return None
    shorter, longer = (_means(again(each)) for each in changed if each)
    if all(abs(longer[name] - shorter[name]) <= _MOVED * found[name] for name in RANGED):
        return None
    return LatencyRange(shorter, longer)


def times_of(run: Run | ClusterRun) -> RequestTimes:
    """Times of the served requests."""
    return cluster_times(run) if isinstance(run, ClusterRun) else request_times(run)


def with_steps(settings: Settings, factor: float) -> Settings | None:
    """The settings with a factor on all step times; None if steps would be scaled beyond what a setting may be."""
    scale = round(getattr(compiled_cost(settings), "scale", 1.0) * factor, 6)
    return replace(settings, step_scale=scale) if LEAST_SCALE <= scale <= MOST_SCALE else None


def _means(times: RequestTimes) -> dict[str, float]:
    values = {"mean_ttft_ms": times.ttft_ms, "mean_tpot_ms": times.tpot_ms, "mean_e2el_ms": times.e2el_ms}
    return {name: float(each.mean()) if len(each) else 0.0 for name, each in values.items()}
