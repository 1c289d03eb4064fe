"""Published figures beside ours: every one within its stated limit, and a planted wrong value visible."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.paper.rows import passed
from fragmeter.experiments.today import published
from fragmeter.sim.types.errors import UserError


@pytest.fixture(scope="module")
def compared():
    return published.rows()


def test_every_published_figure_is_within_its_limit(compared):
    found = published.findings(compared)
    assert len(found) == len(published.published()) >= 16
    assert [each["finding"] for each in found if not passed(each)] == []


@pytest.mark.parametrize("place", range(16))
def test_a_planted_wrong_value_fails_in_its_finding_alone(compared, place):
    fact = published.published()[place]
    percent = fact["metric"].endswith("_pct")
    wrong = fact["published"] + 2.5 * fact["limit"] if percent else fact["published"] * (1.02 + 2.5 * fact["limit"])
    row = compared[place]
    planted = row | {"published": wrong, "error": row["simulated"] - wrong}
    outcomes = [passed(each) for each in published.findings([*compared[:place], planted, *compared[place + 1 :]])]
    assert outcomes == [at != place for at in range(len(compared))]


def test_a_figure_that_nothing_computes_is_named():
    fact = published.published()[0] | {"name": "unknown model"}
    with pytest.raises(UserError, match="unknown model"):
        published.rows([fact])


def test_each_figure_says_where_it_is_from_and_what_is_assumed():
    for fact in published.published():
        assert fact["source"] and fact["settings"] and fact["kind"] in ("predicted", "fitted")
    # What only fits the published value is not called a prediction.
    fitted = {fact["source"] for fact in published.published() if fact["kind"] == "fitted"}
    assert fitted == {"vllm#55196", "vllm-ascend#6610", "vllm#57336", "vllm#54458"}
    assert json.dumps(published.published())
