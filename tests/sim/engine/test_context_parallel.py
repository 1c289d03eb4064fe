"""Ranks that divide the tokens of a sequence are blocks as many times larger, in a pool of as many blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.run import Run
from fragmeter.sim.spec import model
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from same_runs import same
from strategies import KneeCost, LineCost

#: Latent vectors, which any number of ranks divides.
ON = {"policy": "vllm-v1", "model": "deepseek-v3", "gpu": "h200", "tensor_parallel_size": 8}
DRAFTS = (
    '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",'
    ' "synthetic_acceptance_length": 2}'
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, Any], Workload]:
    """Settings with a pool that often preempts, and requests, with texts in common or without."""
    count = draw(st.integers(1, 25))
    lengths = st.lists(st.integers(1, 60), min_size=count, max_size=count)
    prompts, outputs = np.array(draw(lengths)), np.array(draw(lengths))
    gaps = draw(st.lists(st.sampled_from([0, 0, 300, 4000]), min_size=count, max_size=count))
    shared = draw(st.booleans())
    content = PromptContent.of_sessions(np.arange(count) % 3) if shared else None
    work = Workload("load", np.cumsum(gaps), prompts, outputs, content=content)
    longest = int((prompts + outputs).max())
    seqs = draw(st.sampled_from([1, 3, 64]))
    chosen = {
        "max_model_len": longest,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + draw(st.sampled_from([0, 20, 500])),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "async_scheduling": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()) or shared,
        "leap": draw(st.booleans()),
        "core": draw(st.booleans()),
        "step_cost": draw(st.sampled_from([LineCost(), KneeCost(knee_tokens=7)])),
        "room": draw(st.sampled_from([1, 1.5, 4])) * longest,
    }
    return chosen, work


def runs(chosen: dict[str, Any], work: Workload, ranks: int, size: int) -> tuple[Run, Run]:
    """With ranks that divide blocks of ``ranks * size`` tokens, and with such blocks on each."""
    chosen = dict(chosen)
    step_cost, blocks = chosen.pop("step_cost"), 2 + int(chosen.pop("room")) // (ranks * size)
    chosen |= ON | {"num_gpu_blocks_override": blocks}
    divided = settings(**chosen, block_size=size, decode_context_parallel_size=ranks)
    whole = settings(**chosen, block_size=size * ranks)
    return simulate(divided, work, step_cost), simulate(whole, work, step_cost)


@pytest.mark.slow
@hypothesis_settings(deadline=None, max_examples=60)
@given(loads(), st.sampled_from([2, 4, 8]), st.sampled_from([1, 3, 16]))
def test_the_run_is_that_of_larger_blocks(load, ranks, size):
    divided, whole = runs(*load, ranks, size)
    assert divided.replica.block_size == whole.replica.block_size == ranks * size
    same(divided, whole)


def test_a_run_with_blocks_of_one_rank_is_another():
    """The comparison notices a block that holds the tokens of one rank."""
    work = Workload("three", np.array([0, 0, 0]), np.array([40, 50, 60]), np.array([30, 30, 30]))
    chosen = ON | {"num_gpu_blocks_override": 20, "max_model_len": 128, "block_size": 8}
    divided = simulate(settings(**chosen, decode_context_parallel_size=2), work, LineCost())
    plain = simulate(settings(**chosen), work, LineCost())
    assert summary(divided) != summary(plain)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_pool_of_a_server_has_as_many_blocks(ranks):
    """The pool is computed from the memory, and steps from the blocks of a rank."""
    plain = build(settings(**ON))
    replica = build(settings(**ON, decode_context_parallel_size=ranks))
    assert replica.num_blocks == plain.num_blocks and replica.block_size == 16 * ranks
    assert replica.describe()["block_size"] == 16 * ranks
    assert replica.cost.swap_in_ticks(1) == plain.cost.swap_in_ticks(1)


def test_a_longer_sequence_fits():
    longest = {"max_model_len": 163_840, "gpu_memory_utilization": 0.67}
    with pytest.raises(SettingError, match="the KV cache holds a sequence of"):
        build(settings(**ON, **longest))
    build(settings(**ON, **longest, decode_context_parallel_size=2))


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"decode_context_parallel_size": 3}, "= 3: must divide tensor_parallel_size = 8"),
        ({"tensor_parallel_size": 1}, "= 2: must divide tensor_parallel_size = 1"),
        ({"model": "llama-3.1-70b"}, "= 2: needs more ranks than the 8 KV heads of llama-3.1-70b"),
        ({"model": "gpt-oss-120b", "tensor_parallel_size": 16}, "= 2: vLLM divides no layers with windows"),
        (
            {"model": "gpt-oss-120b", "tensor_parallel_size": 16, "disable_hybrid_kv_cache_manager": True},
            "= 2: is simulated for layers that all keep every",
        ),
        ({"model": "qwen3-next-80b-a3b", "tensor_parallel_size": 4}, "= 2: is simulated for layers that all keep"),
        ({"model": "deepseek-v3.2"}, "= 2: is not simulated with the indexer"),
        (
            {"speculative_config": DRAFTS.replace('"ngram"', '"draft_model", "model": "llama-3.2-1b"')},
            "= 2: is not simulated with a draft model; leave out one of them",
        ),
    ],
    ids=str,
)
def test_what_is_not_simulated_is_refused(others, error):
    chosen = settings(**ON | {"decode_context_parallel_size": 2} | others)
    with pytest.raises(SettingError) as raised:
        build(chosen)
    assert str(raised.value).startswith(f"decode_context_parallel_size {error}")


@pytest.mark.parametrize(
    "others", [{"speculative_config": DRAFTS}, {"kv_offloading_size": 4.0}], ids=lambda others: next(iter(others))
)
def test_drafts_of_n_grams_and_a_host_tier_take_as_many_steps_as_with_larger_blocks(others: dict[str, Any]):
    """Of latent vectors the host has one copy, or the part of each rank, which a page of 4,096 bytes holds."""
    work = Workload("ten", np.arange(10) * 10**8, np.full(10, 700), np.full(10, 20))
    work = replace(work, content=PromptContent.of_sessions(np.arange(10) % 3))
    divided = settings(**ON, block_size=16, decode_context_parallel_size=2, num_gpu_blocks_override=60, **others)
    whole = settings(**ON, block_size=32, num_gpu_blocks_override=60, **others)
    served = [simulate(chosen, work, LineCost()) for chosen in (divided, whole)]
    assert served[0].log.end_ticks == served[1].log.end_ticks
    if "kv_offloading_size" in others:
        of_rank = 16 * model("deepseek-v3").slot_bytes("bf16", 8)
        assert [run.replica.memory.tier.cache.num_blocks for run in served] == [
            4 * GIB // (-(-8 * of_rank // 4096) * 4096),
            4 * GIB // (-(-2 * of_rank // 4096) * 4096),
        ]


def test_prompts_computed_elsewhere_are_divided_by_all_ranks():
    work = Workload("one", np.array([0]), np.array([40]), np.array([30]))
    apart = cluster(prefill_replicas=1, decode_replicas=1)
    with pytest.raises(SettingError, match="decode_context_parallel_size = 2: must be tensor_parallel_size = 8 where"):
        simulate_cluster(settings(**ON, decode_context_parallel_size=2), work, apart)
    found = simulate_cluster(settings(**ON, decode_context_parallel_size=8), work, apart)
    assert [run.replica.block_size for run in found.runs] == [128, 128]


def test_a_cluster_of_such_replicas_serves_and_other_policies_refuse():
    work = Workload("four", np.arange(4) * 10**9, np.full(4, 400), np.full(4, 30))
    result = simulate_cluster(settings(**ON, decode_context_parallel_size=8), work, cluster(num_replicas=2))
    assert all(run.replica.block_size == 128 for run in result.runs)
    with pytest.raises(SettingError, match="vllm-v0 does not read it; use --policy vllm-v1"):
        simulate(settings(policy="vllm-v0", decode_context_parallel_size=2), replace(work, name="other"))
