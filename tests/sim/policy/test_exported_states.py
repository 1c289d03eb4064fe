"""States that a prefill exports from within its last chunk (``vllm-v1`` with layers of Mamba-2 and a prefix cache)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.workload.content import PromptContent
from tools.live.step_log import StepLog

#: A layer of Mamba-2, with a state smaller than 16 tokens of the layer of attention beside it.
MODEL = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 1,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def story(model: str, release: str, ahead: bool, budget: int = 512) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """A prompt of 40 tokens, and long after it one of 90 that begins with these, in blocks of 16 tokens: what each step
    computes, and how many states it keeps."""
    content = PromptContent(np.array([0, 1, 2]), np.array([7, 7]), np.array([40, 40]), None)
    ticks = np.array([0, 10**13])
    prompts, outputs = np.array([40, 90]), np.full(2, 4)
    work = Workload("two", ticks, prompts, outputs, max_tokens=outputs, content=content)
    log = StepLog()
    chosen = settings(
        policy="vllm-v1",
        model=model,
        num_gpu_blocks_override=40,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        async_scheduling=ahead,
        vllm_release=release,
        ids=True,
    )
    run = simulate(chosen, work, observers=[log])
    log.idle_started(run.log.end_ticks, 0)
    return [(step.scheduled, sum(block > 0 for block in step.tables[0][1])) for step in log.steps]


def test_the_last_chunk_keeps_the_state_at_a_block_end_and_its_own(model):
    """Block ends are at 32 of 40 tokens, and at 80 of 90. The second prompt continues from the state at 32."""
    assert story(model, "0.33", ahead=False) == [
        (((0, 40),), 2),
        (((0, 1),), 1),
        (((0, 1),), 1),
        (((0, 1),), 1),
        (((1, 58),), 3),
        (((1, 1),), 1),
        (((1, 1),), 1),
        (((1, 1),), 1),
    ]


def test_steps_ahead_keep_them_until_the_chunk_is_known_to_be_computed(model):
    assert story(model, "0.33", ahead=True) == [
        (((0, 40),), 2),
        (((0, 1),), 2),
        (((0, 1),), 1),
        (((0, 1),), 1),
        (((1, 58),), 3),
        (((1, 1),), 3),
        (((1, 1),), 1),
        (((1, 1),), 1),
    ]


def test_an_earlier_release_ends_a_chunk_there(model):
    """At most two states are kept, and each prompt takes a step more."""
    assert story(model, "0.31", ahead=False) == [
        (((0, 32),), 1),
        (((0, 8),), 2),
        (((0, 1),), 1),
        (((0, 1),), 1),
        (((0, 1),), 1),
        (((1, 48),), 2),
        (((1, 10),), 2),
        (((1, 1),), 1),
        (((1, 1),), 1),
        (((1, 1),), 1),
    ]


def test_only_the_last_chunk_exports(model):
    """Chunks of at most 40 tokens end on block ends: from 32 to 64 tokens, then to 90."""
    assert story(model, "0.33", ahead=False, budget=40)[4:7] == [
        (((1, 32),), 2),
        (((1, 26),), 3),
        (((1, 1),), 1),
    ]
