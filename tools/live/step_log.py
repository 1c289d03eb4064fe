"""What a step did, in terms that a real scheduler and ours share, and where two logs of steps differ."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fragmeter.sim.engine.observer import Observed, Observer
from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.memory.accounting.ledger import LEAP, Leap
from fragmeter.sim.metrics.requests import preemptions, request_times
from fragmeter.sim.recording.probe import blocks_digest
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import Sequence, StepPlan

_STEPS = LEAP.index("steps")


class Step(NamedTuple):
    """One step, between its schedule and its end.

    Attributes:
        now: Ticks at which it starts.
        scheduled: (request, tokens that it computes), in the order in which they are computed.
        preempted: Requests that lost their blocks to others, ascending.
        free: Blocks in no table.
        cached: Ids of blocks that can be found by their contents, ascending.
        hits: (request, tokens found in the prefix cache) of each admission, in order.
        evicted: Blocks that lost their contents in the schedule of this step.
        tables: (request, block ids in the first KV group, in the second, ...) of those that hold blocks, ascending by
            request; ids from 1, and 0 where a group keeps nothing any more (vLLM's null block). In a log of digests
            ``(blocks_digest,)``, and ``cached`` is empty.
    """

    now: int
    scheduled: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    free: int
    cached: tuple[int, ...]
    hits: tuple[tuple[int, int], ...]
    evicted: int
    tables: tuple[Any, ...]


class Served(NamedTuple):
    """A workload, served.

    Attributes:
        steps: Every step that computed something or preempted a request.
        finished: (ticks, request), in order.
        rejected: Requests that the API server rejected, ascending.
        preemptions: How often each request was preempted, counted apart from ``steps``: by vLLM's ``Request``, or by the
            metrics of a simulated run.
    """

    steps: list[Step]
    finished: list[tuple[int, int]]
    rejected: tuple[int, ...] = ()
    preemptions: tuple[int, ...] = ()


class Difference(NamedTuple):
    """The first thing in which two logs differ: the step, the field of ``Step``, and both values."""

    step: int
    field: str
    real: object
    ours: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: real {self.real}, ours {self.ours}"


def first_difference(real: Served, ours: Served) -> Difference | None:
    """Where ``ours`` first differs from ``real``; None if nowhere."""
    for number, (theirs, mine) in enumerate(zip_longest(real.steps, ours.steps)):
        if theirs is None or mine is None:
            return Difference(number, "number of steps", len(real.steps), len(ours.steps))
        for field, value, known in zip(Step._fields, theirs, mine, strict=True):
            if value != known:
                return Difference(number, field, value, known)
    if real.rejected != ours.rejected:
        return Difference(len(real.steps), "rejected", real.rejected, ours.rejected)
    if real.preemptions != ours.preemptions:
        return Difference(len(real.steps), "preemptions", real.preemptions, ours.preemptions)
    if real.finished != ours.finished:
        pairs = zip_longest(real.finished, ours.finished)
        number, (theirs, mine) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return Difference(number, "finished", theirs, mine)
    return None


class StepLog(Observer):
    """Writes every step of a run of ``vllm-v1`` down. Block ids must be recorded (``ids``).

    Args:
        digests: Whether to keep a digest of block tables and cached blocks only, for long runs.

    Attributes:
        steps: What happened so far.
        finished: (ticks, request) of those that are done, ascending within a step.
    """

    every_step = True

    def __init__(self, digests: bool = False) -> None:
        self._digests = digests
        self.steps: list[Step] = []
        self.finished: list[tuple[int, int]] = []
        self._evicted = self._looked_up = 0
        #: Requests of the last step, and when it ends.
        self._known: set[Sequence] = set()
        self._end = 0
        #: Sequences that were computed, where batches are in flight.
        self._seen: dict[int, Sequence] = {}
        #: What finished requests held when the plan was carried out: block tables, hashed blocks, and those that compute in vain.
        self._before: tuple[tuple[tuple[Any, ...], ...], tuple[int, ...], list[Sequence]] | None = None

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        if refused.any():
            raise ValueError(f"the pool cannot hold request {int(refused.argmax())}; vLLM would wait for ever")
        self._engine = engine

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        state, memory = self._engine.state, self._engine.memory
        memory.settle(state, min(1, leap[_STEPS]))
        tables, cached, vain = self._before or (self._tables(), self._cached(), [])
        self._before = None
        new = {sequence: sequence.start_tokens - sequence.computed_tokens for sequence in plan.admitted}
        drafts = plan.drafts or {}
        decoded = ((sequence, new.get(sequence, 1) + drafts.get(sequence, 0)) for sequence in state.running)
        computed = [*decoded, *plan.chunks]
        self._note_finished(now)
        self._known, self._end = {sequence for sequence, _ in computed}, now + ticks
        if self._engine.policy.stages > 1:
            self._seen |= {sequence.index: sequence for sequence, _ in computed}
        overrunning = [(sequence, 1 + drafts.get(sequence, 0)) for sequence in vain]
        # vLLM goes through them in order of admission.
        scheduled = [
            (each.index, tokens) for each, tokens in sorted([*computed, *overrunning], key=lambda chunk: chunk[0].order)
        ]
        used = {block for _, *groups in tables for table in groups for block in table if block}
        if self._digests:
            tables = (blocks_digest({index: groups for index, *groups in tables}, {*cached} - used),)
            cached = ()
        evicted = memory.evicted_blocks
        self.steps.append(
            Step(
                now=now,
                scheduled=tuple(scheduled),
                preempted=tuple(sorted(sequence.index for sequence in plan.preempted)),
                free=memory.num_blocks - len(used),
                cached=cached,
                hits=self._hits(plan),
                evicted=evicted - self._evicted,
                tables=tables,
            )
        )
        self._evicted = evicted

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        # A step that computes nothing is no step here.
        self._before = None

    def requests_finished(self, now: int, finished: Iterable[Sequence], overrunning: Iterable[Sequence]) -> None:
        self._engine.memory.settle(self._engine.state, 1)
        self._before = self._tables(), self._cached(), list(overrunning)

    def idle_started(self, now: int, ticks: int) -> None:
        self._note_finished(now)

    def served(self, run: Run) -> Served:
        """All of a run that is over."""
        self._note_finished(run.log.end_ticks)
        if self._seen:
            times = request_times(run)
            finish = zip(times.finish_ticks.tolist(), times.index.tolist())
            self.finished = sorted(finish, key=lambda each: (each[0], self._seen[each[1]].order))
        rejected = () if run.rejected is None else tuple(np.flatnonzero(run.rejected).tolist())
        counts = np.bincount(preemptions(run).request, minlength=len(run.workload))
        return Served(self.steps, self.finished, rejected, tuple(counts.tolist()))

    def _cached(self) -> tuple[int, ...]:
        """Ids of blocks that look-ups can find."""
        return tuple(sorted({*(self._engine.memory.cached_block_ids() + 1).tolist()}))

    def _tables(self) -> tuple[Any, ...]:
        """Block tables of every request that holds blocks, one a KV group."""
        memory = self._engine.memory
        if isinstance(memory, PagedMemory) and memory.group_tables:
            by_group = memory.group_tables.tables.items()
            tables = {sequence.index: tuple(map(_ids, groups)) for sequence, groups in by_group}
        elif memory.tables is not None:
            tables = {sequence.index: (_ids(table),) for sequence, table in memory.tables.tables.items()}
        else:
            raise SimulationFault("a log of steps needs block ids")
        return tuple((index, *groups) for index, groups in sorted(tables.items()))

    def _hits(self, plan: StepPlan) -> tuple[tuple[int, int], ...]:
        log = self._engine.memory.cache_log
        if log is None:
            begun = [sequence for sequence in plan.admitted if not sequence.computed_tokens]
            begun += [sequence for sequence, tokens in plan.chunks if sequence.computed_tokens == tokens]
            return tuple((sequence.index, 0) for sequence in sorted(begun, key=attrgetter("order")))
        columns = log.look_up_columns()
        new = slice(self._looked_up, None)
        hits = tuple(zip(columns["index"][new].tolist(), columns["hit_tokens"][new].tolist(), strict=True))
        self._looked_up = len(columns["index"])
        return hits

    def _note_finished(self, now: int) -> None:
        """Those of the last step that neither run nor wait now are done."""
        state = self._engine.state
        queues = (state.running, state.prefilling, state.stalled, state.waiting)
        done = self._known.difference(*queues)
        self.finished += [(self._end, one.index) for one in sorted(done, key=attrgetter("order"))]
        self._known = set()


def _ids(table: Iterable[int | None]) -> tuple[int, ...]:
    """Block ids as vLLM has them: from 1, and 0 where a group keeps nothing any more."""
    return tuple(0 if block is None else block + 1 for block in table)
