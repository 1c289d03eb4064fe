"""Anyscale's workload: the draw, the pools and pauses by hand, and its ratios."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.experiments.paper.rows import passed
from fragmeter.sim import settings, simulate
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.types.ticks import PER_MS
from fragmeter.sim.workload.workload import Workload
from tools.claims import anyscale
from tools.claims.anyscale import (
    FASTERTRANSFORMER,
    NAIVE,
    RESERVES_CAP,
    RESERVES_OUTPUT,
    VLLM,
    VLLM_AWAKE,
    PausedCost,
    Ratios,
)


@pytest.fixture(scope="module")
def payload() -> dict:
    return anyscale.compare_anyscale((0,))


class TestTheDraw:
    @pytest.mark.parametrize("cap", [32, 128, 512, 1536])
    def test_a_thousand_outputs_up_to_the_cap(self, cap):
        outputs = anyscale.draw(cap, 0).output_tokens
        assert len(outputs) == 1000 and outputs.min() >= 1 and outputs.max() <= cap
        # The mean of an exponential of mean m that is cut at c: m - c / (exp(c / m) - 1).
        assert outputs.mean() == pytest.approx(128 - cap / np.expm1(cap / 128), rel=0.07)

    def test_prompt_and_output_tokens_count(self):
        drawn = anyscale.draw(32, 0)
        assert drawn.total_tokens == drawn.output_tokens.sum() + 512_000

    def test_clients_declare_the_cap_or_the_output(self):
        drawn = anyscale.draw(32, 0)
        assert (drawn.workload(max_tokens=32).max_tokens == 32).all()
        assert (drawn.workload().max_tokens == drawn.output_tokens).all()
        longest = drawn.workload(int(drawn.output_tokens.max()))
        assert (longest.output_tokens == drawn.output_tokens.max()).all()


def test_vllm_s_larger_step_takes_its_activations_off_the_pool():
    # 2 bytes * (8,100 - 2,560) tokens * 2 * 50,272 logits = 1,114,027,520 bytes: 85 of the paper's 983 blocks.
    assert anyscale.vllm_blocks(8100) == 983 - 85


class TestPausedCost:
    def test_every_step_waits_first(self):
        bare, paused = PaperCost(1.0), PausedCost(PaperCost(1.0), 10 * PER_MS, "chosen")
        assert paused.step_ticks(3, 30, 5, 15) == bare.step_ticks(3, 30, 5, 15) + 10 * PER_MS
        assert paused.swap_in_ticks(2) == bare.swap_in_ticks(2) and paused.copy_ticks(4) == bare.copy_ticks(4)
        assert paused.describe()["pause"] == {"value": 10 * PER_MS, "unit": "ticks", "source": "chosen"}

    def test_leaping_and_stepping_take_as_long(self):
        work = Workload("two", np.array([0, 0]), np.array([20, 300]), np.array([50, 9]))
        runs = [
            simulate(settings(leap=leap), work, PausedCost(PaperCost(1.0), 10 * PER_MS, "")) for leap in (True, False)
        ]
        assert runs[0].log.end_ticks == runs[1].log.end_ticks == simulate(settings(), work,
         PaperCost(1.0)).log.end_ticks + 50 * 10 * PER_MS  # fmt: skip


class TestTheRatios:
    @pytest.mark.slow
    def test_every_system_at_every_cap_and_published_values_at_the_widest(self, payload):
        keys = [(row["series"], row["x"]) for row in payload["rows"]]
        assert keys == [(name, cap) for name in anyscale.SERIES for cap in (32, 128, 512, 1536)]
        beside = {row["series"]: row["published"] for row in payload["rows"] if row["x"] == 1536}
        assert beside == {FASTERTRANSFORMER: 4, RESERVES_CAP: 8, RESERVES_OUTPUT: 8, VLLM: 23}
        assert all(row["published"] is None for row in payload["rows"] if row["x"] != 1536)

    def test_one_number_is_fitted_on_fastertransformer_at_the_widest_cap(self, payload):
        fitted = [(row["series"], row["x"]) for row in payload["rows"] if row["kind"] == "fitted"]
        assert fitted == [(FASTERTRANSFORMER, 1536)]
        row = payload["rows"][3]
        assert row["simulated"] == pytest.approx(4)
        assert payload["tokens_per_s"][FASTERTRANSFORMER] / payload["tokens_per_s"][NAIVE] == pytest.approx(4, rel=1e-3)

    def test_the_wider_the_cap_the_more_is_gained(self, payload):
        for name in anyscale.SERIES:
            times = [row["simulated"] for row in payload["rows"] if row["series"] == name]
            assert times == sorted(times)

    def test_only_the_sleep_hangs_on_the_step(self, payload):
        moved = {row["series"] for row in payload["rows"] if row["step_1pct"] > 0}
        assert moved == {VLLM}

    def test_naive_batches_run_to_the_longest_output_of_all(self):
        rates = anyscale.tokens_per_s(1536, 0)
        drawn = anyscale.draw(1536, 0)
        longest = int(drawn.output_tokens.max())
        # 250 batches of four: a prefill of 2,048 tokens, then a step for each token but the first.
        prefill_ms = 25.7 + 0.047 * 256 + 0.14 * (2048 - 256)
        seconds = 250 * 1.125 * (prefill_ms + (longest - 1) * (25.7 + 4 * 0.42)) / 1e3
        assert rates[NAIVE] == pytest.approx(drawn.total_tokens / seconds, rel=1e-6)


@pytest.mark.parametrize(("times", "passes"), [(6.0, True), (5.9, False), (10.0, True), (10.1, False)])
def test_a_ratio_is_reached_within_25_percent(times, passes):
    found = Ratios(1.0, {(name, 1536): [times] for name in (*anyscale.SERIES, VLLM_AWAKE)}, (), {NAIVE: 81.0})
    assert passed(next(iter(anyscale.findings(found, 1536)))) == passes
