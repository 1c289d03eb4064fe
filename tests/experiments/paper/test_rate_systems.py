"""Systems of the rate sweeps: step time by model, samples and beams, and declared max_tokens."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.paper.context_cost import ContextCost
from fragmeter.experiments.paper.figures import fig12, fig14, fig16, fig17
from fragmeter.experiments.paper.paper import ALPACA_SET, Source
from fragmeter.experiments.paper.paper import source as paper_source
from fragmeter.experiments.paper.rate_sweep.costs import Steps
from fragmeter.experiments.paper.rate_sweep.panels import ALPACA, ORACLE, VLLM, lengths_of, published_panel
from fragmeter.experiments.paper.rate_sweep.rate_sweep import TARGET_S, latency_s
from fragmeter.experiments.runs.crossing import crossing
from fragmeter.sim.cost import cost
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.ticks import PER_SECOND

FASTER_TRANSFORMER = "FasterTransformer"
FITTED = ((fig14.SAMPLES_FITTED_ON, fig14.SAMPLES), (fig14.BEAMS_FITTED_ON, fig14.BEAMS))
STEP_S, DECODE_S, PROMPT_S = 0.0257, 0.00042, 0.000047


def asked_slope(letter: str, lengths: Source, most_requests: int | None) -> float:
    """The ``sequence_slope`` with which vLLM crosses at exactly the published rate of a panel of Fig 14."""
    kind, n = fig14.PANELS[letter]
    rate = published_panel(fig14.FIGURE, f"{letter} {kind} {n}")[VLLM]
    arriving = fig14.load_of(lengths_of(ALPACA, lengths), rate, most_requests, lengths.seeds[0])

    def latency(slope: float) -> float:
        system = replace(fig14.system(kind, n, VLLM), steps=Steps(sequence_slope=slope))
        return latency_s(system, arriving, rate, fig14.SCALE.value)

    return crossing(latency, TARGET_S, 0.5).at


class TestSteps:
    def test_opt_13b_s_are_the_paper_s(self):
        assert Steps().ratios() == Steps("llama-13b").ratios() == (1, 1, 1)
        assert Steps().cost().step_ticks(10, 5000, 200, 0) == ContextCost().step_ticks(10, 5000, 200, 0)

    def test_others_are_the_paper_s_times_what_the_roofline_says(self):
        ranks = {"opt-66b": 4, "opt-13b": 1}
        own, base = (cost("roofline", model(name), gpu("a100-40gb"), ranks[name]) for name in ranks)
        steps = Steps("opt-66b", "a100-40gb", 4)
        assert steps.ratios()[0] == own.step_ticks(1, 1, 0, 0) / base.step_ticks(1, 1, 0, 0)
        empty = steps.cost().step_ticks(0, 0, 0, 0)
        assert empty == pytest.approx(STEP_S * steps.ratios()[0] * PER_SECOND, abs=1)
        more = steps.cost().step_ticks(10, 10 * 330, 0, 0) - empty
        assert more == pytest.approx(10 * DECODE_S * steps.ratios()[1] * PER_SECOND, rel=1e-6)
        prompt = steps.cost().step_ticks(0, 0, 1000, 0) - empty
        assert prompt == pytest.approx(1000 * PROMPT_S * steps.ratios()[2] * PER_SECOND, abs=1000)

    def test_larger_models_take_longer_for_weights_and_prompts_and_less_for_a_rank_s_share_of_attention(self):
        for name, card, ranks in (("opt-66b", "a100-40gb", 4), ("opt-175b", "a100-80gb", 8)):
            step, decode, prefill = Steps(name, card, ranks).ratios()
            assert 1.2 < step < 1.6 and 0.5 < decode < 0.9 and 1.2 < prefill < 2.5

    def test_fastertransformer_s_are_the_roofline_s(self):
        system = fig12.system("OPT-66B", "Alpaca", FASTER_TRANSFORMER)
        assert system.steps.cost().name == "roofline"
        assert system.settings.max_num_seqs == 8 and system.settings.tensor_parallel_size == 4


class TestSystems:
    def test_samples_share_what_is_a_request_s_and_beams_take_more(self):
        """One sequence takes Fig 1's time; of many each its own part and a share of the request's."""
        request, beam = fig14.DRAWN
        assert fig14.sequence_slope("parallel", 1) == 1
        system = fig14.system("parallel", 4, VLLM)
        assert system.steps.sequence_slope * 4 == pytest.approx(4 * (1 - request) + request)
        beams = fig14.system("beam", 4, ORACLE)
        assert beams.steps.sequence_slope == pytest.approx(system.steps.sequence_slope + beam)
        assert beams.settings.value("use_beam_search") and beams.n == 4 and not system.settings.value("use_beam_search")

    @pytest.mark.slow
    def test_the_asked_slope_puts_the_crossing_where_it_is_published(self):
        source = Source((0,))
        slope = asked_slope("b", source, 300)
        rate, scale = 10.3, fig12.SCALE.value
        arriving = fig12.load(lengths_of(ALPACA, source), rate, 300 / rate, 0)
        system = replace(fig14.system("parallel", 4, VLLM), steps=Steps(sequence_slope=slope))
        assert latency_s(system, arriving, rate, scale) == pytest.approx(TARGET_S, rel=0.05)

    def test_fastertransformer_batches_what_fits_of_the_declared_outputs(self):
        """Fourteen of Alpaca's requests; of the model's length only seven fit."""
        alpaca = Source((0,), drawn_from=ALPACA_SET)
        declared, other = (fig12.load_of(series, alpaca, 30, 10, 0).workload for series in (FASTER_TRANSFORMER, VLLM))
        assert np.array_equal(declared.max_tokens, declared.output_tokens) and other.max_tokens is None
        system = fig12.system("OPT-13B", "Alpaca", FASTER_TRANSFORMER)
        for max_tokens, most in ((declared.max_tokens, 14), (None, 7)):
            burst = replace(declared, arrival_ticks=np.zeros(len(declared), dtype=np.int64), max_tokens=max_tokens)
            starts = request_times(simulate(system.settings, burst, system.steps.cost())).first_scheduled_ticks
            assert np.unique(starts, return_counts=True)[1].max() == most

    def test_fastertransformer_serves_an_hour_of_every_model(self):
        """So its script in the artifact has it; the others serve 900 s of OPT-175B."""
        every = product(fig12.SERVERS, (FASTER_TRANSFORMER, VLLM))
        spans = {(model, series): fig12.span_s(model, series) for model, series in every}
        assert {key: span for key, span in spans.items() if span != 3600} == {("OPT-175B", VLLM): 900}
        text = fig12.description("OPT-175B", ALPACA, Source((0,)))
        assert "900 s (3,600 s for FasterTransformer)" in text

    def test_vllm_alone_keeps_the_prefix(self):
        vllm, orca = (fig16.system(series, 341).settings for series in (VLLM, ORACLE))
        assert [each.value("shared_prefix_tokens") for each in (vllm, orca)] == [341, 0]
        pairs = fig16.sentences(341, 0).exact
        assert pairs.prompt_tokens.min() > 341
        assert pairs.prompt_tokens.mean() - 341 == pytest.approx(fig16.SOURCE_TOKENS, rel=0.02)
        assert pairs.output_tokens.mean() == pytest.approx(fig16.TARGET_TOKENS, rel=0.02)

    def test_conversations_grow_and_are_cut(self):
        rounds = fig17.conversations(0).exact
        assert rounds.prompt_tokens.max() == 1024 and rounds.output_tokens.max() == 1016
        assert (rounds.prompt_tokens == 1024).mean() > 0.5
        assert (rounds.prompt_tokens + rounds.output_tokens).max() < 2048


@pytest.mark.slow
def test_the_shares_are_those_that_are_asked_for():
    """Each on one value of vLLM's, on drawn lengths."""
    source = Source((0,))
    samples, beams = (asked_slope(letter, source, fig14.MOST_REQUESTS[kind]) for letter, kind in FITTED)
    assert (1 - samples) / (1 - 1 / 4) == pytest.approx(fig14.DRAWN.request, abs=0.03)
    assert beams - samples == pytest.approx(fig14.DRAWN.beam, abs=0.06)


@pytest.mark.slow
@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
def test_the_shares_on_exact_pairs_are_those_that_are_asked_for():
    """With the requests of an hour, as in the paper."""
    folder = Path(os.environ["FRAGMETER_TRACES"])
    exact = paper_source(folder / "sosp23_sharegpt_opt.csv.gz", None, folder / "sosp23_alpaca_opt.csv.gz")
    samples, beams = (asked_slope(letter, exact, None) for letter, _ in FITTED)
    assert (1 - samples) / (1 - 1 / 4) == pytest.approx(fig14.EXACT.request, abs=0.01)
    assert beams - samples == pytest.approx(fig14.EXACT.beam, abs=0.01)
