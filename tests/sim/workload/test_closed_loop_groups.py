"""Users that wait for the answers to requests of several sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from closed_loops import ROOMY, check_replayed, check_sent, sent_and_done
from engine_runs import settings_of, workload_of
from family_runs import CopyCost
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.content import NO_SESSION
from fragmeter.sim.workload.users import Users
from oracle import Limits, Pool, Request
from same_runs import same
from strategies import Case, crowded_cases

COST = CopyCost()


def served(requests: list[Request], n: list[int], users: Users, pool: Pool = ROOMY) -> Run:
    work = replace(workload_of(requests, 64), n=np.array(n), users=users)
    return simulate(settings_of("vllm-sosp23", pool, Limits(64), work=work), work, COST)


def test_samples_of_one_token_are_an_answer():
    # Siblings of a group never begin where the leader's first token is the last one.
    run = served([Request(0, 10, 1)] * 2, [2, 2], Users(1, [0, 0]))
    assert len(request_times(run).index) == 2


def test_turns_of_several_sequences_need_not_be_sent_in_the_order_of_the_trace():
    """Row 2 waits for the answer to row 1, of eight tokens, and row 3 for that to row 0, of one."""
    requests = [Request(0, 4, 1), Request(0, 4, 8), Request(0, 4, 1), Request(0, 4, 1)]
    run = served(requests, [2, 1, 3, 1], Users(None, [0, 0, 0, 0], [1, 2, 2, 1]))
    sent, done = zip(*sent_and_done(run))
    assert sent == (0, 0, done[1], done[0]) and done[0] < done[1]
    assert run.workload.sequences.arrival_ticks.tolist() == [sent[row] for row in (0, 0, 1, 2, 2, 2, 3)]


def test_groups_give_way_and_wait_in_the_order_in_which_they_were_sent():
    """Seven blocks of two. Row 1, two samples, is sent at 260, and row 2 at 51: it gives way first, and behind it
    none begins that was sent later."""
    requests = [Request(1, 4, 1), Request(1, 2, 2), Request(51, 9, 6)]
    run = served(requests, [1, 2, 1], Users(None, [100, 0, 0], [1, 1, 2]), Pool(7, 2, 0))
    check_replayed(run, run.workload, COST)
    assert request_times(run).recomputed.tolist() == [0, 1, 1]


@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v0", "orca-max", "vllm-v1"])
@hypothesis_settings(max_examples=6)
@given(case=crowded_cases(), data=st.data())
def test_several_sequences_of_a_request_are_one_answer(policy, case: Case, data):
    requests = case.requests[:8]
    n = [data.draw(st.integers(1, 3)) for _ in requests]
    thinks = [data.draw(st.sampled_from([0, 1, 5000])) for _ in requests]
    names = [data.draw(st.sampled_from([NO_SESSION, 1, 2, 3])) for _ in requests]
    users = Users(data.draw(st.sampled_from([None, 1, 2, 3])), thinks, names)
    work = replace(workload_of(requests, case.limits.max_model_len), n=np.array(n), users=users)
    leapt, stepped = (
        simulate(settings_of(policy, case.pool, case.limits, work=work, leap=leap), work, COST)
        for leap in (True, False)
    )
    same(leapt, stepped)
    check_replayed(leapt, work, COST)
    check_sent(leapt, users, work.arrival_ticks)
