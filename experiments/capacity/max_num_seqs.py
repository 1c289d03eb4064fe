"""The largest ``max-num-seqs`` that runs without preemption: on a load by simulation, for sequences of one length by arithmetic.

A larger value leaves less memory for the KV cache, so each value is judged with the pool that a server with it has.

A larger value admits more sequences, and together they may outgrow the pool. It also changes which sequences run
together, so a value that preempts can lie between two that do not (tests/experiments/capacity/test_plan_questions.py
has one). The search therefore does not bisect:

1. A run with the largest possible value gives the peak number of running sequences: in the pool of the value 1, which is the largest.
   Larger values change nothing but the pool.
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
from ...sim.metrics.requests import preemptions
from ...sim.runs.run import Run
from ...sim.spec.startup.capacity import least, users
from ...sim.types.sequence import StepPlan
from ..vllm_serve.start import Started

#: Progress display: takes the values, their description and their number.
Watch = Callable[[Iterable[int], str, int], Iterable[int]]


@dataclass(frozen=True)
class MaxNumSeqs:
    """Result of the search.

    Attributes:
        most: Largest value that has an effect: the token budget of a step, or if one is smaller the number of sequences or the most with
            which the server starts.
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


def most_at_once(server: Started, tokens: int) -> int:
    """The largest ``max_num_seqs`` with which the server starts and so many sequences of ``tokens`` run at once.

    It is a fixed point: a server with that value has it as its answer, whatever value the given one has.
    """

    def exceeds(number: int) -> bool:
        changed = server.with_max_num_seqs(number)
        return number > _at_once(changed, tokens) or changed.refusal() is not None

    return least(lambda number: exceeds(number + 1), 0, _at_once(server.with_max_num_seqs(1), tokens))


def _at_once(server: Started, tokens: int) -> int:
    return users(server.launch, server.pool().num_blocks, tokens)


def most_that_start(server: Started, number: int) -> int:
    """The largest ``max_num_seqs`` up to ``number`` with which the server starts."""
    return least(lambda each: server.with_max_num_seqs(each + 1).refusal() is not None, 1, number)


def largest_max_num_seqs(settings_of: Callable[[int], Settings], most: int, work: Workload, watch: Watch) -> MaxNumSeqs:
    """The largest ``max_num_seqs`` with which no request is preempted.

    Args:
        settings_of: The replica with a value, and with the pool that it then has.
        most: See ``MaxNumSeqs``.

    Raises:
        UserError: An invalid setting, or a request longer than the model.
    """
    unlimited, roomy = settings_of(most), settings_of(1).num_gpu_blocks_override
    run, runs = simulate(unlimited, work), 1
    sure = _in_any_order(run, most, lambda value: settings_of(value).num_gpu_blocks_override)
    if not len(preemptions(run).ticks):
        return MaxNumSeqs(most, _peak(run, most), most, sure, runs)
    if roomy != unlimited.num_gpu_blocks_override:
        run, runs = simulate(replace(unlimited, num_gpu_blocks_override=roomy), work), 2
    peak = _peak(run, most)
    values = range(peak, 0, -1)
    for value in watch(values, "Lower max_num_seqs", len(values)):
        runs += 1
        if not preempts(settings_of(value), work):
            return MaxNumSeqs(most, peak, value, sure, runs)
    return MaxNumSeqs(most, peak, None, sure, runs)


def _peak(run: Run, most: int) -> int:
    """The most sequences that may have run at once."""
    # A prompt that continues after a step counts as running and computes no token of its own. With asynchronous scheduling
    # sequences that finished together count for a step more.
    together = np.unique(run.log.residency_end, return_counts=True)[1].max(initial=0)
    peak = int(run.log.rows["batch_size"].max(initial=0)) + 1 + (run.replica.policy.schedules_ahead and int(together))
    return min(most, peak)


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
        self._engine = engine

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        if plan.preempted or plan.swapped_out:
            self.preempted = True
            self._engine.stop()


def _in_any_order(run: Run, most: int, pool_of: Callable[[int], int | None]) -> int:
    """Number of the longest sequences that fit together in the pool of that number, ``most`` at most, however far each has come; one block is
    vLLM's null block."""
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

    def overflows(number: int) -> bool:
        return bool(held[number] > (pool_of(number + 1) or replica.num_blocks) - null)

    return least(overflows, 0, min(most, len(held)))
