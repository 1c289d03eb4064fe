"""Claims about rates of beams are Fig 14f's: its requests, step times, scale and search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.paper.figures import fig14
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE
from fragmeter.experiments.paper.paper import SERIES, SYNTHETIC_SET, Source
from fragmeter.experiments.paper.rate_sweep.panels import Panel
from fragmeter.experiments.paper.rate_sweep.rate_sweep import find_rate, per_step_pct
from fragmeter.experiments.runs.crossing import crossing
from tools.claims.runs import Trial
from tools.claims.sharing import beam_rates, beam_searches, stretched


@pytest.fixture(scope="module")
def panel() -> Panel:
    """What ``fragmeter reproduce fig14f`` measures with the default lengths and two seeds."""
    return fig14.build_panel("f", Source((0, 1), drawn_from=SYNTHETIC_SET), fig14.MOST_REQUESTS["beam"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_claim_5_searches_where_fig_14f_does(panel, seed):
    searches = beam_searches(seed)
    assert list(searches) == list(panel.systems) == list(SERIES)
    for series, mine in searches.items():
        other = panel.search(series, seed)
        assert (mine.system, mine.scale, mine.load.rate) == (other.system, other.scale, other.load.rate)
        columns = ((own.load.workload.arrival_ticks, own.load.workload.prompt_tokens, own.load.workload.output_tokens)
                   for own in (mine, other))  # fmt: skip
        assert all(map(np.array_equal, *columns))


def test_that_is_six_beams_with_fig_14_s_time_a_beam_and_fig_13a_s_scale():
    published = {"Orca (Max)": 0.3, "Orca (Pow2)": 1.9, "Orca (Oracle)": 3.16, "vLLM": 7.03}
    for series, search in beam_searches(0).items():
        assert search.system.n == 6 and search.system.settings.value("use_beam_search")
        # What is spent once a request, on each of six, and what every beam takes beside.
        assert search.system.steps.sequence_slope == pytest.approx(1 - 0.445 + 0.445 / 6 + 0.639)
        assert (search.scale, search.load.rate) == (CONTEXT_STEP_SCALE, published[series])
        # 2,000 at the published rate, or what comes in an hour.
        expected = min(2000, 3600 * published[series])
        assert len(search.load.workload) == pytest.approx(expected, rel=0.1)


def test_longer_steps_move_a_crossing_as_its_exponent_says():
    """L(r, s) = s * L(s * r, 1), here of a power law."""
    at = {scale: crossing(lambda rate, scale=scale: scale * (scale * rate) ** 4, 0.5, 1.0) for scale in (1.0, 1.01)}
    assert stretched(at[1.0], 1.01) == pytest.approx(at[1.01].at, rel=1e-12)
    assert stretched(at[1.0], 1.0) == at[1.0].at
    assert at[1.0].at - stretched(at[1.0], 1.01) == pytest.approx(per_step_pct(at[1.0]), rel=0.02)


@pytest.mark.slow
def test_the_rates_are_those_that_fig_14f_finds(panel):
    rates = beam_rates(Trial(1))
    for series in ("Orca (Oracle)", "vLLM"):
        _, found = find_rate(panel.search(series, 1))
        assert rates[series] == found.at
    longer = find_rate(replace(panel.search("vLLM", 1), scale=1.01 * panel.scales["vLLM"].value))[1]
    # To first order: the curve wiggles, and either crossing is found between two points 2 % apart.
    assert beam_rates(Trial(1, 1.01))["vLLM"] == pytest.approx(longer.at, rel=0.01)
