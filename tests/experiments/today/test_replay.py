"""The replay of a run's sequences, against the run's own ledger and against walks by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.today.loads import LOADS
from fragmeter.experiments.today.pools import PageKind
from fragmeter.experiments.today.replay import BUCKETS, Holdings, replayed, slots_of, vllm_account
from fragmeter.experiments.today.servers import SERVERS, Server, hbm_gib
from fragmeter.experiments.today.waste_today import measure
from fragmeter.sim import settings, simulate
from fragmeter.sim.metrics.kv_groups import group_buckets_at_rows
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.workload.workload import Workload

RANDOM = np.random.default_rng(3)
WORK = Workload("mixed", np.zeros(30), RANDOM.integers(1, 3000, 30), RANDOM.integers(1, 150, 30))
#: Model and blocks of a pool that a few of these requests fill, so that some wait and some are preempted.
CASES = [
    ("llama-3.1-8b", 400),
    ("gemma-3-27b", 3000),
    ("gpt-oss-20b", 800),
    ("qwen3-next-80b-a3b", 40),
    ("jamba-1.5-mini", 260),
]


def served(name: str, blocks: int, **more):
    chosen = settings(
        policy="vllm-v1", model=name, gpu="b300", num_gpu_blocks_override=blocks, enable_prefix_caching=False, **more
    )
    holdings = Holdings()
    return simulate(chosen, WORK, observers=[holdings]), holdings


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("name", "blocks"), CASES)
def test_slots_of_the_record_are_those_of_the_ledger(name, blocks, ahead):
    run, holdings = served(name, blocks, async_scheduling=ahead)
    steps, layout, size = run.log.rows["ticks"] > 0, run.replica.layout, run.replica.block_size
    assert (run.log.rows["waiting"] > 0).any()
    held = holdings.held(run)
    if layout is None:
        mine = slots_of(held, PageKind("full", 1, 1, size), int(steps.sum()))
        theirs = run.accounts.at_rows()
        assert all(np.array_equal(values, theirs[bucket][steps]) for bucket, values in mine.items())
        return
    theirs = group_buckets_at_rows(run)
    for group, kept in zip(layout.names, layout.groups, strict=True):
        kind = PageKind(kept.span.kind, 1, 1, size if kept.span.keeps_tokens else 0, kept.span.tokens)
        for bucket, values in slots_of(held, kind, int(steps.sum())).items():
            slots = values * (1 if kind.block_tokens else size)
            assert np.array_equal(slots, theirs[f"{group}.{bucket}"][steps]), (group, bucket)


@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"])
def test_accounts_add_up_to_the_pool_and_what_is_short(name):
    server = Server(name, name, "b300")
    run, holdings = served(name, 3000 if name == "gemma-3-27b" else 60)
    pool = run.log.capacity_slots // run.log.block_size * server.memory(run).block_bytes
    accounts = [vllm_account(run, pool), *replayed(run, holdings, server.kinds(), pool)]
    for account in accounts:
        assert set(account.buckets) == set(BUCKETS)
        assert sum(account.buckets.values()) == pytest.approx(pool + account.short)
        assert min(account.buckets.values()) >= -1e-6 * pool
    vllm, jenga, separate = accounts
    # The same tokens and states are live under each, in bytes.
    for bucket in ("live", "state"):
        assert jenga.buckets[bucket] == separate.buckets[bucket] == pytest.approx(vllm.buckets[bucket])
    assert vllm.buckets["page_padding"] > 0 == jenga.buckets["page_padding"]


def test_a_record_of_another_run_is_refused():
    run, _ = served("gpt-oss-20b", 800)
    _, other = served("gpt-oss-20b", 900)
    with pytest.raises(SimulationFault):
        other.held(run)


def test_one_request_by_hand():
    """Qwen3-Next, 100 tokens and one output: 7 blocks of 16 in 12 layers, and 36 states."""
    work = Workload("one", np.zeros(1), np.full(1, 100), np.ones(1))
    server = Server("Qwen3-Next", "qwen3-next-80b-a3b", "b300")
    holdings = Holdings()
    run = simulate(server.settings(), work, observers=[holdings])
    memory = server.memory(run)
    pool = run.log.capacity_slots // run.log.block_size * memory.block_bytes
    jenga, _ = replayed(run, holdings, server.kinds(), pool)
    full, state = sorted(server.kinds(), key=lambda kind: kind.name)
    token = full.page_bytes / 16
    assert jenga.buckets["live"] == pytest.approx(100 * token)
    assert jenga.buckets["state"] == state.page_bytes == 36 * state.layer_bytes
    assert jenga.buckets["reserved"] + jenga.buckets["block_tail"] == pytest.approx(12 * token)
    # Two states, or 67 blocks of a layer, fill a large page: 18 full ones, and 84 of 134 small pages in two others.
    assert 2 * state.layer_bytes == 67 * full.layer_bytes
    beside = pool % (2 * state.layer_bytes)
    assert jenga.buckets["stranded"] == pytest.approx((134 - 84) * full.layer_bytes + beside)


@pytest.mark.slow
def test_the_pool_of_every_server_is_that_of_its_start():
    for server in SERVERS:
        work = Workload("one", np.zeros(1), np.full(1, 10), np.full(1, 2))
        run = simulate(server.settings(), work)
        memory = server.memory(run)
        assert memory.num_blocks == run.replica.num_blocks
        parts = hbm_gib(memory, dict.fromkeys(BUCKETS, 0.0))
        assert sum(parts.values()) == pytest.approx(memory.total_bytes / 2**30)


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_measurement_of_each_load(load):
    few = replace(load, requests=16)
    found = measure(Server("gpt-oss", "gpt-oss-20b", "h100-80gb"), few, 1)
    assert found == measure(Server("gpt-oss", "gpt-oss-20b", "h100-80gb"), few, 1)
    assert [row["allocator"] for row in found["kv_bytes"]] == ["vllm", "jenga", "separate"]
    [slots] = found["slots"]
    names = ("live", "state", "reserved", "block_tail", "stranded", "cached", "free")
    assert sum(slots[name] for name in names) == pytest.approx(100, abs=0.01)
    assert (slots["cached"] > 0) == (load.name == "agents" or slots["cached"] > 0)


def test_a_load_beyond_the_longest_sequence_is_named():
    found = measure(Server("Nemotron-H 8B", "nemotron-h-8b", "h100-80gb"), LOADS[1], 0)
    assert "serves no long context" in found["unserved"] and not found["kv_bytes"]


def test_the_agents_have_the_mean_lengths_of_mooncakes_tool_and_agent_trace():
    work = LOADS[2].workload(0)
    assert work.prompt_tokens.mean() == pytest.approx(8596, rel=0.03) and (work.output_tokens == 182).all()
    assert (np.diff(work.prompt_tokens.reshape(-1, 8), axis=1) > 0).all()
