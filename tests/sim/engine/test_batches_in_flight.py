"""Pipeline stages with a batch in each, by hand; ``tests/real_vllm/test_batches_in_flight.py`` has vLLM's own queue beside them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.real_vllm.ours import ConstantCost

from fragmeter.sim import Workload, simulate
from fragmeter.sim import settings as settings_of
from fragmeter.sim.engine.batch_queue import BatchQueue
from fragmeter.sim.engine.core import obstacle
from fragmeter.sim.engine.replica import build
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.integrals import Accounts
from fragmeter.sim.workload.content import PromptContent

#: Ticks of a batch in all stages together.
BATCH = 100


def settings(stages: int, **others):
    chosen = dict(model="llama-3.1-8b", gpu="h100-80gb", max_model_len=400, max_num_seqs=16, max_num_batched_tokens=64)
    return settings_of(policy="vllm-v1", pipeline_parallel_size=stages, outside_ms=0, **{**chosen, **others})


def served(stages: int, arrivals, prompts, outputs, **others):
    work = Workload("some", np.array(arrivals), np.array(prompts), np.array(outputs))
    return simulate(settings(stages, **others), work, ConstantCost(BATCH))


def test_batches_pass_the_stages_one_behind_the_other():
    """The second waits for the first stage; the third, short one for the second in every stage."""
    queue = BatchQueue(stages=2, size=4)
    assert [queue.push(now, ticks).over_ticks for now, ticks in [(0, 100), (0, 100), (100, 20)]] == [100, 150, 160]
    assert queue.free_at == 110
    # One that computes nothing is over at once, and keeps no stage.
    assert (queue.push(120).over_ticks, queue.free_at) == (120, 110)
    assert [queue.pop().over_ticks, queue.pop()] == [100, None]


def test_ticks_that_stages_do_not_divide_are_all_spent():
    assert BatchQueue(stages=3, size=3).push(7, 100).over_ticks == 107


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_one_request_has_a_token_each_time_through_all_stages(stages, asynchronous):
    """No stage helps one request, and no scheduling ahead: its next token needs its last one."""
    times = request_times(served(stages, [0], [40], [5], async_scheduling=asynchronous))
    assert (times.first_token_ticks.tolist(), times.finish_ticks.tolist()) == ([BATCH], [5 * BATCH])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_as_many_requests_as_stages_each_have_a_batch(stages, asynchronous):
    """Each comes in a stage's time after the one before, has its first token after a batch, and then one for every batch."""
    arrivals = [BATCH // stages * number for number in range(stages)]
    times = request_times(served(stages, arrivals, [40] * stages, [6] * stages, async_scheduling=asynchronous))
    assert (times.first_token_ticks - times.arrival_ticks).max() <= 2 * BATCH
    assert (times.finish_ticks - times.first_token_ticks).tolist() == [5 * BATCH] * stages


def test_requests_that_come_together_share_a_batch_for_good():
    """vLLM does not divide them: the other stages stay empty, and all decode as if the stages were one."""
    times = request_times(served(4, [0] * 8, [8] * 8, [9] * 8, async_scheduling=False))
    assert set(times.finish_ticks.tolist()) == {9 * BATCH}


def test_chunks_of_a_prompt_follow_each_other_in_flight():
    """Four chunks of 64 tokens enter one behind the other, each in half a batch's time."""
    times = request_times(served(2, [0], [256], [1], async_scheduling=False))
    assert times.first_token_ticks.tolist() == [3 * BATCH // 2 + BATCH]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("model", "ranks"), [("llama-3.1-8b", 1), ("gemma-3-12b", 1), ("qwen3-next-80b-a3b", 4)])
def test_the_ledger_adds_up_under_preemptions(model, ranks, asynchronous):
    """Windows and states, too; every request has all of its tokens."""
    draw, count = np.random.default_rng(1), 40
    content = PromptContent.of_sessions(np.arange(count) // 4)
    work = Workload(
        "tight", np.sort(draw.integers(0, 3000, count)), draw.integers(20, 200, count), draw.integers(1, 100, count),
        content=content,
    )  # fmt: skip
    options = {"tensor_parallel_size": ranks, "async_scheduling": asynchronous, "enable_prefix_caching": True}
    blocks = {"llama-3.1-8b": 40, "gemma-3-12b": 200, "qwen3-next-80b-a3b": 60}[model]
    run = simulate(
        settings(2, model=model, num_gpu_blocks_override=blocks, max_num_batched_tokens=2048, **options), work,
        ConstantCost(BATCH),
    )  # fmt: skip
    Accounts(run.log).require_conserved()
    found = summary(run)
    assert found["completed"] == count
    assert found["total_output_tokens"] == int(work.output_tokens.sum())


def test_the_core_leaves_them_to_python():
    assert obstacle(settings(2), build(settings(2))) == "pipeline_parallel_size = 2"
    assert obstacle(settings(1), build(settings(1))) is None
