"""The mean normalised latency of a load, from a run that ends early once the mean is certain to be too high.

Of a request that has started, (start - arrival) / output tokens is a part of its normalised latency. Summed over all
that have started, and divided by the number of all requests, that is a lower bound of the mean, and where a server
falls behind, so that requests wait longer and longer, most of it. It is taken twenty times while requests arrive. Once
it is above the most that is asked for, so is the mean, and the run ends there: the outcome is that of the whole run, at
a part of its time. Runs that stay below are simulated to the last request, and their means are exact.
"""

from __future__ import annotations

from math import inf

import numpy as np

from ....sim.cost import StepCost
from ....sim.engine.engine import Engine
from ....sim.engine.observer import Observer
from ....sim.engine.run import simulate
from ....sim.engine.settings import Settings
from ....sim.metrics.requests import request_times
from ....sim.types.ticks import PER_SECOND
from ....sim.workload.workload import Workload

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
