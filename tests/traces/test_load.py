"""A load is what its trace is like: drawn from it, requests have its means, percentiles and burstiness."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import Trace, draw, fit, read, read_load, stats, stream, write, write_load
from fragmeter.traces.synthesis.marginal import inverse, summary

real_traces = pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
SERVE = ("simulate", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--policy", "vllm-v1", "--num-prompts", "60")
LENGTHS = ("prompt_tokens", "output_tokens", "total_tokens")


def made(n: int = 4000, batch: int = 3) -> Trace:
    """Correlated lengths of two kinds, and batches with autocorrelated gaps."""
    rng = stream(0, "test")
    long = rng.random(n) < 0.3
    prompts = np.where(long, rng.integers(2000, 4000, n), rng.integers(1, 50, n))
    outputs = np.where(long, rng.integers(5, 9, n), rng.integers(200, 900, n))
    slow = np.repeat(np.where(rng.random(n // 100 + 1) < 0.5, 0.1, 2.0), 100)[: n // batch]
    gaps_s = slow * rng.exponential(size=n // batch)
    instants = np.concatenate([[0], np.cumsum(gaps_s)])
    arrivals = (np.repeat(instants, batch)[:n] * 1e9).astype(np.int64) * 1000
    return Trace("made", prompts, outputs, arrivals)


def dispersion(trace: Trace, window_s: float) -> float:
    """Variance of the requests in a window over their mean: 1 of a Poisson process."""
    counts = np.bincount((trace.arrival_ticks / ticks.PER_SECOND // window_s).astype(int))
    return counts.var() / counts.mean()


class TestTheMarginal:
    LEVELS = (0, 0.25, 0.5, 1)

    def test_by_hand(self):
        quantiles, means = summary(np.array([5, 1, 1, 2, 9, 2, 3, 30]), self.LEVELS)
        # Sorted: 1 1 | 2 2 | 3 5 9 30, and the values at ranks 0, 1.75 -> 2, 3.5 -> 4, 7.
        assert quantiles.tolist() == [1, 2, 3, 30]
        assert means.tolist() == [1, 2, 11.75]

    def test_every_stratum_keeps_its_mean(self):
        u = (np.arange(100_000) + 0.5) / 100_000
        values = inverse(self.LEVELS, [1, 2, 3, 30], [1, 2, 11.75], u)
        assert [values[u < 0.25].mean(), values[u > 0.5].mean()] == pytest.approx([1, 11.75], rel=0.01)
        assert (values.min(), values.max()) == (1, pytest.approx(30, rel=0.001))


def test_what_is_drawn_is_like_the_trace():
    trace = made()
    drawn, found = stats(draw(fit(trace))), stats(trace)
    for field in LENGTHS:
        assert drawn[field]["mean"] == pytest.approx(found[field]["mean"], rel=0.01)
        for statistic in ("p50", "p90", "p99"):
            assert drawn[field][statistic] == pytest.approx(found[field][statistic], rel=0.05)
    assert drawn["gap_cv"] == pytest.approx(found["gap_cv"], rel=0.1)
    assert drawn["request_rate"] == pytest.approx(found["request_rate"], rel=0.05)


def test_the_lengths_belong_together():
    trace = draw(fit(made()))
    long = trace.prompt_tokens >= 2000
    assert long.mean() == pytest.approx(0.3, abs=0.02)
    # But for the cells of the grid through which the border runs: 0.7 x 16 and 0.3 x 16 are no whole numbers.
    assert (trace.output_tokens[long] < 10).mean() > 0.85 and (trace.output_tokens[~long] >= 200).mean() > 0.9


def test_batches_and_autocorrelated_gaps_are_kept():
    trace = made()
    drawn = draw(fit(trace))
    for found in (trace, drawn):
        assert np.unique(found.arrival_ticks, return_counts=True)[1].mean() == pytest.approx(3, rel=0.01)
    independent = Trace("shuffled", trace.prompt_tokens, trace.output_tokens, shuffled(trace.arrival_ticks))
    assert fit(independent).arrivals.persistence < 0.05 < 0.3 < fit(trace).arrivals.persistence
    assert dispersion(drawn, 30) == pytest.approx(dispersion(trace, 30), rel=0.5)
    assert dispersion(draw(fit(independent)), 30) < 0.5 * dispersion(trace, 30)


def shuffled(arrivals: np.ndarray) -> np.ndarray:
    instants, batches = np.unique(arrivals, return_counts=True)
    gaps = stream(1, "test").permutation(np.diff(instants))
    return np.repeat(np.concatenate([[0], np.cumsum(gaps)]), batches)


def test_any_number_of_requests_and_any_seed():
    load = fit(made())
    few = draw(load, 500)
    assert len(few) == 500
    assert few.prompt_tokens.mean() == pytest.approx(made().prompt_tokens.mean(), rel=0.03)
    assert len(draw(load, 10_000)) == 10_000 and len(draw(load, 1)) == 1
    same, other = draw(load, 500), draw(load, 500, seed=1)
    assert same.prompt_tokens.tolist() == few.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert same.arrival_ticks.tolist() == few.arrival_ticks.tolist() != other.arrival_ticks.tolist()
    with pytest.raises(SettingError, match="num_prompts = 0: must be 1 or more"):
        draw(load, 0)


@pytest.mark.parametrize(
    "trace",
    [
        Trace("one", [5], [6], [7]),
        Trace("alike", [5] * 9, [6] * 9, [7] * 9),
        Trace("no times", [1, 2, 3], [4, 5, 6]),
        Trace("two", [1, 100], [9, 1], [0, ticks.PER_SECOND]),
    ],
    ids=lambda trace: trace.name,
)
def test_traces_that_are_hardly_any(trace, tmp_path):
    write_load(fit(trace), tmp_path / "load.json")
    drawn = draw(read_load(tmp_path / "load.json"), 20)
    assert set(drawn.prompt_tokens) <= set(range(min(trace.prompt_tokens), max(trace.prompt_tokens) + 1))
    assert (drawn.arrival_ticks is None) == (trace.arrival_ticks is None or len(set(trace.arrival_ticks)) == 1)


class TestTheFile:
    def test_it_is_no_trace(self, tmp_path):
        write_load(fit(made()), tmp_path / "load.json")
        with pytest.raises(TraceError, match="load.json: is a load; draw a trace from it by traces sample"):
            read(tmp_path / "load.json")

    def test_it_is_small_and_read_back(self, tmp_path):
        load = fit(made())
        write_load(load, tmp_path / "load.json")
        assert read_load(tmp_path / "load.json") == load
        assert (tmp_path / "load.json").stat().st_size < 10_000

    BROKEN = {
        "version": ({"fragmeter_load": 2}, "fragmeter_load = 2: must be at most 1"),
        "unknown": ({"more": 1}, "more = 1: is not a known field"),
        "grid": ({"rank_grid": [[1]]}, "rank_grid must be 16 x 16 counts"),
        "count": ({"requests": 0}, "requests = 0: must be at least 1"),
        "text": ({"prompt_tokens": "long"}, "prompt_tokens = 'long': "),
    }

    @pytest.mark.parametrize(("change", "complaint"), BROKEN.values(), ids=BROKEN)
    def test_one_that_cannot_be(self, tmp_path, change, complaint):
        path = tmp_path / "load.json"
        write_load(fit(made()), path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(TraceError) as caught:
            read_load(path)
        assert complaint in str(caught.value) and str(caught.value).endswith("fit the load again")

    @pytest.mark.parametrize("quantiles", [[5.0, 1.0], [float("nan")] * 2, [-1.0, 2.0]])
    def test_quantiles_that_cannot_be(self, tmp_path, quantiles):
        path = tmp_path / "load.json"
        write_load(fit(made()), path)
        document = json.loads(path.read_text())
        document["output_tokens"]["quantiles"][:2] = quantiles
        path.write_text(json.dumps(document))
        with pytest.raises(TraceError, match="output_tokens = .*must "):
            read_load(path)

    @pytest.mark.parametrize("text", ["[]", "{", "7", '{"fragmeter_load": 1}'])
    def test_another_file(self, tmp_path, text):
        (tmp_path / "load.json").write_text(text)
        with pytest.raises(TraceError, match="load.json"):
            read_load(tmp_path / "load.json")


@pytest.mark.slow
def test_the_program_fits_draws_and_serves(tmp_path, capsys):
    write(made(400), tmp_path / "made.csv")
    load, new = str(tmp_path / "load.json"), str(tmp_path / "new.csv")

    def result(*tokens: str) -> dict:
        assert status([*tokens, "--json", "-"]) == DONE
        return json.loads(capsys.readouterr().out)

    fitted = result("traces", "synth", str(tmp_path / "made.csv"), "--out", load)
    assert fitted["drawn"]["rows"] == fitted["trace"]["rows"] == 400
    assert result("traces", "sample", load, new, "--num-prompts", "50", "--seed", "3")["rows"] == len(read(new)) == 50
    served = [result(*SERVE, "--trace", load, "--seed", seed) for seed in "001"]
    assert served[0]["completed"] == 60
    assert served[0] == served[1] != served[2]


@pytest.mark.slow
@real_traces
@pytest.mark.parametrize("name", ["azure2023_conv.csv.gz", "mooncake_conversation.jsonl.gz"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_real_loads(name, seed):
    trace = read(Path(os.environ["FRAGMETER_TRACES"]) / name)
    drawn, found = stats(draw(fit(trace), seed=seed)), stats(trace)
    for field in LENGTHS:
        assert drawn[field]["mean"] == pytest.approx(found[field]["mean"], rel=0.01)
        for statistic in ("p50", "p90", "p99"):
            assert drawn[field][statistic] == pytest.approx(found[field][statistic], rel=0.05)
    assert drawn["gap_cv"] == pytest.approx(found["gap_cv"], rel=0.1)
