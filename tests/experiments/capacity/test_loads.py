"""``plan --loads``: several loads on one fleet, each with its own objectives, and models with a fleet each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.capacity.chance import SCALE_WEIGHTS, Chance, all_enough
from fragmeter.experiments.capacity.loads import by_model
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.slo_check import Goal, Seen, check_run, check_slo, judged
from fragmeter.sim import Settings, simulate
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND
from fragmeter.sim.workload.workload import Workload

CHAT = {"name": "chat", "input_len": 300, "output_len": 40, "request_rate": 9, "goodput": ["ttft:500", "tpot:60"]}
LONG = {"name": "long", "input_len": 3000, "output_len": 100, "request_rate": 1, "goodput": ["e2el:60000"]}
SETTINGS = Settings(model="llama-3.1-8b", gpu="h100-80gb", num_gpu_blocks_override=4000)
LINE = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--seeds", "1", "--jobs", "1"]


def written(folder: Path, *tables: dict) -> Path:
    path = folder / "loads.toml"
    lines = ["[[load]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items()) for each in tables]
    path.write_text("\n".join(lines))
    return path


def shared(folder: Path, *tables: dict):
    [found] = by_model(written(folder, *tables), None)
    return found


class TestDraw:
    def test_a_load_keeps_its_requests_and_its_gaps_whatever_is_beside_it(self, tmp_path):
        drawn_chat = {**CHAT, "random_cv": 0.5}
        beside = shared(tmp_path, drawn_chat, LONG).load(SETTINGS, None).draw(7)
        # The same share of the rate beside another load.
        other = shared(tmp_path, drawn_chat, {**LONG, "input_len": 50}).load(SETTINGS, None).draw(7)
        for each in (beside, other):
            assert len(each.gaps) == 5000 and abs(each.gaps.mean() - 1) < 0.05
            assert abs((each.load == 0).mean() - 0.9) < 0.02
        assert (beside.load == other.load).all() and (beside.gaps == other.gaps).all()
        chat = beside.load == 0
        assert (beside.trace.prompt_tokens[chat] == other.trace.prompt_tokens[chat]).all()
        assert set(beside.trace.prompt_tokens[~chat]) == {3000} and set(other.trace.prompt_tokens[~chat]) == {50}

    def test_each_load_arrives_at_its_own_rate(self, tmp_path):
        load = shared(tmp_path, CHAT, LONG).load(SETTINGS, None)
        assert load.pacing.rate == 10
        for rate in (10.0, 40.0):
            work = load.draw(3).at(rate)
            span_s = work.arrival_ticks[-1] / PER_SECOND
            rates = np.bincount(work.load) / span_s
            assert rates == pytest.approx([0.9 * rate, 0.1 * rate], rel=0.1)
        first, second = (load.draw(3).at(rate).load for rate in (1.0, 100.0))
        assert (first == second).all()

    def test_loads_have_random_numbers_of_their_own(self, tmp_path):
        """Twins with one stream would always arrive together."""
        twin = {**CHAT, "name": "twin"}
        work = shared(tmp_path, CHAT, twin).load(SETTINGS, None).draw(0).at(10.0)
        one, other = (work.arrival_ticks[work.load == place] for place in (0, 1))
        assert len(np.intersect1d(one, other)) == 0

    def test_what_one_load_declares_alone_is_left_out(self, tmp_path):
        work = shared(tmp_path, CHAT, LONG).load(SETTINGS, None).draw(0).at(1.0)
        assert (work.max_tokens == work.output_tokens).all() and work.ignore_eos.all()
        drawn = {**LONG, "dataset": "alpaca"}
        del drawn["input_len"], drawn["output_len"]
        work = shared(tmp_path, CHAT, drawn).load(SETTINGS, None).draw(0).at(1.0)
        assert work.max_tokens is None and work.ignore_eos is None


class TestGoal:
    def work(self, load: list[int]) -> Workload:
        n = len(load)
        return Workload("w", np.zeros(n), np.ones(n), np.full(n, 2), load=np.array(load))

    def test_a_rare_load_is_not_outvoted(self):
        """Of 100 requests 80 count; the 8 of the rare load miss, which is a tenth of all of them."""
        load = [1 if place % 10 == 5 else 0 for place in range(100)]
        first = np.array([200 if each else 1 for each in load]) * PER_MS
        seen = Seen(first, first + PER_MS, np.ones(100, dtype=bool))
        limits = (("many", objectives(["ttft:100"])), ("rare", objectives(["ttft:100"])))
        pooled = judged(self.work([0] * 100), Goal(limits[0][1], 0.9), seen, over=True)
        assert pooled.meets and pooled.attained == 0.9
        apart = judged(self.work(load), Goal(limits[0][1], 0.9, limits), seen, over=True)
        assert (apart.meets, apart.load, apart.counted, apart.met) == (False, "rare", 8, 0)
        lenient = (limits[0], ("rare", objectives(["ttft:300"])))
        assert judged(self.work(load), Goal(limits[0][1], 0.9, lenient), seen, over=True).attained == 1

    def test_a_run_is_judged_as_each_load_by_hand(self, tmp_path):
        """And a run that ends as soon as it is certain has the outcome of the whole one."""
        found, outcomes = shared(tmp_path, CHAT, LONG), set()
        load, goal = found.load(SETTINGS, 1000), found.goal(0.9)
        for rate in (5.0, 20.0, 28.0, 34.0, 45.0, 200.0):
            work = load.draw(0).at(rate)
            run = simulate(SETTINGS, work)
            times, ok = request_times(run), []
            counted = (times.index >= 100) & (times.index < 900)
            taken = times.finish_ticks - times.first_token_ticks
            tpot = taken / (times.output_tokens - 1) / PER_MS
            for place, meets in enumerate(((times.ttft_ms <= 500) & (tpot <= 60), times.e2el_ms <= 60_000)):
                rows = counted & (work.load[times.index] == place)
                ok.append(meets[rows].mean())
            whole = check_run(run, goal)
            assert whole.attained == pytest.approx(min(ok)) and whole.meets == (min(ok) >= 0.9)
            assert check_slo(SETTINGS, work, goal).meets == whole.meets
            outcomes.add(whole.meets)
        assert outcomes == {True, False}

    def test_limits_are_scaled_in_every_load(self):
        goal = Goal(
            objectives(["ttft:100"]), 0.9, (("a", objectives(["ttft:100", "tpot:10"])), ("b", objectives(["e2el:5"])))
        )
        assert str(goal.scaled(0.5)) == "a ttft:50 tpot:5, b e2el:2.5"


def planned(path: Path, *more: str) -> dict:
    target = path.parent / "plan.json"
    assert status([*LINE, "--num-prompts", "1000", "--loads", str(path), *more, "--json", str(target)]) == DONE
    return json.loads(target.read_text())


@pytest.mark.slow
def test_an_objective_of_a_rare_load_decides(tmp_path, capsys):
    """A tenth of the requests with an objective that no request meets would pass among all requests."""
    lenient = planned(written(tmp_path, CHAT, LONG))
    assert lenient["recommendation"].startswith("Buy 1 x h100-80gb for 10 requests/s")
    assert lenient["goal"]["loads"] == {"chat": {"ttft": 500, "tpot": 60}, "long": {"e2el": 60000}}
    assert set(lenient["candidates"][0]["attained_by_load"]) == {"chat", "long"}
    strict = planned(written(tmp_path, CHAT, {**LONG, "goodput": ["ttft:0.001"]}))
    assert strict["recommendation"].startswith("Buy none of these")
    assert "alone on the replica 0.0% of the requests do" in strict["recommendation"]


@pytest.mark.slow
def test_models_have_a_fleet_each_and_one_bill(tmp_path, capsys):
    path = written(tmp_path, CHAT, {**LONG, "model": "qwen3-14b"})
    out = tmp_path / "out"
    both = planned(path, "--out", str(out))
    plans = both["plans"]
    assert [*plans] == ["llama-3.1-8b", "qwen3-14b"]
    bills = [each["candidates"][0]["bill"]["per_hour"] for each in plans.values()]
    assert f": {sum(bills):,.2f} USD/h together." in both["recommendation"]
    assert capsys.readouterr().out.startswith("Buy 1 x h100-80gb for llama-3.1-8b, 1 x h100-80gb for qwen3-14b")
    alone = planned(written(tmp_path, CHAT))
    assert alone["candidates"][0]["bill"] == plans["llama-3.1-8b"]["candidates"][0]["bill"]
    assert all((out / name / "plan.html").exists() for name in plans)


def chance(by_scale: tuple[float, ...]) -> Chance:
    return Chance(1, 0.0, by_scale, (1.0,), (1.0,))


def test_the_probability_of_all_fleets_has_one_quantile_of_the_step_times():
    """Fleets that miss at the same scales are enough together as often as one; of independent ones it is the product."""
    same = chance((1.0, 1.0, 1.0, 0.5, 0.0))
    alone = sum(w * c for w, c in zip(SCALE_WEIGHTS, same.by_scale, strict=True)) / 10
    assert all_enough([same]) == pytest.approx(alone)
    sure = chance((1.0,))
    assert all_enough([same, sure]) == pytest.approx(alone)
    draws = chance((0.5,))
    assert all_enough([draws, draws]) == 0.25
    steps = chance((1.0, 1.0, 1.0, 1.0, 0.0))
    assert all_enough([steps, steps]) == all_enough([steps]) == 0.9


@pytest.mark.parametrize(
    ("tables", "more", "says"),
    [
        ([{**CHAT, "goodput": ["ttfs:3"]}], [], "load chat: goodput = 'ttfs:3': must be KEY:MILLISECONDS"),
        ([CHAT, CHAT], [], "has two loads of the name chat; rename one"),
        ([{**CHAT, "serve": "x"}], [], "load chat, serve = 'x'"),
        ([], [], "has no loads; give a table [[load]] for each"),
        ([{k: v for k, v in CHAT.items() if k != "request_rate"}], [], "load chat: request_rate: its load has no arrivals"),
        ([CHAT, LONG], ["--goodput", "ttft:5"], "has the loads and objectives; leave out --goodput"),
        ([CHAT, LONG], ["--request-rate", "5"], "has the loads and objectives; leave out --request-rate"),
        ([CHAT, LONG], ["--input-len", "5"], "has the loads and objectives; leave out --input-len"),
        ([CHAT, {**LONG, "request_rate": 0.1}], ["--num-prompts", "500"], "must be 9,100 or more: 100 of long"),
        ([{**CHAT, "random_prefix_len": 30}, LONG], [], "has prompts that share prefixes"),
        ([CHAT, {**LONG, "trace": "none.csv", "input_len": None, "output_len": None}], [], "none.csv"),
        ([CHAT, {**LONG, "model": "opt-13b"}], ["--serve", "vllm serve opt-13b"], "is of one model, and"),
    ],
)  # fmt: skip
def test_mistakes_name_their_load(tables, more, says, tmp_path, capsys):
    path = written(tmp_path, *({k: v for k, v in each.items() if v is not None} for each in tables))
    assert status([*LINE, "--loads", str(path), *more]) == MISTAKE
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
