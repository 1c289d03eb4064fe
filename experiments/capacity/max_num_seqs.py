"""The largest ``max-num-seqs`` that runs without preemption on a load, by simulation.

A larger value admits more sequences, and together they may outgrow the pool. It also changes which sequences run
together, so a value that preempts can lie between two that do not (tests/experiments/capacity/test_plan_questions.py
has one). The search therefore does not bisect:

1. A run with the largest possible value gives the peak number of running sequences. Larger values change nothing.
2. From the peak down, each value is simulated until the first preemption, which occurs early for large values. The
   first value without a preemption is the answer. Preemptions are those that vLLM counts (``sim.metrics.requests``).
3. A smaller bound is independent of order and times: as many of the longest sequences as fit in the pool together
   never preempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate
from ...sim.engine.observer import Observed, Observer
from ...sim.engine.run import Run
from ...sim.metrics.requests import preemptions
from ...sim.types.sequence import StepPlan

#: Progress display: takes the values, their description and their number.
Watch = Callable[[Iterable[int], str, int], Iterable[int]]


@dataclass(frozen=True)
class MaxNumSeqs:
    """Result of the search.

    Attributes:
        most: Largest value that has an effect: the token budget of a step, or the number of sequences if that is
            smaller.
        peak: Peak number of running sequences with ``most``.
        largest: Largest value without a preemption; None if there is none.
        in_any_order: Bound up to which the same requests cannot preempt, for any arrival times.
        runs: Number of simulations.
    """

    most: int
    peak: int
    largest: int | None
    in_any_order: int
    runs: int

    @property
    def unlimited(self) -> bool:
        """Whether no sequence is preempted even if ``max_num_seqs`` does not limit the batch."""
        return self.largest == self.most

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def largest_max_num_seqs(settings: Settings, work: Workload, watch: Watch) -> MaxNumSeqs:
    """The largest ``max_num_seqs`` with which no request is preempted.

    Raises:
        UserError: An invalid setting, or a request longer than the model.
    """
    most = _most(settings, work)
    run = simulate(replace(settings, max_num_seqs=most), work)
    # A prompt that continues after a step counts as running and computes no token of its own. With asynchronous scheduling
    # sequences that finished together count for a step more.
    together = np.unique(run.log.residency_end, return_counts=True)[1].max(initial=0)
    peak = int(run.log.rows["batch_size"].max(initial=0)) + 1 + (run.replica.policy.schedules_ahead and int(together))
    peak = min(most, peak)
    sure = _in_any_order(run)
    if not len(preemptions(run).ticks):
        return MaxNumSeqs(most, peak, most, sure, 1)
    values, runs = range(peak, 0, -1), 1
    for value in watch(values, "Lower max_num_seqs", len(values)):
        runs += 1
        if not preempts(replace(settings, max_num_seqs=value), work):
            return MaxNumSeqs(most, peak, value, sure, runs)
    return MaxNumSeqs(most, peak, None, sure, runs)


def preempts(settings: Settings, work: Workload) -> bool:
    """Whether a run preempts; the run ends at the first preemption."""
    watch = _UntilPreempted()
    simulate(settings, work, observers=(watch,))
    return watch.preempted


class _UntilPreempted(Observer):
    """Ends a run at its first preemption."""

    def __init__(self) -> None:
        self.preempted = False

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        """See ``Observer``."""
        self._engine = engine

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """See ``Observer``."""
        if plan.preempted or plan.swapped_out:
            self.preempted = True
            self._engine.stop()


def _most(settings: Settings, work: Workload) -> int:
    """The smaller of the tokens of a step and the number of sequences."""
    sequences = int(work.num_sequences.sum())
    budget = settings.max_num_batched_tokens
    return sequences if budget is None else min(sequences, budget)


def _in_any_order(run: Run) -> int:
    """Number of the longest sequences that fit in the pool together, however far each has come; one block is vLLM's null block."""
    scheduler, replica, workload = run.replica.policy, run.replica, run.workload
    null, layout = getattr(scheduler, "null_blocks", 0), run.replica.layout
    # A token that is computed in vain after an EOS takes a slot, too.
    ends_early = True if workload.max_tokens is None else workload.output_tokens < workload.max_tokens
    longer = replace(workload, output_tokens=workload.output_tokens + (scheduler.schedules_ahead & ends_early))
    if layout is None:
        blocks = scheduler.smallest_pool_blocks(longer, replica.block_size) - null
    else:
        # Without preemptions no more than the prompt is ever computed as a prompt.
        alone = replace(workload, output_tokens=np.ones_like(workload.output_tokens))
        prompts = scheduler.smallest_pool_blocks(alone, replica.block_size) - null
        stored, place = np.unique(longer.prompt_tokens + longer.output_tokens - 1, return_inverse=True)
        decodes = np.array([layout.decode_blocks(tokens, replica.block_size) for tokens in stored.tolist()])
        blocks = np.maximum(prompts, decodes[place])
    held = np.cumsum(np.sort(np.repeat(blocks, workload.num_sequences))[::-1])
    return int(np.searchsorted(held, replica.num_blocks - null, side="right"))
