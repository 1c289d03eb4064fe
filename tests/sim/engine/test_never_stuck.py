"""With any pool from one block up, any watermark, any swap space and any policy, every run ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runs import serve, times_of
from fragmeter.experiments.cli.app import status
from fragmeter.sim.config.settings import settings as sim_settings
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.metrics.work import work as work_of
from fragmeter.sim.policy import POLICIES
from fragmeter.traces import synthetic_pairs, workload
from oracle import Pool
from sharing_walk import requests
from strategies import crowded_cases, long_cases, small_cases

ALL_AT_ONCE = 200


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60)
@given(case=st.one_of(small_cases(), crowded_cases(), long_cases()), num_blocks=st.integers(1, 12), tiny=st.booleans())
def test_every_request_is_finished_or_refused(policy, case, num_blocks, tiny):
    """The refused requests are just those with a larger smallest pool, and the smallest pool does serve them."""
    pool = Pool(num_blocks, case.pool.block_size, case.pool.host_blocks) if tiny else case.pool
    case = replace(case, pool=pool)
    run = serve(policy, case)
    served = {index for index, refused in enumerate(run.refused) if not refused}
    assert set(times_of(run)) == served
    assert (run.refused == (run.smallest_pool_blocks > run.replica.num_blocks)).all()
    # Recompute keeps what was generated: every token of the answer is useful once.
    assert work_of(run.log).tokens["useful"] == sum(
        case.requests[index].prompt_tokens + case.requests[index].output_tokens - 1 for index in served
    )


@st.composite
def groups(draw):
    """Settings, and requests of up to six samples or beams; pools from one block up, swap space from none up."""
    size = draw(st.sampled_from((1, 2, 4, 16)))
    arrival_ticks, tokens, n = st.sampled_from((0, 0, 0, 10**11)), st.integers(1, 30), st.integers(1, 6)
    rows = st.tuples(arrival_ticks, tokens, tokens, n)
    chosen = {
        "max_model_len": 60,
        "block_size": size,
        "num_gpu_blocks_override": draw(st.one_of(st.integers(1, 12), st.integers(100 // size, 600 // size))),
        "max_num_seqs": draw(st.sampled_from((1, 6, 40))),
        "max_num_batched_tokens": draw(st.sampled_from((40, 2560))),
        "watermark": draw(st.sampled_from((0, 0.01, 0.4))),
        "preemption_mode": draw(st.sampled_from(("recompute", "swap"))),
        # A block of 16 tokens takes 0.0122 GiB.
        "swap_space": draw(st.sampled_from((0, 0.05, 20))),
        "use_beam_search": draw(st.booleans()),
        "beam_survival": draw(st.sampled_from((0.0, 0.5, 0.92, 1.0))),
    }
    return chosen, requests(*sorted(draw(st.lists(rows, min_size=1, max_size=10))))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ("vllm-sosp23", "vllm-v0", "orca-oracle"))
@settings(max_examples=60)
@given(case=groups(), alone=st.booleans())
def test_every_group_is_finished_or_refused(policy, case, alone):
    """The refused are just those with a larger smallest pool; and alone in its smallest pool each is served."""
    chosen, work = case
    if alone:
        work = requests(*[(0, *(int(column[0]) for column in (work.prompt_tokens, work.output_tokens, work.n)))])
        smallest = int(simulate(only_read(sim_settings(policy=policy, **chosen), work), work).smallest_pool_blocks[0])
        chosen = chosen | {"num_gpu_blocks_override": smallest}
    run = simulate(only_read(sim_settings(policy=policy, **chosen), work), work)
    assert (run.refused == (run.smallest_pool_blocks > run.replica.num_blocks)).all()
    assert not (alone and run.refused.any())
    served = ~run.refused
    content = summary(run)
    assert content["completed"] == served.sum()
    assert [refused["request"] for refused in content["refused_requests"]] == np.flatnonzero(run.refused).tolist()
    assert content["total_output_tokens"] == (work.output_tokens * work.n)[served].sum()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ("vllm-sosp23", "vllm-v0", "orca-oracle"))
@pytest.mark.parametrize("swap_space", (0, 0.5, 20))
def test_groups_all_at_once_in_a_pool_that_they_overfill(policy, swap_space):
    """Six beams each; the largest request just about fits when it is alone."""
    drawn = workload(synthetic_pairs("alpaca52k_opt", ALL_AT_ONCE, 0, 300), np.inf)
    work = replace(drawn, n=np.full(len(drawn), 6))
    chosen = sim_settings(policy=policy, num_gpu_blocks_override=6 * 32, use_beam_search=True, swap_space=swap_space)
    assert summary(simulate(only_read(chosen, work), work))["completed"] == ALL_AT_ONCE


def flood(policy: str, count: int) -> dict:
    """The summary of requests that are all there at the start, with true outputs declared, over 1,401 blocks."""
    work = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", count, 0, 2048), np.inf)
    declared = replace(work, max_tokens=work.output_tokens)
    size = 1 if policy == "sglang" else 16
    pool = sim_settings(policy=policy, num_gpu_blocks_override=1401 * 16 // size, block_size=size)
    return summary(simulate(pool, declared))


@pytest.mark.parametrize("policy", POLICIES)
def test_all_at_once_in_a_pool_that_they_overfill(policy):
    """A peer was seen with 36,593 preemptions and 25 of these 200 requests done."""
    content = flood(policy, ALL_AT_ONCE)
    assert content["completed"] == ALL_AT_ONCE
    assert not content["work"]["thrashing"]


@pytest.mark.slow
@pytest.mark.parametrize("count", (1_000, 10_000))
@pytest.mark.parametrize("policy", POLICIES)
def test_thousands_at_once(policy, count):
    assert flood(policy, count)["completed"] == count


def test_guaranteed_no_evict_never_preempts_and_max_utilization_packs_more():
    sure, full = (flood(name, ALL_AT_ONCE) for name in ("trtllm-no-evict", "trtllm-max-util"))
    assert sure["preemptions"]["recompute"] == 0 < full["preemptions"]["recompute"]
    assert full["mean_batch"] > 1.2 * sure["mean_batch"] and full["duration"] < sure["duration"]


def test_thrashing_is_reported(capsys, tmp_path):
    """Two sequences fill two blocks. vLLM asks for a free block whether one is needed or not, so in every step that
    decodes the second one gives way to the first, and in the next its prompt is computed again."""
    trace = tmp_path / "two.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,40,20\n" * 2)
    small = ["--num-gpu-blocks-override", "2", "--block-size", "64", "--watermark", "0"]
    assert status(["simulate", "--trace", str(trace), *small, "--policy", "vllm-v0"]) == 0
    printed = capsys.readouterr().out
    assert "Thrashing: " in printed
