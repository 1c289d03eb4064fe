"""Batches of Hugging Face's generate and of Orca's FasterTransformer: by hand, and beside the engine's own."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.experiments.runs.slo_check import compiled_cost
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import poisson, stream
from tools.claims.static_batches import (
    batch_ticks,
    fastertransformer_ticks,
    finishes,
    generate_batches,
    generate_ticks,
)

N = 60


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def drawn(prompts: np.ndarray, rate: float | None = None) -> Workload:
    arrivals = np.zeros(N, dtype=np.int64) if rate is None else poisson(N, rate, stream(0, "static"))
    return Workload("static", arrivals, prompts, stream(1, "static").integers(1, 129, N))


def test_a_batch_is_one_prefill_and_a_step_a_further_token():
    cost = compiled_cost(settings(policy="vllm-sosp23"))
    steps = [cost.step_ticks(0, 0, 3 * 10, 3 * 55), cost.step_ticks(3, 33, 0, 0), cost.step_ticks(3, 36, 0, 0)]
    assert batch_ticks(cost, 3, 10, 3) == sum(steps)
    assert batch_ticks(cost, 3, 10, 1) == steps[0]


def test_batches_grow_up_to_2048_tokens_of_longest_prompt_and_longest_output():
    prompts, outputs = tokens(1000, 1048, 10, 10), tokens(1000, 10, 1001, 5)
    # 1,048 + 1,000 just fit; 1,048 + 1,001 do not.
    assert list(generate_batches(prompts, outputs, 9)) == [(0, 2), (2, 4)]
    assert list(generate_batches(prompts, outputs, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(generate_batches(tokens(1), tokens(1), 9)) == [(0, 1)]


def test_generate_runs_for_the_longest_output_and_three_samples_are_three_sequences():
    prompts, outputs = tokens(5, 7, 9), tokens(4, 2, 6)
    assert generate_ticks(OneSecondStep(), prompts, outputs, 2) == (4 + 6) * PER_SECOND
    cost = compiled_cost(settings(policy="vllm-sosp23"))
    assert generate_ticks(cost, prompts, outputs, 3, n=3) == batch_ticks(cost, 9, 9, 6)


def test_generate_takes_as_long_as_the_engine_s_padded_batches():
    work = drawn(stream(2, "static").integers(2, 500, N))
    chosen = settings(policy="fastertransformer", model="llama-13b", max_num_seqs=7)
    ticks = generate_ticks(compiled_cost(chosen), work.prompt_tokens, work.output_tokens, 7)
    assert ticks == simulate(chosen, work).log.end_ticks


def test_what_longer_prompts_have_more_than_the_shortest_goes_in_a_token_a_step():
    # The first computes 3 of 5 tokens, feeds two more, the second of which gives its first token.
    assert fastertransformer_ticks(OneSecondStep(), tokens(5, 3), tokens(4, 1)) == 6 * PER_SECOND
    assert fastertransformer_ticks(OneSecondStep(), tokens(5, 3), tokens(1, 4)) == 4 * PER_SECOND
    cost = compiled_cost(settings(policy="vllm-sosp23"))
    assert fastertransformer_ticks(cost, tokens(5, 3), tokens(4, 1)) == batch_ticks(cost, 2, 3, 6)


def test_waiting_requests_form_the_next_batch():
    arrivals = tokens(0, 1, 2, 3, 20) * PER_SECOND
    # Three seconds a batch; the first goes alone, two of the three waiting requests go next.
    found = finishes(arrivals, 2, lambda batch: 3 * PER_SECOND) // PER_SECOND
    assert found.tolist() == [3, 6, 6, 9, 23]


@pytest.mark.parametrize("most", [1, 8])
def test_batches_of_equal_prompts_finish_when_the_engine_s_do(most):
    work = drawn(np.full(N, 200), rate=0.4)
    chosen = settings(policy="fastertransformer", model="opt-175b", tensor_parallel_size=8, pipeline_parallel_size=2,
                      max_num_seqs=most)  # fmt: skip
    cost = compiled_cost(chosen)
    ends = finishes(
        work.arrival_ticks,
        most,
        lambda batch: fastertransformer_ticks(cost, work.prompt_tokens[batch], work.output_tokens[batch]),
    )
    assert np.array_equal(ends, request_times(simulate(chosen, work)).finish_ticks)
