"""DeepSeek V4 in the engine: what a prompt takes for a moment, and what a sequence keeps; measured under vLLM's own scheduler as well."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.metrics.kv_groups import kv_groups
from tools.live.step_log import StepLog

BLOCKS = 30_000


def _run(prompt: int, output: int):
    work = Workload(
        "one", arrival_ticks=np.zeros(1), prompt_tokens=np.array([prompt]), output_tokens=np.array([output])
    )
    log = StepLog()
    chosen = settings(
        policy="vllm-v1",
        model="deepseek-ai/DeepSeek-V4-Flash",
        gpu="h200",
        tensor_parallel_size=2,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=40_000,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        async_scheduling=False,
        enable_prefix_caching=True,
        ids=True,
        leap=False,
    )
    run = simulate(chosen, work, observers=[log])
    return run, [BLOCKS - 1 - step.free for step in log.served(run).steps]


@pytest.mark.parametrize(
    ("prompt", "output", "taken"),
    [
        # Windows of 128 tokens twice, keys and vectors, inputs of 4 and of 8 tokens a block: 2 x 128 + 32 + 2,048 + 1,024.
        (32_768, 20, [3360, 3414, 3446, 3478, 155]),
        (200, 20, [2 * 4 + 1 + 50 + 25, 27]),
    ],
)
def test_a_chunk_takes_blocks_that_the_next_step_gives_back(prompt: int, output: int, taken: list[int]):
    _, found = _run(prompt, output)
    assert found[: len(taken)] == taken
    # A window that begins with a block needs one fewer; the inputs of 8 and of 128 tokens do at different tokens.
    assert set(found[len(taken) :]) == {taken[-1] - 2, taken[-1] - 1, taken[-1]}


def test_the_ledger_has_each_group_and_adds_up_to_the_pool():
    run, _ = _run(2000, 50)
    groups = kv_groups(run)
    assert groups is not None and len(groups) == 5
    at_rows = run.accounts.at_rows()
    total = sum(at_rows.values())
    assert (total == run.log.capacity_slots).all()
