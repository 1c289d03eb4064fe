"""Pairs drawn from the embedded summaries have the summaries' means, quantiles and joint law."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import catalogue, sample, stream, synthetic_pairs
from fragmeter.traces.synthesis.summaries import length_summaries

SHAREGPT, ALPACA = "vllm_sosp23_sharegpt_opt", "alpaca52k_opt"
DRAWS = 400_000


@pytest.fixture(scope="module", params=[SHAREGPT, ALPACA])
def drawn(request):
    return sample(request.param, DRAWS, stream(1, "test"))


def spearman(pairs) -> float:
    ranks = [pd.Series(tokens).rank() for tokens in (pairs.prompt_tokens, pairs.output_tokens)]
    return float(np.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("name", [SHAREGPT, ALPACA])
def test_the_embedded_facts_hold_together(name):
    summary, levels = length_summaries()["sets"][name], np.array(length_summaries()["quantile_levels"])
    assert np.array(summary["rank_grid16"]).sum() == summary["n"]
    assert np.array(summary["rank_grid16"]).shape == (16, 16)
    for field in ("prompt_tokens", "output_tokens"):
        quantiles, means = np.array(summary[field]["quantiles"]), np.array(summary[field]["stratum_means"])
        assert len(levels) == len(quantiles) == len(means) + 1 == 33
        # Quantiles were rounded to tokens and means to hundredths.
        assert (quantiles[:-1] <= means + 1).all() and (means <= quantiles[1:] + 1).all()
        assert np.diff(levels) @ means == pytest.approx(summary[field]["mean"], rel=0.005)


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens"])
def test_means_and_quantiles_are_the_summarys(drawn, field):
    tokens, facts = getattr(drawn, field), length_summaries()["sets"][drawn.name][field]
    standard_error = tokens.std() / DRAWS**0.5
    assert tokens.mean() == pytest.approx(facts["mean"], abs=4 * standard_error, rel=0.005)
    assert facts["quantiles"][0] <= tokens.min() and tokens.max() <= facts["quantiles"][-1]
    levels = np.array(length_summaries()["quantile_levels"])
    shares_at_or_below = np.searchsorted(np.sort(tokens), facts["quantiles"], side="right") / DRAWS
    assert (shares_at_or_below >= levels - 0.004).all()
    shares_below = np.searchsorted(np.sort(tokens), facts["quantiles"], side="left") / DRAWS
    assert (shares_below <= levels + 0.015).all()


def test_every_stratum_keeps_its_mean():
    pairs, facts = sample(SHAREGPT, DRAWS, stream(2, "test")), length_summaries()["sets"][SHAREGPT]["output_tokens"]
    edges = [round(level * DRAWS) for level in length_summaries()["quantile_levels"]]
    ordered = np.sort(pairs.output_tokens)
    for k in range(10, 25):  # strata of 2.5 to 5 % of the draws
        mean = ordered[edges[k] : edges[k + 1]].mean()
        assert mean == pytest.approx(facts["stratum_means"][k], rel=0.02)


def test_short_prompts_go_with_the_outputs_they_go_with(drawn):
    assert spearman(drawn) == pytest.approx({SHAREGPT: 0.2275, ALPACA: -0.2245}[drawn.name], abs=0.01)


def test_rejection_from_the_uncapped_set_gives_the_papers_sharegpt():
    kept = sample(SHAREGPT, DRAWS, stream(3, "test")).capped(2048, strict=False)
    assert len(kept) / DRAWS == pytest.approx(0.9475, abs=0.0015)
    drawn = sample(SHAREGPT, DRAWS, stream(4, "test"), max_total_tokens=2048)
    assert len(drawn) == DRAWS
    assert (drawn.prompt_tokens + drawn.output_tokens).max() <= 2048
    for pairs in (kept, drawn):
        assert pairs.prompt_tokens.mean() == pytest.approx(163.0, abs=1.5)
        assert pairs.output_tokens.mean() == pytest.approx(338.5, abs=2.0)


def test_the_seed_decides_and_nothing_else_does():
    first, again, other = (synthetic_pairs(SHAREGPT, 500, seed, 2048) for seed in (0, 0, 1))
    assert first.prompt_tokens.tolist() == again.prompt_tokens.tolist()
    assert first.output_tokens.tolist() == again.output_tokens.tolist()
    assert first.output_tokens.tolist() != other.output_tokens.tolist()
    assert len(first) == 500 and first.name == SHAREGPT


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (("sharegpt", 5), "set = 'sharegpt': choose one of vllm_sosp23_sharegpt_opt, alpaca52k_opt"),
        ((ALPACA, -1), "n = -1: must be 0 or more"),
    ],
)
def test_what_cannot_be_drawn(arguments, refused):
    with pytest.raises(SettingError) as caught:
        sample(*arguments, stream(0, "test"))
    assert str(caught.value) == refused


@pytest.mark.slow
def test_a_cap_that_nothing_meets_is_refused_and_does_not_hang():
    with pytest.raises(SettingError) as caught:
        sample(ALPACA, 10, stream(0, "test"), max_total_tokens=6)
    assert str(caught.value) == "max_total_tokens = 6: fewer than 1 in 1,000 of alpaca52k_opt fit; raise it"
    # By the name of the flag, where it is one.
    with pytest.raises(SettingError, match="max_model_len = 6: fewer than"):
        synthetic_pairs(ALPACA, 10, 0, max_model_len=6)


def test_the_catalogue_names_source_and_licence():
    assert catalogue.names() == [SHAREGPT, ALPACA]
    entries = {entry.name: entry for entry in catalogue.describe()}
    assert entries[SHAREGPT].rows == 84_226 and "sosp-ae-39/sosp-ae-astra" in entries[SHAREGPT].source
    means = entries[ALPACA].mean_prompt_tokens, entries[ALPACA].mean_output_tokens
    assert means == pytest.approx((19.31, 58.45), abs=0.005)
    assert all(entry.description and entry.licence for entry in entries.values())
