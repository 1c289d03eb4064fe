"""``fragmeter diagnose``: the planted flag is named, a healthy server is left alone, and every kind of evidence is enough."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, sqrt
from statistics import fmean

import numpy as np
import pytest

from calibrations import document
from fragmeter.experiments.capacity.measurement import after_a_benchmark
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.diagnose.diagnosis import Gain
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import Trace, write
from paths import ROOT

PROBE = ROOT / "tests" / "data" / "real_server" / "1" / "tight" / "probe.jsonl.gz"
STEPS = ROOT / "tests" / "data" / "incidents" / "steps.json"
LINE = "vllm serve llama-3.1-8b --max-model-len 16K"
SMALL = ("--seeds", "3", "--jobs", "1")


def trace_of(folder, prompts: float, outputs: float, rate: float | None, shared: float = 0.0, count: int = 600):
    """A trace with exponential lengths, Poisson arrivals, and prompts that begin with a share of one long prefix."""
    rng = np.random.default_rng(5)
    prompt_tokens, output_tokens = (
        np.minimum(np.ceil(rng.exponential(mean, count)), 4 * mean).astype(np.int64) for mean in (prompts, outputs)
    )
    arrivals = None if rate is None else np.cumsum(np.rint(rng.exponential(1e9 / rate, count)).astype(np.int64)) * 1000
    content = None
    if shared:
        tokens = np.maximum(1, (prompt_tokens * shared).astype(np.int64))
        content = PromptContent(np.arange(count + 1), np.zeros(count, dtype=np.int64), tokens)
    write(Trace("load", prompt_tokens, output_tokens, arrivals, content=content), folder / "load.parquet")
    return folder / "load.parquet"


def diagnose(folder, line: str, gpu: str, *tokens: object, count: int = 150) -> dict:
    """What the command says, as data."""
    out, draws = folder / "diagnosis.json", ("--num-prompts", count, *SMALL)
    arguments = ["diagnose", "--serve", line, "--gpu", gpu, "--json", str(out), *map(str, (*tokens, *draws))]
    assert status(arguments) == DONE
    return json.loads(out.read_text())


@pytest.mark.parametrize(("measured", "tried"), [("auto", False), ("fp8", True)])
def test_a_kv_cache_that_the_calibration_was_not_measured_with_is_no_remedy(measured, tried, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document() | {"kv_cache_dtype": measured}))
    server, change = server_of(parse_serve(LINE), "h100-80gb", None, None), {"kv-cache-dtype": "fp8"}
    assert server.changed(change) is not None
    assert (replace(server, cost=str(path)).changed(change) is not None) == tried


class TestPlanted:
    def test_a_healthy_server_is_left_alone(self, tmp_path):
        load = trace_of(tmp_path, 500, 150, 8)
        found = diagnose(tmp_path, LINE, "h100-80gb", "--trace", load)
        assert (found["state"], found["causes"], found["advised"]) == ("healthy", [], None)
        assert found["as_served"]["preemptions"] == 0

    def test_a_small_pool_is_made_as_large_as_the_gpu_has(self, tmp_path):
        """An fp8 KV cache would help as well, and changes answers: it comes second."""
        load = trace_of(tmp_path, 1000, 300, 25)
        found = diagnose(tmp_path, f"{LINE} --gpu-memory-utilization 0.3", "h100-80gb", "--trace", load)
        assert (found["state"], found["causes"]) == ("remedy", ["small pool"])
        assert found["advised"] == {"gpu-memory-utilization": "0.92"}
        first, *others = found["changes"]
        assert first["seen"]["preemptions"] < 0.1 * found["as_served"]["preemptions"]
        assert first["interval"][0] > 0.05
        assert first["chance"] > 0.975 and "a restart" in first["costs"] and "GiB less of each GPU" in first["costs"]
        # Without a restart a limit at the gateway ends the preemptions, and half of the load has fewer.
        limit, half = sorted(found["without_restart"], key=lambda each: -each["share"])
        assert limit["share"] == 1 and limit["seen"]["preemptions"] < 0.1 * found["as_served"]["preemptions"]
        assert half["share"] == 0.5 and half["seen"]["preemptions"] < 0.5 * found["as_served"]["preemptions"]
        assert "KV dtype" in [cause for each in others for cause in each["causes"]]

    @pytest.mark.slow
    def test_what_the_server_measured_is_no_symptom_of_the_changed_one(self, tmp_path):
        """60 of its 200 requests were preempted; with the larger pool none is, so that no second flag is advised."""
        load = trace_of(tmp_path, 1000, 300, 25)
        (tmp_path / "metrics.txt").write_text(metrics(num_preemptions_total=60))
        line = f"{LINE} --gpu-memory-utilization 0.3"
        found = diagnose(tmp_path, line, "h100-80gb", "--trace", load, "--metrics", tmp_path / "metrics.txt")
        assert found["advised"] == {"gpu-memory-utilization": "0.92"}

    @pytest.mark.slow
    def test_too_many_sequences_are_fewer(self, tmp_path):
        load = trace_of(tmp_path, 300, 1500, None)
        line = f"{LINE} --kv-cache-dtype fp8 --gpu-memory-utilization 0.95 --max-num-batched-tokens 2048"
        found = diagnose(tmp_path, line, "rtx-4090", "--trace", load, "--max-concurrency", 160, count=300)
        assert found["causes"] == ["max-num-seqs too high"]
        assert found["as_served"]["preemptions"] > 50 > found["changes"][0]["seen"]["preemptions"]

    @pytest.mark.slow
    def test_too_few_sequences_are_more(self, tmp_path):
        load = trace_of(tmp_path, 300, 300, 20)
        found = diagnose(tmp_path, f"{LINE} --max-num-seqs 16", "h100-80gb", "--trace", load)
        assert found["causes"] == ["max-num-seqs too low"]

    @pytest.mark.slow
    def test_large_chunks_are_smaller(self, tmp_path):
        """Prompts of 8,000 tokens, several at once, stop the answers of the others for a second."""
        load = trace_of(tmp_path, 6000, 150, 4)
        line = "vllm serve llama-3.1-8b --max-model-len 32K --max-num-batched-tokens 65536"
        found = diagnose(tmp_path, line, "h100-80gb", "--trace", load)
        assert found["causes"][0] == "chunk too large"
        assert found["changes"][0]["seen"]["p99_itl_ms"] < 0.5 * found["as_served"]["p99_itl_ms"]

    @pytest.mark.parametrize(
        ("chunk", "prompts", "rate", "causes"),
        [(16_384, 6000, 2, ["chunk too large"]), (8192, 6000, 2, []), (32_768, 500, 8, [])],
        ids=["above the default", "the default", "above it without stalls"],
    )
    def test_the_strict_limit_is_for_chunks_above_the_default(self, chunk, prompts, rate, causes, tmp_path):
        load = trace_of(tmp_path, prompts, 150, rate)
        line = f"vllm serve llama-3.1-8b --max-model-len 32K --max-num-batched-tokens {chunk}"
        found = diagnose(tmp_path, line, "h100-80gb", "--trace", load)
        assert found["causes"] == causes
        times = found["as_served"]["p99_itl_ms"] / found["as_served"]["median_itl_ms"]
        assert times < 25 and (times > 5) == (prompts == 6000)

    @pytest.mark.slow
    def test_shared_prefixes_are_cached(self, tmp_path):
        load = trace_of(tmp_path, 2000, 100, 12, shared=0.8)
        found = diagnose(tmp_path, f"{LINE} --no-enable-prefix-caching", "h100-80gb", "--trace", load)
        assert (found["causes"], found["advised"]) == (["caching off"], {"enable-prefix-caching": True})
        assert found["prefix_caching"]["hit_rate"] > 0.7 and found["prefix_caching"]["value"] > 0.05

    def test_prefixes_that_are_evicted_too_early_are_kept_on_the_host(self, tmp_path, capsys):
        """40 sessions in turn, each with 12,000 tokens in common, over a cache of 20 of them."""
        count, sessions, turn = 160, 40, np.arange(160)
        prompts, outputs = np.full(count, 12_500), np.full(count, 60)
        content = PromptContent(np.arange(count + 1), turn % sessions, np.full(count, 12_000))
        load = tmp_path / "sessions.parquet"
        write(Trace("load", prompts, outputs, turn * 10**12 // 2, content=content), load)
        line = f"{LINE} --kv-cache-memory-bytes 32G"
        found = diagnose(tmp_path, line, "h100-80gb", "--trace", load, count=count)
        assert found["causes"] == ["evicted prefixes"]
        assert {*found["advised"]} == {"kv-offloading-size"}
        worth = found["prefix_caching"]["hit_rate"], found["cache_worth"]
        assert worth[0] < 0.1 and worth[1]["infinite_hit_blocks"] > 0.5 * worth[1]["asked_blocks"]
        text = " ".join(capsys.readouterr().out.split())
        assert "of the blocks that prompts ask for" in text and "GiB of host memory" in text
        assert "% of the pool's slot-hours hold blocks that are evicted without another hit" in text

    @pytest.mark.slow
    def test_16_bits_are_halved_where_the_gpu_has_no_more(self, tmp_path):
        load = trace_of(tmp_path, 700, 300, 7)
        found = diagnose(tmp_path, f"{LINE} --gpu-memory-utilization 0.92", "rtx-4090", "--trace", load)
        assert found["causes"] == ["KV dtype"]
        assert found["changes"][0]["lossless"] is False

    def test_a_server_that_cannot_keep_up_is_overloaded(self, tmp_path, capsys):
        load = trace_of(tmp_path, 2000, 300, 60)
        found = diagnose(tmp_path, LINE, "h100-80gb", "--trace", load, count=1000)
        assert found["state"] == "overloaded"
        assert "fragmeter plan finds the replicas" in " ".join(capsys.readouterr().out.split())

    def test_with_objectives_their_share_counts(self, tmp_path):
        load = trace_of(tmp_path, 1000, 300, 25)
        line = f"{LINE} --gpu-memory-utilization 0.3"
        strict = diagnose(tmp_path, line, "h100-80gb", "--trace", load, "--goodput", "ttft:500")
        assert strict["causes"] == ["small pool"] and 0 < strict["changes"][0]["gain"] <= 1
        lenient = diagnose(tmp_path, line, "h100-80gb", "--trace", load, "--goodput", "ttft:100000")
        assert (lenient["state"], lenient["changes"]) == ("healthy", [])


class TestCertainty:
    """A large gain with an interval that includes 0 is neither advised nor called none."""

    @pytest.mark.slow
    def test_more_draws_are_asked_for(self, tmp_path, capsys):
        line, answers = f"{LINE} --gpu-memory-utilization 0.3", {}
        for seeds in (2, 4):
            out, load = tmp_path / f"{seeds}.json", ["--request-rate", 20, "--num-prompts", 400]
            arguments = ["--serve", line, "--gpu", "h100-80gb", *load, "--seeds", seeds, "--jobs", 1, "--json", out]
            assert status(["diagnose", *map(str, arguments)]) == DONE
            answers[seeds] = json.loads(out.read_text()), " ".join(capsys.readouterr().out.split())
        few, text = answers[2]
        change = few["changes"][0]
        assert change["gain"] > 0.05 and change["interval"][0] < 0 < change["interval"][1]
        assert few["advised"] is None and few["state"] == "overloaded"
        assert f"Not certain with 2 draws: {change['flags']} helps with a probability of " in text
        # No figure of an interval with improvement and harm.
        assert 0.5 < change["chance"] < 0.975 and "not known" in text
        assert "add draws (--seeds)" in text and "no flag that was tried gains" not in text
        more, text = answers[4]
        assert more["advised"] == change["change"] and "Not certain" not in text

    @pytest.mark.parametrize(
        ("value", "interval", "state"),
        [
            (0.41, (-0.15, 0.7), "undecided"),
            (0.41, (0.05, 0.7), "remedy"),
            (0.04, (-0.2, 0.3), "healthy"),
            (0.41, None, "remedy"),
        ],
    )
    def test_the_state_follows_from_mean_and_interval(self, value, interval, state):
        gain = Gain(value, interval)
        assert (gain.helps, gain.is_large and not gain.helps) == (state == "remedy", state == "undecided")

    def test_the_prediction_holds_the_effect_on_19_of_20_other_draws(self):
        """By draws of known spread; the interval of the mean does not hold them."""
        random = np.random.default_rng(7)
        found = [(Gain.over(draws[:4].tolist(), True), draws[4]) for draws in random.normal(0.3, 0.2, (4000, 5))]
        held = {
            name: fmean(low <= other <= high for gain, other in found for low, high in [getattr(gain, name)])
            for name in ("prediction", "interval")
        }
        assert held["prediction"] == pytest.approx(0.95, abs=0.012) and held["interval"] < 0.85

    def test_the_prediction_has_the_error_of_step_times(self):
        """Draws that agree leave that error alone; else the two are independent. The interval of the mean does not have it."""
        exact = Gain.over([0.5, 0.5, 0.5], True, (0.2, 0.1))
        assert exact.prediction == pytest.approx((0.3, 0.6)) and exact.interval == (0.5, 0.5)
        apart = [0.4, 0.5, 0.6]
        of_draws, both = (Gain.over(apart, True, by_steps) for by_steps in ((0.0, 0.0), (0.3, 0.0)))
        half = of_draws.prediction[1] - 0.5
        assert both.prediction == pytest.approx((0.5 - sqrt(half**2 + 0.3**2), 0.5 + half))
        assert (both.interval, both.chance) == (of_draws.interval, of_draws.chance)

    @pytest.mark.slow
    def test_an_effect_of_waiting_is_less_sure_with_steps_that_are_not_known(self, tmp_path):
        """The pace decides how long a queue is. A fit that states no error leaves the interval of the draws."""
        content = json.loads(STEPS.read_text())
        intervals = []
        for error in (None, 0.3):
            content["fit"] = {} if error is None else {"p90_error": error}
            path = tmp_path / f"{error}.json"
            path.write_text(json.dumps(content))
            cost = ("--cost", path, "--input-len", 60, "--output-len", 80, "--request-rate", 1.2)
            line = "vllm serve llama-3.1-8b --max-model-len 800 --max-num-seqs 2 --num-gpu-blocks-override 1200"
            found = diagnose(tmp_path, line, "h100-80gb", *cost, count=60)
            intervals.append(next(each for each in found["changes"] if each["causes"] == ["max-num-seqs too low"]))
        sure, unsure = intervals
        assert sure["interval"] == unsure["interval"] and sure["gain"] == unsure["gain"]
        wide, narrow = (each["prediction_interval"] for each in (unsure, sure))
        assert wide[0] <= narrow[0] and wide[1] >= narrow[1] and wide[1] - wide[0] > 1.02 * (narrow[1] - narrow[0])

    def test_what_is_known_of_step_times(self, tmp_path):
        """The error of nine of ten steps of a fit, the servers like this one, or the benchmark of the server itself; a calibration of a
        device without an error is taken as given."""

        def interval(**changes):
            return replace(server_of(parse_serve(LINE), "h100-80gb", None, None), **changes).step_interval()

        error = json.loads(STEPS.read_text())["fit"]["p90_error"]
        assert interval(cost=str(STEPS)) == pytest.approx((1 / (1 + error), 1 / (1 - error)))
        assert interval(cost=str(STEPS), step_scale=1.2) == interval(step_scale=1.2) == after_a_benchmark()
        low, high = interval()
        assert 0.5 < low < 1 < high < 2
        (tmp_path / "calibration.json").write_text(json.dumps(document()))
        assert interval(cost=str(tmp_path / "calibration.json")) is None

    def test_the_intervals_of_a_closed_form(self):
        """Four draws: mean 0.5, deviation 0.2, Student's t of three degrees 3.1824; of the index exp(-saved)."""
        saved = [0.5 + each for each in (-0.2, -0.1, 0.1, 0.2)]
        deviation = sqrt(0.1 / 3)
        index, shares = Gain.over(saved, False), Gain.over(saved, True)
        for half, name in ((deviation / 2, "interval"), (deviation * sqrt(1.25), "prediction")):
            low, high = (0.5 + sign * 3.182446 * half for sign in (-1, 1))
            assert getattr(shares, name) == pytest.approx((low, high), rel=1e-6)
            assert getattr(index, name) == pytest.approx((1 - exp(-low), 1 - exp(-high)), rel=1e-6)
        assert Gain.over([0.5], True) == Gain(0.5, None)

    def test_caching_that_may_pay_is_not_said_to_pay(self, tmp_path, capsys):
        """Two draws of a load with few shared tokens: the interval of their difference includes 0."""
        load = trace_of(tmp_path, 2000, 100, 13, shared=0.1)
        arguments = ["--serve", LINE, "--gpu", "h100-80gb", "--trace", load, "--num-prompts", 400, "--seeds", 2]
        out = tmp_path / "d.json"
        assert status(["diagnose", *map(str, [*arguments, "--jobs", 1, "--json", out])]) == DONE
        caching, text = json.loads(out.read_text())["prefix_caching"], " ".join(capsys.readouterr().out.split())
        assert caching["value"] > 0.05 and caching["interval"][0] < 0
        assert "Prefix caching is on and may pay (not certain with 2 draws; add --seeds)" in text


class TestBursts:
    """A draw is one where fewer than half of its requests finish before the last one starts, or all arrive in no time."""

    @pytest.mark.parametrize(
        "tokens",
        [
            ("--request-rate", "1000"),
            ("--max-concurrency", "100"),
            ("--goodput", "ttft:1000", "--request-rate", "1000"),
        ],
    )
    def test_they_are_refused(self, tokens, capsys):
        draws = ("--num-prompts", "100", *SMALL)
        assert status(["diagnose", "--serve", LINE, "--gpu", "h100-80gb", *tokens, *draws]) == MISTAKE
        error = capsys.readouterr().err
        assert "num_prompts = 100: the draws are bursts: " in error and error.count("\n") == 1

    @pytest.mark.slow
    def test_a_stated_rate_is_taken_however_slow_the_server_is(self, tmp_path):
        """The flag is the reason: each request takes more than a second, and 5 arrive every second."""
        found = diagnose(tmp_path, f"{LINE} --max-num-seqs 1", "h100-80gb", "--request-rate", 5, count=50)
        seen = found["as_served"]
        assert seen["turnover"] == pytest.approx(49 / 50) and seen["arriving"] < 0.1
        assert found["causes"] == ["max-num-seqs too low"]

    @pytest.mark.slow
    def test_a_benchmark_that_sends_all_at_once_has_no_rate(self, tmp_path, capsys):
        bench = ROOT / "tests" / "data" / "real_server" / "1" / "tight" / "sharegpt-saturated.json"
        line = ["--serve", "vllm serve model --num-gpu-blocks-override 260 --max-model-len 1024", "--gpu", "h100-80gb"]
        tokens = [
            "diagnose",
            *line,
            "--model",
            str(bench.parent / "model"),
            "--bench",
            str(bench),
            "--num-prompts",
            "200",
        ]
        assert status([*tokens, *SMALL]) == MISTAKE
        assert "the draws are bursts: all requests arrive within 0.0% of the time" in capsys.readouterr().err
        assert status([*tokens, *SMALL, "--max-concurrency", "20"]) == DONE

    def test_known_contents_have_no_more_requests(self, tmp_path, capsys):
        load = trace_of(tmp_path, 500, 150, 1000, shared=0.5, count=60)
        tokens = [
            "diagnose",
            "--serve",
            LINE,
            "--gpu",
            "h100-80gb",
            "--trace",
            str(load),
            "--num-prompts",
            "60",
            *SMALL,
        ]
        assert status(tokens) == MISTAKE
        assert "give a longer recording, or a lower --request-rate" in capsys.readouterr().err


HISTOGRAM = {"100": 0, "200": 50, "500": 150, "1000": 200, "+Inf": 200}


def metrics(**more: float) -> str:
    """Two scrapes, 100 s apart: 200 requests with prompts and outputs of 100 to 1,000 tokens."""
    last = {
        f'request_{what}_tokens_bucket{{le="{bound}"}}': count
        for what in ("prompt", "generation")
        for bound, count in HISTOGRAM.items()
    }
    last |= {
        f"request_{what}_tokens_{part}": value
        for what in ("prompt", "generation")
        for part, value in (("sum", 80_000), ("count", 200))
    }
    last |= {"e2e_request_latency_seconds_sum": 800, "e2e_request_latency_seconds_count": 200}
    last |= {"time_to_first_token_seconds_count": 200, "time_to_first_token_seconds_sum": 20}
    last |= {"num_requests_running": 8, "num_requests_waiting": 0} | more
    scrapes = (dict.fromkeys(last, 0), last)
    lines = [
        f"{1_790_000_000 + 100 * place}\n" + "".join(f"vllm:{name} {value}\n" for name, value in scrape.items())
        for place, scrape in enumerate(scrapes)
    ]
    return "".join(lines)


class TestEvidence:
    @pytest.mark.slow
    def test_metrics_alone_are_enough(self, tmp_path):
        (tmp_path / "metrics.txt").write_text(metrics(num_preemptions_total=60))
        found = diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        load = found["load"]
        # 200 have finished, and 8 more have arrived.
        assert load["request_rate"] == 2.08 and load["max_concurrency"] is None
        assert found["kv_cache"]["origin"] == "computed"
        assert load["mean_tokens"] == pytest.approx([400, 400], rel=0.01)
        assert found["measured"]["server"]["preemptions"] == 60

    @pytest.mark.parametrize(
        ("running", "remark"),
        [
            (8, "(-34%) in the simulation. At the same rate a request takes more time in the server: steps are longer"),
            (5.5, None),
            (
                4,
                "(+32%) in the simulation. At the same rate a request takes less time in the server: steps are shorter",
            ),
        ],
    )
    def test_requests_in_flight_that_differ_are_remarked(self, running, remark, tmp_path, capsys):
        """With 2 requests/s of the same lengths 5.3 run in the simulation."""
        text = metrics(num_requests_running=running, e2e_request_latency_seconds_count=200 - running)
        (tmp_path / "metrics.txt").write_text(text)
        found = diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        assert found["load"]["request_rate"] == 2.0
        assert found["as_served"]["arriving_running"] == pytest.approx(5.3, abs=0.05)
        printed = " ".join(capsys.readouterr().out.split())
        assert ("Trust the changes less." in printed) == (remark is not None)
        assert remark is None or f"While requests arrive {running:.1f} run in the server, and 5.3 {remark}" in printed

    def test_a_cache_that_is_fuller_than_simulated_is_remarked(self, tmp_path, capsys):
        """As many requests run, and hold 8 % in place of 1 % of the KV cache."""
        text = metrics(num_requests_running=5.3, e2e_request_latency_seconds_count=194.7, kv_cache_usage_perc=0.08)
        (tmp_path / "metrics.txt").write_text(text)
        diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        printed = " ".join(capsys.readouterr().out.split())
        assert "8% of the KV cache is in use in the server, and 1% in the simulation, with as many requests" in printed

    def test_of_several_engines_the_busiest_is_diagnosed(self, tmp_path, capsys):
        def of(engine: int, text: str) -> list[str]:
            return [line.replace(" ", f'{{engine="{engine}"}} ').replace("}{", ",") for line in text.splitlines(True)]

        idle = metrics(num_requests_running=4)
        lines = [
            line if line.startswith("179") else line + other
            for line, other in zip(of(0, idle), of(1, metrics()), strict=True)
        ]
        # The samples of the two engines alternate.
        (tmp_path / "metrics.txt").write_text("".join(lines))
        found = diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        assert found["load"]["request_rate"] == 2.08 and found["measured"]["server"]["running"] == 8
        assert "2.08 requests/s, of engine 1, the busiest of 2;" in " ".join(capsys.readouterr().out.split())
        load = ["--trace", str(trace_of(tmp_path, 500, 150, 8)), "--metrics", str(tmp_path / "metrics.txt")]
        assert status(["diagnose", "--serve", LINE, "--gpu", "h100-80gb", *load]) == MISTAKE
        assert "has metrics of 2 engines; the requests of a file went to all of them" in capsys.readouterr().err

    def test_a_cache_without_hits_is_known(self, tmp_path, capsys):
        (tmp_path / "metrics.txt").write_text(metrics(prefix_cache_queries_total=80_000, prefix_cache_hits_total=0))
        diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        printed = " ".join(capsys.readouterr().out.split())
        assert "Prefix caching is on; the server found 0% of the prompt tokens in its cache." in printed
        assert "is not known" not in printed

    @pytest.mark.slow
    def test_a_server_behind_its_load_has_as_many_in_flight(self, tmp_path, capsys):
        """Of which all run in the simulation but for those outside of its engine, in place of 8."""
        (tmp_path / "metrics.txt").write_text(metrics(num_requests_waiting=12))
        found = diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        assert (found["load"]["request_rate"], found["load"]["max_concurrency"]) == (None, 20)
        printed = " ".join(capsys.readouterr().out.split())
        assert found["state"] == "contradicted"
        assert "in the server 12.0 requests wait in place of 0.0." in printed
        assert "8.0 run and 12.0 wait in the server, and 19.9 run and 0.0 wait in the simulation" in printed
        assert (
            "20 requests in flight, of clients that wait for answers (if they do not: --request-rate 2.2);" in printed
        )
        assert (
            "do not say whether clients wait for answers: a single scrape with requests in flight does not tell;"
            in printed
        )
        (warning,) = found["warnings"]
        assert warning in printed and warning.endswith("Trust the changes less.")

    def test_one_scrape_has_a_rate_by_littles_law(self, tmp_path):
        """8 requests run for 4 s each in the mean."""
        text = metrics().partition("1790000100\n")[2]
        (tmp_path / "metrics.txt").write_text(text)
        assert (
            diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")["load"]["request_rate"] == 2.0
        )

    def test_measured_hits_are_a_common_prefix(self, tmp_path):
        text = metrics(prefix_cache_queries_total=80_000, prefix_cache_hits_total=40_000)
        (tmp_path / "metrics.txt").write_text(text)
        found = diagnose(tmp_path, LINE, "h100-80gb", "--metrics", tmp_path / "metrics.txt")
        assert found["as_served"]["hit_rate"] == pytest.approx(0.5, abs=0.05)

    @pytest.mark.slow
    def test_the_server_s_own_pool_counts(self, tmp_path, capsys):
        """The log of another card, or other programs on it: 3,000 blocks where 28,000 are computed."""
        config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="3000"} 1\n'
        (tmp_path / "metrics.txt").write_text(metrics() + config)
        found = diagnose(
            tmp_path, "vllm serve llama-3.1-8b --max-model-len 16K", "h100-80gb", "--metrics", tmp_path / "metrics.txt"
        )
        assert found["kv_cache"]["num_gpu_blocks"] == 3000
        assert "48,000 tokens (by its metrics)" in capsys.readouterr().out
        log = diagnose(
            tmp_path,
            LINE,
            "h100-80gb",
            "--metrics",
            tmp_path / "metrics.txt",
            "--startup-log",
            "GPU KV cache size: 64,000 tokens",
        )
        assert log["kv_cache"]["num_gpu_blocks"] == 4000
        assert "64,000 tokens (by the start-up log)" in capsys.readouterr().out

    @pytest.mark.slow
    def test_the_server_s_own_block_size_counts_unless_the_line_has_one(self, tmp_path):
        config = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="3000"} 1\n'
        (tmp_path / "metrics.txt").write_text(metrics() + config)
        seen = ("h100-80gb", "--metrics", tmp_path / "metrics.txt")
        by_metrics, by_line = (diagnose(tmp_path, line, *seen) for line in (LINE, f"{LINE} --block-size 16"))
        sizes = [(each["settings"]["block_size"], each["kv_cache"]["num_gpu_blocks"]) for each in (by_metrics, by_line)]
        assert sizes == [(32, 3000), (16, 6000)]

    @pytest.mark.slow
    def test_a_given_number_of_blocks_says_nothing_of_the_memory(self, tmp_path):
        config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1200"} 1\n'
        (tmp_path / "metrics.txt").write_text(metrics() + config)
        load, line = trace_of(tmp_path, 1000, 300, 25), f"{LINE} --num-gpu-blocks-override 1200"
        found = diagnose(tmp_path, line, "h100-80gb", "--trace", load, "--metrics", tmp_path / "metrics.txt")
        assert found["advised"] == {"num-gpu-blocks-override": None}
        assert found["kv_cache"]["origin"] == "flag"

    @pytest.mark.slow
    def test_a_probe_has_requests_pool_and_preemptions(self, tmp_path, capsys):
        found = diagnose(tmp_path, "vllm serve llama-3.1-8b --max-model-len 1024", "h100-80gb", "--probe", PROBE)
        server = found["measured"]["server"]
        assert found["kv_cache"]["num_gpu_blocks"] * 16 == server["num_gpu_blocks"] * server["block_size"]
        assert found["measured"]["server"]["preemptions"] > 0
        assert found["load"]["origin"].endswith("requests of probe.jsonl.gz")
        assert "tokens (an estimate, from the blocks of the probe)" in " ".join(capsys.readouterr().out.split())

    def test_a_benchmark_scales_steps(self, tmp_path):
        """TPOT of 20 ms, where the profile says about 6."""
        bench = {
            "model_id": "meta-llama/Llama-3.1-8B-Instruct", "duration": 6.0, "request_rate": 8.0,
            "input_lens": [300] * 60, "output_lens": [50] * 60, "start_times": [place / 8 for place in range(60)],
            "ttfts": [0.06] * 60, "itls": [[0.02] * 49] * 60,
        }  # fmt: skip
        (tmp_path / "bench.json").write_text(json.dumps(bench))
        found = diagnose(tmp_path, LINE, "h100-80gb", "--bench", tmp_path / "bench.json")
        assert found["step_scale"] > 2
        assert found["as_served"]["median_itl_ms"] == pytest.approx(20, rel=0.1)

    @pytest.mark.slow
    def test_without_a_load_it_is_assumed(self, tmp_path, capsys):
        found = diagnose(tmp_path, LINE, "h100-80gb", count=400)
        assert found["load"]["assumed"] is True
        printed = " ".join(capsys.readouterr().out.split())
        assert "assumed: ShareGPT's lengths" in printed
        assert "tokens (an estimate, by vLLM's arithmetic at start)" in printed

    @pytest.mark.slow
    def test_the_assumed_rate_does_not_depend_on_the_size_of_a_draw(self, tmp_path):
        """1,024 sequences fit at once, so that only thousands of requests show what the server serves at most."""
        rates = {
            count: diagnose(tmp_path, LINE, "h100-80gb", count=count)["load"]["request_rate"] for count in (400, 1000)
        }
        assert rates[400] == rates[1000] > 10
        # A load of that rate is served without a queue that grows, and one of twice it is not.
        for factor, keeps_up in ((1, True), (2.5, False)):
            rate = ("--request-rate", factor * rates[400])
            served = diagnose(tmp_path, LINE, "h100-80gb", *rate, count=4000)["as_served"]
            assert (served["behind"] < 0.1) == keeps_up


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (["--serve", LINE], "gpu = None: is missing"),
        (["--serve", f"{LINE} --gpu-memory-utilization 0.1", "--gpu", "h100-80gb"], "serve: it does not start"),
        (["--serve", "sglang serve qwen3-next-80b-a3b", "--gpu", "h100-80gb"], "or use more or larger GPUs; fragmeter plan --serve says more"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--num-prompts", "10"], "num_prompts = '10': must be at least 50"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--bench", "load.csv", "--trace", "load.csv"], "trace = 'load.csv'"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--trace", "load.csv"], "trace = 'load.csv': has no arrivals"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--metrics", "few.txt"], "have no histograms of request lengths"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--request-rate", "0"], "request_rate = 0"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--max-concurrency", "0"], "max_concurrency = 0"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--attainment", "0.5"], "attainment = 0.5"),
        (["--serve", LINE, "--gpu", "h100-80gb", "--request-rate", "1", "--max-concurrency", "2"], "max_concurrency = 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_diagnosed_is_said_in_a_line(tokens, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "load.csv").write_text("prompt_tokens,output_tokens\n10,10\n20,20\n")
    (tmp_path / "few.txt").write_text("vllm:num_requests_running 3\n")
    assert status(["diagnose", *tokens]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_same_files_give_the_same_bytes(tmp_path):
    load = trace_of(tmp_path, 500, 150, 8)
    line = f"{LINE} --enforce-eager"
    assert diagnose(tmp_path, line, "h100-80gb", "--trace", load) == diagnose(
        tmp_path, line, "h100-80gb", "--trace", load
    )
