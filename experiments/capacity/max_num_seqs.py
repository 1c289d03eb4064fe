"""Which ``max-num-seqs`` runs without preemption on a load: the largest, by simulation.

More seats let more sequences in, which outgrow the pool together; but who waits arrives in other company, so that now
and then a value preempts between two that do not (tests/test_plan_questions.py has one). So nothing is bisected:

1. With as many seats as there can be, the run says how many ever run at once: more seats change nothing.
2. From there down every value is simulated until the first preemption, which comes early where seats are many. The
   first value that has none is the answer.
3. Whatever the order and the times: as many as the longest of the load fit together never preempt. That is less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate
from ...sim.engine.engine import Engine
from ...sim.engine.observer import Observer
from ...sim.engine.run import Run
from ...sim.types.sequence import StepPlan

#: Passes values on and shows how far they have come: values, what they are, how many.
Watch = Callable[[Iterable[int], str, int], Iterable[int]]


@dataclass(frozen=True)
class Seats:
    """The answer.

    Attributes:
        most: Largest value that can be asked: the step's tokens, or the requests where they are fewer.
        peak: How many run at once with that.
        largest: Largest value without a preemption; None where there is none.
        in_any_order: Up to this value the same requests cannot preempt, whenever they come.
        runs: Simulations that it took.
    """

    most: int
    peak: int
    largest: int | None
    in_any_order: int
    runs: int

    @property
    def unlimited(self) -> bool:
        """Whether nobody is preempted where seats limit nobody."""
        return self.largest == self.most

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def largest_max_num_seqs(settings: Settings, work: Workload, watch: Watch) -> Seats:
    """The largest ``max_num_seqs`` with which no request is preempted.

    Raises:
        UserError: A setting cannot be, or a request is longer than the model.
    """
    most = _most(settings, work)
    run = simulate(replace(settings, max_num_seqs=most), work)
    # A prompt that goes on after a step has a seat and computes no token of its own.
    peak = min(most, int(run.log.rows["batch_size"].max(initial=0)) + 1)
    sure = _in_any_order(run)
    if not len(run.log.evictions["index"]):
        return Seats(most, peak, most, sure, 1)
    values, runs = range(peak, 0, -1), 1
    for value in watch(values, "Fewer seats", len(values)):
        runs += 1
        if not preempts(replace(settings, max_num_seqs=value), work):
            return Seats(most, peak, value, sure, runs)
    return Seats(most, peak, None, sure, runs)


def preempts(settings: Settings, work: Workload) -> bool:
    """Whether a run preempts; it is over when that is known."""
    watch = _UntilPreempted()
    simulate(settings, work, observers=(watch,))
    return watch.preempted


class _UntilPreempted(Observer):
    """Ends a run at its first preemption."""

    def __init__(self) -> None:
        self.preempted = False

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        """See ``Observer``."""
        self._engine = engine

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """See ``Observer``."""
        if plan.preempted or plan.swapped_out:
            self.preempted = True
            self._engine.stop()


def _most(settings: Settings, work: Workload) -> int:
    """No step has more sequences than tokens, and none more than there are."""
    sequences = int(work.num_sequences.sum())
    budget = settings.max_num_batched_tokens
    return sequences if budget is None else min(sequences, budget)


def _in_any_order(run: Run) -> int:
    """How many of the longest sequences the pool holds to their ends, one block being vLLM's null block."""
    null = getattr(run.replica.policy, "null_blocks", 0)
    blocks = np.repeat(run.smallest_pool_blocks - null, run.workload.num_sequences)
    held = np.cumsum(np.sort(blocks)[::-1])
    return int(np.searchsorted(held, run.replica.num_blocks - null, side="right"))
