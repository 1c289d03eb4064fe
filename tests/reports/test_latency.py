"""Latencies as few points: held to the summary, to the whole distribution, and to objectives worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.reports.data.distribution import MOST_POINTS, of_gaps, of_values
from fragmeter.reports.data.results import Result
from fragmeter.reports.figures.figures import latency_cdf
from fragmeter.reports.page.serving_sections import latencies
from fragmeter.reports.style.look import data_of
from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.metrics.requests import RequestTimes, request_times
from fragmeter.sim.metrics.result import gaps_table, requests_table, served_times
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND
from fragmeter.traces import synthetic_pairs, workload


def load(n: int) -> Workload:
    lengths = synthetic_pairs("vllm_sosp23_sharegpt_opt", 24, seed=5, max_model_len=2048)
    return workload(lengths, request_rate=4, n=n)


@pytest.mark.parametrize("policy", ["static", "orca-max", "vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", "vattention"])
@pytest.mark.parametrize("n", [1, 2])
def test_percentiles_are_those_of_the_summary(policy, n):
    """In every bit, from the tables that a run leaves; the pool is small enough for some to be preempted."""
    pool = 150 if policy in ("vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi") else None
    run = simulate(settings(policy=policy, num_gpu_blocks_override=pool, cost="roofline"), load(n))
    said, times = summary(run), served_times(requests_table(run))
    found = {
        "ttft": of_values(times.ttft_ms),
        "tpot": of_values(times.tpot_ms),
        "itl": of_gaps(Gaps.of_table(gaps_table(run))),
        "e2el": of_values(times.e2el_ms),
    }
    for name, values in found.items():
        percentiles = {percent: said[f"p{percent}_{name}_ms"] for percent in (90, 95, 99)} | {
            50: said[f"median_{name}_ms"]
        }
        assert {percent: values.listed_ms[percent] for percent in percentiles} == percentiles, name
        assert values.mean_ms == said[f"mean_{name}_ms"]


@st.composite
def progressions(draw) -> Gaps:
    rows = draw(st.lists(st.tuples(*[st.integers(0, 50)] * 2, *[st.integers(1, 9)] * 2), min_size=1, max_size=12))
    return Gaps(*np.array(rows, dtype=np.int64).T)


@hypothesis_settings(max_examples=30)
@given(progressions())
def test_many_percentiles_are_those_of_the_list_of_all_gaps(gaps):
    every = [
        first + slope * step
        for first, slope, count, weight in zip(gaps.first, gaps.slope, gaps.count, gaps.weight)
        for step in range(count)
        for _ in range(weight)
    ]
    percents = np.array([0, 12.5, 50, 99, 100])
    table = Gaps.of_table(gaps.as_table())
    assert table.number == len(every)
    found = table.percentiles_ms(percents)
    assert found.tolist() == [gaps.percentile_ms(percent) for percent in percents.tolist()]
    assert found * 1e9 == pytest.approx(np.percentile(every, percents), rel=1e-12)


@pytest.mark.parametrize("kind", ["spread", "tied", "steep"])
def test_no_share_is_read_off_wrong_by_more_than_is_said(kind):
    """At every value: the line's least and greatest share there hold the true one between them, but for the error."""
    random = np.random.default_rng(4)
    values = random.lognormal(3, 2, 20_000)
    values = {"spread": values, "tied": values.round(-1), "steep": np.where(values < 90, 5.0, values)}[kind]
    found = of_values(values)
    assert len(found.values_ms) == len(found.percents) == MOST_POINTS < 500
    assert found.error_pct == pytest.approx(0.25 + 100 / 20_000)
    at = np.unique(values)
    true = 100 * np.searchsorted(np.sort(values), at, side="right") / len(values)
    line = np.interp(at, found.values_ms, found.percents)
    # Where it rises straight up it has many shares.
    ends = [np.searchsorted(found.values_ms, at, side=side) for side in ("left", "right")]
    drawn = ends[0] < ends[1]
    low = np.where(drawn, found.percents[np.minimum(ends[0], MOST_POINTS - 1)], line)
    high = np.where(drawn, found.percents[ends[1] - 1], line)
    assert drawn.any() and not drawn.all()
    assert (true >= low - found.error_pct - 1e-9).all() and (true <= high + found.error_pct + 1e-9).all()
    assert found.listed_ms[99] == found.values_ms[found.percents == 99][0] == np.percentile(values, 99)


def test_few_values_are_each_a_point():
    found = of_values(np.array([40.0, 10.0, 30.0]))
    assert (found.values_ms.tolist(), found.percents.tolist()) == ([10, 30, 40], [0, 50, 100])
    assert of_values(np.array([7.0])).values_ms.tolist() == [7] and of_values(np.zeros(0)) is None
    # n values: (n - 1) * (100 / (n - 1)) is beyond 100 for some n.
    assert all(of_values(np.arange(n, dtype=float)).percents[-1] == 100 for n in range(2, 60))


def times(ttft_ms: list[int], after_ms: list[int], tokens: list[int]) -> RequestTimes:
    first = np.array(ttft_ms) * PER_MS
    last, zero = first + np.array(after_ms) * PER_MS, np.zeros(len(tokens), dtype=np.int64)
    return RequestTimes(np.arange(len(tokens)), zero, zero, first, last, np.array(tokens), zero, zero)


def test_objectives_by_hand():
    """A limit is met where it is reached; an answer of one token meets any TPOT."""
    served = times([500, 501, 100, 90], [100, 0, 101, 900], [3, 1, 3, 10])
    met = objectives(["ttft:500", "tpot:50"]).met(served)
    assert met["ttft"].tolist() == [True, False, True, True]
    assert met["tpot"].tolist() == [True, True, False, False]
    assert met["all"].tolist() == [True, False, False, False]


def test_goodput_is_of_the_requests_that_meet_all():
    run = simulate(settings(policy="orca-max"), load(1))
    goal = objectives(["ttft:2000", "e2el:20000"])
    taken = request_times(run)
    good = int(((taken.ttft_ms <= 2000) & (taken.e2el_ms <= 20_000)).sum())
    results = summary(run, goal)
    assert 0 < good < len(taken.index)
    assert results["request_goodput"] == good / (run.log.end_ticks / PER_SECOND)
    assert results["goodput"] == {"ttft": 2000, "e2el": 20_000}
    assert set(results) - set(summary(run)) == {"request_goodput", "goodput"}


def test_the_page_says_what_the_goodput_is():
    """As ``summary`` has it, from the tables alone."""
    run = simulate(settings(policy="orca-max"), load(1))
    goal, nothing = objectives(["ttft:2000", "e2el:20000"]), pd.DataFrame()
    results = summary(run, goal)
    result = Result("one", results, {}, requests_table(run), nothing, nothing, nothing, gaps=gaps_table(run))
    text = latencies([result], goal).text
    assert f"meet ttft:2000 e2el:20000 (ms), a goodput of {results['request_goodput']:.3g} requests/s." in text


def test_the_figure_has_the_share_of_requests_that_meet_the_objective():
    runs = {"one": of_values(np.array([100.0, 300.0, 5000.0])), "two": of_values(np.array([200.0, 250.0]))}
    figure = latency_cdf("ttft", runs, 250, {"one": 100 / 3, "two": 100.0})
    names = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert names == ["one: 33.3 % within 250 ms", "two: 100.0 % within 250 ms", "objective: 250 ms"]
    assert set(figure.data[-1].x) == {250} and figure.layout.xaxis.type == "log"
    assert data_of(figure).values.tolist() == [
        ["one", 0.0, 100.0], ["one", 50.0, 300.0], ["one", 100.0, 5000.0], ["two", 0.0, 200.0], ["two", 100.0, 250.0],
    ]  # fmt: skip
    numbers = figure.layout.meta["numbers"]
    met = pd.DataFrame(numbers["rows"], columns=numbers["columns"])["Met by (% of requests)"]
    assert met.tolist() == [100 / 3, 100.0]
    plain = latency_cdf("tpot", {"two": runs["two"]})
    assert [trace.name for trace in plain.data] == ["two", "two, median and p99"]
    assert plain.layout.xaxis.type is None
