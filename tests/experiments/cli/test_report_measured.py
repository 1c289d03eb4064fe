"""``fragmeter report --measured``: simulated beside measured, by benchmarks of which the truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench_files import benchmark
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.report import read_measured
from fragmeter.reports.data.results import Result, read_result
from fragmeter.reports.figures.figures import simulated_against_measured
from fragmeter.reports.figures.measured import MOST_POINTS, agreement

LATENCIES = ("ttft", "tpot", "e2el")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "run"
    assert status(["simulate", "--num-prompts", "14", "--request-rate", "4", "--out", str(out)]) == DONE
    return out


@pytest.fixture(scope="module")
def result(run) -> Result:
    return read_result(run, "run")


def report(*tokens: object) -> int:
    return status(["report", *map(str, tokens)])


@pytest.mark.parametrize(("slower", "inside_pct"), [(1.0, 100), (1.09, 100), (1.12, 0), (0.8, 0)])
def test_a_server_so_many_times_as_slow(result, tmp_path, slower, inside_pct):
    found = read_measured(benchmark(tmp_path / "bench.json", result.requests, slower), [result])
    assert found.warning == ""
    for metric in LATENCIES:
        near = agreement(metric, found.pairs["run"])
        assert (near.requests, near.inside_pct) == (14, inside_pct)
        assert near.median_pct == pytest.approx(100 / slower - 100, abs=1e-6)
        assert near.median_size_pct == pytest.approx(abs(100 / slower - 100), abs=1e-6)


def test_every_point_is_a_request(result, tmp_path):
    pairs = read_measured(benchmark(tmp_path / "bench.json", result.requests, 1.25), [result]).pairs
    *_, points = simulated_against_measured("e2el", pairs).data
    taken_ms = ((result.requests["finish_ticks"] - result.requests["arrival_ticks"]) / 1e9).astype(float)
    assert sorted(points.y) == pytest.approx(sorted(taken_ms))
    assert points.x == pytest.approx(1.25 * points.y)
    assert points.name == "run: 0.0 %"


def test_of_many_requests_some_are_drawn_and_all_are_counted():
    random = np.random.default_rng(2)
    measured = random.lognormal(5, 1, 20_000)
    table = pd.DataFrame({"measured_ttft_ms": measured, "simulated_ttft_ms": measured * random.normal(1, 0.1, 20_000)})
    table.loc[:9, "measured_ttft_ms"] = [0.0] * 5 + [np.nan] * 5
    figure = simulated_against_measured("ttft", {"many": table})
    *_, points = figure.data
    assert len(points.x) == MOST_POINTS and {measured[10:].min(), measured[10:].max()} <= set(points.x)
    assert figure.layout.title.subtitle.text == "Drawn: 1,000 of each run, evenly chosen."
    near = agreement("ttft", table)
    # Of a normal distribution 68.3 % lie within one standard deviation.
    assert near.requests == 19_990 and near.inside_pct == pytest.approx(68.3, abs=1)


@pytest.mark.slow
def test_where_nothing_was_measured_a_word_says_so(run, tmp_path):
    assert report(run, "--out", tmp_path / "page.html") == DONE
    html = (tmp_path / "page.html").read_text()
    assert "No measurement was given: these numbers are simulated. fragmeter report --measured FILE" in html
    assert "median error" not in html.split("<main", 1)[1].split("</main", 1)[0]


@pytest.mark.slow
def test_requests_that_were_sent_at_other_times_are_said_to_be(run, result, tmp_path, capsys):
    path = benchmark(tmp_path / "bench.json", result.requests)
    late = json.loads(path.read_text())
    late["start_times"] = [2 * start + 7 for start in late["start_times"]]
    path.write_text(json.dumps(late))
    assert report(run, "--measured", path, "--out", tmp_path / "page.html") == DONE
    assert "The requests were sent at other times than the benchmark's" in capsys.readouterr().out.replace("\n", " ")
    assert "The requests were sent at other times" in (tmp_path / "page.html").read_text()
    closed = benchmark(tmp_path / "closed.json", result.requests, start_times=late["start_times"], max_concurrency=4)
    assert read_measured(closed, [result]).warning == ""


def test_a_run_of_other_requests_is_refused(run, result, tmp_path, capsys):
    longer = result.requests.assign(prompt_tokens=result.requests["prompt_tokens"] + 1)
    for name, other in (("fewer.json", result.requests.iloc[:9]), ("longer.json", longer)):
        path = benchmark(tmp_path / name, other)
        assert report(run, "--measured", path, "--out", tmp_path / "page.html") == MISTAKE
        said = capsys.readouterr().err
        assert "has other requests than vllm-sosp23; run fragmeter simulate --trace" in said and said.count("\n") == 1
        assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_what_validate_left_is_drawn(result, tmp_path, capsys):
    path = benchmark(tmp_path / "bench.json", result.requests)
    server = ["--gpu", "a100-40gb", "--policy", "vllm-sosp23"]
    assert status(["validate", "--against", str(path), *server, "--out", str(tmp_path / "against")]) == DONE
    page, data = tmp_path / "page.html", tmp_path / "summary.json"
    assert report(tmp_path / "against", "--out", page, "--json", data) == DONE
    html = page.read_text()
    assert "vllm-sosp23: TTFT of 100.0 % of 14 requests is within 10 %, median error +0.0 %" in html
    assert ">All metrics</h2>" in html and json.loads(data.read_text())["requests"] == 14
    (tmp_path / "against" / "requests.parquet").write_bytes(b"PAR1")
    page.unlink()
    capsys.readouterr()
    assert report(tmp_path / "against", "--out", page) == MISTAKE
    assert (
        "holds a damaged comparison (requests.parquet: is not a Parquet file); make it again by"
        in capsys.readouterr().err
    )
    assert not page.exists()
