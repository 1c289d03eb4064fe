"""``fragmeter report`` of a sweep: its goodput equals that of simulate, and no other point beats its front."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.sweep.report import MOST_SERIES, read_sweep
from fragmeter.reports.data.pareto_front import unbeaten
from fragmeter.reports.data.results import read_result
from fragmeter.reports.figures.figures import against_rate, throughput_pareto
from fragmeter.reports.page.sweep_report import Sweep, write_sweep_report
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.metrics.result import served_times

GOAL = ["ttft:27", "tpot:40"]
LOAD = ["--num-prompts", "16", "--tensor-parallel-size", "2"]
SWEEP = [*LOAD, "--jobs", "1", "--grid", "policy=orca-max,vllm-v1", "--grid", "request_rate=2,4", "--grid", "seed=1:2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two policies at two rates with two seeds."""
    out = tmp_path_factory.mktemp("sweeps") / "small"
    assert status(["sweep", *SWEEP, "--goodput", *GOAL, "--out", str(out)]) == DONE
    return out


def report(*tokens: object) -> int:
    return status(["report", *map(str, tokens)])


@pytest.mark.slow
def test_a_point_is_what_simulate_comes_to(folder, tmp_path):
    points = read_sweep(folder).points
    assert len(points) == 8 and points["series"].tolist() == ["orca-max"] * 4 + ["vllm-v1"] * 4
    arguments = ["--policy", "vllm-v1", "--request-rate", "4", "--seed", "2", "--out", str(tmp_path / "run")]
    assert status(["simulate", *LOAD, *arguments]) == DONE
    run = read_result(tmp_path / "run")
    (at,) = points.query("series == 'vllm-v1' and request_rate == 4 and seed == 2").to_dict("records")
    met = objectives(GOAL).met(served_times(run.requests))["all"]
    assert 0 < met.sum() < len(met)
    assert at["request_goodput"] == met.sum() / run.summary["duration"]
    assert at["tokens_per_s_per_gpu"] == run.summary["output_throughput"] / 2
    assert at["tokens_per_s_per_user"] == 1e3 / run.summary["median_tpot_ms"]
    assert at["p99_ttft_ms"] == run.summary["p99_ttft_ms"]


@pytest.mark.slow
def test_the_page_has_both_sections(folder, tmp_path):
    page, data = tmp_path / "sweep.html", tmp_path / "summary.json"
    assert report(folder, "--out", page, "--json", data) == DONE
    html = page.read_text()
    for title in ("Goodput and latency against the rate", "Throughput against speed", "The points"):
        assert html.count(f">{title}</h2>") == 1
    assert "Goodput: requests/s that meet ttft:27 tpot:40 (ms)" in html and "8 points in 2 series, by policy." in html
    assert json.loads(data.read_text()) == {"report": str(page), "points": 8, "failed": 0, "axes": ["policy"]}


def test_seeds_are_their_mean_with_the_range(folder):
    sweep = read_sweep(folder)
    figure = against_rate(sweep.points, "p99_ttft_ms", "TTFT", "ms")
    own = sweep.points.query("series == 'vllm-v1'").groupby("request_rate")["p99_ttft_ms"]
    (line,) = (trace for trace in figure.data if trace.name == "vllm-v1")
    assert line.x.tolist() == [2, 4] and line.y == pytest.approx(own.mean())
    assert line.y + line.error_y.array == pytest.approx(own.max())
    assert line.y - line.error_y.arrayminus == pytest.approx(own.min())


def test_a_series_has_one_colour_also_where_others_are_one_line():
    """Series a and b have the same TPOT, and are one line there."""
    columns = {"series": ["a", "b", "c"] * 2, "request_rate": [1.0] * 3 + [2.0] * 3}
    points = pd.DataFrame(columns | {"ttft": [1.0, 2, 3, 4, 5, 6], "tpot": [1.0, 1, 2, 1, 1, 3]})
    ttft, tpot = (against_rate(points, name, name, "ms") for name in ("ttft", "tpot"))
    assert [trace.name for trace in tpot.data] == ["a = b", "c"]
    colours = [{trace.name[0]: trace.line.color for trace in figure.data} for figure in (ttft, tpot)]
    assert colours[0]["a"] == colours[1]["a"] != colours[0]["c"] == colours[1]["c"]


def test_a_line_under_others_has_a_band_where_they_meet():
    """Series a and b are equal at the first rate only, and c lies elsewhere."""
    columns = {"series": ["a", "b", "c"] * 2, "request_rate": [1.0] * 3 + [2.0] * 3, "ttft": [1.0, 1, 9, 2, 3, 8]}
    figure = against_rate(pd.DataFrame(columns), "ttft", "TTFT", "ms")
    band, *lines = figure.data
    assert figure.layout.title.subtitle.text == "A pale band: lines lie on each other."
    assert [line.name for line in lines] == ["a", "b", "c"] and not band.showlegend
    assert band.x.tolist() == [1, 2] and band.y[0] == 1 and band.y[1] != band.y[1]
    assert band.line.color == lines[0].line.color and band.line.width > lines[1].line.width
    assert band.marker.size > lines[1].marker.size


def table(**columns: object) -> pd.DataFrame:
    plain = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "seed": 0, "request_throughput": 1.0}
    plain |= {"output_throughput": 300.0, "p99_ttft_ms": 9.0, "p99_tpot_ms": 9.0, "median_tpot_ms": 20.0}
    rows = max(len(values) for values in columns.values())
    return pd.DataFrame({name: [value] * rows for name, value in plain.items()} | columns)


def swept(tmp_path: Path, **columns: object) -> Sweep:
    table(**columns).to_parquet(tmp_path / "sweep.parquet")
    return read_sweep(tmp_path)


def test_what_tells_series_apart(tmp_path):
    """Not what a policy brings with it, nor the rate."""
    policies, blocks = ["orca-max", "vllm-v1", "vllm-v1", "vllm-v1"], [1, 16, 16, 8]
    found = swept(tmp_path, policy=policies, request_rate=[1, 1, 2, 2], block_size=blocks, max_num_seqs=[nan, 4, 4, 4])
    assert found.axes == ["policy", "block_size"]
    expected = ["orca-max, block_size 1", *["vllm-v1, block_size 16"] * 2, "vllm-v1, block_size 8"]
    assert found.points["series"].tolist() == expected
    many = swept(tmp_path, policy=["vllm-v1"] * 40, request_rate=[1.0] * 40, block_size=list(range(40)))
    assert many.axes == [] and set(many.points["series"]) == {"vllm-v1"} and MOST_SERIES < 40


@pytest.mark.slow
def test_where_nothing_can_be_drawn_a_word_says_so(tmp_path):
    alike = swept(tmp_path, policy=["a", "b"], request_rate=[inf, inf], median_tpot_ms=[0.0, 0.0])
    html = write_sweep_report(tmp_path / "page.html", alike).read_text()
    assert "No two points differ in the request rate" in html and "no speed per user" in html
    found = swept(tmp_path, policy=["a", "a", "a"], request_rate=[1.0, 2.0, 3.0], error=[None, None, "no pool"])
    html = write_sweep_report(tmp_path / "page.html", found).read_text()
    assert "1 more could not be run" in html and "No objectives were given" in html


@hypothesis_settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_no_point_beats_the_front(points):
    for point, best in zip(points, unbeaten(points), strict=True):
        beaten = any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points)
        assert best == (not beaten)


def test_the_front_is_ringed_and_the_rest_is_faint():
    places = {"tokens_per_s_per_user": [30.0, 20, 25, 10], "tokens_per_s_per_gpu": [100.0, 200, 90, 300]}
    rings, line = throughput_pareto(pd.DataFrame({"series": "a", "request_rate": [1, 2, 3, 4]} | places)).data
    assert list(zip(rings.x, rings.y)) == [(10, 300), (20, 200), (30, 100)]
    assert np.array(line.marker.opacity)[[0, 1, 3]].tolist() == [1, 1, 1] and line.marker.opacity[2] < 0.5


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--goodput", "ttft:5"],
            "goodput = ['ttft:5']: applies only to runs; leave it out, and give it to fragmeter sweep",
        ),
        (["--request", "3"], "request = 3: applies only to runs; leave it out"),
        (["elsewhere"], "small': is not a run; name it alone"),
    ],
)
def test_what_is_of_runs_is_refused(folder, tmp_path, capsys, flags, complaint):
    assert report(folder, *flags, "--out", tmp_path / "page.html") == MISTAKE
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1 and not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"PAR1", "sweep.parquet: is not a Parquet file; no point was run, or it is damaged: run fragmeter sweep"),
        (pd.DataFrame({"policy": ["a"]}), "has no column tensor_parallel_size; no point was run"),
        (table(policy=["a"], error=["no pool"]), "no point could be run; its column error says why"),
    ],
)
def test_a_sweep_without_points_is_refused(tmp_path, capsys, content, complaint):
    if isinstance(content, bytes):
        (tmp_path / "sweep.parquet").write_bytes(content)
    else:
        content.to_parquet(tmp_path / "sweep.parquet")
    assert report(tmp_path, "--out", tmp_path / "page.html") == MISTAKE
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_a_sweep_that_was_cut_short_is_refused(tmp_path, capsys):
    (tmp_path / "cut" / "points").mkdir(parents=True)
    assert report(tmp_path / "cut", "--out", tmp_path / "page.html") == MISTAKE
    said = capsys.readouterr().err
    assert "cut: is a sweep that has not come to its end; run the same fragmeter sweep again" in said
    assert said.count("\n") == 1 and not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_other_objectives_are_other_points(tmp_path):
    """What was kept without objectives, or with others, is not taken for these."""
    arguments = ["sweep", "--num-prompts", "4", "--jobs", "1", "--grid", "request_rate=2", "--out", str(tmp_path)]
    found = []
    for goal in ([], ["--goodput", "ttft:1"], ["--goodput", "ttft:9000"]):
        assert status([*arguments, *goal]) == DONE
        found.append(read_sweep(tmp_path))
    assert [each.objectives for each in found] == ["", "ttft:1", "ttft:9000"]
    assert "request_goodput" not in found[0].points
    none, all_of_them = (each.points["request_goodput"].item() for each in found[1:])
    assert none == 0 and all_of_them == found[2].points["request_throughput"].item() > 0


def test_a_sweep_refuses_objectives_that_cannot_be(tmp_path, capsys):
    assert status(["sweep", *SWEEP, "--goodput", "itl:5", "--out", str(tmp_path / "out")]) == MISTAKE
    assert "goodput = 'itl:5': must be KEY:MILLISECONDS" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
