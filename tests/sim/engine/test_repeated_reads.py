"""Reads of blocks that several decodes have in common: a story, the count against the block tables, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import radix_cases
import same_runs as leaps
from engine_runs import settings_of, steps_of, workload_of
from fragmeter.sim import Settings, Workload, settings
from fragmeter.sim.engine.core import compiled, serves
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.repeats import idle_repeats
from fragmeter.sim.memory.paged import cached, group_cache
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.types.errors import PluginError
from hybrid_runs import model_of
from oracle import Limits, Pool
from oracle.hybrid import Groups
from ramp_cost import RampCost
from rereads import KneeRereads, RampRereads, Recount
from shared_prefixes import SharedCase, caching_settings, of_pieces, shared_cases

BASE, CONTEXT = 100, 10
RAMP = RampRereads(base_ticks=BASE, context_ticks=CONTEXT)


class FreeCopies(RampRereads):
    """Copies of blocks take no time."""

    def copy_ticks(self, slots: int) -> int:
        return 0


costs = st.sampled_from([RampRereads(context_ticks=3), KneeRereads(), KneeRereads(knee_tokens=7)])


def case_of(pieces: list, own: list[int], outputs: list[int], arrivals: list[int], num_blocks: int = 50) -> SharedCase:
    requests, content = of_pieces(arrivals, pieces, own, outputs)
    return SharedCase(requests, Pool(num_blocks, 4), Limits(100, max_num_seqs=64), RAMP, content)


@pytest.mark.parametrize("switches", [{}, {"leap": False}, {"ids": True}])
def test_two_share_a_prefix(switches):
    """Blocks of four; both prompts begin with the same ten tokens, of which the second one finds eight.

    0: prompt 0 alone. 100: 0 decodes over 11 tokens, and prompt 1 goes beside it: its table names two blocks of 0's, which it
    does not read as a decode. 310: both decode, over 12 + 13 tokens of which 8 are read again: 25 - 5 tokens of time. 610 and
    910: 1 is alone again, and reads each of its blocks once.
    """
    case = case_of([[(7, 10)], [(7, 10)]], [0, 2], [3, 4], [0, 50])
    recount = Recount()
    observers = (recount,) if switches.get("ids") else ()
    run = simulate(caching_settings(case, **switches), case.workload, case.cost, observers=observers)
    wanted = [(0, 100), (100, 100 + 10 * 11), (310, 100 + 10 * 20), (610, 100 + 10 * 14), (850, 100 + 10 * 15)]
    assert [(step.start_ticks, step.ticks) for step in steps_of(run)] == wanted
    assert max(recount.found, default=8) == 8


@pytest.mark.parametrize("leap", [True, False])
def test_one_of_them_is_computed_in_vain(leap):
    """Under asynchronous scheduling 0 ends with an EOS that the next decision does not know: its row is computed once more.

    2 comes at 50, which the decision of the second step does not know, and finds eight tokens of 0's in the third. The steps decode
    over 11 + 13 and 12 + 14 tokens; 13 + 15 + 13, in vain for 0, of which eight are read again; 16, in vain, + 14; 15.
    """
    case = case_of([[(7, 10)], [], [(7, 10)]], [0, 12, 2], [3, 4, 4], [0, 0, 50])
    run = simulate(caching_settings(case, async_scheduling=True, leap=leap), case.workload, case.cost)
    wanted = [0, 24, 26, 41 - 5, 30, 15]
    assert [(step.ticks - BASE) // CONTEXT for step in steps_of(run)] == wanted


def check(chosen: Settings, work: Workload, cost, has_ids: bool) -> list[int]:
    """Steps and leaps are the same, with block ids and without, and every count is that of the tables."""
    counts, runs = [], [simulate(chosen, work, cost)]
    for leap in (True, False):
        recount = Recount()
        runs.append(simulate(replace(chosen, leap=leap, ids=has_ids), work, cost, observers=[recount]))
        counts += recount.found
    for run in runs[:-1]:
        if run.replica.memory.speculation is None:
            leaps.same(run, runs[-1])
        assert summary(run) == summary(runs[-1])
    return counts


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=shared_cases(), cost=costs, ahead=st.booleans())
def test_the_count_is_that_of_the_tables(case, cost, ahead):
    check(caching_settings(case, async_scheduling=ahead), case.workload, cost, has_ids=True)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=shared_cases(), cost=costs, ahead=st.booleans(), data=st.data())
def test_the_count_over_kv_groups_is_that_of_a_group_that_keeps_every_token(case, cost, ahead, data):
    longest = max(request.prompt_tokens + request.output_tokens for request in case.requests)
    groups = Groups(*data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (0, 1)])), data.draw(st.integers(1, longest)))
    pages = (groups.full + groups.sliding) * (-(-longest // case.pool.block_size) + data.draw(st.integers(1, 9)))
    sized = replace(
        case, pool=replace(case.pool, num_blocks=pages), limits=replace(case.limits, max_model_len=longest + 1)
    )
    chosen = caching_settings(sized, async_scheduling=ahead)
    check(replace(chosen, model=model_of(groups)), case.workload, cost, has_ids=False)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=radix_cases.shared_cases(), cost=costs)
def test_the_count_in_a_radix_tree_is_that_of_the_slots(case, cost):
    work = workload_of(case.requests, case.limits.max_model_len, case.content)
    check(settings_of("sglang", case.pool, case.limits, work=work), work, cost, has_ids=True)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=shared_cases(), cost=costs, ahead=st.booleans(), drafts=st.integers(1, 3))
def test_the_count_of_steps_that_verify_drafts_is_that_of_the_tables(case, cost, ahead, drafts):
    rates = [0.6**place for place in range(1, drafts + 1)]
    drafting = {"method": "ngram", "num_speculative_tokens": drafts, "synthetic_acceptance_rates": rates}
    drafting |= {"rejection_sample_method": "synthetic"}
    tokens = max(case.limits.max_num_batched_tokens, drafts + 1)
    chosen = caching_settings(case, async_scheduling=ahead, speculative_config=drafting)
    check(replace(chosen, max_num_batched_tokens=tokens), case.workload, cost, has_ids=False)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=shared_cases(), cost=costs, ahead=st.booleans())
def test_the_count_beside_a_host_tier_is_that_of_the_tables(case, cost, ahead):
    chosen = caching_settings(case, async_scheduling=ahead, kv_offloading_size=1)
    check(chosen, case.workload, cost, has_ids=False)


GROUPS = {"model": model_of(Groups(2, 1, 9))}
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 1,
        "synthetic_acceptance_rates": [0.5],
        "rejection_sample_method": "synthetic",
    }
}
HOST = {"kv_offloading_size": 1}


def crowd(**switches) -> list[int]:
    """The counts of five requests that come one after the other and begin alike; prompts of two of them go on in chunks, and two
    end at their declared lengths."""
    case = case_of([[(7, 12)]] * 5, [3, 2, 5, 30, 30], [30, 20, 25, 9, 9], [0, 150, 700, 1400, 1500], 200)
    requests = [
        replace(each, max_tokens=each.output_tokens) if each.output_tokens > 20 else each for each in case.requests
    ]
    limits = replace(case.limits, max_num_batched_tokens=12, max_num_seqs=12)
    case = replace(case, requests=requests, limits=limits)
    chosen = replace(caching_settings(case), **switches)
    return check(chosen, case.workload, RAMP, has_ids=not switches.keys() - {"async_scheduling"})


@pytest.mark.parametrize("switches", [{}, GROUPS, DRAFTS, HOST])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_crowd_has_every_count(switches, ahead):
    """Of twelve tokens in blocks of four, of up to five decodes: so that the properties above are no empty ones."""
    assert {0, 12, 24, 36} <= set(crowd(**switches, async_scheduling=ahead)) <= {0, 12, 24, 36, 48}


@pytest.mark.parametrize(
    "module, switches", [(cached, {}), (group_cache, GROUPS), (group_cache, DRAFTS), (group_cache, HOST)]
)
@pytest.mark.parametrize("part", [0, 2])
def test_a_wrong_count_is_found(module, switches, part):
    """Catches: what prompts name counts as read by decodes; or is taken off twice."""

    def wrong(*given) -> int:
        return part * idle_repeats(*given)

    with mock.patch.object(module, "idle_repeats", wrong), pytest.raises(PluginError, match="the tables have"):
        crowd(**switches)


@pytest.mark.parametrize("ids", [True, False])
def test_a_pinned_prefix_is_read_again_by_all_leaders_but_one(ids):
    """Blocks of four, one of them pinned. 1 comes beside the decodes of 0, and 2 beside those of both: contexts of 7, 8 + 7 (of
    which four are read again), 9 + 8 + 7 (eight), 10 + 9 + 8 (eight)."""
    chosen = settings(
        policy="vllm-sosp23", block_size=4, num_gpu_blocks_override=60, shared_prefix_tokens=4, max_num_seqs=8, ids=ids
    )
    work = Workload("prefix", np.array([0, 50, 150]), np.array([6, 6, 6]), np.array([5, 4, 3]))
    recount = Recount()
    run = simulate(chosen, work, RAMP, observers=(recount,) if ids else ())
    contexts = [0, 7, 8 + 7 - 2, 9 + 8 + 7 - 5, 10 + 9 + 8 - 5]
    assert [step.ticks for step in steps_of(run)] == [BASE + CONTEXT * context for context in contexts]
    assert set(recount.found) == ({0, 4, 8} if ids else set())


@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v0"])
@pytest.mark.parametrize("samples, prompt, output", [(1, 12, 5), (2, 12, 5), (5, 13, 7), (4, 3, 4)])
def test_samples_of_one_prompt_in_closed_form(policy, samples, prompt, output):
    """n samples read the full blocks of their prompt n times, n - 1 times again; the half-full one is copied before."""
    chosen = settings(policy=policy, block_size=4, num_gpu_blocks_override=60, max_num_seqs=64)
    work = Workload("samples", np.array([0]), np.array([prompt]), np.array([output]), n=np.array([samples]))
    run = simulate(chosen, work, FreeCopies(base_ticks=BASE, context_ticks=CONTEXT))
    repeated = (samples - 1) * (prompt // 4 * 4)
    contexts = [samples * (prompt + step) - 7 * repeated // 10 for step in range(1, output)]
    assert run.log.end_ticks == BASE + sum(BASE + CONTEXT * context for context in contexts)


def test_the_core_serves_what_reads_no_block_again():
    """Runs with shared prefixes are served in Python under such a cost, and by the core under another."""
    alike, apart = (case_of(pieces, [5, 5], [3, 3], [0, 0]) for pieces in ([[(7, 10)], [(7, 10)]], [[], []]))
    served = {}
    for name, case in {"alike": alike, "apart": apart}.items():
        chosen = settings(policy="vllm-v1", enable_prefix_caching=True, block_size=4, num_gpu_blocks_override=50)
        for cost in (RAMP, RampCost(base_ticks=BASE, context_ticks=CONTEXT)):
            served[name, cost is RAMP] = serves(chosen, build(chosen, cost, case.workload))
    there = compiled()[0] is not None
    assert served == {("alike", True): False, ("alike", False): there, ("apart", True): there, ("apart", False): there}
