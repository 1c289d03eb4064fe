"""The fit of step times to a server's recording."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.experiments.measured.step_fit import fit_steps, fitted, step_table
from fragmeter.sim.cost.steps import FittedSteps, StepCoefficients
from fragmeter.sim.recording.probe import ProbedStep
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import UserError

TRUE = StepCoefficients(
    base_us=4000,
    token_us=(400, 300, 200, 150, 120, 100, 80, 60, 60),
    row_us=90,
    context_us=0.8,
    chunk_us=700,
    pair_us=0.2,
)


def drawn(count, seed=1, noise=0.0, most=200):
    """A table of random steps, timed by ``TRUE`` and by random errors."""
    random = np.random.default_rng(seed)
    decodes = random.integers(0, 33, count)
    prefill = np.where(random.random(count) < 0.4, random.integers(1, most, count), 0)
    prefill[(decodes == 0) & (prefill == 0)] = 1
    context = decodes * random.integers(20, 900, count)
    pairs = prefill * random.integers(0, 300, count) + prefill * (prefill + 1) // 2
    table = {"decodes": decodes, "decode_context": context, "prefill_tokens": prefill, "prefill_pairs": pairs}
    table["repeated_slots"] = np.zeros(count, np.int64)
    return table | {"ns": timed(TRUE, table) * random.lognormal(0, noise, count) if noise else timed(TRUE, table)}


def timed(coefficients, table, repeated_reads=1.0):
    cost = FittedSteps(coefficients, repeated_reads=repeated_reads)
    read = cost.effective_context or (lambda context, _: context)
    names = ("decodes", "decode_context", "repeated_slots", "prefill_tokens", "prefill_pairs")
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    rows = ((decodes, read(context, again), *prefill) for decodes, context, again, *prefill in rows)
    return np.array([cost.step_ticks(*row) / (ticks.PER_US // 1000) for row in rows])


def found_in(table):
    found = fit_steps(table)["coefficients"]
    return StepCoefficients(**found | {"token_us": tuple(found["token_us"])})


def test_known_times_are_found_again():
    table = drawn(3000)
    found = found_in(table)
    assert found.context_us == pytest.approx(TRUE.context_us, rel=1e-6)
    assert found.pair_us == pytest.approx(TRUE.pair_us, rel=1e-6)
    other = drawn(500, seed=2)
    assert np.abs(timed(found, other) / other["ns"] - 1).max() < 1e-6


def test_noise_leaves_the_sum_and_new_steps_unbiased():
    table, other = drawn(4000, noise=0.1), drawn(2000, seed=7)
    found = found_in(table)
    assert timed(found, table).sum() == pytest.approx(table["ns"].sum(), rel=1e-6)
    error = timed(found, other) / other["ns"] - 1
    assert np.median(np.abs(error)) < 0.01
    # A constant step would miss by far.
    assert np.median(np.abs(table["ns"].mean() / other["ns"] - 1)) > 0.2


def shared(count, reads, seed=1):
    """The same steps, in half of which some of the context is read again."""
    table, random = drawn(count, seed), np.random.default_rng(seed + 1)
    share = np.where(random.random(count) < 0.5, random.uniform(0, 0.7, count), 0)
    table["repeated_slots"] = (table["decode_context"] * share).astype(np.int64)
    return table | {"ns": timed(TRUE, table, reads)}


@pytest.mark.parametrize("reads", [0.0, 0.25, 1.0])
def test_the_time_of_a_repeated_read_is_found_again(reads):
    table = shared(3000, reads)
    found = fit_steps(table)
    assert found["repeated_reads"] == pytest.approx(reads, abs=1e-4)  # contexts are whole tokens
    assert found["coefficients"]["context_us"] == pytest.approx(TRUE.context_us, rel=1e-4)
    # The steps of another load, which shares nothing: one coefficient for all of the context would be too small.
    other = drawn(500, seed=3)
    assert np.abs(timed(found_in(table), other) / other["ns"] - 1).max() < 1e-4


def test_repeated_reads_never_take_longer_than_first_ones():
    table = shared(3000, 1.0)
    again_ns = 2 * TRUE.context_us * 1000 * table["repeated_slots"]
    assert fit_steps(table | {"ns": table["ns"] + again_ns})["repeated_reads"] == 1
    assert fit_steps(drawn(3000))["repeated_reads"] == 1


def test_a_term_that_costs_nothing_is_never_negative():
    table = drawn(300, noise=0.3)
    for value in vars(found_in(table)).values():
        assert np.min(value) >= 0


def step(begin, end, tokens, **work):
    rest = dict(
        decode_context=0,
        repeated_slots=0,
        prefill_tokens=0,
        prefill_pairs=0,
        sampled=0,
        waiting=0,
        evicted=0,
        buckets={},
    )
    return ProbedStep(
        start_ns=begin,
        end_ns=end,
        begin_ns=begin,
        tokens=tokens,
        preempted=(),
        hits=(),
        free=0,
        blocks=0,
        **rest | work,
    )


def test_a_step_lasts_until_the_next_one_begins_unless_the_server_was_idle():
    steps = [
        step(0, 8_000_000, ((0, 5),), prefill_tokens=5, prefill_pairs=15),
        step(9_000_000, 12_000_000, ((0, 1),), decode_context=6),
        step(900_000_000, 903_000_000, ((0, 1), (1, 3)), decode_context=7, prefill_tokens=3, prefill_pairs=6),
        step(904_000_000, 905_000_000, ()),
        step(906_000_000, 907_000_000, ((0, 1),)),
    ]
    table = step_table(steps)
    assert table["ns"].tolist() == [9_000_000, 3_000_000, 4_000_000]
    assert table["decodes"].tolist() == [0, 1, 1]
    assert table["decode_context"].tolist() == [0, 6, 7]
    assert table["prefill_pairs"].tolist() == [15, 0, 6]


def test_too_few_steps_are_refused():
    header = {"vllm": "0.32.0", "model": "m", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with pytest.raises(UserError, match="has 1 complete steps; record at least 100"):
        fitted(header, [step(0, 1, ((0, 1),)), step(2, 3, ())], "a test")
