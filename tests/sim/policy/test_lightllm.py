"""LightLLM's estimate: exact with true lengths, pausing the latest with wrong ones, and paged memory underneath."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy.lightllm import FOREVER, _steps_above
from fragmeter.sim.runs.run import Run
from fragmeter.traces import synthetic_pairs, workload

SLOTS = 12_000


def served(**fields) -> Run:
    """Three hundred requests at once, with their true lengths declared, in a pool that they overfill."""
    work = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 300, 0, 2048), np.inf)
    chosen = settings(num_gpu_blocks_override=SLOTS, block_size=1, max_num_seqs=200, watermark=0.0, **fields)
    return simulate(chosen, replace(work, max_tokens=work.output_tokens))


def test_true_lengths_never_overcommit_and_fill_the_pool():
    run = served(policy="lightllm")
    assert not len(run.log.evictions["decode_step"])
    assert max(run.log.rows["held"] + run.log.rows["batch_size"] * (run.log.rows["steps"] - 1)) <= SLOTS
    # The estimate of the peak packs more than the sum of all completions, which end at different times.
    sure, sum_of_completions = (summary(served(policy=name)) for name in ("lightllm", "trtllm-no-evict"))
    assert sure["mean_batch"] > 1.1 * sum_of_completions["mean_batch"]


def test_a_wrong_estimate_pauses_the_latest():
    run = served(policy="lightllm", output_estimate=0.3)
    residencies, evictions, end = run.log.residencies, run.log.evictions, run.log.residency_end
    assert len(evictions["decode_step"]) > 20
    for victim, decode_step in zip(evictions["index"].tolist(), evictions["decode_step"].tolist()):
        remaining = (residencies["start_step"] < decode_step) & (end > decode_step)
        assert victim > residencies["index"][remaining].max(initial=-1)


def test_under_paged_admission_it_is_paged_with_blocks_of_one_tick_for_tick():
    """Estimating that no request generates anything leaves the question whether the prompt fits now."""
    estimate, paged = served(policy="lightllm", output_estimate=1e-3), served(policy="trtllm-max-util")
    assert len(paged.log.evictions["decode_step"]) > 20
    for table in ("residencies", "evictions"):
        mine, theirs = getattr(estimate.log, table), getattr(paged.log, table)
        assert all((mine[name] == theirs[name]).all() for name in theirs)
    assert estimate.accounts.window() == paged.accounts.window()
    assert summary(estimate)["waste"] == summary(paged)["waste"]


def test_a_waiting_sequence_remains_refused_for_as_long_as_is_said():
    """Each later step computed anew, for random sequences: never above the truth, and nearly always the truth."""
    draws = np.random.default_rng(0)
    exact = 0
    for _ in range(400):
        running = [tuple(pair) for pair in draws.integers(0, 30, (draws.integers(1, 6), 2)).tolist()]
        new = tuple(draws.integers(1, 30, 2).tolist())
        capacity = int(draws.integers(30, 150))
        refused = [
            largest_sum([(max(0, left - step), held + step) for left, held in running], new) > capacity
            for step in range(90)
        ]
        truth = refused.index(False) if False in refused else FOREVER
        said = _steps_above(running, new, capacity)
        assert (said == 0) == (truth == 0) and said <= truth
        exact += said == truth
    assert exact > 380


def largest_sum(running: list[tuple[int, int]], new: tuple[int, int]) -> int:
    """The peak as LightLLM's source has it: the i-th sum, most left to generate first."""
    ordered = sorted([*running, new], reverse=True)
    return max(
        left * (place + 1) + sum(held for _, held in ordered[: place + 1]) for place, (left, _) in enumerate(ordered)
    )
