"""The walk of ``walk.py`` for KV groups: every slot through the tables of its group, wherever the engine waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_runs import engine_to_step, workload_of
from fragmeter.sim.memory.paged.group_cache import NULL_BLOCK
from hybrid_runs import HybridCase, settings_for
from oracle.slots import FREE, SlotMap, classify_slot


@dataclass
class HybridMoment:
    """The engine at the start of a step or a leap; ``tables`` maps a request to its tables, one a group."""

    now: int
    running: bool
    tables: dict[int, tuple[list[int | None], ...]]
    free_ids: tuple[int, ...]
    buckets: dict[str, int]


class HybridWalk:
    """One engine with block ids kept, stopped at every decision."""

    def __init__(self, policy: str, hybrid: HybridCase, leap: bool = False) -> None:
        case = hybrid.case
        chosen = settings_for(policy, hybrid, work=None, leap=leap, ids=True)
        workload = workload_of(case.requests, case.limits.max_model_len)
        self.engine = engine_to_step(chosen, case.cost, workload, leap)
        self.case, self.env, self.memory = case, self.engine.env, self.engine.memory

    def moments(self) -> Iterator[HybridMoment]:
        """Every wait of the engine, and the state that it is left in."""
        while self.engine.process.is_alive:
            self.env.step()
            state, kept = self.engine.state, self.memory.group_tables
            kept.grow_until(state.decode_step + 1)
            tables = {s.index: tuple(list(table) for table in found) for s, found in kept.tables.items()}
            moment = HybridMoment(self.env.now, bool(tables), tables, kept.pool.free_ids, {})
            moment.buckets = self._census(moment)
            yield moment

    def _census(self, moment: HybridMoment) -> dict[str, int]:
        size = self.case.pool.block_size
        slots = SlotMap(self.memory.num_blocks * size)
        for index, tables in moment.tables.items():
            request, computed = self.case.requests[index], self._computed(index)
            for table in tables:
                for i in (i for i in range(len(table) * size) if table[i // size] is not NULL_BLOCK):
                    final = request.prompt_tokens + request.output_tokens
                    bucket = classify_slot(i, computed, final, computed, len(table) * size)
                    slots.put(table[i // size] * size + i % size, bucket)
        for slot in (page * size + offset for page in moment.free_ids for offset in range(size)):
            slots.put(slot, FREE)
        return slots.census()

    def _computed(self, index: int) -> int:
        """Tokens that a request holds with those of its current step."""
        state = self.engine.state
        sequence = next(s for s in self.memory.group_tables.tables if s.index == index)
        return sequence.computed_tokens if sequence in state.prefilling else state.decode_step + sequence.lag
