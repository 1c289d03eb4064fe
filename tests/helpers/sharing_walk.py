"""An independent walk over an engine with shared blocks: every table entry, looked up where it lies.

It stops the engine in every step, lets tables grow into it, and reads block tables, reference counts and free lists. Nothing
of the counts that the memory keeps is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import simpy

from fragmeter.sim import Settings, Workload
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.grouping import grouped_source, smallest_pools
from fragmeter.sim.engine.replica import build


class Moment(NamedTuple):
    """What the tables say in one step.

    ``tables`` and ``tokens`` are by sequence; the tokens with those of the step.
    """

    decode_step: int
    tables: dict[int, list[int]]
    tokens: dict[int, int]
    live_slots: int
    held_slots: int
    saved_slots: int
    cached_slots: int


class SharingWalk:
    """One engine with block ids, stopped in every step; for policies that decode in every step."""

    def __init__(self, settings: Settings, workload: Workload) -> None:
        replica = build(settings, None, workload, True, workload.dialogue)
        refused = smallest_pools(replica.policy, replica.block_size, workload, True) > replica.num_blocks
        source, self.state = grouped_source(settings, workload, replica.policy, replica.memory, refused)
        self.memory, self.tables = replica.memory, replica.memory.tables
        self.env = simpy.Environment(initial_time=0)
        self.engine = Engine(
            self.env, source, replica.policy, replica.memory, replica.cost, leap=False, state=self.state
        )

    def moments(self) -> Iterator[Moment]:
        """Every step, with invariants 2 and 3 checked."""
        while self.engine.process.is_alive:
            self.env.step()
            if self.engine.process.is_alive and self.state.running:
                self.tables.grow_until(self.state.decode_step + 1)
                self._check_references()
                moment = self._look()
                self._check_writes(moment)
                yield moment

    def _look(self) -> Moment:
        size, prefix, kept = self.memory.block_size, self._pinned(), self._kept()
        tables = {sequence.index: list(table) for sequence, table in self.tables.tables.items()}
        tokens = {sequence.index: self.state.decode_step + sequence.lag for sequence in self.state.running}
        assert set(tables) == set(tokens)
        assert all(len(tables[index]) == -(-count // size) for index, count in tokens.items())
        live = {(block, slot) for block in prefix for slot in range(size)}
        for index, count in tokens.items():
            live |= {(tables[index][i // size], i % size) for i in range(count)}
        named = Counter(prefix) + Counter(block for table in tables.values() for block in table)
        saved = named.total() - len(named)
        cached = {block for table in kept for block in table} - set(named)
        counts = (len(live), len(named) * size, saved * size, len(cached) * size)
        return Moment(self.state.decode_step, tables, tokens, *counts)

    def _pinned(self) -> set[int]:
        return set(getattr(self.tables, "prefix", ()))

    def _kept(self) -> list[list[int]]:
        """Tables of parents that are done."""
        return [*getattr(self.memory, "kept", {}).values()]

    def _check_references(self) -> None:
        """Invariant 2: a reference for every table entry and pin, none on free blocks; on the host too."""
        kept = self.tables
        for pool, tables, pins in (
            (kept.pool, kept.tables, [[*self._pinned()], *self._kept()]),
            (kept.host_pool, kept.host_tables, []),
        ):
            entries = Counter(block for table in (*pins, *tables.values()) for block in table)
            assert pool.reference_counts == [entries[block] for block in range(pool.num_blocks)]
            assert sorted([*entries, *pool.free_ids]) == list(range(pool.num_blocks))

    def _check_writes(self, moment: Moment) -> None:
        """Invariant 3: the block that a sequence writes in this step is in no other table."""
        entries = Counter(block for table in moment.tables.values() for block in table)
        for index, table in moment.tables.items():
            block = table[(moment.tokens[index] - 1) // self.memory.block_size]
            assert entries[block] == 1, f"invariant 3: block {block} is written and named {entries[block]} times"


def requests(*rows: tuple[int, int, int, int]) -> Workload:
    """Requests as (arrival_ticks, prompt_tokens, output_tokens, n)."""
    arrival, prompt, output, n = (np.array(column, dtype=np.int64) for column in zip(*rows))
    return Workload("groups", arrival, prompt, output, n=n)
