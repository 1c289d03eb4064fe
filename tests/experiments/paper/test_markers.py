"""Orca (Max) read off straight lines between the artifact's rates: the reading, slow copies, and one panel."""

from __future__ import annotations

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.figures.fig12 import SCALE
from fragmeter.experiments.paper.figures.markers import RATES, compare_markers, points_of, reading
from fragmeter.experiments.paper.paper import Source
from fragmeter.experiments.paper.published import paper_figures
from fragmeter.experiments.paper.rate_sweep.costs import Steps
from fragmeter.experiments.paper.rate_sweep.rate_sweep import TARGET_S


def test_the_reading_is_where_the_last_line_crosses_half_a_second():
    # From 0.3 to 16.3 s/token in 0.25 req/s: 0.2 of 16 is 1/80 of the way.
    assert reading([(0.25, 0.1), (0.5, 0.3), (0.75, 16.3)]) == pytest.approx(0.5 + 0.25 / 80)


def test_slow_copies_take_that_many_times_as_long_and_steps_do_not():
    plain, slow = (Steps(copy_slowdown=times).cost() for times in (1, 5))
    # A chunk of 2,048 slots: 819,200 bytes each, read and written at 1,555 GB/s.
    assert plain.copy_ticks(2048) / 1e9 == pytest.approx(2 * 2048 * 819_200 / 1_555e9 * 1000, rel=1e-6)
    assert slow.copy_ticks(2048) == pytest.approx(5 * plain.copy_ticks(2048), rel=1e-6)
    assert slow.step_ticks(6, 500, 20, 0) == plain.step_ticks(6, 500, 20, 0)


def test_the_plotted_rates_enclose_the_published_ones():
    fig14 = paper_figures()["fig14"]
    published = {name[0]: dict(zip(fig14["series"], fig14[name], strict=True)) for name in fig14 if name[1:2] == " "}
    assert set(published) == set(RATES)
    for letter, rates in RATES.items():
        assert rates[0] < published[letter]["Orca (Max)"] < rates[-1]


@pytest.mark.slow
def test_a_panel_has_its_markers_up_to_the_first_above_the_target():
    document = compare_markers(Bench(Source((0,))), ("a", "d"))
    assert [(row["series"], row["copies_take"]) for row in document["rows"]] == [
        ("Fig 14a", 1), ("Fig 14d", 1), ("Fig 14d", 5),
    ]  # fmt: skip
    for row in document["rows"]:
        latencies = [latency for _, latency in row["markers"]]
        assert latencies == sorted(latencies) and latencies[-2] <= TARGET_S < latencies[-1]
        assert row["simulated"] == pytest.approx(reading(row["markers"]), rel=1e-3)
    samples, beams, slow = (row["simulated"] for row in document["rows"])
    assert slow < beams < samples * 1.2
    assert points_of("a", 1, Source((0,)))[0][0] == RATES["a"][0] and SCALE.value > 1
