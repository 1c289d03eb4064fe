"""Fleets of a given size of a made-up service, as ``plan --check`` tests them, beside all 48 seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.experiments.capacity import tasks
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.confidence import Decision, mean_rate
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.planning import Planner
from fragmeter.experiments.cli.app import DONE, MISSED, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.errors import UserError
from fragmeter.traces import Pacing
from made_up_service import FIRST, Service, smallest


class TestOneFleet:
    """What ``plan --check`` asks for."""

    GOAL = Goal(Objectives(ttft=500))

    def asked(self, service: Service, replicas: int, monkeypatch: pytest.MonkeyPatch, wanted: float = 100.0) -> Any:
        monkeypatch.setattr(tasks, "carry_out", service.carry_out)
        load = Load(Inputs(requests=Requests(dataset="alpaca", num_prompts=100), pacing=Pacing(request_rate=wanted)))
        (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb"], {})
        seeds = range(FIRST, FIRST + 4)
        return Planner(load, self.GOAL, seeds, Workers(jobs=1), None, wanted).tested(candidate, replicas)

    @pytest.mark.parametrize("size", [8, 9, 10, 11, 12])
    def test_of_that_size(self, size, monkeypatch):
        service = Service()
        found = self.asked(service, size, monkeypatch)
        rates = service.rates("a100-80gb", size)
        assert (found.rates, found.sure_rate) == (tuple(rates[:4]), sorted(rates)[1])
        assert found.known_rates is None and found.least_replicas is None
        enough = sum(rate < 100 for rate in rates) <= 1
        assert (found.decision is Decision.ENOUGH) == enough == (size >= smallest(service, "a100-80gb", 100))

    def test_rates_of_bursts(self, monkeypatch):
        found = self.asked(Service(saturated=None, known=0.5), 12, monkeypatch)
        assert found.known_rates == pytest.approx([rate / 2 for rate in found.rates])

    def test_below_the_data_sheet_nothing_is_run(self, monkeypatch):
        service = Service()
        found = self.asked(service, 1, monkeypatch, 2e4)
        assert found[:5] == (Decision.TOO_FEW, (), (), 0.0, None)
        least = found.least_replicas
        assert 1 < least < 1024 and not service.calls
        # With as many it is, and with one fewer it is not.
        assert self.asked(service, least - 1, monkeypatch, 2e4).least_replicas == least and not service.calls
        assert self.asked(service, least, monkeypatch, 2e4).shares and service.of_stage("go_ahead") == [(FIRST,)]
        assert self.asked(service, 1, monkeypatch, 1e9).least_replicas > 1024

    def test_its_runs_fill_its_replicas(self, monkeypatch):
        """A replica has 600 requests in flight at its highest rate: its runs have ten times as many."""
        service, counts = Service(in_flight=600), {}

        def carry_out(name, asked, load, goal):
            counts[asked.work.__name__] = load.num_prompts()
            return service.carry_out(name, asked, load, goal)

        monkeypatch.setattr(tasks, "carry_out", carry_out)
        load = Load(Inputs(requests=Requests(dataset="alpaca"), pacing=Pacing(request_rate=9.0)))
        (candidate,) = candidates(ServeLine("llama-3.1-8b", {}), ["a100-80gb"], {})
        planner = Planner(load, self.GOAL, range(FIRST, FIRST + 1), Workers(jobs=1), None, 9.0)
        assert planner.tested(candidate, 1).decision is Decision.ENOUGH
        assert counts == {"go_ahead": 5000, "attained_share": 6000, "highest_rate": 6000}

    @pytest.mark.parametrize("stage", ["go_ahead", "attained_share", "highest_rate"])
    def test_what_fails_is_said(self, stage, monkeypatch):
        with pytest.raises(UserError, match="it fails"):
            self.asked(Service(failing=(stage, "a100-80gb")), 11, monkeypatch)


class TestChecks:
    """``plan --check`` of 100 requests/s, on the fleets of a made-up service."""

    @pytest.fixture
    def check(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
        def run(service: Service, replicas: int, rate: float = 100.0) -> dict[str, Any]:
            monkeypatch.setattr(tasks, "carry_out", service.carry_out)
            path, out = tmp_path / "services.toml", tmp_path / "found.json"
            path.write_text(
                '[[service]]\nname = "one"\nserve = "vllm serve llama-3.1-8b"\ngpu = "a100-80gb"\ndataset = "alpaca"\n'
                f'num_prompts = 100\nrequest_rate = {rate}\ngoodput = ["ttft:500"]\nreplicas = {replicas}\n'
            )
            line = ["plan", "--check", str(path), "--jobs", "1", "--seed", str(FIRST), "--json", str(out)]
            code, document = status(line), json.loads(out.read_text())
            (found,) = document["services"]
            assert document["meets"] == found["meets"] == (code == DONE) and code in (DONE, MISSED)
            return found

        return run

    @pytest.mark.parametrize(("size", "result"), [(9, "misses"), (10, "misses"), (11, "meets"), (20, "meets")])
    def test_a_fleet_meets_them_if_all_but_one_of_48_seeds_do(self, size, result, check):
        service = Service()
        found = check(service, size)
        rates = service.rates("a100-80gb", size)
        mean = float(np.exp(np.log(rates[:4]).mean()))
        assert (found["result"], found["meets"]) == (result, sum(rate < 100 for rate in rates) <= 1)
        assert found["shares"][:4] == [min(1.0, 0.9 * rate / 100) for rate in rates[:4]]
        assert (found["sure_rate"], found["highest_rate"]) == (sorted(rates)[1], pytest.approx(mean))
        assert found["headroom"] == pytest.approx(mean / 100 - 1)
        assert (found["request_rate"], found["replicas"]) == (100, size)
        assert not found["is_burst"] and not found["highest_rate_is_bound"] and found["least_replicas"] is None

    @pytest.mark.parametrize(("known", "is_burst"), [(0.9, False), (0.4, True)])
    def test_a_burst_at_the_rate_leaves_it_open(self, known, is_burst, check):
        """Twenty replicas take 199 requests/s in bursts."""
        service = Service(saturated=None, known=known)
        found = check(service, 20)
        rates = service.rates("a100-80gb", 20)
        assert (found["is_burst"], found["result"]) == (is_burst, "open" if is_burst else "meets")
        assert found["highest_rate_is_bound"] and found["sure_rate"] == (None if is_burst else sorted(rates)[1])
        assert found["highest_rate"] == pytest.approx(max(100.0, known * mean_rate(rates[:4])))

    def test_a_burst_that_misses_is_decided(self, check):
        found = check(Service(saturated=None, known=0.5), 5)
        assert (found["result"], found["is_burst"], found["highest_rate_is_bound"]) == ("misses", False, True)
        assert found["highest_rate"] == pytest.approx(mean_rate(Service().rates("a100-80gb", 5)[:4]))

    def test_a_rate_that_is_just_known_is_no_burst(self, check):
        """Of the first four seeds the lowest takes exactly the wanted rate as a load."""
        lowest = min(Service().rates("a100-80gb", 20, 4))
        found = check(Service(saturated=None, known=100 / lowest), 20)
        assert min(100 / lowest * rate for rate in Service().rates("a100-80gb", 20, 4)) == 100
        assert not found["is_burst"]
