"""Bugs that were planted on purpose and that no other test saw: a small story for each that tells them apart."""

from __future__ import annotations

from unittest import mock

import pytest

from engine_runs import buckets_at_rows, evictions_of, residencies_of, serve, times_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import CARRY_ON
from oracle import Limits, Pool, Request
from strategies import Case, LineCost
from walk import Walk

PAGED = "vllm-sosp23"
FRESH, RECOMPUTED, SWAPPED_IN = 0, 1, 2
#: The classical index, 1 - 2/3, where two of three free blocks are together.
HOLES = 1 - 2 / 3


def everything(run: Run) -> dict[str, list[int]]:
    """Every column of the run log, and the times of every request."""
    run_log = run.log
    kept = {"rows": run_log.rows, "residencies": run_log.residencies, "evictions": run_log.evictions}
    columns = {f"{table}.{name}": column.tolist() for table, named in kept.items() for name, column in named.items()}
    return columns | {"times": [*times_of(run).items()]}


def swaps(requests: list[Request], num_blocks: int, host_blocks: int) -> Case:
    """Blocks of one slot, so that each sequence takes one a step; victims are swapped out while the host has room."""
    limits = Limits(60, watermark_fraction=0.0, preemption_mode="swap")
    return Case(requests, Pool(num_blocks, 1, host_blocks), limits, LineCost())


@pytest.mark.parametrize("leap", [True, False])
def test_no_request_is_admitted_past_one_preempted_in_the_same_step(leap):
    """Catches: phase 3 stops at the last arrival that was preempted in this step, not at the first of them.

    Sixteen slots, room for one on the host. After the prefills nothing is free.
    1: five want a slot. 4 gives its one up, to the host; 3 its seven, to be computed again. 0, 1, 2 take three.
    2: five are free, three are taken; 4 comes back with its one and a new one. None is free for 3.
    3: four want a slot. 4 gives up two, too many for the host, and then 2 its eight. Ten are free; 0 and 1 take two. 3
       would fit into eight, but it came after 2, which was preempted just now.
    4: 0 and 1 are done. 2 takes nine of sixteen; 3 wants eight.
    5: 2 is done. 3 and 4 go together.
    """
    prompts, outputs = (1, 1, 6, 7, 1), (4, 4, 4, 2, 3)
    run = serve(PAGED, swaps([Request(0, *lengths) for lengths in zip(prompts, outputs)], 16, 1), leap=leap)
    assert residencies_of(run) == [
        *((0, i, prompt, 0, FRESH) for i, prompt in enumerate(prompts)),
        (2, 4, 2, 1, SWAPPED_IN),
        (4, 2, 9, 3, RECOMPUTED),
        (5, 3, 8, 1, RECOMPUTED),
        (5, 4, 3, 2, RECOMPUTED),
    ]
    assert evictions_of(run) == [(1, 3, 0), (1, 4, 1), (3, 4, 0), (3, 2, 0)]


# Thirteen slots, two on the host.
ID_CASE = swaps([Request(0, 3, 3), Request(0, 3, 3), Request(0, 5, 3), Request(0, 2, 4)], 13, 2)
# By step: tables, host tables, and the free blocks with the next to be taken last.
ID_LOG = {
    0: ({0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8, 9, 10], 3: [11, 12]}, {}, ()),
    # 3 goes to the host, then 2 gives up its blocks; 0 takes the last of them and 1 the one before.
    1: ({0: [0, 1, 2, 10], 1: [3, 4, 5, 9]}, {3: [0, 1]}, (11, 12, 6, 7, 8)),
    # 0 and 1 take theirs first, then 3 comes back with two blocks and one for its next token.
    2: ({0: [0, 1, 2, 10, 8], 1: [3, 4, 5, 9, 7], 3: [6, 12, 11]}, {}, ()),
    # 0 and 1 are done. 3 takes a block, then 2 is admitted with six.
    3: ({3: [6, 12, 11, 7], 2: [9, 5, 4, 3, 8, 10]}, {}, (0, 1, 2)),
    # 2 came before 3: it takes its block first, although it was admitted later.
    4: ({3: [6, 12, 11, 7, 1], 2: [9, 5, 4, 3, 8, 10, 2]}, {}, (0,)),
}


@pytest.mark.parametrize("leap", [True, False])
def test_block_ids_go_out_in_the_order_of_arrival_and_come_back_as_they_lie_in_the_table(leap):
    """Catches: a sequence admitted again while a later arrival runs takes its blocks after that one; a table that goes
    to the host gives its blocks back in another order. Leaps and steps agree in both."""
    walk = Walk(PAGED, ID_CASE, leap)
    seen = {m.decode_step: (m.tables, m.host_tables, m.free_ids[::-1]) for m in walk.ids()}
    assert seen.items() <= ID_LOG.items() if leap else seen == ID_LOG
    assert {0, 1, 2, 3} <= set(seen)
    # 2 is done before 3, and the blocks of 3 are freed last.
    assert walk.memory.tables.pool.free_ids[::-1] == (0, 9, 5, 4, 3, 8, 10, 2, 6, 12, 11, 7, 1)


@pytest.mark.parametrize("leap", [True, False])
def test_the_largest_chunk_holds_a_model_that_ends_within_a_block(leap):
    """Catches: chunks of 256 blocks at most, for a model of 513 tokens in blocks of two. It needs 257, so the chunk is
    one of 512, all of the pool."""
    run = serve("orca-max", Case([Request(0, 500, 13)], Pool(512, 2), Limits(513), LineCost()), leap=leap)
    assert run.refused.tolist() == [False]
    first = {name: slots for name, slots in buckets_at_rows(run)[0].items() if slots}
    assert first == {"live": 500, "reserved": 13, "round_up": 1024 - 513}


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("window", "over_iterations", "over_time"),
    [
        ((0, 357), 2 * HOLES / 3, 228 * HOLES / 357),
        ((60, 129), 0, 0),
        ((60, 130), HOLES, HOLES / 70),
        ((100, 243), HOLES, 114 * HOLES / 143),
        ((150, 300), HOLES, HOLES),
        ((244, 357), 0, HOLES),
        ((300, 557), 0, 57 * HOLES / 257),
    ],
)
def test_a_window_has_its_own_fragmentation(leap, window, over_iterations, over_time):
    """Catches: a step that starts as the window ends counts, the time before the window counts, the window is ignored.

    Four chunks of a block, of which the second remains when the first step, 129 ticks long, is over. In two more of 114
    ticks three blocks are free, two of them together. A step belongs to the window in which it starts."""
    requests = [Request(0, 1, output) for output in (1, 3, 1, 1)]
    run = serve("orca-oracle", Case(requests, Pool(4, 4), Limits(64), LineCost()), window, leap=leap)
    assert run.accounts.external_fragmentation(*window) == pytest.approx((over_iterations, over_time))


# Thirty-two slots. Request 2 asks for 34, or 33, and is refused; 6 is preempted for 5 where memory is paged.
CHUNKY = Case(
    [
        Request(0, 3, 4), Request(0, 5, 2), Request(200, 20, 14), Request(900, 4, 9), Request(900, 2, 1),
        Request(5000, 12, 9), Request(5001, 9, 12), Request(9000, 7, 3),
    ],
    Pool(16, 2), Limits(40, watermark_fraction=0.0), LineCost("sloped", 2, 3),
)  # fmt: skip


@pytest.mark.parametrize("requests", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", ["static", "orca-oracle", PAGED])
def test_a_source_that_reads_a_few_requests_at_a_time_loses_none(policy, requests):
    """Catches: the last request of a chunk is dropped, the first one of the next is delivered twice; tests have no
    65,536 requests, so the chunk is made small."""
    whole = serve(policy, CHUNKY)
    assert sorted(times_of(whole)) == [0, 1, 3, 4, 5, 6, 7]
    with mock.patch("fragmeter.sim.workload.source._CHUNK", requests):
        assert everything(serve(policy, CHUNKY)) == everything(whole)


@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("policy", ["static", "orca-oracle", PAGED])
def test_a_ledger_that_is_sealed_often_keeps_every_record_once(policy, requests):
    """Catches: a record is lost or doubled where the ledger is sealed, which is once in 32,768 requests."""
    whole = serve(policy, CHUNKY)
    assert (len(whole.log.evictions["index"]) > 0) == (policy == PAGED)
    with mock.patch("fragmeter.sim.memory.accounting.ledger._SEAL_REQUESTS", requests):
        assert everything(serve(policy, CHUNKY)) == everything(whole)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_are_integrated_a_few_at_a_time_give_the_same_sums(rows):
    """Catches: the growth of later rows is read off the first ones; only steps were integrated in pieces, and they do
    not grow."""
    run = serve(PAGED, CHUNKY, (600, 6200))
    whole = [run.accounts.window(*edges) for edges in ((), (600, 6200))]
    with mock.patch("fragmeter.sim.runs.integrals._CHUNK_ROWS", rows):
        assert [run.accounts.window(*edges) for edges in ((), (600, 6200))] == whole


def test_a_policy_that_lets_no_request_run_is_a_fault():
    """Catches: the engine ends a run in which requests still wait, as if all were served."""
    with mock.patch("fragmeter.sim.policy.vllm_sosp23.VllmSosp23.schedule", return_value=CARRY_ON):
        with pytest.raises(SimulationFault, match="vllm-sosp23 is stuck: nothing runs and 2 requests wait"):
            # The compiled core has the schedule of its own.
            serve(PAGED, Case([Request(0, 3, 4), Request(0, 5, 2)], Pool(9, 2), Limits(40), LineCost()), core=False)
