"""Small cases of memories and their accounts, with answers worked out by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from engine_runs import settings_of
from fragmeter.sim import simulate
from fragmeter.sim.memory import PagedMemory, PageGroups
from fragmeter.sim.memory.accounting.drafts import Speculation
from fragmeter.sim.memory.accounting.kv_groups import FULL, RING, SLIDING, STATE
from fragmeter.sim.memory.accounting.ledger import Ledger
from fragmeter.sim.memory.accounting.moves import Moves
from fragmeter.sim.memory.paged.dialogue import DialogueMemory
from fragmeter.sim.memory.paged.offload import OffloadedMemory, OffloadTransaction
from fragmeter.sim.memory.paged.speculative import Progress, SpeculativeMemory
from fragmeter.sim.memory.prefix import Chains, FreeKVCacheBlockQueue
from fragmeter.sim.memory.prefix.tiers import Offloaded
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.integrals import Accounts
from fragmeter.sim.spec.speculative import SpeculativeConfig
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from ramp_cost import RampCost
from token_strings import Strings


class Served:
    """A memory, and the state of the engine around it."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory, self.state = memory, State()

    def start(self, index: int, prompt: int, output: int = 99) -> Sequence:
        """A sequence that prefills its whole prompt in the coming step."""
        sequence = Sequence(index, prompt, output, output)
        self.memory.admit(sequence, self.state.decode_step)
        self.state.start(sequence, self.state.decode_step)
        return sequence

    def step(self, steps: int = 1) -> tuple[int, ...]:
        """The running sequences grow; the levels for the ledger."""
        meter = self.memory.advance(self.state, steps)
        self.state.decode_step += steps
        return meter


class TestTables:
    def test_of_a_sequence_that_stops_to_grow_has_the_blocks_that_are_counted(self):
        """Prompts of 4 and 6 tokens in blocks of 4. After five steps they have 8 and 10 tokens: two and three blocks."""
        served = Served(PagedMemory(9, 4, ids=True))
        first, second = served.start(0, 4), served.start(1, 6)
        served.step(5)
        assert served.memory.free == 9 - 2 - 3
        for sequence in (first, second):
            served.memory.stall(sequence, served.state.decode_step, finished=True)
        tables = served.memory.tables.tables
        # In step 1 the first takes a block, in step 3 the second does.
        assert (tables[first], tables[second]) == ([0, 3], [1, 2, 4])
        served.memory.release_finished((first, second), served.state.decode_step)
        assert served.memory.free == served.memory.tables.pool.num_free == 9

    def test_a_table_takes_its_block_before_those_of_a_finished_request_come_free(self):
        """With steps ahead the decision for the step in which a request is over is taken while it still has its blocks."""
        served = Served(PagedMemory(9, 4, ids=True))
        first, second = served.start(0, 5), served.start(1, 4)
        served.step()
        served.memory.stall(first, served.state.decode_step, finished=True)
        served.memory.release_finished((first,), served.state.decode_step)
        # Blocks 0 and 1 are the last ones freed, and the next ones taken.
        assert served.memory.tables.tables == {second: [2, 3]}
        assert {*served.memory.tables.pool.free_ids[:2]} == {0, 1}


class TestPagesOfGroups:
    """Blocks of 2 tokens. A full group and two with a window of 4: with 9 tokens a sequence holds 5 blocks in the full group,
    and 2 in each other one, as the window of the next token begins with token 6."""

    GROUPS = PageGroups.of(full=1, sliding=2, window_tokens=4, most_prompt_blocks=5)

    def memory(self) -> PagedMemory:
        return PagedMemory(40, 2, groups=self.GROUPS, host_blocks=40, ids=True)

    def test_of_tokens_and_of_given_back_blocks(self):
        memory = self.memory()
        assert memory.pages(5, [3]) == 5 * 3 - 3 * 2
        assert [memory.pages_for(tokens) for tokens in (1, 4, 5, 9)] == [3, 6, 9 - 2, 15 - 6]

    def test_the_pool_has_what_the_groups_have_not(self):
        served = Served(self.memory())
        sequence = served.start(0, 9)
        # The prompt takes all its blocks; those before the window come back in the next step.
        held = []
        for _ in range(4):
            served.step()
            held.append(40 - served.memory.free)
        # 9, 10, 11 and 12 tokens.
        assert held == [3 * 5, 3 * 5 - 2 * 3, 3 * 6 - 2 * 3, 3 * 6 - 2 * 4]
        served.memory.release((sequence,), served.state.decode_step)
        assert served.memory.free == 40

    def test_the_host_has_what_the_next_token_needs(self):
        served = Served(self.memory())
        sequence = served.start(0, 9)
        served.step(2)
        served.memory.evict((), (sequence,), served.state.decode_step)
        # Ten tokens: five blocks in the full group, and two in each other one.
        assert (served.memory.free, served.memory.host_free) == (40, 40 - 9)


@pytest.mark.parametrize(
    ("kinds", "exports", "blocks"),
    [
        ((FULL,), False, 5),
        ((FULL, STATE), False, 6),
        ((FULL, STATE), True, 7),
        ((FULL, STATE, STATE, RING), True, 10),
        ((FULL, RING), False, 6),
        ((SLIDING, RING), False, 4),
    ],
)
def test_an_admission_asks_for_a_block_for_each_ring_and_state(kinds, exports, blocks):
    """Of five blocks of tokens, three at the most in a window; where kernels export states, two for each state."""
    groups = PageGroups(kinds, window_tokens=4, most_prompt_blocks=3, exports_states=exports)
    wanted = [sum(each.number * each.wanted_blocks(tokens) for each in groups.classes(1)) for tokens in (5, 0)]
    assert wanted == [blocks, 0]


class TestAdmission:
    """Blocks of 4 tokens, of which a prompt of 20 has five; a window asks for three at the most."""

    def memory(self, *kinds: str, cached: bool = True, exports: bool = False) -> PagedMemory:
        strings = Strings()
        for own in range(2):
            strings.add([(9, 0, 10), (own, 0, 10)])
        by_block = cached and STATE in kinds
        groups = PageGroups(kinds, 8, 3, states_by_block=by_block, exports_states=exports)
        return PagedMemory(60, 4, groups=groups, chains=Chains(strings, 4) if cached else None, in_turn=True)

    def asked(self, memory: PagedMemory, now: int, index: int = 0) -> tuple[int, int]:
        """Blocks that an admission asks for if it computes ``now`` tokens, and those that hold none of them."""
        transaction, sequence = memory.transaction(0), Sequence(index, 20, 5, 5)
        known = transaction.look_up(sequence)
        return transaction.lacking(sequence, now), transaction.beyond(sequence, known + now)

    @pytest.mark.parametrize(
        ("exports", "now", "asked"),
        [
            # Two full groups have ten blocks, the window three, the state and the ring one; of 8 tokens 3 x 2, and those two.
            (False, 8, (15, 7)),
            # All at once: the window's group has all five blocks, too.
            (False, 20, (17, 0)),
            # The last chunk takes a second block for the state that it exports.
            (True, 8, (16, 8)),
            (True, 20, (18, 0)),
        ],
    )
    def test_of_all_kinds_of_groups(self, exports, now, asked):
        assert self.asked(self.memory(FULL, FULL, SLIDING, STATE, RING, exports=exports), now) == asked

    def test_where_nothing_is_kept_for_look_ups(self):
        """5 + 3 + 1 + 1 blocks; those of 8 tokens are 2 + 2 + 1 + 1."""
        assert self.asked(self.memory(FULL, SLIDING, STATE, RING, cached=False), 8) == (10, 4)

    def test_behind_a_prefix_that_is_found(self):
        """Two blocks of 10 shared tokens: three are left in each of two full groups, and one of them for the next four tokens."""
        served = Served(self.memory(FULL, FULL, RING))
        first = Sequence(0, 20, 5, 5)
        transaction = served.memory.transaction(0)
        assert transaction.look_up(first) == 0
        transaction.enter(first, 20, 11)
        served.memory.admit(first, 0)
        served.state.start(first, 0)
        served.step()
        assert self.asked(served.memory, 4, index=1) == (3 * 2 + 1, 2 * 2)
        # Those of a request that has left have to be taken from the free ones.
        served.memory.release((first,), 1)
        assert self.asked(served.memory, 4, index=1) == (3 * 2 + 1 + 2 * 2, 2 * 2)


class TestAdmissionWithDrafts:
    """Blocks of 4 tokens; a drafter of two tokens looks ahead by two slots."""

    def memory(self) -> SpeculativeMemory:
        strings = Strings()
        for own in range(2):
            strings.add([(9, 0, 10), (own, 0, 10)])
        drafter = SpeculativeConfig("eagle3", 2, None, (0.5, 0.25))
        return SpeculativeMemory(
            20, 4, Speculation(drafter, 0), Chains(strings, 4), 64, FreeKVCacheBlockQueue, PageGroups()
        )

    @pytest.mark.parametrize(
        ("now", "asked"),
        [
            # 16 tokens are four blocks; 4 tokens and two slots are two of them.
            (4, (4, 2)),
            # 16 tokens and two slots are five blocks.
            (16, (5, 0)),
        ],
    )
    def test_of_a_prompt_and_of_its_first_tokens(self, now, asked):
        transaction, sequence = self.memory().transaction(0), Sequence(0, 16, 5, 5)
        assert transaction.look_up(sequence) == 0
        assert (transaction.lacking(sequence, now), transaction.beyond(sequence, now)) == asked

    def test_behind_a_prefix_that_is_found(self):
        """Two blocks of 10 shared tokens, in no table any more: they have to be taken, too."""
        memory = self.memory()
        transaction, first = memory.transaction(0), Sequence(0, 16, 5, 5)
        transaction.look_up(first)
        transaction.enter(first, 16, 5)
        memory.release((first,), 1)
        transaction, second = memory.transaction(1), Sequence(1, 16, 5, 5)
        assert transaction.look_up(second) == 8
        assert (transaction.lacking(second, 4), transaction.beyond(second, 12)) == (2 + 2, 0)
        assert transaction.lacking(second, 8) == 3 + 2


class TestDrafts:
    """Two drafts for each token of a decode, in blocks of 4, up to 12 tokens of a sequence."""

    def memory(self, ahead: bool = False) -> SpeculativeMemory:
        drafter = SpeculativeConfig("ngram", 2, None, (0.5, 0.25))
        return SpeculativeMemory(
            20, 4, Speculation(drafter, 0), None, 12, FreeKVCacheBlockQueue, PageGroups(ahead=ahead)
        )

    def test_a_decode_computes_its_drafts_as_far_as_the_budget_and_the_model_allow(self):
        memory = self.memory()
        sequence = Sequence(0, 6, 6, 6)
        transaction = memory.transaction(0)
        transaction.look_up(sequence)
        transaction.enter(sequence, 6, 2)
        transaction.end_decision({sequence})
        # Six tokens are computed, and the model has places for the inputs of 11 at the most.
        assert [transaction.tokens_of(sequence, budget) for budget in (9, 3, 2, 0)] == [3, 3, 2, 0]
        memory.progress[sequence].computed = 9
        assert transaction.tokens_of(sequence, 9) == 11 - 9
        memory.progress[sequence].computed = 11
        assert transaction.tokens_of(sequence, 9) == 0

    def test_a_decode_that_ends_in_the_step_that_runs_computes_no_more(self):
        """Six tokens of prompt and two of output: after the first two steps both are there, whatever drafts are accepted."""
        memory = self.memory(ahead=True)
        sequence = Sequence(0, 6, 2, 2)
        served = Served(memory)
        transaction = memory.transaction(0)
        transaction.look_up(sequence)
        transaction.enter(sequence, 6, 2)
        transaction.end_decision({sequence})
        memory.admit(sequence, 0)
        served.state.start(sequence, 0)
        served.step()
        transaction = memory.transaction(1)
        assert transaction.tokens_of(sequence, 9) == 3
        transaction.take(sequence, 3, 0)
        transaction.end_decision({sequence})
        served.step()
        assert memory.transaction(2).tokens_of(sequence, 9) == 0

    @pytest.mark.parametrize(
        ("decodes", "prefilling", "continues", "prompt", "computed", "tokens", "padded"),
        [
            # A lone token is not padded in a step of its own, but beside a decode, or behind a prefix that is found.
            (False, False, False, 1, 0, 1, 1),
            (True, False, False, 1, 0, 1, 3),
            (False, False, False, 9, 8, 1, 3),
            # Two tokens are a prefill, and so is the rest of a chunked one; a step with such a one pads nothing.
            (True, False, False, 10, 8, 2, 2),
            (True, True, False, 9, 8, 1, 1),
            (True, False, True, 9, 8, 1, 1),
            # 8 and 3 tokens are below 12; 9 and 3 are not.
            (True, False, False, 10, 9, 1, 1),
        ],
    )
    def test_a_lone_token_is_padded_to_the_length_of_a_decode(
        self, decodes, prefilling, continues, prompt, computed, tokens, padded
    ):
        memory, sequence = self.memory(), Sequence(0, prompt, 3, 3)
        transaction = memory.transaction(0)
        assert not memory.continues_prefill
        memory.continues_prefill = continues
        if decodes:
            memory.drafts[Sequence(1, 4, 4, 4)] = 2
        if prefilling:
            memory.progress[sequence] = Progress(computed, prompt, prefills=True)
        assert transaction.padded(sequence, computed, tokens) == padded

    def test_a_step_that_goes_on_with_a_prefill_pads_nothing(self):
        memory, sequence = self.memory(), Sequence(0, 9, 3, 3)
        transaction = memory.transaction(0)
        transaction.look_up(sequence)
        transaction.enter(sequence, 8, 2)
        sequence.computed_tokens = 8
        memory.prefill(sequence, 0)
        transaction = memory.transaction(0)
        transaction.take(sequence, 1, 1)
        assert memory.continues_prefill and not memory.drafts


class TestAdmissionFromTheHost:
    """Blocks of 4 tokens. A prompt of 18 tokens, five blocks, of which the host has two."""

    def offered(
        self, free: int, reserves_whole: bool, watermark_blocks: int = 0
    ) -> tuple[OffloadedMemory, OffloadTransaction, Sequence]:
        strings = Strings()
        for text in (9, 5, 9):
            strings.add([(text, 0, 18)])
        memory = OffloadedMemory(
            free,
            4,
            PageGroups((FULL,)),
            Chains(strings, 4),
            Offloaded(10, 1),
            FreeKVCacheBlockQueue,
            watermark_blocks=watermark_blocks,
            reserves_whole=reserves_whole,
        )
        sequence = Sequence(0, 18, 5, 5)
        names = memory.cache.names_of(sequence)[:2]
        memory.tier.cache.start_store(7, [(name, place) for place, name in enumerate(names)])
        memory.tier.cache.end_store(names)
        return memory, memory.transaction(0), sequence

    @pytest.mark.parametrize(
        ("free", "reserves_whole", "loads"), [(5, True, True), (4, True, False), (5, False, True), (4, False, True), (1, False, False)]
    )  # fmt: skip
    def test_it_is_loaded_where_its_blocks_fit(self, free, reserves_whole, loads):
        """The two blocks, or all five where an admission reserves them."""
        memory, transaction, sequence = self.offered(free, reserves_whole)
        assert transaction.look_up(sequence) == (None if loads else 0)
        assert (memory.tier.loaded, transaction.free) == ({sequence: 8} if loads else {}, free - 2 * loads)
        if not loads:
            assert (transaction.lacking(sequence, 18), transaction.beyond(sequence, 4)) == (free + 1, 0)

    @pytest.mark.parametrize(
        ("blocks", "reserves_whole", "running", "loads"),
        [
            (5, True, False, True),
            (6, True, True, False),
            (7, True, True, True),
            (3, False, True, False),
            (4, False, True, True),
            (2, False, False, True),
        ],
    )
    def test_beside_another_sequence_a_block_is_left_free(self, blocks, reserves_whole, running, loads):
        """The other one has a block, and the watermark is one."""
        memory, transaction, sequence = self.offered(blocks, reserves_whole, watermark_blocks=1)
        if running:
            other = Sequence(1, 4, 5, 5)
            transaction.look_up(other)
            transaction.enter(other, 4, 1)
        assert memory.any_running == running
        assert transaction.look_up(sequence) == (None if loads else 0)

    def test_it_may_be_admitted_once_a_running_one_fills_its_next_block_or_while_blocks_are_copied(self):
        """Requests 0 and 2 are the same text, request 1 another one."""
        memory, transaction, sequence = self.offered(20, False)
        alike, other = Sequence(2, 18, 5, 5), Sequence(1, 18, 5, 5)
        assert [memory.may_admit(sequence, running) for running in ([], [other], [alike], [other, alike])] == [
            False,
            False,
            True,
            True,
        ]
        transaction.look_up(sequence)
        assert memory.may_admit(alike, [])

    def test_what_it_takes_after_the_load_is_beyond_its_first_tokens(self):
        memory, transaction, sequence = self.offered(9, True)
        transaction.look_up(sequence)
        assert transaction.lacking(sequence, 10) == 5 - 2
        assert [transaction.beyond(sequence, tokens) for tokens in (4, 8, 9, 12, 13, 18)] == [3, 3, 2, 2, 1, 0]


class TestPublished:
    """Requests of the same tokens in blocks of 4, in one group, where sequences take their blocks one by one."""

    def memory(self, ahead: bool) -> PagedMemory:
        strings = Strings()
        for _ in range(3):
            strings.add([(0, 0, 30)])
        groups = PageGroups((FULL,), ahead=ahead)
        return PagedMemory(20, 4, groups=groups, chains=Chains(strings, 4), in_turn=True)

    @pytest.mark.parametrize(("ahead", "found"), [(False, 8), (True, 4)])
    def test_a_block_that_a_decode_fills_is_found_when_its_last_token_is_known(self, ahead, found):
        """In the step that computes it; with steps ahead, the token is only known after that step."""
        served = Served(self.memory(ahead))
        first = served.start(0, 7)
        served.step()
        transaction = served.memory.transaction(served.state.decode_step)
        transaction.grow_tables(0)
        transaction.take(first, 1, transaction.needed(first, 1))
        assert served.memory.cache.look_up(Sequence(1, 20, 9, 9)).blocks * 4 == found

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_block_that_a_prefill_fills_is_found_in_that_step(self, ahead):
        """Chunks of 4 tokens of a prompt of 10; every token of a prompt is known."""
        served = Served(self.memory(ahead))
        first = Sequence(0, 10, 9, 9)
        transaction = served.memory.transaction(0)
        assert transaction.look_up(first) == 0
        transaction.enter(first, 4, transaction.lacking(first, 4))
        first.computed_tokens = 4
        served.memory.prefill(first, 0)
        served.step(0)
        transaction = served.memory.transaction(0)
        transaction.take(first, 4, transaction.needed(first, 4))
        assert served.memory.cache.look_up(Sequence(1, 20, 9, 9)).blocks == 2

    @pytest.mark.parametrize(("ahead", "found"), [(False, 8), (True, 4)])
    def test_a_block_that_the_last_step_of_a_leap_fills_is_found_before_the_next_one_is_taken(self, ahead, found):
        """Five tokens, and three steps more."""
        served = Served(self.memory(ahead))
        served.start(0, 5)
        served.step(4)
        served.memory.transaction(served.state.decode_step)
        assert served.memory.cache.look_up(Sequence(1, 20, 9, 9)).blocks * 4 == found


def test_a_request_that_goes_on_within_a_block_copies_it():
    """Of the seven tokens of a running request one goes on from six, which end within its second block, and one from four."""
    dialogue = Dialogue(np.array([NO_PARENT, 0, 0]), np.array([0, 6, 4]), np.zeros(3, dtype=bool))
    memory = DialogueMemory(9, 4, dialogue)
    memory.tables.moves = Moves()
    served = Served(memory)
    parent = served.start(0, 7)
    served.step()
    memory.transaction(served.state.decode_step)
    children = [Sequence(index, 8, 5, 5) for index in (1, 2)]
    for child in children:
        memory.look_up(child, served.state.decode_step)
        memory.promise(child)
        memory.admit(child, served.state.decode_step)
    tables = [memory.tables.tables[sequence] for sequence in (parent, *children)]
    assert [table[:1] for table in tables] == [tables[0][:1]] * 3
    assert memory.tables.moves.copies == [(tables[0][1], tables[1][1], 4)]


@pytest.mark.parametrize(
    ("lost", "computed", "tokens", "recomputed"), [(0, 0, 5, 0), (10, 4, 3, 3), (10, 8, 5, 2), (10, 12, 5, 0)]
)
def test_a_chunk_computes_again_what_was_lost(lost, computed, tokens, recomputed):
    """Of so many tokens that a preempted sequence had, those behind what it has by now."""
    ledger, sequence = Ledger(()), Sequence(3, 20, 5, 5)
    sequence.lost_tokens, sequence.computed_tokens = lost, computed
    ledger.chunk(sequence, tokens, 700)
    assert {name: column.tolist() for name, column in ledger.chunks.columns().items()} == {
        "index": [3],
        "start_ticks": [700],
        "tokens": [tokens],
        "recomputed_tokens": [recomputed],
    }


@pytest.mark.parametrize(("growing", "more", "fails"), [(1, 1, False), (2, 0, True), (1, 2, True)])
def test_tokens_that_outgrow_a_reservation_are_a_fault_within_the_leap(growing, more, fails):
    """Four tokens, and ten of output in a leap. All 14 slots are reserved, and 13 are filled, as the last token needs none: there is
    room for one more, but not for two, nor for a second sequence."""
    chosen = settings_of("orca-oracle", Pool(8, 4), Limits(40), work=None)
    log = simulate(chosen, Workload("one", np.zeros(1), np.array([4]), np.array([10])), RampCost(base_ticks=100)).log
    assert max(log.rows["steps"]) > 2
    changed = {"growing": log.rows["growing"] * growing, "live": log.rows["live"] + more}
    grown = replace(log, rows=log.rows | changed)
    with pytest.raises(SimulationFault, match="reserved") if fails else nullcontext():
        Accounts(grown).require_conserved()


def test_a_fault_of_the_ledger_names_its_step():
    """The second of two such requests has two tokens too many from its first step on, the tenth after the ten of the first one."""
    work = Workload("two", np.array([0, 10_000]), np.array([4, 4]), np.array([10, 10]))
    log = simulate(settings_of("orca-oracle", Pool(8, 4), Limits(40), work=None), work, RampCost(base_ticks=100)).log
    live = log.rows["live"] + 2 * (log.rows["start_ticks"] >= 10_000)
    with pytest.raises(SimulationFault, match=r"reserved = -\d+ in decode step 10, "):
        Accounts(replace(log, rows=log.rows | {"live": live})).require_conserved()


def test_a_pinned_prefix_is_live_while_nothing_runs():
    """Two requests of 12 tokens, of which 8 are a pinned prefix, and 3 of output, a million ticks apart, in blocks of 4. A step
    takes 100 ticks, and there are 3 for each: 600 ticks of steps, and else only the prefix is live."""
    chosen = settings_of("vllm-sosp23", Pool(10, 4), Limits(40), work=None, shared_prefix_tokens=8)
    work = Workload("apart", np.array([0, 1_000_000]), np.array([12, 12]), np.array([3, 3]))
    run = simulate(chosen, work, RampCost(base_ticks=100))
    assert run.log.pinned_slots == 8
    span = run.accounts.window(0, 1_000_300)
    # A sequence has 4, 5 and 6 tokens of its own in its three steps.
    live = 8 * 1_000_300 + 2 * 100 * (4 + 5 + 6)
    assert span.slot_ticks["live"] == live
    assert sum(span.slot_ticks.values()) == run.log.capacity_slots * 1_000_300


def test_swapped_blocks_are_on_the_host_from_their_going_to_their_return():
    """Two requests of 8 tokens and 9 of output in blocks of 4, with five blocks. In the second step either needs a third block,
    and one goes to the host with two, which takes 34 ticks, until the other one has ended after nine steps of 100."""
    chosen = settings_of("vllm-sosp23", Pool(5, 4, 10), Limits(40, preemption_mode="swap", watermark_fraction=0.0))
    work = Workload("two", np.zeros(2, dtype=np.int64), np.array([8, 8]), np.array([9, 9]))
    run = simulate(chosen, work, RampCost(base_ticks=100))
    host = {name: column.tolist() for name, column in run.log.host.items()}
    assert host["held_blocks"] == [2, 0]
    assert host["ticks"] == [100, 900 + 34]
    assert summary(run)["host_pool"]["max_used_blocks"] == 2
