"""Whole plans of a made-up service: what is bought and each number of the answer, beside brute force. Nothing is simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.experiments.capacity import tasks
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.chance import SCALE_WEIGHTS
from fragmeter.experiments.capacity.confidence import NUM_SEEDS, mean_rate
from fragmeter.experiments.capacity.contender import Question
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.planning import Planner
from fragmeter.experiments.capacity.prices import prices
from fragmeter.experiments.capacity.uncertainty import uncertainty
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.experiments.runs.sweeping import Outcome
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.traces import Pacing
from made_up_service import FIRST, POWERS, PRICES, Service, smallest

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs ``plan`` with a service, and returns its document."""

    def run(service: Service, *flags: str, gpus: str = "a100-80gb,h200", seeds: int | None = 4) -> dict[str, Any]:
        monkeypatch.setattr(tasks, "carry_out", service.carry_out)
        (tmp_path / "prices.json").write_text(json.dumps({"currency": "EUR", "per_gpu_hour": PRICES}))
        (tmp_path / "short.csv").write_text("prompt_tokens,output_tokens\n30,10\n50,30\n")
        given = {
            "--trace": tmp_path / "short.csv",
            "--prices": tmp_path / "prices.json",
            "--seeds": seeds,
            "--seed": FIRST,
        }
        own = [text for name, value in given.items() if value and name not in flags for text in (name, str(value))]
        line = ["plan", "--model", "llama-3.1-8b", "--gpu", gpus, "--goodput", "ttft:500", "--jobs", "1"]
        assert status([*line, "--num-prompts", "100", *own, *flags, "--json", str(tmp_path / "plan.json")]) == DONE
        capsys.readouterr()
        return json.loads((tmp_path / "plan.json").read_text())

    return run


def chance_of(service: Service, gpu: str, size: int, scales: tuple[float, ...]) -> float:
    """The weight of the cases of eight draws that a fleet meets at 100 requests/s."""
    met = (
        weight
        for rate in service.rates(gpu, size, 8)
        for scale, weight in zip(scales, SCALE_WEIGHTS, strict=True)
        if rate >= 100 * scale
    )
    return sum(met) / sum(SCALE_WEIGHTS) / 8


class TestForARate:
    """100 requests/s: eleven A100s for 22 an hour, or five H200s for 25, of which four are one too few for some seeds."""

    @pytest.mark.slow
    def test_the_answer(self, plan):
        service = Service()
        document = plan(service, "--request-rate", "100")
        first, other = document["candidates"]
        assert (document["recommended"], document["wanted_request_rate"]) == ({"gpu": "a100-80gb"}, 100)
        assert (document["seeds"], document["seed"], document["currency"], document["num_prompts"]) == (
            4,
            3,
            "EUR",
            100,
        )
        for found, gpu in ((first, "a100-80gb"), (other, "h200")):
            size = smallest(service, gpu, 100)
            rates = service.rates(gpu, size)
            fleet, cost = found["fleet"], found["bill"]
            assert found["candidate"] == {"gpu": gpu}
            assert (fleet["replicas"], fleet["seeds"]) == (size, NUM_SEEDS)
            assert fleet["misses"] == sum(rate < 100 for rate in rates)
            assert fleet["rates"] == rates[:4] and fleet["sure_rate"] == sorted(rates)[1]
            assert (cost["replicas"], cost["gpus"], cost["per_hour"]) == (size, size, size * PRICES[gpu])
            assert (
                cost["fewest_replicas"] == fleet["fewest"] and cost["fewest_per_hour"] == fleet["fewest"] * PRICES[gpu]
            )
            prompt, output = 40, 20
            for name, tokens in (("input", prompt), ("output", output), ("total", prompt + output)):
                assert cost["per_million"][name] == pytest.approx(size * PRICES[gpu] / (0.36 * tokens))
            mean = float(np.exp(np.log(rates[:4]).mean()))
            assert cost["full_per_million"] == pytest.approx(size * PRICES[gpu] / (0.0036 * mean * 60))
            assert found["request_rate"] == 100 / size and not found["every_rate_meets"]
            assert found["seed_rates"] == [service.of_one(gpu)] and found["spread"] == 0
            assert found["saturated_request_rate"] == 2 * service.of_one(gpu) and found["attained_alone"] == 1
            assert "known_rates" not in found and "prefill_replicas" not in found
            # The detail is of the first seed, with the highest rate of one replica.
            assert service.of_stage("detail", gpu) == [(FIRST, Cluster(num_replicas=size), 100, service.of_one(gpu))]
        assert not service.of_stage("known_rate")
        assert {call[1] for call in service.of_stage("attained_share", "h200")} <= {
            Cluster(num_replicas=size) if size > 1 else Cluster() for size in range(1, 9)
        }

    @pytest.mark.slow
    def test_a_fleet_is_as_large_as_the_confidence_asks_for(self, plan):
        """All cases of the first eight draws, one by one."""
        for confidence in (0.6, 0.9, 0.97):
            service = Service(scaled=True)
            document = plan(service, "--request-rate", "100", "--confidence", str(confidence))
            for found in document["candidates"]:
                gpu, fleet = found["candidate"]["gpu"], found["fleet"]
                (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), [gpu], {})
                scales = uncertainty(candidate).scales

                confirmed = smallest(service, gpu, 100)
                sizes = range(confirmed, 4 * confirmed)
                assert fleet["replicas"] == next(
                    size for size in sizes if chance_of(service, gpu, size, scales) >= confidence - 1e-9
                )
                for each in fleet["chances"]:
                    assert each["chance"] == pytest.approx(chance_of(service, gpu, each["replicas"], scales))
                assert not fleet["is_unsure"] and fleet["seeds"] == NUM_SEEDS

    def test_a_fault_of_a_run_is_raised_with_its_last_line(self, monkeypatch):
        monkeypatch.setattr(tasks, "carry_out", lambda name, *_: Outcome(name, fault="Traceback\n  at\nthe last"))
        load = Load(Inputs(requests=Requests(dataset="alpaca", num_prompts=100), pacing=Pacing(request_rate=9.0)))
        planner = Planner(Question(load, Goal(Objectives(ttft=500)), range(4), 9.0), Workers(jobs=1), None)
        with pytest.raises(SimulationFault) as raised:
            group = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb"], {})
            planner.answers([group], prices(None), lambda *_: None)
        assert str(raised.value) == "the last"
        assert raised.value.__notes__ == ["Traceback\n  at\nthe last"]

    @pytest.mark.slow
    def test_bursts_make_bounds(self, plan):
        """Runs are loads up to 0.97 of the highest rates: a lower bound of the headroom where that is above 100."""
        service = Service(saturated=None, known=0.97)
        document = plan(service, "--request-rate", "100")
        for found in document["candidates"]:
            rates = service.rates(found["candidate"]["gpu"], found["fleet"]["replicas"])[:4]
            assert found["known_rates"] == pytest.approx([0.97 * rate for rate in rates])
            assert found["fleet"]["rates"] == rates and found["saturated_request_rate"] is None
            known = max(100.0, mean_rate(found["known_rates"]))
            cost = found["bill"]
            assert cost["full_per_million"] == pytest.approx(cost["per_hour"] / (0.0036 * known * 60))
            if min(found["known_rates"]) < 100:
                assert cost["fewest_replicas"] == cost["replicas"]
        seeds = [seed for seed, *_ in service.of_stage("known_rate", "h200")]
        assert seeds == [3, 4, 5, 6]

    @pytest.mark.slow
    def test_runs_that_are_loads_are_known(self, plan):
        document = plan(Service(saturated=None), "--request-rate", "100")
        assert not any("known_rates" in found for found in document["candidates"])

    @pytest.mark.slow
    @pytest.mark.parametrize("stage", ["go_ahead", "attained_share", "highest_rate", "takes_rate", "detail"])
    def test_what_fails_of_one_leaves_the_others(self, plan, stage):
        document = plan(Service(failing=(stage, "a100-80gb")), "--request-rate", "100")
        first, failed = document["candidates"]
        assert document["recommended"] == first["candidate"] == {"gpu": "h200"}
        assert failed["error"] == "it fails" and "bill" not in failed and first["error"] is None
        assert ("fleet" in failed) == (stage == "detail")

    def test_what_misses_alone_is_not_searched_for(self, plan):
        service = Service(alone=False)
        document = plan(service, "--request-rate", "100")
        assert document["recommended"] is None and document["flags"] is None
        assert {call[0] for call in service.calls} == {"go_ahead"}
        assert [each["attained_alone"] for each in document["candidates"]] == [0, 0]
        assert [each["request_rate"] for each in document["candidates"]] == [0, 0]

    def test_one_seed_is_taken_at_its_word(self, plan):
        service = Service()
        document = plan(service, "--request-rate", "100", seeds=1)
        for found in document["candidates"]:
            size = ceil(100 / service.of_one(found["candidate"]["gpu"]))
            assert (found["fleet"]["replicas"], found["fleet"]["seeds"]) == (size, 1)
            assert (
                found["fleet"]["sure_rate"]
                == found["fleet"]["rates"][0]
                == size * service.of_one(found["candidate"]["gpu"])
            )
        assert {call[2] for call in service.calls} == {FIRST}

    @pytest.mark.slow
    def test_four_seeds_begin_a_search_and_twelve_a_rate(self, plan):
        assert plan(Service(), "--request-rate", "9", seeds=None)["seeds"] == 4
        assert plan(Service(), seeds=None)["seeds"] == 12

    @pytest.mark.slow
    def test_the_wanted_rate_of_a_trace_is_its_own_times_the_scale(self, plan, tmp_path):
        """A request each half second."""
        rows = "".join(f"{place / 2},30,10\n" for place in range(9))
        (tmp_path / "timed.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
        trace = ["--trace", str(tmp_path / "timed.csv"), "--rate-scale"]
        assert [plan(Service(), *trace, scale)["wanted_request_rate"] for scale in ("1", "3")] == [2, 6]

    def test_a_request_longer_than_the_model_refuses_it(self, plan, tmp_path):
        (tmp_path / "long.csv").write_text("prompt_tokens,output_tokens\n900,124\n")
        lengths = ["--max-model-len", "1023,1024", "--trace", str(tmp_path / "long.csv"), "--request-rate", "9"]
        first, other = plan(Service(), *lengths, gpus="h200")["candidates"]
        assert first["candidate"]["max_model_len"] == "1024" and first["bill"]["replicas"] == 1
        assert "1,024 tokens, and max_model_len is 1023" in other["refused"]
        # The number of refused requests has a name of its own.
        assert first["refused"] is None

    @pytest.mark.slow
    def test_the_flags_are_those_of_the_recommendation(self, plan):
        """Of equal bills the first."""
        document = plan(Service(), "--max-num-seqs", "8,9", "--request-rate", "30", gpus="h200")
        assert [each["candidate"]["max_num_seqs"] for each in document["candidates"]] == ["8", "9"]
        assert "--max-num-seqs 8" in document["flags"] and "--max-num-seqs 9" not in document["flags"]

    @pytest.mark.slow
    def test_equal_fleets_are_one_answer(self, plan):
        """A router before one replica chooses nothing; before two they differ."""
        routers = ["--router", "round-robin,kv-aware"]
        for rate, count in (("5", 1), ("40", 2)):
            document = plan(Service(), *routers, "--request-rate", rate, gpus="a100-80gb")
            assert len(document["candidates"]) == count

    @pytest.mark.slow
    def test_gpus_are_counted_where_one_has_no_price(self, plan, tmp_path):
        PRICED = {name: price for name, price in PRICES.items() if name != "h200"}
        (tmp_path / "few.json").write_text(json.dumps({"per_gpu_hour": PRICED}))
        document = plan(Service(), "--request-rate", "100", "--prices", str(tmp_path / "few.json"))
        first, other = document["candidates"]
        assert (document["currency"], document["gpus_without_price"]) == ("GPU-hours", ["h200"])
        assert [each["bill"]["per_hour"] for each in (first, other)] == [
            each["bill"]["gpus"] for each in (first, other)
        ]


class TestDivided:
    """A quarter of the replicas prefill."""

    def test_the_share_divides_every_fleet(self, plan):
        service = Service(saturated=2.0, known=0.99)
        flags = ["--request-rate", "100", "--prefill-replicas", "auto"]
        (found,) = plan(service, *flags, gpus="a100-80gb")["candidates"]
        size = smallest(service, "a100-80gb", 100)
        assert (found["fleet"]["replicas"], found["prefill_replicas"]) == (size, round(size / 4))
        assert service.of_stage("best_share") == [(FIRST, ceil(100 / service.of_one("a100-80gb")), "round-robin", 100)]
        clusters = {call[1] for call in service.of_stage("attained_share")}
        assert clusters and all(each.prefill_replicas == max(1, int(each.size / 4 + 0.5)) for each in clusters)
        # Its limit is sought above its own highest rate, and its known rates are asked for though replicas saturate.
        ((_, cluster, rate, highest),) = service.of_stage("detail")
        assert (cluster.size, rate, highest) == (size, 100, service.rates("a100-80gb", size)[0])
        assert len(service.of_stage("known_rate")) == 4 and found["known_rates"] == pytest.approx(
            [0.99 * each for each in found["fleet"]["rates"]]
        )

    @pytest.mark.parametrize(("prefill", "least"), [("1", 2), ("3", 4), ("auto", 2)])
    def test_the_smallest_has_both_kinds(self, plan, prefill, least):
        service = Service()
        flags = ["--request-rate", "1", "--prefill-replicas", prefill]
        (found,) = plan(service, *flags, gpus="a100-80gb")["candidates"]
        assert found["fleet"]["replicas"] == found["fleet"]["fewest"] == least

    def test_a_share_that_cannot_be_found_is_an_error(self, plan):
        service = Service(failing=("best_share", "a100-80gb"))
        flags = ["--request-rate", "30", "--prefill-replicas", "none,auto"]
        first, failed = plan(service, *flags, gpus="a100-80gb")["candidates"]
        assert (failed["error"], first["candidate"]["prefill_replicas"]) == ("it fails", "none")

    @pytest.mark.parametrize(
        "given", [["--prefill-replicas", "0"], ["--router", "best"], ["--router", "round-robin,none"]]
    )
    def test_what_is_no_fleet_is_refused_before_a_run(self, given, monkeypatch, capsys):
        service = Service()
        monkeypatch.setattr(tasks, "carry_out", service.carry_out)
        line = ["plan", "--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "ttft:500", "--num-prompts", "100"]
        assert status([*line, "--request-rate", "9", "--jobs", "1", *given]) == MISTAKE
        assert not service.calls and capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("flag", ["--prefill-replicas", "--router"])
    def test_without_a_rate_there_is_no_fleet(self, flag, capsys):
        value = {"--prefill-replicas": "1", "--router": "kv-aware"}[flag]
        line = ["plan", "--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "ttft:500", "--num-prompts", "100"]
        assert status([*line, flag, value]) == MISTAKE
        assert "is of a fleet, for a wanted rate; give --request-rate" in capsys.readouterr().err


class TestWithoutARate:
    """The rate that 90 % of other seeds take with one replica, and the price of its tokens."""

    def test_the_answer(self, plan):
        service = Service()
        document = plan(service)
        first, other = document["candidates"]
        assert (first["candidate"]["gpu"], document["wanted_request_rate"]) == ("h200", None)
        for found in (first, other):
            gpu = found["candidate"]["gpu"]
            rates = service.rates(gpu)
            sure = sorted(rates)[1]
            assert (found["request_rate"], found["seed_rates"]) == (sure, rates[:4])
            assert found["spread"] == pytest.approx(np.log(rates[:4]).std(ddof=1))
            assert "fleet" not in found and "known_rates" not in found and "least_replicas" not in found
            cost = found["bill"]
            assert (cost["replicas"], cost["gpus"], cost["per_hour"]) == (1, 1, PRICES[gpu])
            assert (
                cost["per_million"]["total"]
                == cost["full_per_million"]
                == pytest.approx(PRICES[gpu] / (0.0036 * sure * 60))
            )
            assert service.of_stage("detail", gpu) == [(FIRST, Cluster(), sure, rates[0])]

    def test_bursts_make_bounds(self, plan):
        service = Service(saturated=None, known=0.5)
        for found in plan(service)["candidates"]:
            gpu = found["candidate"]["gpu"]
            assert found["known_rates"] == [rate / 2 for rate in service.rates(gpu)[:4]]
            calls = service.of_stage("known_rate", gpu)
            expected = [(FIRST + place, Cluster(), rate, rate) for place, rate in enumerate(service.rates(gpu)[:4])]
            assert calls == expected

    def test_of_seeds_that_take_a_rate_it_is_asked_whether_its_run_is_a_load(self, plan, monkeypatch):
        """Of four seeds one takes no rate and another every rate."""
        rates = {3: 0.5, 4: inf, 5: 0.25, 6: 0.0}
        monkeypatch.setattr(Service, "of_one", lambda self, gpu, seed=FIRST: rates.get(seed, 0.4))
        monkeypatch.setitem(POWERS, "a100-80gb", -35)
        service = Service(saturated=None)
        (found,) = plan(service, gpus="a100-80gb")["candidates"]
        assert (found["request_rate"], found["spread"]) == (0.25, 0.0)
        assert {seed for seed, *_ in service.of_stage("known_rate")} == {3, 5}

    def test_a_replica_that_saturates_tells_its_rates(self, plan):
        service = Service(known=0.5)
        assert not any("known_rates" in found for found in plan(service)["candidates"])
        assert not service.of_stage("known_rate")

    def test_what_meets_at_every_rate_has_no_price(self, plan, monkeypatch):
        monkeypatch.setitem(POWERS, "a100-80gb", 700)
        monkeypatch.setattr(Service, "of_one", lambda self, gpu, seed=FIRST: inf if gpu == "a100-80gb" else 20.0)
        service = Service(saturated=None)
        first, every = plan(service)["candidates"]
        assert first["candidate"]["gpu"] == "h200" and "bill" not in every
        assert every["every_rate_meets"] and every["request_rate"] is None and every["seed_rates"] == [None] * 4
        assert service.of_stage("detail", "a100-80gb") == [(FIRST, Cluster(), inf, inf)]


class TestDay:
    """Steps of 40, 100 and 70 requests/s, of 60 s each."""

    def day(self, plan: Plan, service: Service, tmp_path: Path, rows: str = "0,40\n60,100\n120,70\n") -> dict[str, Any]:
        (tmp_path / "day.csv").write_text(f"start_s,request_rate\n{rows}")
        flags = ["--rate-curve", str(tmp_path / "day.csv"), "--startup-seconds", "20"]
        document = plan(service, *flags, gpus="a100-80gb")
        assert document["wanted_request_rate"] == 100
        return document["day"]

    @pytest.mark.slow
    def test_each_step_has_the_smallest_fleet(self, plan, tmp_path):
        service = Service()
        day = self.day(plan, service, tmp_path)
        sure = sorted(service.rates("a100-80gb"))[1]
        most = ceil(100 / sure)
        (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb"], {})
        likely = sure / uncertainty(candidate).decisive(0.9)
        assert likely < sure and [step["replicas"] for step in day["steps"]] == [
            ceil(40 / likely),
            most,
            ceil(70 / likely),
        ]
        assert day["constant_replicas"] == most and not day["rates_are_lower_bounds"]
        sizes = sorted({round(most * part / 9) for part in range(1, 9)} | {most})
        # The constant fleet takes the busiest step.
        takes = {size: size * likely for size in sizes} | {most: 100}
        assert day["rate_by_replicas"] == {str(size): pytest.approx(taken) for size, taken in takes.items()}
        sought = {
            call[1].size: call[4]
            for call in service.of_stage("highest_rate")
            if call[0] == FIRST and call[1].size < most
        }
        assert sought == {size: pytest.approx(100 * size / most) for size in sizes[:-1]}
        assert service.of_stage("full_load") == [(FIRST, Cluster(num_replicas=most), pytest.approx(most * sure))]
        assert day["autoscaler_targets"] == {
            "concurrency": 7,
            "kv_cache_usage": 0.5,
            "request_rate": pytest.approx(most * sure),
        }
        # An A100 costs 2 an hour.
        hours = sum(step["replicas"] for step in day["steps"]) / 60
        assert (day["replica_hours"], day["price"]) == pytest.approx((hours, 2 * hours))
        assert (day["constant_replica_hours"], day["constant_price"]) == pytest.approx((3 * most / 60, 6 * most / 60))
        assert [step["price"] for step in day["steps"]] == pytest.approx(
            [step["replicas"] / 30 for step in day["steps"]]
        )
        assert [step["constant_price"] for step in day["steps"]] == pytest.approx([most / 30] * 3)
        assert [(step["start_s"], step["end_s"]) for step in day["steps"]] == [(0, 60), (60, 120), (120, 180)]
        assert (day["startup_seconds"], day["requests"], day["attainment"]) == (20, 60 * 210, 0.9)
        assert day["attained"] == day["attained_by_constant_fleet"] == 0.95
        assert {call[0] for call in service.of_stage("served_day")} == {FIRST}
        assert {call[3] for call in service.of_stage("served_day")} == {
            (most,) * 3,
            tuple(step["replicas"] for step in day["steps"]),
        }

    @pytest.mark.slow
    def test_of_several_candidates_it_is_that_of_the_recommended_one(self, plan, tmp_path):
        service = Service()
        (tmp_path / "day.csv").write_text("start_s,request_rate\n0,40\n60,100\n")
        document = plan(service, "--rate-curve", str(tmp_path / "day.csv"), gpus="h200,a100-80gb")
        best, day = document["candidates"][0], document["day"]
        assert best["candidate"] == {"gpu": "a100-80gb"} and {
            call[1] for call in service.calls if call[0] == "served_day"
        } == {"a100-80gb"}
        assert day["constant_replicas"] == best["bill"]["replicas"] and day["startup_seconds"] == 120
        assert day["constant_price"] == pytest.approx(2 * day["constant_replica_hours"])

    @pytest.mark.slow
    def test_bursts_of_smaller_fleets_are_bounds(self, plan, tmp_path):
        """Their runs are loads up to 0.8 of the highest rates."""
        service = Service(saturated=None, known=0.8)
        day = self.day(plan, service, tmp_path)
        most = day["constant_replicas"]
        lowest = 0.8 * min(service.rates("a100-80gb", 1, 4))
        takes = {int(size): rate for size, rate in day["rate_by_replicas"].items()}
        assert day["rates_are_lower_bounds"]
        assert all(rate == pytest.approx(size * lowest) for size, rate in takes.items() if size < most)
        assert takes[most] == 100

    @pytest.mark.slow
    def test_what_fails_ends_it(self, plan, tmp_path, capsys):
        for stage in ("served_day", "full_load"):
            with pytest.raises(AssertionError):
                self.day(plan, Service(failing=(stage, "a100-80gb")), tmp_path)
            assert "it fails" in capsys.readouterr().err
