"""Limits of vLLM's API server under ``vllm-v1``: stories by hand, a loss system, and leaps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import same_runs as leaps
from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.users import Users

STEP = 100


@dataclass(frozen=True)
class Constant:
    """Every step takes 100 ticks."""

    name: str = "constant"

    def step_ticks(self, decodes, decode_context, prefill_tokens, prefill_pairs):
        return STEP

    def decode_line(self, decodes, context):
        return STEP, 0, None

    def swap_out_ticks(self, blocks):
        return 0

    swap_in_ticks = copy_ticks = swap_out_ticks

    def describe(self):
        return {}


def load(*rows: tuple[int, int, int], **columns) -> Workload:
    """Requests of (arrival, prompt tokens, output tokens), all of them up to ``max_tokens``."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*rows))
    return Workload("rows", arrivals, prompts, outputs, **{"max_tokens": outputs} | columns)


def serve(work: Workload, asynchronous: bool = False, leap: bool = True, **given):
    plain = {"outside_ms": 0, "max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4}
    chosen = plain | {"num_gpu_blocks_override": 400} | given
    return simulate(settings(policy="vllm-v1", async_scheduling=asynchronous, leap=leap, **chosen), work, Constant())


def rejected(run) -> list[int]:
    return np.flatnonzero(run.rejected).tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unfinished_requests(asynchronous):
    """Request 0 runs from 0 to 300, request 1 from 100 (asynchronous: 200) on for 500 ticks.

    At 250 and at 299 request 0 is unfinished: the step in progress ends at 300. At 300 it is not. Request 4 then
    makes two, so that request 5, of the same tick, is too many.
    """
    work = load((0, 5, 3), (50, 5, 5), (250, 5, 1), (299, 5, 1), (300, 5, 2), (300, 5, 1))
    run = serve(work, asynchronous, max_num_queued_reqs=2)
    assert rejected(run) == [2, 3, 5]
    table = requests_table(run)
    start = 200 if asynchronous else 100
    assert table["finish_ticks"][[0, 1]].tolist() == [300, start + 500]
    assert table["finish_ticks"].isna().tolist() == table["rejected"].tolist() == run.rejected.tolist()
    assert table["cached_tokens"].isna().tolist() == run.rejected.tolist()
    assert (summary(run)["rejected"], summary(run)["refused"], summary(run)["completed"]) == (3, 0, 3)


def test_queued_tokens():
    """A prompt of 100 tokens takes two steps of 64; its first token is there at 200.

    The chunk computed by 100 still counts: at 150 there are 100 tokens, at least the limit. At 200 there are none, and one
    prompt after the other is accepted until there are 100: 60 and 60.
    """
    work = load((0, 100, 9), (150, 5, 1), (199, 5, 1), (200, 60, 1), (200, 60, 1), (200, 1, 1))
    run = serve(work, max_num_queued_tokens=100)
    assert rejected(run) == [1, 2, 5]
    assert requests_table(run)["first_token_ticks"][0] == 200


def test_a_cached_prefix_is_not_subtracted_and_a_preempted_request_has_its_first_token():
    prompts = {"max_num_queued_tokens": 40}
    run = serve(load((0, 40, 2), (1000, 40, 2), (1001, 40, 2)), **prompts)
    assert rejected(run) == [2]
    tight = serve(load((0, 8, 20), (0, 8, 20), (1500, 8, 1)), num_gpu_blocks_override=10, max_model_len=28, **prompts)
    assert sum(summary(tight)["preemptions"].values()) == 1
    assert rejected(tight) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_samples_of_a_request_count_one_by_one_and_are_rejected_together(asynchronous):
    work = load((0, 5, 5), (10, 5, 5), (20, 5, 5), n=np.array([2, 3, 2]))
    assert rejected(serve(work, asynchronous, max_num_queued_reqs=4)) == [1]


def accepted_by_a_loss_system(arrivals: list[int], service: list[int]) -> list[int]:
    """One server without a queue. A step starts at once, as nothing runs."""
    taken, free_at = [], 0
    for request, arrival in enumerate(arrivals):
        if arrival >= free_at:
            taken.append(request)
            free_at = arrival + service[request]
    return taken


rows = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=30).map(
    lambda drawn: [(int(at), *rest) for at, (_, *rest) in zip(np.cumsum([gap for gap, *_ in drawn]), drawn)]
)


@pytest.mark.slow
@given(drawn=rows, asynchronous=st.booleans())
def test_one_request_at_a_time_is_a_loss_system(drawn, asynchronous):
    """A request of p prompt and o output tokens takes ceil(p / 64) + o - 1 steps."""
    run = serve(load(*drawn), asynchronous, max_num_queued_reqs=1)
    service = [STEP * (-(-prompt // 64) + output - 1) for _, prompt, output in drawn]
    accepted = accepted_by_a_loss_system([at for at, *_ in drawn], service)
    assert np.flatnonzero(~run.rejected).tolist() == accepted
    table = requests_table(run)
    assert [table["finish_ticks"][one] - table["arrival_ticks"][one] for one in accepted] == [
        service[one] for one in accepted
    ]
    assert run.log.end_ticks == max(drawn[one][0] + service[one] for one in accepted)


def judged_after_the_run(run, work: Workload, requests: int | None, tokens: int | None) -> list[bool]:
    """Whether each request exceeds the limits, by the times of a finished run."""
    table, exceeding = requests_table(run), []
    for row, arrival in enumerate(work.arrival_ticks.tolist()):
        before = table.iloc[[one for one in range(row) if not exceeding[one]]]
        unfinished = int((before["finish_ticks"] > arrival).sum())
        queued = int(before["prompt_tokens"][before["first_token_ticks"] > arrival].sum())
        too_many = requests is not None and unfinished + 1 > requests
        exceeding.append(too_many or (tokens is not None and queued >= tokens))
    return exceeding


limits = st.tuples(st.none() | st.integers(1, 6), st.none() | st.integers(1, 300)).filter(any)


@pytest.mark.slow
@hypothesis_settings(max_examples=150)
@given(
    drawn=rows,
    asynchronous=st.booleans(),
    ends_early=st.booleans(),
    limit=limits,
    blocks=st.sampled_from([42, 60, 400]),
    seqs=st.sampled_from([1, 2, 8]),
)
def test_leaps_are_steps_and_every_request_is_judged_at_its_arrival(
    drawn, asynchronous, ends_early, limit, blocks, seqs
):
    requests, tokens = limit
    given = {"max_num_queued_reqs": requests, "max_num_queued_tokens": tokens, "max_num_seqs": seqs}
    given |= {"num_gpu_blocks_override": blocks, "max_model_len": 164}
    work = load(*drawn)
    if ends_early:
        work = replace(work, max_tokens=None)
    runs = [serve(work, asynchronous, leap, **given) for leap in (True, False)]
    leaps.same(*runs)
    assert runs[0].rejected.tolist() == runs[1].rejected.tolist()
    assert requests_table(runs[0]).equals(requests_table(runs[1]))
    assert runs[0].rejected.tolist() == judged_after_the_run(runs[0], work, requests, tokens)


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(drawn=rows, asynchronous=st.booleans())
def test_limits_that_are_never_reached_change_nothing(drawn, asynchronous):
    limited = serve(load(*drawn), asynchronous, max_num_queued_reqs=1000, max_num_queued_tokens=10**6)
    plain = serve(load(*drawn), asynchronous)
    leaps.same(replace(limited, rejected=None), plain)
    assert requests_table(limited).drop(columns="rejected").equals(requests_table(plain))


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_closed_loops_and_clusters_are_refused(name):
    work = load((0, 5, 3), (0, 5, 3))
    with pytest.raises(SettingError, match=f"^{name} = 3: what users do after a rejection"):
        serve(replace(work, users=Users(1, np.zeros(2, dtype=np.int64))), **{name: 3})
    with pytest.raises(SettingError, match=f"^{name} = 3: needs a single replica"):
        simulate_cluster(settings(policy="vllm-v1", **{name: 3}), work, cluster(num_replicas=2))
