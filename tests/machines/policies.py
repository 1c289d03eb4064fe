"""Compositions of the paged memory as their policies reach them: a scheduler serves random requests, step by step.

The walk looks at every block table after every decision and knows nothing of hashes, histograms or logs: it remembers which
tokens each block was filled with.

    invariant 1   what the meter says is held is what tables name; with free blocks that is the pool
    invariant 2   references of a block are the table entries with it, on the device and on the host
    contents      a hit block was filled with the tokens of the request that hits it; what its next token needs is there
    never stuck   while a request waits, or any holds blocks, some step computes; at the end the pool is free again
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fragmeter.sim.engine.executor import Executor
from fragmeter.sim.memory import PageGroups, most_prompt_blocks
from fragmeter.sim.memory.accounting.kv_groups import FULL, SLIDING, STATE
from fragmeter.sim.memory.accounting.ledger import Ledger
from fragmeter.sim.policy import Limits, Pool
from fragmeter.sim.policy import policy as policy_of
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.content import Run
from strategies import LineCost

from .draws import EITHER, combined

LONGEST = 40
#: Streams of tokens: those of prefixes that requests share come first, then one for each request.
FAMILIES = 3
#: More steps than any request waits for another.
PATIENCE = 400
WINDOWS = ((FULL, SLIDING), (SLIDING, FULL, SLIDING), (SLIDING,))
STATES = ((FULL, STATE), (STATE, FULL, STATE))
BOTH = ((FULL, SLIDING, STATE), (SLIDING, STATE))


class Contents:
    """``Tokens`` of requests that begin with part of a shared prefix and go on with tokens of their own."""

    def __init__(self) -> None:
        self.unshared: list[bool] = []
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, family: int, shared: int, prompt: int, output: int) -> None:
        self._rows.append((family, shared, prompt, output))
        self.unshared.append(not shared)

    def runs(self, request: int) -> list[Run]:
        family, shared, prompt, _ = self._rows[request]
        runs = [(family, 0, shared), (FAMILIES + request, 0, prompt - shared)]
        return [run for run in runs if run[2]]

    def output_runs(self, request: int) -> list[Run]:
        _, shared, prompt, output = self._rows[request]
        return [(FAMILIES + request, prompt - shared, output)]

    def tokens(self, request: int, count: int) -> tuple[tuple[int, int], ...]:
        """The first tokens of a request, one by one."""
        runs = [*self.runs(request), *self.output_runs(request)]
        return tuple((stream, start + at) for stream, start, length in runs for at in range(length))[:count]


class PolicyMachine(RuleBasedStateMachine):
    """Arrivals, and leaps of any length that the policy allows."""

    policy_name: ClassVar[str] = "vllm-v1"
    kinds: ClassVar[tuple[tuple[str, ...], ...]] = ((FULL,),)
    caches: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}

    @initialize(
        pool=combined(range(10, 61, 10), range(1, 5), range(2, 10), (1, 3, 8)),
        host_blocks=st.integers(0, 20),
        place=st.integers(0, 5),
    )
    def build(self, pool, host_blocks, place):
        num_blocks, size, window, budget = pool
        kind = policy_of(self.policy_name)
        kinds = self.kinds[place % len(self.kinds)]
        limits, options = Limits(LONGEST, 1 + place, max(budget, 1 + place)), kind.options_type(**self.options)
        most = most_prompt_blocks(window, kind.in_flight_tokens(limits, options), LONGEST, size)
        ahead = getattr(options, "async_scheduling", False)
        groups = PageGroups(kinds, window, most, STATE in kinds and self.caches, ahead)
        self.policy = kind(limits, options, groups)
        self.contents = Contents()
        self.memory = self.policy.memory(
            Pool(
                num_blocks=num_blocks,
                block_size=size,
                max_model_len=LONGEST,
                host_blocks=host_blocks,
                ids=True,
                token_runs=self.contents if self.caches else None,
            )
        )
        self.num_blocks, self.size, self.groups = num_blocks, size, groups
        self.state = State(self.policy.preempted_first)
        self.ledger = Ledger(self.memory.meter)
        self.executor = Executor(self.state, self.memory, LineCost(), self.ledger)
        # What each block was filled with: its group, and all tokens up to its end; and the look-ups that were walked.
        self.filled: dict[int, tuple[int, tuple]] = {}
        self.walked = self.now = 0
        # Sequences that finished in the last step, and that the next decision does not know of.
        self.ended: list[Sequence] = []

    @rule(request=combined(range(1, 25), range(1, 16), range(FAMILIES), (0, 4, 9, 24), EITHER))
    def arrive(self, request):
        prompt, output, family, shared, two = request
        workload = SimpleNamespace(prompt_tokens=np.array([prompt]), output_tokens=np.array([output]))
        if self.policy.smallest_pool_blocks(workload, self.size)[0] > self.num_blocks:
            return
        for _ in range(1 + two):
            index = len(self.contents.unshared)
            self.contents.add(family, min(shared, prompt), prompt, output)
            self.state.waiting.append(Sequence(index, prompt, output, output + 3 * two))

    @precondition(lambda self: self.has_work())
    @rule(steps=st.integers(1, 12))
    def leap(self, steps):
        self.decide(steps)

    def has_work(self) -> bool:
        state = self.state
        return bool(
            state.waiting or state.batch_size or state.prefilling or state.stalled or state.swapped or self.ended
        )

    def decide(self, most: int) -> None:
        """A decision, and as many steps as it holds for."""
        state, memory = self.state, self.memory
        transaction = memory.transaction(state.decode_step)
        assert transaction.free == self.count_free()
        plan = self.policy.schedule(state, transaction)
        begun = self.executor.carry_out(plan, self.now)
        self.now += 1
        steps, ended = 0, self.ended
        self.ended = []
        if ended:
            leaving = [sequence for sequence in ended if sequence not in plan.preempted]
            memory.release_finished(leaving, state.decode_step)
            for sequence in leaving:
                state.forget(sequence)
        if state.batch_size and not plan.pauses:
            limit = min(most, state.calendar[0][0] - state.decode_step) if plan.steady else 1
            steps = min(limit, self.policy.horizon(state, memory, limit)) if limit > 1 else 1
        else:
            assert begun[1] or begun[2] or plan.preempted or ended, "nothing computes"
        memory.settle(state, min(1, steps))
        self.walk_hits()
        meter = memory.advance(state, steps)
        self.check_meter(dict(zip(memory.meter, meter, strict=True)))
        state.decode_step += steps
        memory.settle(state, 0)
        self.fill()
        self.check_tables()
        if self.policy.schedules_ahead:
            self.ended = state.note_finished(LONGEST)
            memory.hold_finished(tuple(state.finished), state.decode_step)
        else:
            memory.release(state.take_finished(), state.decode_step)

    # --- The walk ---

    def tables(self) -> dict[Sequence, tuple[list[int | None], ...]]:
        kept = self.memory.group_tables
        if kept is not None:
            return kept.tables
        return {sequence: (table,) for sequence, table in self.memory.tables.tables.items()}

    def pool(self):
        return (self.memory.group_tables or self.memory.tables).pool

    def count_free(self) -> int:
        return self.pool().num_free

    def computed(self, sequence: Sequence) -> int:
        if sequence in self.state.running:
            return sequence.held_tokens(self.state.decode_step)
        return sequence.computed_tokens

    def fill(self) -> None:
        """Remember what full blocks are filled with."""
        for sequence, tables in self.tables().items():
            full = self.computed(sequence) // self.size
            for group, place, block in entries(tables):
                if place < full:
                    self.filled[block] = self.meaning(sequence, group, place)

    def meaning(self, sequence: Sequence, group: int, place: int) -> tuple[int, tuple]:
        return group, self.contents.tokens(sequence.index, (place + 1) * self.size)

    def walk_hits(self) -> None:
        """Blocks that were found are filled with what they stand for."""
        if self.memory.cache_log is None:
            return
        columns = self.memory.cache_log.look_up_columns()
        found = list(zip(columns["index"].tolist(), columns["hit_tokens"].tolist(), strict=True))[self.walked :]
        self.walked += len(found)
        hits = dict(found)
        tables = {sequence: found for sequence, found in self.tables().items() if sequence.index in hits}
        # Some are filled in this step, by sequences that are scheduled before.
        now = {}
        for sequence, found in self.tables().items():
            known = sequence.start_tokens if sequence in self.state.running else sequence.computed_tokens
            for group, place, block in entries(found):
                if hits.get(sequence.index, 0) <= place * self.size < known // self.size * self.size:
                    now[block] = self.meaning(sequence, group, place)
        for sequence, found in tables.items():
            for group, place, block in entries(found):
                if (place + 1) * self.size <= hits[sequence.index]:
                    assert (self.filled | now)[block] == self.meaning(sequence, group, place)

    def check_tables(self) -> None:
        """Invariant 2, and what the next token of each sequence needs."""
        named = Counter(block for tables in self.tables().values() for _, _, block in entries(tables))
        free = self.pool().free_ids
        assert sorted([*named, *free]) == list(range(self.memory.num_blocks))
        references = getattr(self.pool(), "reference_counts", None)
        assert references is None or references == [named[block] for block in range(self.memory.num_blocks)]
        for sequence, tables in self.tables().items():
            computed = self.computed(sequence)
            for group, (kind, table) in enumerate(zip(self.groups.kinds, tables, strict=True)):
                for place in self.needed(kind, computed):
                    assert table[place] is not None
                    if (place + 1) * self.size <= computed and (kind != STATE or self.groups.states_by_block):
                        assert self.filled[table[place]] == self.meaning(sequence, group, place)
        kept = self.memory.group_tables
        if kept is not None:
            on_host = [block for tables in kept.host_tables.values() for _, _, block in entries(tables)]
            assert sorted([*on_host, *kept.host_pool.free_ids]) == list(range(self.memory.host_blocks))
            assert self.memory.host_free == kept.host_pool.num_free

    def needed(self, kind: str, computed: int) -> range:
        """Places of a table that the token after ``computed`` ones needs."""
        blocks = -(-computed // self.size)
        if kind == FULL or not computed:
            return range(blocks)
        if kind == STATE:
            return range(blocks - 1, blocks) if self.groups.states_by_block else range(1)
        return range(max(0, computed - self.groups.window_tokens + 1) // self.size, blocks)

    def check_meter(self, meter: dict[str, int]) -> None:
        """Invariant 1, of the first step of a leap."""
        named = {block for tables in self.tables().values() for _, _, block in entries(tables)}
        groups, size = self.groups, self.size
        if self.memory.is_plain:
            assert meter["held"] == len(named) * size
            return
        held = (groups.full + groups.sliding) * meter["held"] - groups.sliding * meter.get("skipped", 0)
        if groups.states_by_block:
            held += groups.states * (meter["held"] - meter["skipped_states"])
        else:
            held += groups.states * meter.get("states", 0)
        held -= sum(meter.get(name, 0) for name in ("shared", "shared_in_windows", "shared_states"))
        assert held == len(named) * size

    def teardown(self):
        """Whatever waits is served."""
        if not hasattr(self, "state"):
            return
        decisions = 0
        while self.has_work():
            decisions += 1
            assert decisions < PATIENCE * (1 + len(self.contents.unshared)), "stuck"
            self.decide(LONGEST)
        assert self.memory.transaction(self.state.decode_step).free == self.memory.num_blocks == self.count_free()
        assert self.memory.host_free == self.memory.host_blocks


def entries(tables: tuple[list[int | None], ...]):
    """Group, place and block of every entry with a block."""
    for group, table in enumerate(tables):
        for place, block in enumerate(table):
            if block is not None:
                yield group, place, block


def composed(name: str, **facts: Any) -> type[PolicyMachine]:
    """A machine for a composition."""
    return type(name, (PolicyMachine,), facts)


SWAPS, AT_ONCE = {"preemption_mode": "swap"}, {"async_scheduling": False}
#: By what a memory is composed of.
COMPOSITIONS: dict[str, type[PolicyMachine]] = {
    "CachedMemory": composed("CachedMachine", caches=True),
    "CachedMemory, steps not scheduled ahead": composed("CachedAtOnceMachine", caches=True, options=AT_ONCE),
    "PagedMemory, windows": composed("WindowMachine", kinds=WINDOWS),
    "PagedMemory, windows, prefix cache, steps not scheduled ahead": composed(
        "CachedWindowAtOnceMachine", kinds=WINDOWS, caches=True, options=AT_ONCE
    ),
    "PagedMemory, states, prefix cache, steps not scheduled ahead": composed(
        "CachedStateAtOnceMachine", kinds=STATES, caches=True, options=AT_ONCE
    ),
    "PagedMemory, windows, prefix cache": composed("CachedWindowMachine", kinds=WINDOWS, caches=True),
    "PagedMemory, states": composed("StateMachine", kinds=STATES),
    "PagedMemory, states, prefix cache": composed("CachedStateMachine", kinds=STATES, caches=True),
    "PagedMemory, windows and states, prefix cache": composed("CachedMixtureMachine", kinds=BOTH, caches=True),
    "PagedMemory, windows, host pool": composed(
        "SwappingWindowMachine", policy_name="vllm-sosp23", kinds=WINDOWS, options=SWAPS
    ),
    "PagedMemory, windows, host pool, vllm-v0": composed(
        "SwappingWindowV0Machine", policy_name="vllm-v0", kinds=WINDOWS, options=SWAPS
    ),
}
