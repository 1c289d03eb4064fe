"""How many requests/s a system takes before its mean normalised latency exceeds 0.5 s/token: SOSP'23's rate sweeps.

*Requests.* Those that the artifact's trace rule draws at the published rate; at any other rate the very same ones
with the same gaps, further apart or closer together. So a curve is made of common random numbers, and at the
published rate it is the paper's own trace. All are served to the last, and the mean is over all of them, as in
the artifact.

*Step time.* If all steps take s times as long, and requests come s times as far apart, every latency is s times
what it was: L(r, s) = s * L(s * r, 1). So everything runs at s = 1, and the scale is applied afterwards: to fit s
on a published rate R is to find where the curve s * L(s * R, 1) crosses the target, and how far a crossing moves
with 1 % of step time follows from the slope there. What bounds swaps and copies is scaled with the rest.

*Crossing.* By bisection (``crossing``). Rates at which latency is known to be far above the target are not simulated
to the end (``overload``). One search is one job, on whatever core is free.

The mean normalised latency of a load, from a run that ends early once the mean is certain to be too high.

Of a request that has started, (start - arrival) / output tokens is a part of its normalised latency. Summed over all
that have started, and divided by the number of all requests, that is a lower bound of the mean, and where a server
falls behind, so that requests wait longer and longer, most of it. It is taken twenty times while requests arrive. Once
it is above the most that is asked for, so is the mean, and the run ends there: the outcome is that of the whole run, at
a part of its time. Runs that stay below are simulated to the last request, and their means are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from typing import Any

import numpy as np

from ....sim.cost import StepCost
from ....sim.engine.engine import Engine
from ....sim.engine.observer import Observer
from ....sim.engine.run import simulate
from ....sim.engine.settings import Settings
from ....sim.metrics.requests import request_times
from ....sim.types.ticks import PER_SECOND
from ....sim.workload.workload import Workload
from ...runs.crossing import Crossing, crossing
from ...runs.output import track
from ...runs.parallel import Workers, as_they_finish
from .costs import Steps

#: Of the times at which a run tells how far it is, which share looks at the bound: it takes a pass over the run.
_LOOKS_EVERY = 10


def mean_latency_s(settings: Settings, work: Workload, cost: StepCost, most_s: float = inf) -> float:
    """Mean of (finish - arrival) / output tokens over all requests served, in s/token.

    Args:
        most_s: Means that are known to be above it are infinite.
    """
    watch = _Watch(work, most_s)
    run = simulate(settings, work, cost, None if most_s == inf else watch.look, (watch,))
    if watch.is_far_above:
        return inf
    return float(request_times(run).normalized_latency_s.mean())


class _Watch(Observer):
    """Checks the bound during a run, and ends a run that is far above it."""

    def __init__(self, work: Workload, most_s: float) -> None:
        self._work, self._most_s = work, most_s
        self._looks = 0
        self.is_far_above = False

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        """See ``Observer``."""
        self._engine = engine

    def look(self, _: int) -> None:
        """Now and then: end a run that is far above."""
        self._looks += 1
        if self._looks % _LOOKS_EVERY == 0 and self.least_s() > self._most_s:
            self.is_far_above = True
            self._engine.stop()

    def least_s(self) -> float:
        """The bound."""
        work, residencies = self._work, self._engine.ledger.residencies.columns()
        # Residencies are in the order of time: a request starts with the first of its sequences' residencies.
        request = np.repeat(np.arange(len(work)), work.num_sequences)[residencies["index"]]
        started, first = np.unique(request, return_index=True)
        waited = (residencies["start_ticks"][first] - work.arrival_ticks[started]) / PER_SECOND
        return float((waited / work.output_tokens[started]).sum()) / len(work)


#: s/token; where the paper draws the line.
TARGET_S = 0.5
#: Of the published rate: where the curve is asked too, for the picture.
_LIGHT = 0.75
#: Of the target: latencies above need not be known but for the point next to the crossing.
_FAR_ABOVE = 2.0
#: Where the search for a scale starts.
_SCALE_START = 1.2


@dataclass(frozen=True)
class System:
    """What serves a load.

    Attributes:
        settings: Its replica.
        steps: What a step takes, at scale 1.
        n: Sequences that every request asks for.
    """

    settings: Settings
    steps: Steps
    n: int = 1


@dataclass(frozen=True)
class Load:
    """Requests at the rate at which they were drawn, in requests/s."""

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
        key: What it is called in the results.
        asked: Other rates, in requests/s, for which the latency is reported.
    """

    key: tuple[Any, ...]
    system: System
    load: Load
    scale: float
    asked: tuple[float, ...] = ()


def latency_s(system: System, load: Load, rate: float, scale: float = 1.0, most_s: float = inf) -> float:
    """Mean normalised latency in s/token, over all requests, at a rate in requests/s with steps scaled.

    Args:
        most_s: What is known to be above it is infinite.
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
    """As ``crossing_of``, by the search's key; its points include one of light load and what else the search asks
    for.
    """
    curve = partial(latency_s, search.system, search.load, scale=search.scale)
    found = crossing_of(search)
    known = dict(found.points)
    added = {rate: curve(rate) for rate in (_LIGHT * search.load.rate, *search.asked) if rate not in known}
    return search.key, replace(found, points=tuple(sorted((added | known).items())))


def find_rates(searches: Sequence[Search], subject: str) -> dict[tuple[Any, ...], Crossing]:
    """Every search's crossing, in the order of the searches; those of many requests are begun first."""
    jobs = sorted(((search,) for search in searches), key=lambda job: len(job[0].load.workload), reverse=True)
    return _done(find_rate, jobs, subject, [search.key for search in searches])


def fit_scale(system: System, load: Load) -> Crossing:
    """The scale of the step time at which the system crosses the target at the very rate of its load."""
    curve = partial(latency_s, system, load, load.rate)
    return crossing(partial(curve, most_s=_FAR_ABOVE * TARGET_S), TARGET_S, _SCALE_START, curve)


def latencies(
    searches: Sequence[Search], rates: Mapping[tuple[Any, ...], float], subject: str
) -> dict[tuple[Any, ...], float]:
    """Mean normalised latency of every search's system and load at the rate under its key."""
    return _done(_latency_at, [(search, rates[search.key]) for search in searches], subject, list(rates))


def _latency_at(search: Search, rate: float) -> tuple[tuple[Any, ...], float]:
    return search.key, latency_s(search.system, search.load, rate, search.scale)


def _done(
    call: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], subject: str, keys: Iterable[tuple[Any, ...]]
) -> dict[tuple[Any, ...], Any]:
    found = dict(track(as_they_finish(call, jobs, len(jobs), Workers()), subject, len(jobs)))
    return {key: found[key] for key in keys if key in found}


def per_step_pct(found: Crossing) -> float:
    """How far the rate moves if all steps take 1 % longer: it falls by 1 %, and by what the target is then too high."""
    return found.at * (1 + found.exponent) / 100


def stretched(found: Crossing, stretch: float) -> float:
    """Where the same load crosses if all steps take ``stretch`` times as long, with the curve a power law."""
    return found.at * stretch ** -(1 + found.exponent)


def moved_to(found: Crossing, latency: float) -> float:
    """Where another load crosses, to first order, that has this latency where ``found`` crosses."""
    return found.at * exp(-found.exponent * log(latency / TARGET_S))
