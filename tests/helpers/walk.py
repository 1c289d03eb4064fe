"""An independent walk over a running engine: every slot of the pool, looked up where it really lies.

The walk stops the engine wherever it waits, and reads block tables, chunks and free lists. It counts tokens itself and
classifies every slot by its address, so that it shares neither sums nor integrals with the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import simpy

from engine_runs import settings_of, workload_of
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.replica import build
from fragmeter.sim.policy.static import FasterTransformer
from fragmeter.sim.workload.source import OpenLoop
from oracle.slots import FINISHED_HOLD, FREE, STRANDED, SlotMap, census, classify_slot
from strategies import Case


@dataclass
class Moment:
    """The engine at the start of a step or a leap (``running`` is empty where it only waits or swaps).

    ``running`` maps a request to the tokens computed once the step is done, ``tables`` and ``host_tables`` one to its
    block ids, ``pieces`` one to the slots of its piece; ``slots`` has the bucket of every slot that has an address.
    """

    now: int
    decode_step: int
    running: dict[int, int]
    waiting: list[int]
    buckets: dict[str, int]
    tables: dict[int, list[int]] = field(default_factory=dict)
    host_tables: dict[int, list[int]] = field(default_factory=dict)
    free_ids: tuple[int, ...] = ()
    host_free_ids: tuple[int, ...] = ()
    free_chunks: tuple[tuple[int, int], ...] = ()
    pieces: dict[int, range] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)


class Walk:
    """One engine with block ids kept, stopped at every decision."""

    def __init__(self, policy: str, case: Case, leap: bool = False) -> None:
        self.case = case
        settings = settings_of(policy, case.pool, case.limits, work=None, leap=leap, ids=True)
        workload = workload_of(case.requests, case.limits.max_model_len)
        replica = build(settings, case.cost)
        too_large = replica.policy.smallest_pool_blocks(workload, replica.block_size) > replica.num_blocks
        self.refused = {int(index) for index in too_large.nonzero()[0]}
        self.policy, self.memory = policy, replica.memory
        self.env = simpy.Environment(initial_time=0)
        source = OpenLoop(workload, too_large, replica.max_model_len)
        self.engine = Engine(self.env, source, replica.policy, self.memory, replica.cost, leap=leap)
        self.generated = Counter({index: 0 for index in range(len(case.requests)) if index not in self.refused})
        self.ended: list[int] = []

    def moments(self) -> Iterator[Moment]:
        """Every wait of the engine, and the state that it is left in."""
        before: Moment | None = None
        with mock.patch.object(FasterTransformer, "max_batch_tokens", self.case.limits.ft_max_tokens):
            while self.engine.process.is_alive:
                self.env.step()
                if before is not None:
                    self._count_tokens(before)
                before = self._look()
                yield before

    def ids(self) -> Iterator[Moment]:
        """As above for paged memory, with block ids and without a look at the slots; only where something runs."""
        while self.engine.process.is_alive:
            self.env.step()
            moment = Moment(self.env.now, self.engine.state.decode_step, {}, [], {})
            self._tables(moment)
            if self.engine.state.running:
                yield moment

    def _count_tokens(self, before: Moment) -> None:
        """A token a step for every sequence that ran and was not done."""
        steps = self.engine.state.decode_step - before.decode_step
        for index in before.running:
            wanted = self.case.requests[index].output_tokens
            if self.generated[index] < wanted <= self.generated[index] + steps:
                self.ended.append(index)
            self.generated[index] = min(wanted, self.generated[index] + steps)

    def _look(self) -> Moment:
        state = self.engine.state
        running = {sequence.index: self.computed(sequence.index) for sequence in state.running}
        waiting = [sequence.index for sequence in state.waiting]
        moment = Moment(self.env.now, state.decode_step, running, waiting, {})
        kind = {"vllm-sosp23": self._paged, "orca": self._counted}
        if self.policy in ("static", "fastertransformer"):
            self._batch(moment)
        else:
            kind.get(self.policy, self._chunks)(moment)
        return moment

    def computed(self, index: int) -> int:
        """Tokens that a request holds with those of its current, or next, step."""
        return self.case.requests[index].prompt_tokens + self.generated[index]

    def _final(self, index: int) -> int:
        return self.case.requests[index].prompt_tokens + self.case.requests[index].output_tokens

    def _paged(self, moment: Moment) -> None:
        """Slots through the block tables; each block is in one table or free."""
        self._tables(moment)
        size = self.case.pool.block_size
        slots = SlotMap(self.case.pool.slots)
        for index, table in moment.tables.items():
            computed, end = moment.running[index], len(table) * size
            for i in range(end):
                bucket = classify_slot(i, computed, self._final(index), computed, end)
                slots.put(table[i // size] * size + i % size, bucket)
        for block in moment.free_ids:
            for slot in range(block * size, (block + 1) * size):
                slots.put(slot, FREE)
        moment.buckets, moment.slots = slots.census(), slots.classes

    def _tables(self, moment: Moment) -> None:
        kept = self.memory.tables
        kept.grow_until(moment.decode_step + 1)
        moment.tables = {sequence.index: list(table) for sequence, table in kept.tables.items()}
        moment.host_tables = {sequence.index: list(table) for sequence, table in kept.host_tables.items()}
        moment.free_ids, moment.host_free_ids = kept.pool.free_ids, kept.host_pool.free_ids

    def _chunks(self, moment: Moment) -> None:
        """Slots through the chunks of the arena, taken and free."""
        size, slots = self.case.pool.block_size, SlotMap(self.case.pool.slots)
        for sequence in self.engine.state.running:
            start, index = sequence.grant.start * size, sequence.index
            moment.pieces[index] = range(start, start + sequence.grant.slots)
            requested = self._requested(index)
            for i in range(sequence.grant.slots):
                slots.put(start + i, classify_slot(i, moment.running[index], self._final(index), requested, requested))
        free_lists = self.memory.arena.free_lists
        moment.free_chunks = tuple(sorted((start, blocks) for blocks, starts in free_lists.items() for start in starts))
        wanted = self._blocked_blocks(moment)
        for start, blocks in moment.free_chunks:
            for slot in range(start * size, (start + blocks) * size):
                slots.put(slot, STRANDED if blocks < wanted else FREE)
        moment.buckets, moment.slots = slots.census(), slots.classes

    def _requested(self, index: int) -> int:
        """R of an Orca with chunks."""
        request, model = self.case.requests[index], self.case.limits.max_model_len
        power = 1
        while power < request.output_tokens:
            power *= 2
        expected = {"orca-max": model, "orca-pow2": power, "orca-oracle": request.output_tokens}[self.policy]
        return min(request.prompt_tokens + expected, model)

    def _blocked_blocks(self, moment: Moment) -> int:
        """The chunk of the queue's head, if no free one holds it."""
        if not moment.waiting:
            return 0
        wanted = 1
        while wanted * self.case.pool.block_size < self._requested(moment.waiting[0]):
            wanted *= 2
        return 0 if any(blocks >= wanted for _, blocks in moment.free_chunks) else wanted

    def _counted(self, moment: Moment) -> None:
        """Slots without addresses: what every sequence was granted, and the rest free."""
        slots: list[str] = []
        for sequence in self.engine.state.running:
            index, requested = sequence.index, sequence.grant.slots
            computed = moment.running[index]
            slots += [classify_slot(i, computed, self._final(index), requested, requested) for i in range(requested)]
        moment.buckets = census([*slots, *[FREE] * (self.case.pool.slots - len(slots))])

    def _batch(self, moment: Moment) -> None:
        """As above, one after the other; padding and the slots of ended members are held."""
        longest = max((self.case.requests[index].prompt_tokens for index in moment.running), default=0)
        slots: list[str] = []
        for sequence in self.engine.state.running:
            index, requested = sequence.index, sequence.grant.slots
            done = self.generated[index] == self.case.requests[index].output_tokens
            padding = requested if done else longest - self.case.requests[index].prompt_tokens
            own, computed = requested - padding, moment.running[index]
            moment.pieces[index] = range(len(slots), len(slots) + requested)
            slots += [classify_slot(i, computed, self._final(index), own, own) for i in range(own)]
            slots += [FINISHED_HOLD] * padding
        moment.slots = [*slots, *[FREE] * (self.case.pool.slots - len(slots))]
        moment.buckets = census(moment.slots)
