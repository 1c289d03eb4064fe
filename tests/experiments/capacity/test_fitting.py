"""Sequences that fit at once: one number on the screen, and the one that a saturated simulation runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim import Settings, Workload, simulate
from fragmeter.sim.metrics.requests import preemptions
from fragmeter.sim.spec.startup.capacity import users
from fragmeter.sim.spec.startup.launch import Launch

#: Windows, states with and without prefix caching, packed groups, latent vectors, one group; with small pools.
LINES = {
    "states": "qwen3.6-27b -q fp8",
    "states, not cached": "qwen3.6-27b -q fp8 --no-enable-prefix-caching",
    "large pages": "nemotron-3-super -tp 2 -q fp8",
    "latent vectors and states": "kimi-linear-48b-a3b",
    "packed": "glm-5.3-flash -tp 4",
    "windows": "openai/gpt-oss-120b",
    "wide windows": "gemma-3-27b -tp 2",
    "synchronous": "gemma-3-27b -tp 2 --no-async-scheduling",
    "one group": "llama-3.1-8b",
    "divided sequences": "deepseek-v3 -tp 8 -dcp 8",
}
#: A prompt in the first step of all.
PROMPT = 8


def server(name: str, blocks: int) -> tuple[Launch, Settings]:
    line = f"vllm serve {LINES[name]} --max-model-len 8192 --num-gpu-blocks-override {blocks} --max-num-seqs 64"
    found = started(parse_serve(line), "h200")
    return found.launch, replace(found.settings(), cost="roofline")


def saturated(chosen: Settings, sequences: int, tokens: int, prompt: int = PROMPT) -> tuple[Settings, Workload]:
    """A server that runs up to so many sequences, and more requests of that length at once."""
    prompt, requests = min(prompt, tokens - 1), sequences + 2
    work = Workload("saturated", np.zeros(requests), np.full(requests, prompt), np.full(requests, tokens - prompt))
    return replace(chosen, max_num_seqs=sequences), work


def preempts(served: tuple[Settings, Workload]) -> bool:
    return bool(len(preemptions(simulate(*served)).ticks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "large pages" else name for name in LINES]
)
@trials(max_examples=6)
@given(tokens=st.integers(300, 2600), data=st.data())
def test_as_many_run_in_a_saturated_simulation_and_no_more(name, tokens, data):
    launch, _ = server(name, 1000)
    each = launch.decode_blocks(tokens)
    # One sequence of the longest and the null block fit, too; a few sequences are fast to simulate.
    least = max(launch.sequence_blocks(8192), launch.sequence_blocks(tokens)) + 1
    blocks = least + data.draw(st.integers(0, 3 * each))
    launch, chosen = server(name, blocks)
    fitting = users(launch, blocks, tokens)
    run = simulate(*saturated(chosen, fitting, tokens))
    assert run.log.rows["batch_size"].max() == fitting and not len(run.log.evictions["index"])
    # One more starts, and takes the blocks of another, or waits because the pool has none for it.
    more = saturated(chosen, fitting + 1, tokens)
    assert preempts(more) or simulate(*more).log.rows["batch_size"].max() == fitting


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_longer_prompts_are_not_preempted_either(name, share):
    launch, chosen = server(name, 1500 if "window" in name or "synch" in name else 500)
    for tokens in (400, 1700, 4100):
        fitting = users(launch, launch.num_gpu_blocks_override, tokens)
        assert not preempts(saturated(chosen, min(fitting, 200), tokens, int(share * tokens)))


def test_a_sequence_with_a_block_of_each_group_by_hand():
    # Qwen3.6 27B in blocks of 832 tokens: a group of attention and three of states, in which two blocks hold two states each.
    launch, _ = server("states", 400)
    assert launch.block_tokens == 832
    blocks = [launch.decode_blocks(tokens) for tokens in (2, 833, 834, 1665, 1666, 2498)]
    assert blocks == [4, 4, 2 + 6, 2 + 6, 3 + 6, 4 + 6]
    # Prompts of 500 tokens: 17 fit a step, and with the step in flight 34 may hold the three states of a block before, too.
    assert users(launch, 400, 500) == 399 // 4 and users(launch, 400, 1000) == (399 - 34 * 3) // 5
    # gpt-oss 120B: 18 layers with all tokens, and 18 with a window of 128, which may lie in 9 blocks of 16.
    launch, _ = server("windows", 8000)
    assert [launch.decode_blocks(tokens) for tokens in (100, 145, 5000)] == [7 + 7, 9 + 9, 313 + 9]
