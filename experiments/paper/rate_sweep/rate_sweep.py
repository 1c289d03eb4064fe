"""Rate sweeps of SOSP'23: the request rate at which a system's mean normalised latency reaches 0.5 s/token.

*Requests.* The artifact's trace rule draws the requests at the published rate. Other rates serve the same requests with
their gaps scaled, so that a curve uses common random numbers and its point at the published rate is the paper's own
trace. All requests are served, and the mean is over all of them, as in the artifact.

*Step time.* If all steps take s times as long and all gaps are s times as long, every latency is s times as long: L(r,
s) = s * L(s * r, 1). Every run therefore has s = 1, and the scale is applied afterwards. Fitting s on a published rate
R means finding the point where the curve s * L(s * R, 1) crosses the target. The slope at a crossing gives its shift
for 1 % of step time. The time of swaps and copies scales in the same way.

*Crossing.* Bisection finds the crossing (``crossing``). One search is one job on one core.

*Early stop.* A run ends as soon as its mean is certain to exceed the highest latency of interest (``mean_latency_s``).
A started request has a normalised latency of at least (start - arrival) / output tokens. The sum of these terms over
all started requests, divided by the number of all requests, is a lower bound of the mean. For a server that falls
behind it is most of the mean. The bound is computed twenty times while requests arrive. Runs below the limit continue
to the last request, and their means are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from typing import Any

import numpy as np

from ....sim import Settings, Workload, simulate
from ....sim.cost import StepCost
from ....sim.engine.core import CoreEngine
from ....sim.engine.engine import Engine
from ....sim.memory.accounting.ledger import Ledger
from ....sim.metrics.requests import request_times
from ....sim.types.ticks import PER_SECOND
from ...runs.crossing import Crossing, crossing
from ...runs.output import track
from ...runs.parallel import Workers, as_they_finish
from .costs import Steps

#: The bound is computed at one in this many looks at a run, because it takes a pass over the run.
_LOOKS_EVERY = 10


def mean_latency_s(settings: Settings, work: Workload, cost: StepCost, most_s: float = inf) -> float:
    """Mean of (finish - arrival) / output tokens over all requests served, in s/token.

    Args:
        most_s: Means that are known to be above it are returned as infinity.
    """
    watch = _Watch(work, most_s)
    run = simulate(settings, work, cost, watch=None if most_s == inf else watch.look)
    if watch.is_far_above:
        return inf
    return float(request_times(run).normalized_latency_s.mean())


class _Watch:
    """Checks the bound during a run, and ends the run once the mean is certain to exceed the limit."""

    def __init__(self, work: Workload, most_s: float) -> None:
        self._work, self._most_s = work, most_s
        self._looks = 0
        self.is_far_above = False

    def look(self, engine: Engine | CoreEngine) -> bool:
        """End the run if the bound exceeds the limit."""
        self._looks += 1
        self.is_far_above = self._looks % _LOOKS_EVERY == 0 and self.least_s(engine.ledger) > self._most_s
        return self.is_far_above

    def least_s(self, ledger: Ledger) -> float:
        """The lower bound of the mean, in s/token."""
        work, residencies = self._work, ledger.residencies.columns()
        # Residencies are in order of time: a request starts with the first residency of any of its sequences.
        request = np.repeat(np.arange(len(work)), work.num_sequences)[residencies["index"]]
        started, first = np.unique(request, return_index=True)
        waited = (residencies["start_ticks"][first] - work.arrival_ticks[started]) / PER_SECOND
        return float((waited / work.output_tokens[started]).sum()) / len(work)


#: Target latency of the paper, s/token.
TARGET_S = 0.5
#: Further rates for the picture, as shares of the published rate.
_LIGHT = 0.75
#: Latencies above this multiple of the target are only computed at the point next to the crossing.
_FAR_ABOVE = 2.0
#: First scale of the search.
_SCALE_START = 1.2


@dataclass(frozen=True)
class System:
    """A system that serves a load.

    Attributes:
        settings: Its replica.
        steps: Its step time at scale 1.
        n: Sequences per request.
    """

    settings: Settings
    steps: Steps
    n: int = 1


@dataclass(frozen=True)
class Load:
    """Requests, and the rate in requests/s at which they were drawn."""

    workload: Workload
    rate: float

    def at(self, rate: float) -> Workload:
        """The same requests and gaps at another rate."""
        ticks = np.rint(self.workload.arrival_ticks * (self.rate / rate)).astype(np.int64)
        return replace(self.workload, arrival_ticks=ticks)


@dataclass(frozen=True)
class Search:
    """One job: the crossing of a system under a load, with steps ``scale`` times as long.

    Attributes:
        key: Its name in the results.
        reported_rates: Other rates, in requests/s, at which the latency is reported.
    """

    key: tuple[Any, ...]
    system: System
    load: Load
    scale: float
    reported_rates: tuple[float, ...] = ()


def latency_s(system: System, load: Load, rate: float, scale: float = 1.0, most_s: float = inf) -> float:
    """Mean normalised latency in s/token, over all requests, at a rate in requests/s with scaled steps.

    Args:
        most_s: Latencies known to be above it are returned as infinity.
    """
    work = load.at(rate * scale)
    if system.n > 1:
        work = replace(work, n=np.full(len(work), system.n))
    return scale * mean_latency_s(system.settings, work, system.steps.cost(), most_s / scale)


def crossing_of(search: Search) -> Crossing:
    """The rate at which the system crosses the target."""
    curve = partial(latency_s, search.system, search.load, scale=search.scale)
    return crossing(partial(curve, most_s=_FAR_ABOVE * TARGET_S), TARGET_S, search.load.rate, curve)


def find_rate(search: Search) -> tuple[tuple[Any, ...], Crossing]:
    """As ``crossing_of``, with the search's key; the points include one of light load and the other rates of the search."""
    curve = partial(latency_s, search.system, search.load, scale=search.scale)
    found = crossing_of(search)
    known = dict(found.points)
    added = {rate: curve(rate) for rate in (_LIGHT * search.load.rate, *search.reported_rates) if rate not in known}
    return search.key, replace(found, points=tuple(sorted((added | known).items())))


def find_rates(searches: Sequence[Search], subject: str) -> dict[tuple[Any, ...], Crossing]:
    """Every search's crossing, in the order of the searches; searches with many requests start first."""
    jobs = sorted(((search,) for search in searches), key=lambda job: len(job[0].load.workload), reverse=True)
    return _done(find_rate, jobs, subject, [search.key for search in searches])


def fit_scale(system: System, load: Load) -> Crossing:
    """The scale of the step time at which the system crosses the target at the rate of its load."""
    curve = partial(latency_s, system, load, load.rate)
    return crossing(partial(curve, most_s=_FAR_ABOVE * TARGET_S), TARGET_S, _SCALE_START, curve)


def latencies(
    searches: Sequence[Search], rates: Mapping[tuple[Any, ...], float], subject: str
) -> dict[tuple[Any, ...], float]:
    """Mean normalised latency of every search's system and load, at the rate under its key."""
    return _done(_latency_at, [(search, rates[search.key]) for search in searches], subject, list(rates))


def _latency_at(search: Search, rate: float) -> tuple[tuple[Any, ...], float]:
    return search.key, latency_s(search.system, search.load, rate, search.scale)


def _done(
    call: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], subject: str, keys: Iterable[tuple[Any, ...]]
) -> dict[tuple[Any, ...], Any]:
    found = dict(track(as_they_finish(call, jobs, len(jobs), Workers()), subject, len(jobs)))
    return {key: found[key] for key in keys if key in found}


def per_step_pct(found: Crossing) -> float:
    """Shift of the crossing if all steps take 1 % longer: the rate falls by 1 %, and by the effect of the lower target."""
    return found.at * (1 + found.exponent) / 100


def moved_to(found: Crossing, latency: float) -> float:
    """The crossing, to first order, of another load that has this latency at the rate of ``found``."""
    return found.at * exp(-found.exponent * log(latency / TARGET_S))
