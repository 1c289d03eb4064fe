"""Trees of requests: forks from any token of another one, and going back to it."""

from __future__ import annotations

import json
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import what_is_read
from expanded import expand
from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.memory.accounting.buckets import BUCKETS
from fragmeter.sim.memory.paged.dialogue import DialogueMemory, Start
from fragmeter.sim.memory.prefix import BlockPool
from fragmeter.sim.metrics.result import steps_table
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.traces import read, workload, write
from rereads import RampRereads, Recount
from sharing_walk import SharingWalk

PAGED = ("vllm-sosp23", "vllm-v0")
CONTIGUOUS = ("orca", "orca-max", "orca-pow2", "orca-oracle")
LATER, LAST = 3 * 10**12, 6 * 10**12
#: In the first decode step after two prompts that came at once.
DECODING = 45 * 10**9
unhurried = partial(hypothesis_settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tree(*rows: tuple) -> Workload:
    """Requests as (arrival_ticks, prompt_tokens, output_tokens), those with a parent (..., parent, tokens, rolls_back)."""
    full = [row if len(row) == 6 else (*row, NO_PARENT, 0, False) for row in rows]
    arrival, prompt, output, parent, tokens, back = (np.array(column) for column in zip(*full))
    return Workload("tree", arrival, prompt, output, dialogue=Dialogue(parent, tokens, back))


@st.composite
def trees(draw, policies=PAGED + CONTIGUOUS):
    """Settings with a small pool, and trees of up to fourteen requests."""
    size = draw(st.sampled_from((1, 2, 3, 4, 16)))
    arrivals = sorted(draw(st.lists(st.integers(0, 6 * 10**12) | st.just(0), min_size=1, max_size=14)))
    rows: list[tuple] = []
    for arrival in arrivals:
        parent = draw(st.integers(-1, len(rows) - 1))
        output = draw(st.integers(1, 40))
        most = rows[parent][1] + rows[parent][2] - 1 if parent >= 0 else 0
        if most < 1:
            rows.append((arrival, draw(st.integers(1, 40)), output))
        else:
            tokens = draw(st.integers(1, most))
            rows.append((arrival, tokens + draw(st.integers(1, 10)), output, parent, tokens, draw(st.booleans())))
    chosen = {
        "policy": draw(st.sampled_from(policies)),
        "block_size": size,
        "num_gpu_blocks_override": max(2, draw(st.sampled_from((20, 40, 80, 200))) * max(1, 16 // size) // 4),
        "max_num_seqs": draw(st.sampled_from((3, 8, 40))),
        "max_num_batched_tokens": draw(st.sampled_from((45, 200, 2560))),
        "watermark": draw(st.sampled_from((0, 0.01, 0.1))),
    }
    work = tree(*rows)
    return what_is_read(chosen, work), work


def check_that_leaping_and_stepping_agree(chosen, work):
    runs = [simulate(settings(**chosen, leap=leap), work) for leap in (True, False)]
    leapt, stepped = (json.dumps(summary(run)) + expand(steps_table(run)).to_csv() for run in runs)
    assert leapt == stepped
    rows = runs[0].accounts.at_rows()
    assert (sum(rows[bucket] for bucket in BUCKETS) == runs[0].log.capacity_slots).all()
    assert all((rows[bucket] >= 0).all() for bucket in BUCKETS)
    assert summary(runs[0])["total_output_tokens"] == int(work.output_tokens[~runs[0].refused].sum())


def check_the_tables(chosen, work):
    """Invariants 2 and 3 on the way; and what the ledger says is what the tables hold."""
    walk = SharingWalk(settings(**chosen), work)
    walked = [moment[3:] for moment in walk.moments()]
    run = simulate(settings(**chosen, leap=False), work)
    rows = run.log.rows | {"cached": run.accounts.at_rows()["cached"]}
    decodes = rows["steps"] > 0
    assert [*zip(*(rows[name][decodes].tolist() for name in ("live", "held", "saved", "cached")))] == walked
    assert walk.memory.free == walk.memory.num_blocks
    assert walk.memory.free == walk.tables.pool.num_free + walk.memory.cached_blocks


@pytest.mark.slow
@unhurried(max_examples=50)
@given(case=trees())
def test_leaping_and_stepping_give_the_same_bits(case):
    check_that_leaping_and_stepping_agree(*case)


@pytest.mark.slow
@unhurried(max_examples=50)
@given(case=trees(policies=("vllm-sosp23",)))
def test_invariants_2_and_3_hold_on_the_tables_and_the_ledger_is_what_they_say(case):
    check_the_tables(*case)


@pytest.mark.slow
@unhurried(max_examples=50)
@given(case=trees(policies=PAGED))
def test_what_decodes_read_again_is_what_the_tables_have_in_common(case):
    """Tables that are kept for children read nothing."""
    chosen, work = case
    runs = [
        simulate(
            settings(**chosen, leap=leap),
            work,
            RampRereads(base_ticks=10**9, context_ticks=10**8),
            observers=[Recount()],
        )
        for leap in (True, False)
    ]
    assert summary(runs[0]) == summary(runs[1])


@pytest.mark.slow
@unhurried(max_examples=2000)
@given(case=trees())
def test_leaping_and_stepping_in_many_cases(case):
    check_that_leaping_and_stepping_agree(*case)


@pytest.mark.slow
@unhurried(max_examples=2000)
@given(case=trees(policies=("vllm-sosp23",)))
def test_the_tables_in_many_cases(case):
    check_the_tables(*case)


def tables_of(work: Workload, **chosen) -> list[dict[int, list[int]]]:
    """Block tables of every step, those that are as before left out."""
    moments = SharingWalk(settings(num_gpu_blocks_override=20, block_size=4, **chosen), work).moments()
    steps = [moment.tables for moment in moments]
    return [now for before, now in zip([None, *steps], steps) if now != before]


FIRST = (0, 6, 5)  # tokens 1 to 10 are stored: blocks 0, 1, 2


def test_a_fork_names_the_full_blocks_and_copies_the_half_full_one():
    """Nine of the parent's ten stored tokens: blocks 0 and 1 are named, block 2 is copied to 3."""
    assert tables_of(tree(FIRST, (LATER, 10, 2, 0, 9, False)))[-1] == {1: [0, 1, 3]}


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    work = tree(FIRST, (LATER, 9, 2, 0, 8, False))
    assert tables_of(work)[-1] == {1: [0, 1, 3]}
    run = simulate(settings(num_gpu_blocks_override=20, block_size=4), work)
    assert summary(run)["copied_slots"] == 0 and run.log.rows["prefill_tokens"].sum() == 6 + 1


def test_a_rollback_goes_on_in_the_parents_blocks():
    """Back to five tokens: block 1 is written on in place, block 2 is given up and taken again for the ninth token."""
    assert tables_of(tree(FIRST, (LATER, 7, 4, 0, 5, True)))[-2:] == [{1: [0, 1]}, {1: [0, 1, 2]}]


def test_a_rollback_copies_what_others_name():
    """A fork that runs names blocks 0 and 1; to write on in block 1 from its sixth token is to copy it."""
    fork, back = (LATER, 9, 30, 0, 8, False), (LATER + 10**11, 7, 2, 0, 6, True)
    both = [tables for tables in tables_of(tree(FIRST, fork, back)) if len(tables) == 2]
    # The copy goes to block 2, which the parent's table has just given up.
    assert both == [{1: [0, 1, 3, 4], 2: [0, 2]}]


def test_a_parent_that_runs_is_forked_as_far_as_it_has_got():
    """The child asks for the parent's first eight tokens while it has about twenty."""
    work = tree((0, 6, 60), (5 * 10**11, 9, 2, 0, 8, False))
    run = simulate(settings(num_gpu_blocks_override=20, block_size=4), work)
    assert run.log.rows["prefill_tokens"].sum() == 6 + 1
    early = tree((0, 6, 60), (5 * 10**11, 65, 2, 0, 64, False))
    computed = simulate(settings(num_gpu_blocks_override=40, block_size=4), early)
    assert computed.log.rows["prefill_tokens"].sum() == 6 + 65


def test_what_is_kept_is_cached_and_given_up_when_blocks_run_out():
    """Ten blocks. Parents 0 and 1 keep three blocks each; a request of eight blocks takes the older one's, so that
    its child computes everything, and the younger one's child does not."""
    work = tree(FIRST, FIRST, (LATER, 25, 2), (LAST, 10, 2, 0, 9, False), (2 * LAST, 10, 2, 1, 9, False))
    run = simulate(settings(num_gpu_blocks_override=10, block_size=4, leap=False), work)
    assert [tokens for tokens in run.log.rows["prefill_tokens"].tolist() if tokens] == [12, 25, 10, 1]
    assert run.accounts.at_rows()["cached"].tolist() == [0] * 5 + [3 * 4] * 4 + [1 * 4] * 2
    # While nothing runs both are kept, until the large one comes.
    ends = run.log.rows["start_ticks"] + run.log.rows["ticks"]
    idle = run.accounts.window(int(ends[4]), LATER)
    assert idle.slot_ticks["cached"] == 6 * 4 * (LATER - int(ends[4])) and idle.slot_ticks["live"] == 0
    cache = summary(run)["prefix_cache"]
    assert (cache["hit_tokens"], cache["evicted_blocks"]) == (9, 3)
    plenty = simulate(settings(num_gpu_blocks_override=20, block_size=4), work)
    assert [tokens for tokens in plenty.log.rows["prefill_tokens"].tolist() if tokens] == [12, 25, 1, 1]


def test_the_parent_used_longest_ago_is_given_up():
    """As above, but a child of 0 comes before the large request, which therefore takes the blocks of 1."""
    child = (10, 2, 0, 9, False)
    work = tree(FIRST, FIRST, (LATER, *child), (2 * LATER, 25, 2), (LAST, *child), (2 * LAST, 10, 2, 1, 9, False))
    run = simulate(settings(num_gpu_blocks_override=10, block_size=4), work)
    assert [tokens for tokens in run.log.rows["prefill_tokens"].tolist() if tokens] == [12, 1, 25, 1, 10]


def test_a_prompt_that_others_pause_for_gives_up_nothing_for_a_step_that_is_over():
    """Four blocks of 4: one is kept for request 3, request 1 opened its second one in the step before request 2 comes,
    and takes no other. The last free block holds request 2's prompt, and request 3 finds what was kept."""
    work = tree((0, 4, 1), (0, 4, 4), (DECODING, 3, 1), (LATER, 5, 1, 0, 4, False))
    run = simulate(settings(policy="vllm-v0", num_gpu_blocks_override=4, block_size=4, watermark=0), work)
    assert run.log.rows["prefill_tokens"].tolist()[:3] == [8, 0, 3]
    cache = summary(run)["prefix_cache"]
    assert (cache["hit_tokens"], cache["evicted_blocks"]) == (4, 0)


@pytest.mark.parametrize("policy", CONTIGUOUS)
def test_contiguous_policies_copy_a_fork_and_roll_back_in_place(policy):
    """A fork copies 9 tokens, in bytes and in time; a rollback finds them where they are."""
    fork = simulate(settings(policy=policy), tree(FIRST, (LATER, 10, 2, 0, 9, False)))
    back = simulate(settings(policy=policy), tree(FIRST, (LATER, 7, 4, 0, 5, True)))
    assert fork.log.rows["prefill_tokens"].sum() == 6 + 1 and back.log.rows["prefill_tokens"].sum() == 6 + 2
    assert fork.log.copies["slots"].tolist() == [9] and back.log.copies["slots"].tolist() == []
    assert fork.log.rows["swap_ticks"].sum() == fork.log.copies["ticks"].sum() > 0


def test_a_piece_that_is_too_short_to_continue_in_is_copied():
    """Orca (Oracle) reserves what comes: 16 slots for the parent, and 48 for the child with more."""
    run = simulate(settings(policy="orca-oracle"), tree(FIRST, (LATER, 7, 40, 0, 5, True)))
    assert run.log.copies["slots"].tolist() == [5]


@pytest.mark.parametrize(("policy", "size"), (("sglang", None), ("vllm-v1", 4)))
def test_where_prompts_are_cached_by_content_trees_are_found_by_it(policy, size):
    work = tree((0, 20, 30), (LATER, 45, 5, 0, 44, False), (LAST, 30, 5, 0, 20, True))
    run = simulate(settings(policy=policy, block_size=size), work)
    assert [tokens for tokens in run.log.rows["prefill_tokens"].tolist() if tokens] == [20, 1, 10]


def test_policies_that_know_no_parents_compute_every_prompt():
    work = tree((0, 20, 30), (LATER, 45, 5, 0, 44, False))
    assert simulate(settings(policy="tgi"), work).log.rows["prefill_tokens"].sum() == 20 + 45


def test_a_half_full_block_that_is_named_and_not_copied_breaks_invariant_3():
    """Planted: a fork names the parent's half-full block while the parent writes on in it."""
    work = tree((0, 6, 60), (5 * 10**11, 8, 9, 0, 7, False))
    chosen = settings(num_gpu_blocks_override=40, block_size=4)
    list(SharingWalk(chosen, work).moments())
    start = DialogueMemory._start

    def shares_all(memory, sequence):
        found = start(memory, sequence)
        return found if found.copied is None else Start([*found.shared, found.copied], None, found.parent)

    with mock.patch.object(DialogueMemory, "_start", shares_all), pytest.raises(AssertionError, match="invariant 3"):
        list(SharingWalk(chosen, work).moments())


def test_a_reference_that_is_forgotten_is_found():
    """Planted: names of other requests' blocks do not count."""
    work = tree((0, 6, 60), (5 * 10**11, 9, 9, 0, 8, False))
    with mock.patch.object(BlockPool, "touch", lambda pool, block: None), pytest.raises(AssertionError):
        list(SharingWalk(settings(num_gpu_blocks_override=40, block_size=4), work).moments())


CSV = "arrival_s,prompt_tokens,output_tokens,parent,fork_at,truncate_to\n"


def trace(tmp_path, *rows: str):
    path = tmp_path / "tree.csv"
    path.write_text(CSV + "".join(f"{row}\n" for row in rows))
    return path


def test_a_trace_names_the_parent_of_each_request(tmp_path):
    found = read(trace(tmp_path, "0,6,5,,,", "3,10,2,0,9,", "6,7,4,0,,5")).dialogue
    assert found.parent.tolist() == [-1, 0, 0]
    assert found.parent_tokens.tolist() == [0, 9, 5] and found.rolls_back.tolist() == [False, False, True]
    lines = tmp_path / "tree.jsonl"
    lines.write_text(
        '{"arrival_s": 0, "prompt_tokens": 6, "output_tokens": 5}\n'
        '{"arrival_s": 3, "prompt_tokens": 10, "output_tokens": 2, "parent": 0, "fork_at": 9}\n'
    )
    work = workload(read(lines))
    assert work.dialogue.parent.tolist() == [-1, 0] and work.dialogue.parent_tokens.tolist() == [0, 9]
    assert len(read(lines).first(1).dialogue) == 1
    assert work.sha256() != workload(read(trace(tmp_path, "0,6,5,,,", "3,10,2,,,"))).sha256()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3,10,2,1,9,", "line 3: parent = 1: must be an earlier row"),
        ("3,10,2,-1,9,", "line 3: parent = -1: must be an earlier row"),
        ("3,10,2,0.5,9,", "line 3: parent = 0.5: must be the row of an earlier request"),
        ("3,10,2,0,,", "line 3: fork_at = nan: a row with a parent has either fork_at or truncate_to"),
        ("3,10,2,0,4,4", "line 3: fork_at = 4: a row with a parent has either fork_at or truncate_to"),
        ("3,10,2,,4,", "line 3: fork_at = 4: has no parent to begin with"),
        ("3,10,2,0,0,", "line 3: fork_at = 0: must leave a token"),
        ("3,10,2,0,,10", "line 3: truncate_to = 10: must leave a token"),
        ("3,30,2,0,,11", "line 3: truncate_to = 11: must leave a token"),
        ("3,10,2,x,9,", "line 3: parent = 'x': must be the row of an earlier request"),
    ],
)
def test_what_a_trace_cannot_say(tmp_path, row, message):
    with pytest.raises(TraceError, match=message):
        read(trace(tmp_path, "0,6,5,,,", row))


@pytest.mark.parametrize("column", ("fork_at", "truncate_to"))
def test_a_column_of_tokens_without_one_of_parents_is_refused(tmp_path, column):
    (tmp_path / "t.csv").write_text(f"arrival_s,prompt_tokens,output_tokens,{column}\n0,6,5,3\n")
    with pytest.raises(TraceError, match=f"{column} gives the fork point of a parent; name the parent"):
        read(tmp_path / "t.csv")


def test_what_a_workload_cannot_say():
    dialogue = Dialogue(np.array([-1, 0]), np.array([0, 3]), np.array([False, False]))
    lengths = (np.array([0, 1]), np.array([4, 9]), np.array([2, 2]))
    Workload("w", *lengths, dialogue=dialogue)
    with pytest.raises(SettingError, match="leave out hash_ids, session_id and n"):
        Workload("w", *lengths, dialogue=dialogue, n=np.array([2, 1]))
    with pytest.raises(SettingError, match="parent_tokens = 9: request 1 can begin with 1 to 5 tokens"):
        too_many = Dialogue(np.array([-1, 0]), np.array([0, 9]), np.array([False, False]))
        Workload("w", *lengths, dialogue=too_many)
    with pytest.raises(
        SettingError, match="shared_prefix_tokens = 2: cannot be combined with a trace with parent requests"
    ):
        simulate(settings(shared_prefix_tokens=2), Workload("w", *lengths, dialogue=dialogue))


@pytest.mark.parametrize("name", ("tree.csv", "tree.jsonl", "tree.parquet"))
def test_a_trace_is_written_as_it_was_read(tmp_path, name):
    before = read(trace(tmp_path, "0,6,5,,,", "3,10,2,0,9,", "6,7,4,0,,5"))
    write(before, tmp_path / f"out-{name}")
    after = read(tmp_path / f"out-{name}").dialogue
    for field in before.dialogue.columns():
        assert getattr(after, field).tolist() == getattr(before.dialogue, field).tolist()
