"""Compositions of memories as policies reach them: a scheduler serves random requests, step by step.

``composition`` names one: the policy, the class of the memory, and its parts. ``POLICY_MACHINES`` has a machine for each that
the registry's policies can reach (``tests/sim/policy/test_compositions.py`` enumerates them).

The walk looks at every block table after every decision and knows nothing of hashes, histograms or logs: it remembers which
tokens each block was filled with.

    invariant 1   what the meter says is held is what tables name; with free blocks that is the pool
    invariant 2   references of a block are the table entries with it, on the device and on the host
    contents      a hit block was filled with the tokens of the request that hits it; what its next token needs is there
    never stuck   while a request waits, or any holds blocks, some step computes; at the end the pool is free again

Memories without block tables are walked by machines of their own (``reservations``, ``radix_memory``, ``paged``); here they
answer for the levels of the meter, and for what must never be stuck.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fragmeter.sim.engine.executor import Executor
from fragmeter.sim.memory import (
    CachedMemory,
    ContiguousMemory,
    DeferredMemory,
    Memory,
    PagedMemory,
    PageGroups,
    most_prompt_blocks,
)
from fragmeter.sim.memory.accounting.kv_groups import FULL, SLIDING, STATE
from fragmeter.sim.memory.accounting.ledger import Ledger
from fragmeter.sim.memory.paged.cells import CellMemory
from fragmeter.sim.policy import Limits, Pool
from fragmeter.sim.policy import policy as policy_of
from fragmeter.sim.policy.base import AnyPolicy
from fragmeter.sim.policy.options import VllmV1Options, minor_version
from fragmeter.sim.policy.server import CONSUMER
from fragmeter.sim.spec.releases import free_queue
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.sequence import Sequence, StepPlan
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.content import Run
from fragmeter.sim.workload.workload import Workload
from strategies import LineCost

from .draws import EITHER, combined

LONGEST = 40
#: Streams of tokens: those of prefixes that requests share come first, then one for each request.
FAMILIES = 3
#: More steps than any request waits for another.
PATIENCE = 400
FULL_ALONE = ((FULL,),)
WINDOWS = ((FULL, SLIDING), (SLIDING, FULL, SLIDING), (SLIDING,))
STATES = ((FULL, STATE), (STATE, FULL, STATE))
BOTH = ((FULL, SLIDING, STATE), (SLIDING, STATE))


def composition(policy: AnyPolicy, memory: Memory) -> str:
    """Name of what a policy schedules over, and of how it hands out blocks."""
    kinds, options = memory.groups.kinds, policy.options
    parts = {
        "windows": SLIDING in kinds,
        "states": STATE in kinds,
        "prefix cache": memory.cache_log is not None and not isinstance(memory, CachedMemory),
        "host pool": memory.host_blocks > 0,
        "steps ahead": policy.schedules_ahead,
        "blocks deferred": memory.groups.defers,
        "prompts in turn": isinstance(options, VllmV1Options) and _computes_in_turn(options),
        "freed blocks last": isinstance(options, VllmV1Options) and _frees_last(options, memory),
    }
    arena = [type(memory.arena).__name__] if isinstance(memory, ContiguousMemory) and memory.arena is not None else []
    return ", ".join(
        [f"{policy.name}: {type(memory).__name__}", *arena, *(part for part, is_in in parts.items() if is_in)]
    )


def _computes_in_turn(options: VllmV1Options) -> bool:
    """Whether several prefills go on at once, so that sequences take their blocks one by one."""
    in_turn = options.long_prefill_token_threshold > 0 or options.prefill_schedule_interval > 1
    return in_turn or options.scheduling_policy == "priority"


def _frees_last(options: VllmV1Options, memory: Memory) -> bool:
    caching, by_token = memory.cache_log is not None, memory.groups.kinds == (FULL,)
    return free_queue(minor_version(options.vllm_release), caching, by_token) != "unhashed-first"


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
    #: Options of the policy, of which each run takes one.
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    swaps: ClassVar[bool] = False
    ids: ClassVar[bool] = True
    kv_role: ClassVar[str | None] = None
    #: Operations so far, of all runs of the machine.
    operations: ClassVar[int] = 0

    @initialize(
        pool=combined(range(10, 61, 10), range(1, 5), range(2, 10), (1, 3, 8)),
        host_blocks=st.integers(0, 20),
        place=st.integers(0, 5),
    )
    def build(self, pool, host_blocks, place):
        self.drawn = {"pool": pool, "host_blocks": host_blocks, "place": place}
        num_blocks, size, window, budget = pool
        kind = policy_of(self.policy_name)
        kinds = self.kinds[place % len(self.kinds)]
        chosen = self.variants[(place + host_blocks) % len(self.variants)]
        limits = Limits(LONGEST, 1 + place, max(budget, 1 + place), kv_role=self.kv_role)
        options = kind.options_type(**chosen)
        kind = kind.variant(options)
        size = kind.default_block_size if kind.default_block_size == 1 else size
        most = most_prompt_blocks(window, kind.in_flight_tokens(limits, options), LONGEST, size)
        ahead = options.schedules_ahead
        by_block = STATE in kinds and self.caches
        groups = PageGroups(kinds, window, most, by_block, ahead, exports_states=by_block and bool(host_blocks % 2))
        self.policy = kind(limits, options, groups if kind.serves_kv_groups else None)
        self.contents = Contents()
        self.memory = self.policy.memory(
            Pool(
                num_blocks=num_blocks,
                block_size=size,
                max_model_len=LONGEST,
                host_blocks=host_blocks if self.swaps else 0,
                ids=self.ids,
                token_runs=self.contents if self.caches else None,
                caches_prefixes=self.caches,
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
        type(self).operations += 1
        declared = output + 3 * two
        workload = Workload("one", np.zeros(1), np.array([prompt]), np.array([output]), np.array([declared]))
        if self.policy.smallest_pool_blocks(workload, self.size)[0] > self.num_blocks:
            return
        for _ in range(1 + two):
            index = len(self.contents.unshared)
            self.contents.add(family, min(shared, prompt), prompt, output)
            sequence = Sequence(index, prompt, output, declared)
            if self.kv_role == CONSUMER:
                sequence.computed_tokens = prompt - 1
            sequence.urgency = (index % 3, index)
            self.state.waiting.append(sequence)

    @precondition(lambda self: self.has_work())
    @rule(steps=st.integers(1, 12))
    def leap(self, steps):
        type(self).operations += 1
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
        if self.is_walked():
            assert transaction.free == self.count_free()
        plan = self.policy.schedule(state, transaction)
        begun = self.executor.carry_out(plan, self.now)
        self.now += 1
        steps, ended = 0, self.ended
        self.ended = []
        waits = self.free_deferred(plan)
        if ended:
            leaving = [sequence for sequence in ended if sequence not in plan.preempted]
            self.note_in_vain(leaving)
            memory.release_finished(leaving, state.decode_step)
            for sequence in leaving:
                state.forget(sequence)
        if state.batch_size and not plan.prefill_only:
            alike = plan.valid_until_horizon and not memory.deferred
            limit = min(most, state.calendar[0][0] - state.decode_step) if alike else 1
            steps = min(limit, self.policy.horizon(state, memory, limit)) if limit > 1 else 1
        else:
            assert begun[1] or begun[2] or plan.preempted or ended or waits, "nothing computes"
        memory.settle(state, min(1, steps))
        self.walk_hits()
        named = self.named()
        meter = memory.advance(state, steps)
        self.check_meter(dict(zip(memory.meter, meter, strict=True)), named)
        state.decode_step += steps
        if self.is_walked():
            memory.settle(state, 0)
        self.fill()
        self.check_tables()
        if self.policy.schedules_ahead:
            self.ended = state.note_finished(self.policy.expects_end)
            for sequence in state.finished:
                memory.stall(sequence, state.decode_step, finished=True)
        elif self.policy.leaves_together:
            memory.release(state.take_ended(), state.decode_step)
        else:
            memory.release(state.take_finished(), state.decode_step)

    def free_deferred(self, plan: StepPlan) -> bool:
        """Overridden where blocks wait for steps in flight. Returns whether there was one, so that the decision may compute nothing."""
        return False

    def note_in_vain(self, leaving: list[Sequence]) -> None:
        """Overridden likewise: finished sequences are about to leave."""

    def deferred(self) -> list[int]:
        """Blocks in no table that wait for a step in flight."""
        return []

    # --- The walk ---

    def is_walked(self) -> bool:
        """Whether the memory has block tables, with no block but in them or free."""
        memory = self.memory
        return isinstance(memory, PagedMemory) and not isinstance(memory, DeferredMemory)

    def tables(self) -> dict[Sequence, tuple[list[int | None], ...]]:
        kept = self.memory.group_tables
        if kept is not None:
            return kept.tables
        return {sequence: (table,) for sequence, table in self.memory.tables.tables.items()}

    def pool(self):
        return (self.memory.group_tables or self.memory.tables).pool

    def kept(self) -> list[int]:
        """Cells that slots keep, in no table."""
        return self.memory.cached_block_ids().tolist() if isinstance(self.memory, CellMemory) else []

    def count_free(self) -> int:
        return self.pool().num_free + len(self.kept())

    def computed(self, sequence: Sequence) -> int:
        if sequence in self.state.running:
            return sequence.held_tokens(self.state.decode_step)
        return sequence.computed_tokens

    def fill(self) -> None:
        """Remember what full blocks are filled with."""
        if not self.is_walked():
            return
        for sequence, tables in self.tables().items():
            full = self.computed(sequence) // self.size
            for group, place, block in entries(tables):
                if place < full:
                    self.filled[block] = self.meaning(sequence, group, place)

    def meaning(self, sequence: Sequence, group: int, place: int) -> tuple[int, tuple]:
        return group, self.contents.tokens(sequence.index, (place + 1) * self.size)

    def walk_hits(self) -> None:
        """Blocks that were found are filled with what they stand for."""
        if self.memory.cache_log is None or not self.is_walked():
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
        if not self.is_walked():
            return
        named = Counter(block for tables in self.tables().values() for _, _, block in entries(tables))
        free = self.pool().free_ids
        others = [*self.kept(), *self.deferred()]
        assert sorted([*named, *free, *others]) == list(range(self.memory.num_blocks))
        references = getattr(self.pool(), "reference_counts", None)
        held = named + Counter(others)
        assert references is None or references == [held[block] for block in range(self.memory.num_blocks)]
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

    def named(self) -> set[int]:
        """Blocks that are held: in tables, or deferred."""
        if not self.is_walked():
            return set()
        return {block for tables in self.tables().values() for _, _, block in entries(tables)} | {*self.deferred()}

    def check_meter(self, meter: dict[str, int], named: set[int]) -> None:
        """Invariant 1, of the first step of a leap, in which these blocks are in tables."""
        if not self.is_walked():
            assert 0 <= meter["live"] <= meter["held"] <= self.memory.capacity_slots
            return
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
        assert self.memory.room_after(self.state, 0) == self.memory.capacity_slots
        assert self.memory.host_free == self.memory.host_blocks
        if self.is_walked():
            assert self.memory.transaction(self.state.decode_step).free == self.memory.num_blocks == self.count_free()


def entries(tables: tuple[list[int | None], ...]):
    """Group, place and block of every entry with a block."""
    for group, table in enumerate(tables):
        for place, block in enumerate(table):
            if block is not None:
                yield group, place, block


class CellMachine(PolicyMachine):
    """Slots that share one cache. A run ends where a batch lacks cells, and the next one begins."""

    def decide(self, most: int) -> None:
        try:
            super().decide(most)
        except SettingError as error:
            batch, lacking = (int(word) for word in re.findall(r"\d+", str(error))[:2])
            self.memory.settle(self.state, 0)
            assert not self.memory.kept and lacking
            assert self.pool().num_free == batch - lacking
            self.build(**self.drawn)


class DecodeMachine(PolicyMachine):
    """Requests that come with all but the last token of their prompts, and steps in flight that write blocks: of a sequence that such a
    step computes none is given to another one before it is over."""

    kv_role = CONSUMER

    def __init__(self) -> None:
        super().__init__()
        # The sequences that the step in flight computes, and blocks that it writes and reads for those that have finished.
        self.in_flight: set[Sequence] = set()
        self.writes: set[int] = set()

    def has_work(self) -> bool:
        return super().has_work() or bool(self.memory.deferred)

    def deferred(self) -> list[int]:
        waiting = self.memory.fences.deferred.values()
        return [block for each in waiting for _, _, block in entries(each.tables)]

    def free_deferred(self, plan: StepPlan) -> bool:
        """See ``PolicyMachine``; the step in flight is over, and what it wrote may be taken by the next decision."""
        before = bool(self.in_flight)
        assert self.in_flight.isdisjoint(plan.preempted)
        self.memory.settle(self.state, 1)
        taken = {block for tables in self.tables().values() for _, _, block in entries(tables)}
        assert self.writes.isdisjoint(taken)
        self.in_flight, self.writes = {*self.state.running, *(each for each, _ in plan.chunks)}, set()
        if self.memory.deferred:
            self.memory.free_deferred(self.state.decode_step)
        return before

    def note_in_vain(self, leaving: list[Sequence]) -> None:
        for sequence in leaving:
            if sequence in self.state.running:
                for kind, table in zip(self.groups.kinds, self.tables()[sequence], strict=True):
                    places = self.needed(kind, sequence.target_tokens - 1)
                    self.writes |= {table[place] for place in (*places, places.stop) if place < len(table)}

    def check_tables(self) -> None:
        super().check_tables()
        assert self.writes.isdisjoint(self.pool().free_ids)


def composed(
    policy: str, memory: str, *parts: str, machine: type[PolicyMachine] = PolicyMachine, **facts: Any
) -> tuple[str, type[PolicyMachine]]:
    """A composition, and its machine."""
    label = ", ".join([f"{policy}: {memory}", *parts])
    words = "".join(character if character.isalnum() else " " for character in label).title()
    return label, type("".join(words.split()) + "Machine", (machine,), {"policy_name": policy} | facts)


def _of_decode_replicas() -> list[tuple[str, type[PolicyMachine]]]:
    layouts = {(): FULL_ALONE, ("windows",): WINDOWS, ("states",): STATES, ("windows", "states"): BOTH}
    facts: dict[str, Any] = {"machine": DecodeMachine, "variants": ({"async_scheduling": True},)}
    parts = "steps ahead", "blocks deferred"
    return [composed("vllm-v1", "PagedMemory", *kept, *parts, kinds=kinds, **facts) for kept, kinds in layouts.items()]


def _of_vllm_v1() -> list[tuple[str, type[PolicyMachine]]]:
    """Every layout of layers, with and without caching, and every way in which blocks change hands."""
    found = []
    layouts = {(): FULL_ALONE, ("windows",): WINDOWS, ("states",): STATES, ("windows", "states"): BOTH}
    for (layers, kinds), caches, ahead, in_turn, last in product(layouts.items(), *[EITHER] * 4):
        own = caches and not layers and not in_turn
        parts = {
            "prefix cache": caches and not own,
            "steps ahead": ahead,
            "prompts in turn": in_turn,
            "freed blocks last": last,
        }
        release = {"vllm_release": "0.22" if caches else "0.27"} if last else {}
        variants = tuple({"async_scheduling": ahead} | release | turn for turn in (IN_TURN if in_turn else ({},)))
        names = (*layers, *(part for part, is_in in parts.items() if is_in))
        memory = "CachedMemory" if own else "PagedMemory"
        found.append(composed("vllm-v1", memory, *names, kinds=kinds, caches=caches, variants=variants))
    return found


#: Options of vllm-v1 under which several prefills go on at once.
IN_TURN: tuple[dict[str, Any], ...] = (
    {"long_prefill_token_threshold": 3},
    {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True},
    {"prefill_schedule_interval": 3},
    {"scheduling_policy": "priority"},
    {"scheduling_policy": "priority", "scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 4},
)
SWAPS: dict[str, Any] = {"swaps": True, "variants": ({"preemption_mode": "swap"}, {"preemption_mode": "recompute"})}
ORDERS: tuple[dict[str, Any], ...] = ({"schedule_policy": "lpm"}, {"schedule_policy": "fcfs"})
IN_SYNC = tuple(order | {"disable_overlap_schedule": True} for order in ORDERS)
UNIFIED: tuple[dict[str, Any], ...] = ({"kv_unified": True},)
ARENAS = {"buddy": "BuddyArena", "first-fit": "FirstFitArena", "best-fit": "BestFitArena"}
#: By the name that ``composition`` gives.
POLICY_MACHINES: dict[str, type[PolicyMachine]] = dict(
    [
        *_of_vllm_v1(),
        *_of_decode_replicas(),
        *(composed(name, "PagedMemory", "windows", kinds=WINDOWS) for name in ("vllm-sosp23", "vllm-v0")),
        *(
            composed(name, "PagedMemory", *windows, "host pool", kinds=kinds, **SWAPS)
            for name in ("vllm-sosp23", "vllm-v0")
            for windows, kinds in (((), FULL_ALONE), (("windows",), WINDOWS))
        ),
        *(
            composed(name, "PagedMemory")
            for name in (
                "vllm-sosp23",
                "vllm-v0",
                "sarathi",
                "fastgen",
                "lightllm",
                "trtllm-no-evict",
                "trtllm-max-util",
            )
        ),
        *(
            composed(name, "ContiguousMemory", arena, variants=({"arena": kind},))
            for name in ("orca-max", "orca-pow2", "orca-oracle")
            for kind, arena in ARENAS.items()
        ),
        composed("orca", "ContiguousMemory"),
        composed("static", "BatchMemory"),
        composed("fastertransformer", "BatchMemory"),
        composed("tgi", "ReservedMemory"),
        *(composed("llama-cpp", "StreamMemory", *parts, caches=bool(parts)) for parts in ((), ("prefix cache",))),
        *(
            composed("llama-cpp", "CellMemory", *parts, machine=CellMachine, caches=bool(parts), variants=UNIFIED)
            for parts in ((), ("prefix cache",))
        ),
        composed("vattention", "DeferredMemory"),
        *(
            composed(
                "sglang",
                memory,
                *parts,
                caches="prefix cache" in parts,
                ids=memory == "SlotRadixMemory",
                variants=variants,
            )
            for memory in ("RadixMemory", "SlotRadixMemory")
            for caches in ((), ("prefix cache",))
            for parts, variants in ((caches, IN_SYNC), ((*caches, "steps ahead"), ORDERS))
        ),
    ]
)
