"""Moments of a run: what the block map, the ledger and the requests say at the same times."""

from __future__ import annotations

import numpy as np
import pytest

import fragmeter as fm
from fragmeter.reports.blockmap.palette import SHADES
from fragmeter.reports.explore.moments import MOST_MOMENTS, WHOLE, moments
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.recording.blocks import record

LOAD = {
    "num_prompts": 120,
    "request_rate": 8,
    "input_len": 100,
    "output_len": 150,
    "random_range_ratio": 0.9,
    "num_gpu_blocks_override": 300,
}


def found(policy: str, **more: object):
    run = fm.simulate(policy=policy, **LOAD, **more)
    served, blocks = record(run.run.settings, run.run.workload, most_columns=2 * MOST_MOMENTS)
    return run, blocks, moments(served, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "orca", "orca-pow2", "vllm-sosp23", "vllm-v1"])
def test_queues_are_those_of_the_tables(policy):
    run, _, got = found(policy)
    requests, residencies = run.requests, run.table("residencies")
    assert len(got.at_ms) == MOST_MOMENTS and np.all(np.diff(got.at_ms) > 0)
    for place, at_ms in enumerate(got.at_ms):
        # Times are cut to milliseconds, in which little begins or ends.
        here = residencies[(residencies["start_s"] * 1e3 < at_ms) & (residencies["end_s"] * 1e3 > at_ms + 1)]["request"]
        late = residencies[(residencies["start_s"] * 1e3 < at_ms + 1) & (residencies["end_s"] * 1e3 > at_ms)]["request"]
        ended = (requests["finish_s"] * 1e3 <= at_ms).sum()
        assert 0 <= got.running[place] <= late.nunique()
        if policy != "static":
            assert got.running[place] >= here.nunique()
        arrived = (requests["arrival_s"] * 1e3 <= at_ms).sum()
        assert abs(got.running[place] + got.waiting[place] - (arrived - ended)) <= 3
    assert (got.preempted <= got.waiting).all()
    assert (got.preempted > 0).any() == (policy.startswith("vllm") and run.summary["preemptions.recompute"] > 0)


@pytest.mark.parametrize("policy", ["orca-pow2", "vllm-sosp23", "vllm-v1"])
def test_shares_are_those_of_the_blocks(policy):
    _, _, got = found(policy)
    # Of the blocks of vLLM V1 one holds no tokens.
    assert got.pixels.shape == (MOST_MOMENTS, 300 - (policy == "vllm-v1")) and not got.is_counted
    assert abs(got.shares.sum(axis=1) - WHOLE).max() <= len(BUCKETS)
    is_live = got.pixels < SHADES
    # A block is what most of its slots are.
    assert abs(is_live.mean(axis=1) - got.shares[:, 0] / WHOLE).max() < 0.05


def test_counted_slots_are_drawn_side_by_side_within_the_pool():
    _, blocks, got = found("orca", max_tokens="512")
    assert got.is_counted and len(blocks.block_ids) > 300 >= got.pixels.shape[1] >= 299
    free = got.pixels == got.pixels.max()
    # Nothing is free before a block that is held.
    assert (np.diff(free.astype(int), axis=1) >= 0).all()
    assert abs(free.mean(axis=1) - got.shares[:, BUCKETS.index("free")] / WHOLE).max() < 0.05


@pytest.mark.parametrize("output_len", [40, 150])
def test_orca_at_the_length_of_the_model_is_orca_max(output_len):
    load = LOAD | {"output_len": output_len, "num_gpu_blocks_override": 960}
    one, other = fm.simulate(policy="orca", max_tokens="2048", **load), fm.simulate(policy="orca-max", **load)
    assert one.as_dict()["mean_ttft_ms"] == other.as_dict()["mean_ttft_ms"]
    assert one.as_dict()["output_throughput"] == other.as_dict()["output_throughput"]
