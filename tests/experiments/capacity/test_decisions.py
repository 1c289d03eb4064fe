"""Decisions of a plan on cases with known answers: what is bought, and what a search serves to decide it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runs import settings_of
from fragmeter.experiments.capacity import max_rate, split
from fragmeter.experiments.capacity.fleet import serve
from fragmeter.experiments.capacity.load import Drawn
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types import ticks
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Trace
from oracle import Limits, Pool
from ramp_cost import RampCost

GOAL = Goal(Objectives(ttft=1000))


class AnyLoad:
    """A load that is not served."""

    def draw(self, seed: int, replicas: int) -> AnyLoad:
        return self

    def at(self, rate: float) -> float:
        return rate


@st.composite
def peaks(draw: st.DrawFn) -> list[float]:
    """Rates of the divisions of a fleet: rising up to one of them, then falling."""
    highest = sorted(draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=60, unique=True)))
    left = draw(st.lists(st.booleans(), min_size=len(highest), max_size=len(highest)))
    rising = [rate for rate, is_left in zip(highest, left, strict=True) if is_left]
    falling = [rate for rate, is_left in zip(highest, left, strict=True) if not is_left]
    return [*rising, *falling[::-1]]


class TestSplit:
    @pytest.mark.slow
    @given(rates=peaks(), wanted=st.floats(1, 1e4))
    def test_the_share_is_that_of_the_best_division(self, rates, wanted):
        """Beside all divisions; of more than 16 replicas, those of 16."""
        replicas, tried = len(rates) + 1, min(len(rates) + 1, 16)
        rates = rates[: tried - 1]
        asked = []

        def highest(chosen, load, goal, seed, cluster, near, most):
            assert cluster.prefill_replicas + cluster.decode_replicas == tried and most is None
            asked.append((cluster.prefill_replicas, near))
            return rates[cluster.prefill_replicas - 1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split, "highest_rate", highest)
            share = split.best_share(settings(), AnyLoad(), GOAL, 0, replicas, "round-robin", wanted)
        assert rates[round(share * tried) - 1] == max(rates)
        # Each division is served once, at the rate that falls to so many replicas.
        assert len(asked) == len({prefill for prefill, _ in asked})
        assert all(near == pytest.approx(wanted * tried / replicas) for _, near in asked)

    @pytest.mark.slow
    @given(shares=peaks())
    def test_where_no_division_takes_a_rate_it_is_the_one_that_serves_most_requests_in_time(self, shares):
        shares = shares[:15]

        def check(chosen, rate, cluster, goal):
            return SloCheck(False, 10**6, shares[cluster.prefill_replicas - 1], {})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split, "highest_rate", lambda *_: 0.0)
            patch.setattr(split, "check_fleet", check)
            share = split.best_share(settings(), AnyLoad(), GOAL, 0, len(shares) + 1, "round-robin", 5.0)
        assert shares[round(share * (len(shares) + 1)) - 1] == max(shares)

    def test_shares_are_rounded_to_the_nearest_replica(self):
        found = [split.divided(size, "round-robin", "auto", 0.25).prefill_replicas for size in range(2, 13)]
        assert found == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
        # Half a replica rounds up, and one is left to decode.
        assert split.divided(3, "round-robin", "auto", 0.9).decode_replicas == 1


class TestScout:
    """Before the search of the first seed a part of its requests is served: an eighth, at least 100."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("requests", "part"), [(2400, 300), (801, 100), (240, 100), (60, 60)])
    def test_it_serves_a_part_and_the_search_starts_at_its_rate(self, requests, part, monkeypatch):
        searched, whole = [], max_rate._search

        def search(settings, drawn, goal, most, start, stride, step_cost):
            found = whole(settings, drawn, goal, most, start, stride, step_cost)
            searched.append((len(drawn.gaps), start, found.power))
            return found

        monkeypatch.setattr(max_rate, "_search", search)
        chosen, cost = one_server()
        max_rate.go_ahead(chosen, Even(requests), Goal(Objectives(ttft=400)), 0, cost)
        (scouted, _, near), (served, start, _) = searched
        assert (scouted, served, start) == (part, requests, near)


class Even:
    """Requests of one token each, with exponential gaps."""

    def __init__(self, n: int) -> None:
        self.n = n

    def draw(self, seed: int) -> Drawn:
        ones = np.ones(self.n, dtype=np.int64)
        return Drawn(Trace("even", ones, ones), np.random.default_rng(seed).exponential(size=self.n), None, None)


def one_server():
    """A server of one sequence at a time, which takes a tenth of a second for each."""
    chosen = settings_of("vllm-sosp23", Pool(64, 16), Limits(64, max_num_seqs=1))
    return chosen, RampCost(base_ticks=ticks.from_seconds(0.1))


def test_of_replicas_that_run_one_by_one_the_run_is_that_of_the_first():
    """Samples share blocks, so their replicas are served in turn: the first has requests 0, 3, 6, ..."""
    lengths = np.arange(20, 30)
    work = Workload("samples", np.arange(10) * ticks.PER_SECOND, lengths, np.full(10, 4), n=np.full(10, 2))
    found = serve(settings(policy="vllm-sosp23"), work, Cluster(num_replicas=3))
    assert found.run.workload.prompt_tokens.tolist() == [20, 23, 26, 29]
    assert sorted(found.times.index.tolist()) == [*range(10)]


PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "ttft:500", "tpot:50", "--jobs", "1"]
LOAD = ["--num-prompts", "100", "--seeds", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"), [([], "no rate is asked for"), (["--request-rate", "3"], "3 requests/s wanted")]
)
def test_a_plan_says_the_rate_that_it_is_asked_for(flags, said, capsys):
    assert status([*PLAN, *LOAD, *flags]) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert [text in printed for text in ("no rate is asked for", "3 requests/s wanted")] == [
        text == said for text in ("no rate is asked for", "3 requests/s wanted")
    ]


@pytest.mark.slow
def test_the_constant_fleet_of_a_day_is_that_of_its_busiest_step(tmp_path, capsys):
    rows = "".join(f"{600 + place},10\n" for place in range(400))
    (tmp_path / "short.csv").write_text(f"prompt_tokens,output_tokens\n{rows}")
    (tmp_path / "day.csv").write_text("start_s,request_rate\n0,20\n60,200\n120,20\n")
    flags = ["--trace", str(tmp_path / "short.csv"), "--num-prompts", "300", "--seeds", "1", "--startup-seconds", "20"]
    out = tmp_path / "day.json"
    assert status([*PLAN, *flags, "--rate-curve", str(tmp_path / "day.csv"), "--json", str(out)]) == DONE
    day = json.loads(out.read_text())["day"]
    sizes = [step["replicas"] for step in day["steps"]]
    assert sizes[0] < sizes[1] and day["constant_replicas"] == max(sizes)
    assert day["constant_price"] == pytest.approx(sum(step["constant_price"] for step in day["steps"]), rel=0.2)
