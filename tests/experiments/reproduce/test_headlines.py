"""The sentence of each figure: its numbers are those of the rows, simulated and published."""

from __future__ import annotations

import pytest

from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.headlines import headline

RATE = "crossing_req_per_s"


def said(figure: str, *values: tuple) -> str:
    """Of rows of (series, metric, x, published, simulated)."""
    keys = ("series", "metric", "x", "published", "simulated")
    return headline({"figure": figure, "rows": [dict(zip(keys, value, strict=True)) for value in values]})


RATES = [("Orca (Max)", RATE, None, 1.0, 1.0), ("Orca (Oracle)", RATE, None, 2.0, 3.0), ("vLLM", RATE, None, 4.0, 4.5)]


@pytest.mark.parametrize("figure", ["fig12a", "fig14f", "fig17"])
def test_rates_are_compared_with_those_of_two_orcas(figure):
    assert said(figure, *RATES) == (
        "At 0.5 s/token the request rate of vLLM is 1.50 times that of Orca (Oracle) (published 2.00, -25 %) and 4.50 times"
        " that of Orca (Max) (published 4.00, +12 %)."
    )


def test_use_of_the_pool_leaves_out_policies_that_the_paper_does_not_print():
    states = "token_states_pct"
    rows = [("FasterTransformer", states, None, None, 7.0), ("Orca (Max)", states, None, 20.4, 21.0)]
    rows += [("Orca (Oracle)", states, None, 38.2, 38.5), ("vLLM", states, None, 96.3, 96.0)]
    expected = (
        "Token states fill 96.0 % of the pool under vLLM and 21.0 to 38.5 % under the Orcas; published 96.3 % and 20.4 to"
        " 38.2 %."
    )
    assert said("fig2", *rows) == said("waste", *rows) == expected


def test_the_quicker_of_two_ways_is_named_where_the_simulation_differs():
    rows = [("recompute", "s_per_token", x, *both) for x, both in ((1, (2.0, 2.0)), (64, (3.0, 2.0)))]
    rows += [("swap", "s_per_token", x, *both) for x, both in ((1, (2.5, 3.0)), (64, (1.0, 3.0)))]
    assert said("fig19b", *rows) == (
        "Recomputing preempted requests has a lower latency than swapping them at all 2 block sizes; published: at block"
        " size 1."
    )


def test_the_best_block_size_is_named_for_each_load():
    latency = "normalized_latency_s_per_token"
    rows = [
        ("ShareGPT", latency, 16, 0.3, 0.125),
        ("ShareGPT", latency, 32, 0.2, 0.25),
        ("Alpaca", latency, 16, 1.0, 2.0),
    ]
    assert said("fig18b", *rows) == (
        "Block size with the lowest latency at ShareGPT: 16 (0.125 s/token), published 32 (0.20 s/token); at Alpaca: 16"
        " (2.00 s/token), published 16 (1.00 s/token)."
    )


@pytest.mark.parametrize("name", ["fig1", "fig3", "fig19a", "table1"])
def test_the_sentence_has_numbers_of_both_sides_of_the_document(name):
    document = FIGURES[name].make(None)
    text = headline(document)
    assert text and text.endswith(".") and "published" in text
    moved = [row | {"simulated": row["simulated"] * 2} for row in document["rows"]]
    assert headline(document | {"rows": moved}) != text
    other = [row | {"published": row["published"] * 2} for row in document["rows"]]
    assert headline(document | {"rows": other}) not in (text, "")


def test_a_figure_without_its_systems_has_no_sentence():
    assert said("fig12a", ("a", RATE, None, 1.0, 1.0)) == said("claims", *RATES) == said("fig19b") == ""
