"""Groups of sequences and dialogue trees against an independent oracle: every step, residency, eviction and time."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from family_runs import (
    CONTIGUOUS,
    PAGED,
    TREES,
    FamilyCase,
    RowSlots,
    group_cases,
    outcome_of,
    rows_of,
    run_of,
    same,
    tree_cases,
)
from fragmeter.sim.memory.paged.dialogue import DialogueMemory
from fragmeter.sim.policy import sharing
from oracle import Limits, Pool
from oracle.families import FamilyRequest
from strategies import LineCost

GROUPED = sorted(PAGED | CONTIGUOUS)
MANY = {"max_examples": 2000, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.slow
@pytest.mark.parametrize("policy", GROUPED)
@hypothesis_settings(max_examples=40)
@given(data=st.data())
def test_groups_do_what_the_oracle_says(policy, data):
    same(data.draw(group_cases(policy)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", TREES)
@hypothesis_settings(max_examples=40)
@given(data=st.data())
def test_trees_do_what_the_oracle_says(policy, data):
    same(data.draw(tree_cases(policy)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", GROUPED)
@hypothesis_settings(**MANY)
@given(data=st.data())
def test_groups_do_what_the_oracle_says_at_length(policy, data):
    same(data.draw(group_cases(policy)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", TREES)
@hypothesis_settings(**MANY)
@given(data=st.data())
def test_trees_do_what_the_oracle_says_at_length(policy, data):
    same(data.draw(tree_cases(policy)))


class StoryCost(LineCost):
    """100 ticks, 10 a decode, 1 a prompt token; 7 a block out, 3 a block in, 2 a slot copied."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 100 + 10 * decodes + prefill_tokens

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 100 + 10 * decodes, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        return 7 * blocks

    def swap_in_ticks(self, blocks: int) -> int:
        return 3 * blocks

    def copy_ticks(self, slots: int) -> int:
        return 2 * slots


def story(policy: str, requests: list[FamilyRequest], pool: Pool, *steps: tuple) -> None:
    """Both are held to steps worked out by hand: (start, ticks, decode step, batch size, prefill tokens, ticks of
    moves, and slots live, held, saved, cached, held on the host). Without siblings or parents all goes another way."""
    case = FamilyCase(policy, requests, pool, Limits(96, max_num_seqs=40, watermark_fraction=0.0), cost=StoryCost())
    outcome = same(case)
    assert rows_of(run_of(case, leap=False)) == [RowSlots(*step) for step in steps]
    apart = [replace(r, n=1, parent=None, parent_tokens=0, rolls_back=False) for r in requests for _ in range(r.n)]
    plain = outcome_of(replace(case, requests=apart))
    assert [step.ticks for step in plain.steps] != [step.ticks for step in outcome.steps]


def test_a_group_gives_way_for_want_of_a_block_that_it_does_not_need():
    """In step 2 one block is free. Neither needs one, but a group of two asks for two: it leaves with its three
    blocks, the prompt's once. It comes back when three and two are free."""
    story(
        "vllm-sosp23",
        [FamilyRequest(0, 4, 6), FamilyRequest(0, 4, 4, n=2)],
        Pool(6, 4, host_blocks=10),
        (0, 108, 0, 2, 8, 0, 8, 8, 0, 0, 0),
        (108, 130, 1, 3, 0, 0, 11, 20, 4, 0, 0),
        (238, 131, 2, 1, 0, 21, 6, 8, 0, 0, 12),
        (369, 110, 3, 1, 0, 0, 7, 8, 0, 0, 12),
        (479, 110, 4, 1, 0, 0, 8, 8, 0, 0, 12),
        (589, 110, 5, 1, 0, 0, 9, 12, 0, 0, 12),
        (699, 129, 6, 2, 0, 9, 8, 12, 4, 0, 0),
        (828, 120, 7, 2, 0, 0, 10, 12, 4, 0, 0),
    )


def test_a_group_that_is_computed_again_finds_the_full_blocks_of_its_prompt():
    """As above without a host. In step 3 the leader computes six tokens and its sibling two, in step 5 seven and
    three."""
    story(
        "vllm-sosp23",
        [FamilyRequest(0, 4, 6), FamilyRequest(0, 4, 4, n=2)],
        Pool(6, 4),
        (0, 108, 0, 2, 8, 0, 8, 8, 0, 0, 0),
        (108, 130, 1, 3, 0, 0, 11, 20, 4, 0, 0),
        (238, 110, 2, 1, 0, 0, 6, 8, 0, 0, 0),
        (348, 118, 3, 3, 8, 0, 15, 20, 4, 0, 0),
        (466, 110, 4, 1, 0, 0, 8, 8, 0, 0, 0),
        (576, 120, 5, 3, 10, 0, 19, 24, 4, 0, 0),
    )


def test_of_two_that_roll_back_in_one_step_the_last_one_writes_in_place():
    """Blocks of two. B names A's first block. C rolls A back to one token of it, D rolls B back: C copies the block,
    four ticks, since B names it; then only D does."""
    story(
        "vllm-v0",
        [
            FamilyRequest(0, 3, 1),
            FamilyRequest(1000, 3, 1, 1, 0, 2),
            FamilyRequest(2000, 2, 1, 1, 0, 1, True),
            FamilyRequest(2000, 2, 1, 1, 1, 1, True),
        ],
        Pool(12, 2),
        (0, 103, None, 1, 3, 0, 3, 4, 0, 0, 0),
        (1000, 101, None, 1, 1, 0, 3, 4, 0, 2, 0),
        (2000, 106, None, 2, 2, 4, 4, 4, 0, 0, 0),
    )


def test_two_forks_of_one_step_count_the_blocks_that_both_name_once():
    """Four blocks, two of them kept: both children name these and take one each."""
    story(
        "vllm-sosp23",
        [FamilyRequest(0, 7, 2), FamilyRequest(1000, 9, 1, 1, 0, 8), FamilyRequest(1000, 9, 1, 1, 0, 8)],
        Pool(4, 4),
        (0, 107, 0, 1, 7, 0, 7, 8, 0, 0, 0),
        (107, 110, 1, 1, 0, 0, 8, 8, 0, 0, 0),
        (1000, 102, 2, 2, 2, 0, 10, 16, 8, 0, 0),
    )


def test_a_step_that_only_prefills_gives_up_nothing_for_paused_sequences():
    """At 844 the running request is about to ask for a block, and none is in no table. But it stands still while the
    child is prefilled, which finds its parent and computes one token."""
    story(
        "vllm-v0",
        [FamilyRequest(0, 7, 2), FamilyRequest(300, 4, 6), FamilyRequest(800, 5, 1, 1, 0, 4)],
        Pool(4, 4),
        (0, 107, None, 1, 7, 0, 7, 8, 0, 0, 0),
        (107, 110, 0, 1, 0, 0, 8, 8, 0, 0, 0),
        (300, 104, None, 1, 4, 0, 4, 4, 0, 8, 0),
        (404, 110, 1, 1, 0, 0, 5, 8, 0, 8, 0),
        (514, 110, 2, 1, 0, 0, 6, 8, 0, 8, 0),
        (624, 110, 3, 1, 0, 0, 7, 8, 0, 8, 0),
        (734, 110, 4, 1, 0, 0, 8, 8, 0, 8, 0),
        (844, 101, None, 1, 1, 0, 13, 16, 0, 0, 0),
        (945, 110, 5, 1, 0, 0, 9, 12, 0, 0, 0),
    )


def test_a_piece_is_not_given_up_for_a_head_that_does_not_fit_all_the_same():
    """44 slots. At 238 request 2 asks for 30, and 26 would be free if request 0's six were given up. They stay, and
    at 458 request 3 copies five tokens from there."""
    story(
        "orca",
        [FamilyRequest(0, 4, 2, max_tokens=2), FamilyRequest(0, 14, 4, max_tokens=4), FamilyRequest(100, 20, 2, max_tokens=10),
         FamilyRequest(150, 6, 1, 1, 0, 5, False, 1)],
        Pool(11, 4),
        (0, 118, 0, 2, 18, 0, 18, 24, 0, 0, 0),
        (118, 120, 1, 2, 0, 0, 20, 24, 0, 0, 0),
        (238, 110, 2, 1, 0, 0, 16, 18, 0, 6, 0),
        (348, 110, 3, 1, 0, 0, 17, 18, 0, 6, 0),
        (458, 131, 4, 2, 21, 10, 26, 37, 0, 6, 0),
        (589, 110, 5, 1, 0, 0, 21, 30, 0, 0, 0),
    )  # fmt: skip


def test_nothing_is_kept_for_a_request_that_was_refused():
    """The only child of request 0 needs seven blocks of four; that of request 2 does not, and finds four tokens."""
    story(
        "vllm-sosp23",
        [
            FamilyRequest(0, 7, 2),
            FamilyRequest(500, 9, 20, 1, 0, 8),
            FamilyRequest(1000, 4, 1),
            FamilyRequest(2000, 5, 1, 1, 2, 4),
        ],
        Pool(4, 4),
        (0, 107, 0, 1, 7, 0, 7, 8, 0, 0, 0),
        (107, 110, 1, 1, 0, 0, 8, 8, 0, 0, 0),
        (1000, 104, 2, 1, 4, 0, 4, 4, 0, 0, 0),
        (2000, 101, 3, 1, 1, 0, 5, 8, 0, 0, 0),
    )


def test_beams_find_their_parents_after_a_prefill_in_which_the_clock_stood_still():
    """They are computed again, three times, in steps of their own; each of those brings a token, as a decode does."""
    few = Limits(96, max_num_batched_tokens=5, max_num_seqs=1, watermark_fraction=0.0)
    outcome = same(FamilyCase("vllm-v0", [FamilyRequest(0, 3, 18, n=2)], Pool(6, 8), few, survival=0.9))
    assert outcome.times[0][3] == 2


def test_a_table_with_only_running_blocks_is_not_given_up():
    """At 625, where no block is free for it, and at 847, where an earlier request takes one, the child gives way.
    Nothing is cached before it does, so nothing is given up; then its parent's two blocks are, and are found again."""
    story(
        "vllm-sosp23",
        [FamilyRequest(0, 7, 2), FamilyRequest(300, 4, 9), FamilyRequest(500, 9, 6, 1, 0, 8)],
        Pool(5, 4),
        (0, 107, 0, 1, 7, 0, 7, 8, 0, 0, 0),
        (107, 110, 1, 1, 0, 0, 8, 8, 0, 0, 0),
        (300, 104, 2, 1, 4, 0, 4, 4, 0, 8, 0),
        (404, 110, 3, 1, 0, 0, 5, 8, 0, 8, 0),
        (514, 111, 4, 2, 1, 0, 15, 20, 0, 0, 0),
        (625, 110, 5, 1, 0, 0, 7, 8, 0, 8, 0),
        (735, 112, 6, 2, 2, 0, 18, 20, 0, 0, 0),
        (847, 110, 7, 1, 0, 0, 9, 12, 0, 8, 0),
        (957, 110, 8, 1, 0, 0, 10, 12, 0, 8, 0),
        (1067, 110, 9, 1, 0, 0, 11, 12, 0, 8, 0),
        (1177, 110, 10, 1, 0, 0, 12, 12, 0, 8, 0),
        (1287, 103, 11, 1, 3, 0, 11, 12, 0, 0, 0),
        (1390, 110, 12, 1, 0, 0, 12, 12, 0, 0, 0),
        (1500, 110, 13, 1, 0, 0, 13, 16, 0, 0, 0),
        (1610, 110, 14, 1, 0, 0, 14, 16, 0, 0, 0),
    )


def test_groups_that_ask_for_fewer_blocks_than_they_have_sequences_are_found_out():
    """Planted: a group may go on with one free block."""
    requests = [FamilyRequest(0, 4, 6), FamilyRequest(0, 4, 4, n=2)]
    case = FamilyCase("vllm-sosp23", requests, Pool(6, 4), Limits(96, max_num_seqs=40, watermark_fraction=0.0))
    with mock.patch.object(sharing, "num_seqs_of", lambda sequence: 1), pytest.raises(AssertionError):
        same(case)


def test_parents_that_are_not_looked_up_are_found_out():
    """Planted: nothing is found."""
    case = FamilyCase(
        "vllm-sosp23", [FamilyRequest(0, 7, 2), FamilyRequest(1000, 9, 1, 1, 0, 8)], Pool(9, 4), Limits(96)
    )
    same(replace(case, limits=replace(case.limits, max_num_seqs=40)))
    with mock.patch.object(DialogueMemory, "_is_there", lambda *_: False), pytest.raises(AssertionError):
        same(replace(case, limits=replace(case.limits, max_num_seqs=40)))
