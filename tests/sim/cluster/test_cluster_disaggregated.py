"""Prefill on some replicas and decode on others: what is transferred, what is held meanwhile, and that nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster_runs import ROUTERS, Views, same_cluster, serve_apart, watched
from engine_runs import LONG_MODEL, evictions_of, residencies_of, times_of
from fragmeter.sim.cluster import (
    ClusterRun,
    cluster,
    cluster_requests_table,
    cluster_summary,
    cluster_times,
    simulate_cluster,
)
from fragmeter.sim.config.settings import settings
from fragmeter.sim.spec import model
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from shared_prefixes import shared_cases
from strategies import Case, LineCost, crowded_cases, long_cases, small_cases
from token_times import token_ticks

POLICIES = ("vllm-v1", "sarathi")
SLOT_BYTES = model(LONG_MODEL).slot_bytes()
#: GB/s, at which a token takes about a tick, about 100, which is a step, and about 8,000.
BANDWIDTHS = (1e9, 8e6, 1e5)
links = st.fixed_dictionaries(
    {
        "kv_transfer_bandwidth": st.sampled_from(BANDWIDTHS),
        "kv_transfer_latency": st.sampled_from([0.0, 5e-7]),
        "router": st.sampled_from(ROUTERS),
        "decode_router": st.sampled_from([name for name in ROUTERS if name != "prefix-affine"]),
    }
)
cases = st.one_of(small_cases(), crowded_cases(), long_cases())
apart = {"case": cases, "prefill": st.integers(1, 2), "decode": st.integers(1, 2), "link": links}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=10)
@given(**apart, data=st.data())
def test_leap_and_step_are_the_same_bits(policy, case, prefill, decode, link, data):
    """Invariant 6, also in a window that begins or ends while blocks are only held."""
    leap_and_step(policy, case, prefill, decode, link, data)


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(**apart)
def test_leap_and_step_are_the_same_bits_where_steps_are_scheduled_ahead(case, prefill, decode, link):
    noting = Views()
    with noting.noted():
        runs = [
            serve_apart("vllm-v1", case, prefill, decode, link=link, leap=leap, async_scheduling=True)
            for leap in (True, False)
        ]
    assert not noting.differences
    same_cluster(*runs)
    assert_nothing_is_lost(runs[0])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=1000)
@given(**apart, data=st.data())
def test_leap_and_step_are_the_same_bits_at_length(policy, case, prefill, decode, link, data):
    """Invariants 1, 4 and 6."""
    assert_nothing_is_lost(leap_and_step(policy, case, prefill, decode, link, data))


def leap_and_step(
    policy: str, case: Case, prefill: int, decode: int, link: dict[str, Any], data: st.DataObject
) -> ClusterRun:
    """The same runs, over a window that is drawn; the one that leaps."""
    end = serve_apart(policy, case, prefill, decode, link=link).end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    noting = Views()
    with noting.noted():
        leapt, stepped = (serve_apart(policy, case, prefill, decode, window, link, leap=leap) for leap in (True, False))
    assert not noting.differences
    same_cluster(leapt, stepped)
    assert_same_columns(leapt.transfers, stepped.transfers)
    return leapt


@pytest.mark.slow
@hypothesis_settings(max_examples=12)
@given(case=shared_cases(), prefill=st.integers(1, 2), decode=st.integers(1, 2), link=links)
def test_leap_and_step_are_the_same_bits_where_prefixes_are_cached(case, prefill, decode, link):
    """Invariants 1 and 6, with blocks that are held for a transfer and found by others meanwhile."""
    leapt, stepped = (serve_apart("vllm-v1", case, prefill, decode, link=link, leap=leap) for leap in (True, False))
    same_cluster(leapt, stepped)
    assert_same_columns(leapt.transfers, stepped.transfers)
    assert_nothing_is_lost(leapt)
    caches = [run.replica.cache_log is not None for run in leapt.runs]
    assert caches == [True] * prefill + [False] * decode


def assert_same_columns(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert {name: column.tolist() for name, column in one.items()} == {
        name: column.tolist() for name, column in other.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=12)
@given(**apart)
def test_no_request_is_lost_and_what_is_transferred_is_the_prompts(policy, case, prefill, decode, link):
    """Invariants 1 and 4 over both kinds of replicas."""
    assert_nothing_is_lost(serve_apart(policy, case, prefill, decode, link=link))


def assert_nothing_is_lost(run: ClusterRun) -> None:
    work, moved, times = run.workload, run.transfers, cluster_times(run)
    served, more = ~run.refused, work.output_tokens > 1
    assert times.index.tolist() == np.flatnonzero(served).tolist()
    # Every request is prefilled once and, if it has more than a token, decoded once, where its KV went.
    first = run.num_arriving
    assert sorted(np.concatenate(run.rows[:first]).tolist()) == np.flatnonzero(served).tolist()
    assert sorted(np.concatenate(run.rows[first:]).tolist()) == np.flatnonzero(served & more).tolist()
    assert sorted(moved["row"].tolist()) == np.flatnonzero(served & more).tolist()
    for rows, number in zip(run.rows[first:], range(first, len(run.runs)), strict=True):
        assert set(moved["row"][moved["replica"] == number].tolist()) == set(rows.tolist())
    # The prompts' bytes, and nothing else.
    assert moved["bytes"].sum() == work.prompt_tokens[served & more].sum() * SLOT_BYTES
    assert cluster_summary(run)["kv_transfer"]["bytes"] == moved["bytes"].sum()
    # All tokens that were asked for, in time.
    assert {row: len(ticks) for row, ticks in all_token_ticks(run).items()} == {
        int(row): int(work.output_tokens[row]) for row in times.index
    }
    for ticks in all_token_ticks(run).values():
        assert (np.diff(ticks) > 0).all()
    for part in run.runs:
        assert sum(part.accounts.window().slot_ticks.values()) == part.replica.memory.capacity_slots * run.end_ticks


def all_token_ticks(run: ClusterRun) -> dict[int, np.ndarray]:
    """When each token of every request came: the first where it was prefilled, the others where it was decoded."""
    first = run.num_arriving
    sides = [
        token_ticks(ClusterRun(run.settings, cluster(), run.workload, run.runs[side], run.rows[side], None, {}))
        for side in (slice(first), slice(first, None))
    ]
    return {row: np.concatenate([ticks, sides[1].get(row, ticks[:0])]) for row, ticks in sides[0].items()}


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=6)
@given(**apart)
def test_what_is_said_of_requests_follows_from_their_tokens(policy, case, prefill, decode, link):
    """TTFT, inter-token gaps with the one across the link, and the end."""
    run = serve_apart(policy, case, prefill, decode, link=link)
    tokens, times, results = all_token_ticks(run), cluster_times(run), cluster_summary(run)
    assert times.first_token_ticks.tolist() == [tokens[row][0] for row in times.index.tolist()]
    assert times.finish_ticks.tolist() == [tokens[row][-1] for row in times.index.tolist()]
    gaps = np.concatenate([np.diff(ticks) for ticks in tokens.values()] or [np.zeros(0)])
    assert results["mean_itl_ms"] == pytest.approx(gaps.mean() / 1e9 if len(gaps) else 0.0)
    assert results["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99) / 1e9 if len(gaps) else 0.0)
    assert results["total_output_tokens"] == sum(map(len, tokens.values()))


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=6)
@given(**apart)
def test_a_link_carries_one_prompt_after_the_other(policy, case, prefill, decode, link):
    """Each as long as its bytes take; ready when its prompt is done."""
    run = serve_apart(policy, case, prefill, decode, link=link)
    times, moved = cluster_times(run), run.transfers
    done = dict(zip(times.index.tolist(), times.first_token_ticks.tolist(), strict=True))
    assert moved["ready_ticks"].tolist() == [done[row] for row in moved["row"].tolist()]
    latency = round(link["kv_transfer_latency"] * 1e9)
    for number in range(prefill):
        own = moved["prefill_replica"] == number
        free, columns = 0, (moved[name][own].tolist() for name in ("ready_ticks", "start_ticks", "end_ticks", "bytes"))
        for ready, start, end, size in zip(*columns, strict=True):
            assert start == max(ready, free)
            free = end - latency
            assert 0 <= free - start - size * 1000 / link["kv_transfer_bandwidth"] < 1 + 1e-6


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=6)
@given(**apart)
def test_littles_law_holds_from_the_arrival_to_the_last_token(policy, case, prefill, decode, link):
    """Over both kinds of replicas, and the links between."""
    with watched() as clocks:
        run = serve_apart(policy, case, prefill, decode, link=link)
    times = cluster_times(run)
    assert clocks[0].request_ticks == int((times.finish_ticks - times.arrival_ticks).sum())


SLOW = {"kv_transfer_bandwidth": SLOT_BYTES * 1e12 / 100 / 1e9, "kv_transfer_latency": 7e-9}


def apart_story(requests: list[Request], pool: Pool, **more: Any) -> ClusterRun:
    """With a link that carries a token in 100 ticks, and 7 ticks of latency; sarathi has no null block in its pool."""
    case = Case(requests, pool, Limits(50, watermark_fraction=0.0), LineCost())
    return serve_apart("sarathi", case, link=SLOW, **more)


def test_a_lone_request():
    """A prefill of six tokens takes 101 + 7 * 6 = 143, the transfer 607. The first step of decoding computes one token,
    101 + 7, and each of the other two takes 101 + 13. The blocks are held until 750; idle until then, and after."""
    run = apart_story([Request(0, 6, 4)], Pool(10, 4))
    assert [times_of(part) for part in run.runs] == [{0: (0, 143, 143, 0, 0)}, {0: (750, 858, 858 + 2 * 114, 0, 0)}]
    table = cluster_requests_table(run).iloc[0]
    assert (table["transfer_ticks"], table["prefill_replica"], table["replica"]) == (607, 0, 1)
    assert (table["first_token_ticks"], table["finish_ticks"]) == (143, 1086)
    ledger, end = run.runs[0].accounts.window().slot_ticks, 1086
    # In its second block a slot is for the token of the output, and one is left.
    assert ledger["live"] == 6 * 750 and ledger["reserved"] + ledger["block_tail"] == 2 * 750
    assert ledger["free"] == 40 * end - 8 * 750
    work = cluster_summary(run)["replicas"][0]["work"]["seconds"]
    assert (work["useful"], work["idle"]) == (pytest.approx(143e-12), pytest.approx((end - 143) * 1e-12))


def test_a_request_of_one_token_goes_nowhere():
    run = apart_story([Request(0, 6, 1)], Pool(10, 4))
    assert len(run.transfers["row"]) == 0 and [len(rows) for rows in run.rows] == [1, 0]
    table = cluster_requests_table(run)
    assert table["replica"].tolist() == [0] and table["transfer_ticks"].isna().all()
    assert cluster_summary(run)["completed"] == 1


def test_a_request_that_waits_for_memory_waits_for_a_transfer():
    """Two prompts of 12, of which the pool holds one: the second begins when the first one's KV is where it goes."""
    run = apart_story([Request(0, 12, 3), Request(1, 12, 3)], Pool(4, 4))
    prefill, transfer = 101 + 7 * 12, 12 * 100 + 7
    begin = prefill + transfer
    end = begin + prefill
    assert times_of(run.runs[0]) == {0: (0, prefill, prefill, 0, 0), 1: (begin, end, end, 0, 0)}
    assert run.runs[0].accounts.window().slot_ticks["live"] == 2 * 12 * (prefill + transfer)


def test_prompts_that_are_done_together_are_sent_one_after_the_other():
    run = apart_story([Request(0, 2, 2), Request(0, 3, 2)], Pool(10, 4))
    ready = 101 + 7 * 5
    assert run.transfers["ready_ticks"].tolist() == [ready] * 2
    assert run.transfers["start_ticks"].tolist() == [ready, ready + 200]
    assert run.transfers["end_ticks"].tolist() == [ready + 207, ready + 507]


def test_a_sequence_preempted_where_it_decodes_is_recomputed_there():
    """Both fit with their prompts, and not with their outputs: the later one gives way, and when it comes again computes
    its prompt and what it generated, there; nothing is transferred twice."""
    run = apart_story([Request(0, 6, 12), Request(0, 6, 12)], Pool(6, 4))
    decode = run.runs[1]
    assert [(index, swapped) for _, index, swapped in evictions_of(decode)] == [(1, 0)] * 2
    # Request, tokens and generated tokens of every residency: first the prompt and its first token, then all there is.
    residencies = [residency[1:4] for residency in residencies_of(decode)]
    assert residencies[:2] == [(0, 7, 1), (1, 7, 1)]
    again = residencies[2:]
    assert [(index, tokens - generated) for index, tokens, generated in again] == [(1, 6)] * 2
    assert 1 < again[0][2] < again[1][2]
    assert run.transfers["row"].tolist() == [0, 1]
    summary = cluster_summary(run)
    assert summary["preemptions"] == {"recompute": 2, "swap": 0}
    assert cluster_requests_table(run)["recomputed"].tolist() == [0, 2]
    # All but the token that is computed next had been computed before.
    assert summary["work"]["tokens"]["recomputed"] == sum(tokens - 1 for _, tokens, _ in again)


def test_a_decode_router_sees_what_is_on_its_way():
    """Two prompts are done in one step; the second goes to the other replica, as the first one's tokens count already."""
    run = apart_story([Request(0, 4, 3), Request(0, 4, 3)], Pool(10, 4), decode_replicas=2)
    assert run.transfers["replica"].tolist() == [1, 2]


MISTAKES = {
    "half of it": ({"prefill_replicas": 2}, "decode_replicas = None: goes with prefill_replicas = 2"),
    "the other half": ({"decode_replicas": 2}, "prefill_replicas = None: goes with decode_replicas = 2"),
    "both": (
        {"prefill_replicas": 1, "decode_replicas": 1, "num_replicas": 2},
        "num_replicas = 2: cannot be combined with",
    ),
    "affine decodes": (
        {"prefill_replicas": 1, "decode_replicas": 1, "decode_router": "prefix-affine"},
        "decode_router = 'prefix-affine': nothing is cached",
    ),
    "an unused link": ({"kv_transfer_latency": 3}, "kv_transfer_latency = 3.0: applies only to prefill_replicas"),
    "an unused router": ({"decode_router": "kv-aware"}, "decode_router = 'kv-aware': applies only to prefill_replicas"),
    "no bandwidth": ({"kv_transfer_bandwidth": 0}, "kv_transfer_bandwidth = 0"),
}


@pytest.mark.parametrize(("fields", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_cluster_that_cannot_be(fields, message):
    with pytest.raises(SettingError) as error:
        cluster(**fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "orca"}, "orca cannot go on from a prompt computed elsewhere; take vllm-v1 or sarathi"),
        (
            {
                "policy": "vllm-v1",
                "model": "deepseek-v3",
                "gpu": "h200",
                "tensor_parallel_size": 8,
                "decode_context_parallel_size": 4,
            },
            "must be tensor_parallel_size = 8 where prompts are computed elsewhere",
        ),
    ],
)
def test_a_policy_or_a_model_that_cannot(fields, message):
    one = np.ones(1, dtype=np.int64)
    with pytest.raises(SettingError, match=message):
        apart = cluster(prefill_replicas=1, decode_replicas=1)
        simulate_cluster(settings(**fields), Workload("one", one, one, one), apart)


_DRAFTS = {"num_speculative_tokens": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}
#: What a deployment of prefill and decode apart has beside layers of several kinds.
_BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n-grams": {"speculative_config": json.dumps({"method": "ngram", **_DRAFTS})},
    "MTP": {"speculative_config": json.dumps({"method": "mtp", **_DRAFTS})},
    "offloading": {"kv_offloading_size": 0.25},
    "MTP and offloading": {
        "speculative_config": json.dumps({"method": "mtp", **_DRAFTS}),
        "kv_offloading_size": 0.25,
    },
}


@pytest.mark.parametrize("beside", _BESIDE)
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "gpt-oss-120b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_deployment_of_several_features_serves_every_token(shape: str, beside: str, ahead: bool):
    """Windows, states, drafts and offloading: nothing is lost, decodes compute no prompt, and no block is left."""
    draw = np.random.default_rng(0)
    prompts, outputs = draw.integers(20, 3000, 24), draw.integers(1, 30, 24)
    contents = PromptContent.of_sessions(np.arange(24) // 4)
    work = Workload("several", np.sort(draw.integers(0, 10**11, 24)), prompts, outputs, content=contents)
    chosen = settings(
        policy="vllm-v1",
        gpu="h200",
        model=shape,
        tensor_parallel_size=2,
        max_model_len=4096,
        num_gpu_blocks_override=3000,
        async_scheduling=ahead,
        enable_prefix_caching=True,
        **_BESIDE[beside],
    )
    run = simulate_cluster(chosen, work, cluster(prefill_replicas=1, decode_replicas=1))
    assert not run.refused.any()
    more = np.flatnonzero(outputs > 1)
    assert sorted(run.transfers["row"].tolist()) == more.tolist()
    tokens = cluster_times(run)
    assert (tokens.finish_ticks > tokens.first_token_ticks)[more].all()
    prefilling, decoding = run.runs
    # In the first step of a sequence there the first token's KV is computed, and nothing of the prompt.
    assert decoding.log.rows["prefill_tokens"].sum() == len(more)
    assert prefilling.replica.caches_prefixes
    assert not decoding.replica.caches_prefixes
    for part in run.runs:
        assert sum(part.accounts.window().slot_ticks.values()) == part.replica.memory.capacity_slots * run.end_ticks
