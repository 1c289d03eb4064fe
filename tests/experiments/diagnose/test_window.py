"""What readings show by themselves: what happens, since when, and what to do without a restart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.diagnosis import Gain
from fragmeter.experiments.diagnose.load import _by_throughput
from fragmeter.experiments.diagnose.text import _effect, _gain_text
from fragmeter.experiments.diagnose.window import Now, lines, now_of
from fragmeter.experiments.measured.scrapes import readings_of
from fragmeter.experiments.measured.server_metrics import ServerMetrics, served_load
from fragmeter.experiments.runs.student_t import below
from fragmeter.sim import settings

BEGIN_S = 1_790_000_000


def text(rows: list[tuple[float, ...]], *more: str, every_s: int = 10) -> str:
    """Scrapes of requests that run and wait, the use of the KV cache, preemptions, and further counters."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total", *more)
    return "".join(
        f"{BEGIN_S + every_s * place}\n" + "".join(f"vllm:{name} {value}\n" for name, value in zip(names, row))
        for place, row in enumerate(rows)
    )


def now(rows: list[tuple[float, ...]], *more: str) -> Now:
    readings = readings_of("metrics", text(rows, *more))
    return now_of(readings, served_load(readings))


LIGHT, FULL = (12, 0, 0.4, 0), (41, 60, 0.99, 0)


class TestSince:
    def test_a_step_is_found_where_it_is(self):
        found = now([LIGHT] * 12 + [(41, 60 + n % 3, 0.99, 5 * n) for n in range(9)])
        assert (found.turn.signal, found.turn.at_s, found.turn.grows) == ("requests waiting", BEGIN_S + 120, False)
        assert (found.turn.before, found.turn.after) == (0, pytest.approx(61))
        # Now is the time since then.
        assert (found.running, found.preemptions, found.passed_s) == (41, 40, 90)
        shown = " ".join(lines(found))
        assert "80 s before the last reading: requests waiting from 0 to 61" in shown

    def test_a_queue_that_grows_begins_at_its_bend(self):
        found = now([LIGHT] * 10 + [(41, 4 * n, 0.9, 0) for n in range(1, 15)])
        assert found.turn.grows and found.turn.at_s == pytest.approx(BEGIN_S + 95, abs=10)
        assert found.turn.after == pytest.approx(56, abs=2)

    @pytest.mark.parametrize("waiting", [0, 40])
    def test_noise_has_no_turning_point(self, waiting):
        rng = np.random.default_rng(1)
        found = now([(20, int(rng.poisson(waiting)), 0.5, 0) for _ in range(40)])
        assert found.turn is None
        assert "no turning point" in " ".join(lines(found))

    def test_a_cache_that_evicts_before_it_hits(self):
        names = "prefix_cache_queries_total", "prefix_cache_hits_total"
        before = [(12, 0, 0.4, 0, 100 * n, 80 * n) for n in range(10)]
        after = [(41, 30, 0.99, 0, 900 + 100 * n, 720 + 10 * n) for n in range(1, 10)]
        shown = " ".join(lines(now(before + after, *names)))
        assert "hit rate falls from 80% to 10%" in shown and "it evicts before it hits" in shown


class TestWhy:
    @pytest.mark.parametrize(
        ("row", "symptom"),
        [
            ((0, 0, 0.0, 0), "idle"),
            (LIGHT, "light"),
            ((12, 0, 0.98, 0), "nearly full"),
            (FULL, "full"),
            ((12, 9, 0.4, 0), "limited"),
        ],
    )
    def test_steady_readings(self, row, symptom):
        found = now([row] * 8)
        assert found.symptom == symptom
        assert not ("Nothing waits" in " ".join(lines(found)) and found.waiting)

    def test_a_preemption_is_a_full_pool(self):
        assert now([(12, 0, 0.7, n) for n in range(8)]).symptom == "full"

    def test_one_reading_is_enough(self):
        found = now([FULL])
        assert (found.symptom, found.turn, found.passed_s) == ("full", None, None)

    def test_a_limit_at_the_gateway_fills_most_of_the_pool(self):
        found = now([FULL] * 8)
        assert found.at_gateway == int(0.9 * 41 / 0.99)
        assert f"at most {found.at_gateway} requests be in flight" in " ".join(lines(found))


@pytest.mark.parametrize(("others", "balanced"), [((6.0, 2.0), False), ((30.0, 20.0), True)])
def test_engines_out_of_balance_are_named_with_what_to_do_without_a_restart(others, balanced):
    """Engine 1 has 41 requests in flight; the other two 4 or 25 in the mean."""
    rows = []
    for place in range(6):
        rows.append(f"{1_790_000_000 + 10 * place}")
        for engine, count in enumerate((others[0], 40.0, others[1])):
            rows.append(f'vllm:num_requests_running{{engine="{engine}"}} {count}')
            rows.append(f'vllm:num_requests_waiting{{engine="{engine}"}} {1.0 if engine == 1 else 0.0}')
    readings = readings_of("m.txt", "\n".join(rows) + "\n")
    found = now_of(readings, served_load(readings))
    assert found.engine == "1" and found.others == sum(others) / 2
    said = " ".join(lines(found))
    sentence = "Out of balance: engine 1 has 41.0 requests in flight, each of the other 2 has 4.0 in the mean."
    assert (sentence in said) != balanced and ("Out of balance" in said) != balanced


def test_lengths_follow_from_tokens_and_the_use_of_the_pool():
    """Of a server with lengths of ShareGPT's shape: 200 run, by their residence, in a pool of 200,000 tokens."""
    from fragmeter.experiments.runs.inputs import DATASETS, DEFAULT_DATASET
    from fragmeter.traces import synthetic_pairs

    pairs = synthetic_pairs(DATASETS[DEFAULT_DATASET], 4000, 3, 16_384)
    prompts, outputs = 3.0 * pairs.prompt_tokens, 0.5 * pairs.output_tokens
    rng = np.random.default_rng(0)
    running = rng.choice(len(prompts), 20_000, p=outputs / outputs.sum())
    held = float((prompts[running] + rng.random(20_000) * outputs[running]).mean())
    chosen = settings(model="llama-3.1-8b", num_gpu_blocks_override=12_500, block_size=16, max_model_len=16_384)
    seen = ServerMetrics(
        2,
        kv_usage=(100 * held / 200_000, 1.0),
        running=100.0,
        prompt_rate=7 * prompts.mean(),
        output_rate=7 * outputs.mean(),
    )
    found = _by_throughput(seen, chosen, 16_384)
    assert found[0].mean() == pytest.approx(prompts.mean(), rel=0.05)
    assert found[1].mean() == pytest.approx(outputs.mean(), rel=0.05)


class TestNotKnown:
    def test_an_interval_of_gain_and_harm_has_no_figure(self):
        wide, sure = Gain(0.42, (-20.15, 0.98), 0.7), Gain(0.42, (0.3, 0.5), 0.99, (0.2, 0.6))
        small = Gain(0.0, (-0.01, 0.02), 0.6, (-0.02, 0.03))
        assert _gain_text(wide, None) == "the change of the latency index is not known"
        assert _effect(wide, None) == "not known"
        assert _gain_text(sure, None) == "latency index -42% (-60% to -20%)"
        # Too small to matter, either way.
        assert _effect(small, None) == "+0% (-3 to +2)"

    @pytest.mark.parametrize("degrees", [1, 2, 3, 9])
    @pytest.mark.parametrize("value", [-3.0, -0.4, 0.0, 1.0, 6.0])
    def test_the_probability_is_students(self, value, degrees):
        assert below(value, degrees) == pytest.approx(stats.t.cdf(value, degrees), abs=1e-12)


def test_a_server_without_room_is_not_healthy(tmp_path, capsys):
    """98 % of a pool in use, and no request waits for it yet."""
    (tmp_path / "metrics.txt").write_text(text([(2, 0, 0.98, 0)] * 4))
    line = ["diagnose", "--serve", "vllm serve llama-3.1-8b --max-model-len 16K", "--gpu", "h100-80gb"]
    load = ["--input-len", 200, "--output-len", 50, "--request-rate", 2, "--num-prompts", 60, "--seeds", 1, "--jobs", 1]
    given = [*line, "--metrics", tmp_path / "metrics.txt", *load, "--json", tmp_path / "out.json"]
    assert status([*map(str, given)]) == DONE
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["state"], found["now"]["symptom"]) == ("no room", "nearly full")
    shown = " ".join(capsys.readouterr().out.split())
    assert "No room: no flag" in shown and "by its metrics 98% of the KV cache" in shown and "Healthy" not in shown


@pytest.mark.parametrize(("queued_s", "shown"), [(1.0, True), (2.9, False)])
def test_the_api_servers_own_time_is_what_no_histogram_of_the_engine_has(queued_s, shown):
    """Of 4 s, 1 s passes in the engine behind its queue: 2 s or 0.1 s are left, for a tenth of 4 s and 50 ms that are a symptom."""
    names = (
        ("e2e_request_latency_seconds", 4.0),
        ("request_queue_time_seconds", queued_s),
        ("request_inference_time_seconds", 1.0),
    )
    more = [f"{name}_{part}" for name, _ in names for part in ("sum", "count")]
    rows = [(*LIGHT, *(value for _, mean in names for value in (20.0 * n * mean, 20.0 * n))) for n in range(8)]
    said = " ".join(lines(now(rows, *more)))
    assert ("2,000 of the 4,000 ms of a request pass in the API server" in said) == shown
    assert ("--api-server-count" in said) == shown
