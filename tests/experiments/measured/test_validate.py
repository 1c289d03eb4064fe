"""``fragmeter validate --against``: an oracle written out as a server, and what is found to be wrong with it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE
from fragmeter.experiments.measured import knobs as measured_knobs
from fragmeter.experiments.measured import replay as measured_replay
from fragmeter.experiments.measured.run import first_knob_text
from fragmeter.experiments.measured.server_metrics import ServerMetrics
from fragmeter.experiments.measured.start import benchmark
from fragmeter.experiments.runs.pool_use import pool_use
from fragmeter.sim import simulate, summary
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import measured, read
from served_bench import BLOCKS, CHOSEN, FLAGS, SENT, Server, held, validate, written


class TestPlanted:
    def test_the_same_settings_leave_no_error(self, tmp_path):
        bench, base, knobs = held(tmp_path, Server())
        rows = {row["metric"]: row for row in measured_replay.compared(bench, base)}
        assert rows["num_preemptions"]["measured"] >= 1
        # Gauges are sampled every 50 ms; the rest is exact but for the seconds that are written as decimals.
        assert rows["mean_kv_cache_usage"]["error"] == pytest.approx(0, abs=0.02)
        assert rows["mean_num_requests_running"]["error"] == pytest.approx(0, abs=0.02)
        for name in set(rows) - {"mean_kv_cache_usage", "mean_num_requests_running"}:
            assert rows[name]["error"] == pytest.approx(0, abs=1e-9), name
        assert [knob.name for knob in knobs] == ["step_scale", "num_gpu_blocks", "ttft_offset_ms", "all"]
        assert measured_replay.total_error(list(rows.values())) < 1e-9
        assert all(knob.was == pytest.approx(knob.value, abs=1e-6) for knob in knobs if knob.was is not None)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("server", "first", "value"),
        [
            (Server(scale=1.3), "step_scale", 1.3 * 1.125),
            (Server(scale=0.8), "step_scale", 0.8 * 1.125),
            (Server(blocks=49), "num_gpu_blocks", 49),
            (Server(offset_s=0.03), "ttft_offset_ms", 30),
        ],
    )
    def test_what_is_planted_is_named_first(self, server, first, value, tmp_path):
        """Not by an exact search: the scale is fitted to the median TPOT, and the offset to the medians of TTFT."""
        knobs = held(tmp_path, server)[2]
        ranked = measured_knobs.ranked(knobs)
        assert ranked[0].name == first
        assert ranked[0].value == pytest.approx(value, rel=0.002)
        assert ranked[0].removed > 0.98
        assert all(knob.removed < 0.35 for knob in ranked[1:])

    def test_what_is_planted_together_is_found_together(self, tmp_path):
        knobs = held(tmp_path, Server(1.3, 49, 0.03))[2]
        assert knobs[-1].name == "all"
        assert all(knob.removed < 0.7 for knob in knobs[:-1]) and knobs[-1].removed > 0.98
        assert knobs[-1].error < 0.005

    def test_without_metrics_the_pool_is_not_tried(self, tmp_path):
        path, _ = written(tmp_path, Server(blocks=49), SENT)
        bench = benchmark(path, None, CHOSEN)
        base = measured_replay.replay(bench, CHOSEN)
        assert [knob.name for knob in measured_knobs.vary_knobs(bench, CHOSEN, base)] == [
            "step_scale",
            "ttft_offset_ms",
            "all",
        ]


class TestValues:
    def test_of_a_benchmark_they_are_what_vllm_prints(self, tmp_path):
        """By hand: the first token after 0.2 and 0.4 s; then gaps of 0.1 and 0.3 s, and one of 0.6 s. From the first
        request at 10 s to the last answer at 12 s; outputs of 3 and 2 tokens, prompts of 10 and 20."""
        results = {
            "model_id": "opt-13b", "duration": 2.5, "request_rate": 1.0, "input_lens": [10, 20], "output_lens": [3, 2],
            "start_times": [10.0, 11.0], "ttfts": [0.2, 0.4], "itls": [[0.1, 0.3], [0.6]],
        }  # fmt: skip
        (tmp_path / "bench.json").write_text(json.dumps(results))
        found = benchmark(tmp_path / "bench.json", None, CHOSEN).values()
        expected = {
            "request_throughput": 1.0, "output_throughput": 2.5, "total_token_throughput": 17.5,
            "mean_ttft_ms": 300, "median_ttft_ms": 300, "p99_ttft_ms": 398,
            "mean_tpot_ms": 400, "median_tpot_ms": 400, "p99_tpot_ms": 596,
            "mean_itl_ms": 1000 / 3, "median_itl_ms": 300, "p99_itl_ms": 594,
            "mean_e2el_ms": 800, "median_e2el_ms": 800, "p99_e2el_ms": 996,
        }  # fmt: skip
        assert found == pytest.approx(expected)

    def test_of_a_replay_they_are_those_of_its_summary(self, tmp_path):
        bench = benchmark(written(tmp_path, Server(), SENT)[0], None, CHOSEN)
        replayed = measured_replay.replay(bench, CHOSEN)
        results = summary(replayed.run)
        assert replayed.values() == pytest.approx({name: results[name] for name in replayed.values()}, rel=1e-12)

    def test_behind_an_offset_throughput_has_it_once(self, tmp_path):
        """It delays the last answer, too."""
        knobs = {knob.name: knob for knob in held(tmp_path, Server(offset_s=0.5))[2]}
        bench = benchmark(written(tmp_path, Server(offset_s=0.5), SENT)[0], None, CHOSEN)
        for row in measured_replay.compared(bench, knobs["ttft_offset_ms"].replayed):
            assert row["error"] == pytest.approx(0, abs=1e-9), row["metric"]


class TestKnobs:
    def test_an_offset_is_that_of_requests_that_hardly_waited(self, tmp_path):
        """All are 30 ms late, and requests that find many running 300 ms more."""
        bench = benchmark(written(tmp_path, Server(), SENT)[0], None, CHOSEN)
        others, rows = bench.under_way(), np.arange(len(SENT))
        crowded = others > np.quantile(others, 0.25)
        assert 0.25 < crowded.mean() < 0.75
        early_s = bench.measured.ttft_s - 0.03 - 0.3 * crowded
        replayed = SimpleNamespace(times=SimpleNamespace(index=rows), ttft_s=early_s)
        assert measured_knobs._late_ticks(bench, replayed) == pytest.approx(30 * PER_MS, rel=1e-6)

    def test_the_servers_pool_may_have_blocks_of_another_size(self, tmp_path):
        bench = benchmark(written(tmp_path, Server(), SENT)[0], None, CHOSEN)
        bench = replace(bench, metrics=ServerMetrics(num_scrapes=1, num_gpu_blocks=30, block_size=8))
        knobs = {
            knob.name: knob for knob in measured_knobs.vary_knobs(bench, CHOSEN, measured_replay.replay(bench, CHOSEN))
        }
        replica = knobs["num_gpu_blocks"].replayed.run.replica
        assert (replica.num_blocks, replica.block_size) == (30, 8)
        assert "give --num-gpu-blocks-override 30 --block-size 8, or" in knobs["num_gpu_blocks"].advice


def closed_loop(offset_ms: float = 0.0) -> dict:
    """Results of four clients of a simulated replica that send after each answer; a token's time is the end of its step."""
    prompts = np.array([one.prompt_tokens for one in SENT])
    outputs = np.array([one.output_tokens for one in SENT])
    think = np.full(len(SENT), round(offset_ms * PER_MS))
    run = simulate(CHOSEN, Workload("closed", np.zeros(len(SENT)), prompts, outputs, users=Users(4, think)))
    residencies, run_log = run.log.residencies, run.log
    tokens: list[list[int]] = [[] for _ in SENT]
    for index, start, end in zip(residencies["index"], residencies["start_step"], run_log.residency_end, strict=True):
        tokens[index] += run_log.end_of(np.arange(start, end) + 1).tolist()
    sent = run.workload.arrival_ticks
    return {
        "request_rate": "inf",
        "max_concurrency": 4,
        "start_times": (sent / PER_SECOND + 100).tolist(),
        "ttfts": [(times[0] - at) / PER_SECOND + offset_ms / 1e3 for times, at in zip(tokens, sent, strict=True)],
        "itls": [(np.diff(times) / PER_SECOND).tolist() for times in tokens],
    }


class TestClosedLoop:
    def test_clients_that_wait_are_users_that_wait(self, tmp_path):
        bench, base, _ = held(tmp_path, Server(), **closed_loop())
        assert measured_replay.total_error(measured_replay.compared(bench, base)) == pytest.approx(0, abs=1e-9)
        assert bench.under_way().max() == 3
        # Nothing but an answer lets a client send: a replica that is faster than the server is not held back.
        assert not bench.arrivals.arrival_ticks.any() and bench.trace.arrival_ticks.any()

    def test_an_offset_delays_every_round(self, tmp_path):
        knobs = held(tmp_path, Server(), **closed_loop(offset_ms=80))[2]
        first = measured_knobs.ranked(knobs)[0]
        # A step of four takes 31 ms, and what arrives within it waits for its end.
        assert (first.name, first.value) == ("ttft_offset_ms", pytest.approx(80, abs=15))
        assert first.removed > 0.95

    def test_a_limit_under_a_rate_holds_back_and_never_hurries(self, tmp_path):
        """With one client at a time, requests come when they were sent or later, one after the other."""
        path, _ = written(tmp_path, Server(), SENT, max_concurrency=1)
        bench = benchmark(path, None, CHOSEN)
        base = measured_replay.replay(bench, CHOSEN)
        times, arrivals = base.times, np.array([one.arrival_ticks for one in SENT])
        assert (times.arrival_ticks == np.maximum(arrivals, np.append(0, times.finish_ticks[:-1]))).all()


class TestGauges:
    def test_they_are_those_of_the_oracles_steps(self):
        outcome = Server().serve(SENT)
        rows = [(one.arrival_ticks, one.prompt_tokens, one.output_tokens) for one in SENT]
        run = simulate(CHOSEN, Workload("asked", *np.array(rows).T))
        slots = (BLOCKS - 1) * 4
        used = np.array([slots - step.buckets.get("free", 0) for step in outcome.steps])
        ticks = np.array([step.ticks for step in outcome.steps])
        running = np.array([len(step.running) for step in outcome.steps])
        found = pool_use(run)
        assert found.mean_usage == pytest.approx((used * ticks).sum() / (slots * ticks.sum()), rel=1e-12)
        assert found.max_usage == pytest.approx(used.max() / slots, rel=1e-12)
        assert found.mean_running == pytest.approx((running * ticks).sum() / ticks.sum(), rel=0.02)
        assert found.hit_rate is None

    def test_the_most_is_reached_within_a_leap(self):
        """One request of 3 + 21 tokens in blocks of 4: a single leap that ends with 23 tokens in 6 of 60 blocks."""
        run = simulate(CHOSEN, Workload("one", np.zeros(1), np.array([3]), np.array([21])))
        assert pool_use(run).max_usage == 6 / 60

    def test_what_is_cached_is_free(self):
        """The second of two that never meet holds its 6 blocks alone, though those of the first are kept."""
        work = Workload("two", np.array([0, 100 * PER_SECOND]), np.full(2, 3), np.full(2, 21))
        run = simulate(replace(CHOSEN, enable_prefix_caching=True), work)
        assert run.accounts.at_rows()["cached"].max() > 0
        assert pool_use(run).max_usage == 6 / 60
        assert pool_use(run).mean_usage == pytest.approx(pool_use(simulate(CHOSEN, work)).mean_usage)


def test_requests_are_paired_on_the_terminal_in_json_and_in_files(tmp_path, capsys):
    path, metrics = written(tmp_path, Server(offset_s=0.03), SENT)
    out, data = tmp_path / "out", tmp_path / "all.json"
    assert validate("--against", path, "--metrics", metrics, *FLAGS, "--out", out, "--json", data) == DONE
    printed = capsys.readouterr().out
    assert "Calibrate first: ms outside of the engine, which removes 100% of the error of" in printed
    assert "30 ms pass before a request reaches the engine (HTTP, tokenizer, network), 30 ms of it between" in printed
    # A knob of no help is in the table alone, and preemptions point to what finds their cause.
    assert "--step-scale:" not in printed
    assert "Requests are preempted: fragmeter diagnose with the same --serve" in printed
    document = json.loads(data.read_text())
    pairs = pd.read_parquet(out / "requests.parquet")
    pd.testing.assert_frame_equal(pd.DataFrame(document["scatter"]), pairs)
    assert pairs["row"].tolist() == list(range(1, len(SENT) + 1))
    assert (pairs["measured_ttft_ms"] - pairs["simulated_ttft_ms"]).to_numpy() == pytest.approx(30, abs=1e-6)
    assert pairs["simulated_tpot_ms"].to_numpy() == pytest.approx(pairs["measured_tpot_ms"], abs=1e-6, nan_ok=True)
    kept = json.loads((out / "against.json").read_text())
    assert kept == {name: value for name, value in document.items() if name != "scatter"}
    assert kept["calibrate_first"][0] == "ttft_offset_ms"


def knob(name: str, removed: float) -> measured_knobs.Knob:
    """A knob of an error of 20 %."""
    return measured_knobs.Knob(name, 1.0, 2.0, 0.2 * (1 - removed), removed, f"Set {name}.", None)


@pytest.mark.parametrize(
    ("removed", "text"),
    [
        ((-0.3, 0.02, 0.05), "None of these explains the error of 20.0%"),
        ((-0.3, 0.02, 0.5), "No knob alone explains the error of 20.0%. All together leave 10.0%: Set all."),
        (
            (0.4, 0.02, 0.5),
            "Calibrate first: --step-scale, which removes 40% of the error of 20.0%. All together leave 10.0%: Set all.",
        ),
        # All together are worse than the first alone, and not advised.
        (
            (0.4, 0.02, 0.3),
            "Calibrate first: --step-scale, which removes 40% of the error of 20.0%. With the other knobs, too, no less is left:"
            " 14.0% against 12.0%.",
        ),
    ],
)
def test_advice_is_of_what_removes_the_error(removed, text):
    names = ("step_scale", "ttft_offset_ms", "all")
    assert first_knob_text(0.2, [knob(*each) for each in zip(names, removed, strict=True)]).startswith(text)


@pytest.mark.slow
def test_the_same_files_give_the_same_bytes(tmp_path):
    path, metrics = written(tmp_path, Server(scale=1.3), SENT)
    for name in ("one", "two"):
        assert validate("--against", path, "--metrics", metrics, *FLAGS, "--out", tmp_path / name) == DONE
    for name in ("against.json", "requests.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


class TestRoot:
    """The search for a scale, without a replay."""

    @pytest.mark.parametrize("elasticity", [0.3, 1.0, 1.7, 3.5])
    def test_the_scale_of_a_power_law_is_found(self, elasticity):
        """TPOT = scale ** elasticity: queues make it steeper than 1, and limits flatter."""
        tries = []

        def attempt(scale: float):
            tries.append(scale)
            return scale, None, math.log(2.0) - elasticity * math.log(scale)

        scale, _, left = measured_knobs._root(attempt, attempt(1.0))
        assert abs(left) < measured_knobs.CLOSE
        assert scale == pytest.approx(2.0 ** (1 / elasticity), rel=2e-3)
        assert len(tries) <= measured_knobs.MOST_RUNS + 1

    def test_a_jump_is_closed_in_on(self):
        """Too long from a scale of 1.5 on, too short below: every try lies between the nearest two of those before."""
        tries = []

        def attempt(scale: float):
            tries.append(scale)
            return scale, None, 1.0 if scale < 1.5 else -1.0

        measured_knobs._root(attempt, attempt(1.0))
        for place, scale in enumerate(tries[2:], 2):
            below = [one for one in tries[:place] if one < 1.5]
            above = [one for one in tries[:place] if one >= 1.5]
            assert max(below) < scale < min(above)
        assert len(tries) == measured_knobs.MOST_RUNS + 1

    def test_where_nothing_helps_the_best_is_kept(self):
        assert measured_knobs._root(lambda scale: (scale, None, 1.0), (1.0, None, 0.5))[0] == 1.0


def test_the_error_of_the_parts_counts_alike_and_no_more_than_whole():
    """Throughput and four latencies; an error of 300 % counts as one of 100 %."""
    rows = [{"metric": "mean_ttft_ms", "error": 3.0}, {"metric": "p99_ttft_ms", "error": 0.0}]
    rows += [{"metric": "request_throughput", "error": -0.1}, {"metric": "num_preemptions", "error": 5.0}]
    assert measured_replay.total_error(rows) == pytest.approx((0.5 + 0.1) / 2)
    assert measured_replay.total_error([{"metric": "mean_tpot_ms", "error": None}]) == 1.0


def test_measured_is_in_the_order_of_the_trace(tmp_path):
    """A result is in the order of its data set, a trace in that of time."""
    path, _ = written(tmp_path, Server(), SENT)
    document = json.loads(path.read_text())
    shuffled = np.random.default_rng(0).permutation(len(SENT)).tolist()
    lists = {name: value for name, value in document.items() if isinstance(value, list)}
    moved = {name: [value[place] for place in shuffled] for name, value in lists.items()}
    path.write_text(json.dumps(document | moved))
    bench = benchmark(path, None, CHOSEN)
    assert measured_replay.total_error(
        measured_replay.compared(bench, measured_replay.replay(bench, CHOSEN))
    ) == pytest.approx(0, abs=1e-9)
    assert measured(path, read(path)).max_concurrency is None
    assert replace(bench, metrics=None).duration_s == pytest.approx(document["duration"])
