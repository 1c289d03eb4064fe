"""The parts of a plan on small cases, by hand or beside brute force; runs are made up, or a few steps long."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity import candidates as candidates_of_plan
from fragmeter.experiments.capacity import detail, least, split
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.confidence import capped, lower_limit, mean_rate
from fragmeter.experiments.capacity.prices import Prices, prices
from fragmeter.experiments.capacity.request import Aims
from fragmeter.experiments.capacity.what_if import changed_replicas
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim import settings
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.policy import Limits, Policy
from fragmeter.sim.types.errors import SettingError
from made_up_service import RateOnly
from trials import ended

GOAL = Goal(Objectives(ttft=500))


class TestShare:
    @pytest.mark.slow
    @given(st.lists(st.floats(0.001, 0.9), min_size=1, max_size=7), st.integers(0, 4), st.integers(0, 4))
    def test_any_rate_is_better_than_none_and_of_none_the_most_requests_in_time(self, rates, left, right):
        """Divisions at both ends take no rate; the nearer to those that do, the more requests meet the goal."""
        ordered = sorted(set(rates))
        takes = [0.0] * left + ordered + [0.0] * right
        met = [*range(left), *(0 for _ in ordered), *range(right)[::-1]]

        def check(chosen, rate, cluster, goal):
            return SloCheck(False, 8, met[cluster.prefill_replicas - 1], {})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split, "highest_rate", lambda *given: takes[given[4].prefill_replicas - 1])
            patch.setattr(split, "check_fleet", check)
            share = split.best_share(settings(), RateOnly(), GOAL, 0, len(takes) + 1, "round-robin", 5.0)
        assert takes[round(share * (len(takes) + 1)) - 1] == max(takes)

    @pytest.mark.parametrize(("replicas", "tried"), [(16, 15), (17, 15), (2, 1)])
    def test_at_most_sixteen_replicas_are_divided(self, replicas, tried, monkeypatch):
        sizes = set()

        def highest(*given):
            sizes.add(given[4].size)
            return float(given[4].prefill_replicas)

        monkeypatch.setattr(split, "highest_rate", highest)
        share = split.best_share(settings(), RateOnly(), GOAL, 0, replicas, "round-robin", 5.0)
        assert share == pytest.approx(tried / (tried + 1)) and sizes <= {tried + 1}


class TestChangedFleet:
    @pytest.mark.slow
    @given(
        st.integers(1, 60), st.sampled_from([1, 2, 8]), st.fractions(Fraction(1, 4), 4, max_denominator=40),
        st.fractions(1, 4, max_denominator=40),
    )  # fmt: skip
    def test_replicas_are_the_fewest_that_the_rate_needs(self, groups, engines, relative, margin):
        replicas, worse = groups * engines, relative > 1
        found = changed_replicas(replicas, engines, float(relative), float(margin))
        needed = replicas * relative / (margin if worse else 1)
        fewest = next(size for size in range(engines, 4 * replicas + engines + 1, engines) if size >= needed)
        assert found == (max(replicas, fewest) if worse else min(replicas, fewest))


class TestRatesOfSeeds:
    def test_infinite_rates_count_as_the_highest_finite_one(self):
        assert capped([inf, 4.0, 9.0]) == [9.0, 4.0, 9.0]
        assert mean_rate([inf, 3.0, 9.0]) == pytest.approx(243 ** (1 / 3))
        assert (mean_rate([inf, inf]), mean_rate([0.0, 5.0]), mean_rate([0.5])) == (inf, 0.0, pytest.approx(0.5))

    def test_seeds_are_doubled_up_to_48(self):
        search = lower_limit([5.0] * 4, 1.0, lambda *asked: asked, lambda *asked: pytest.fail("a rate is sought"))
        found, rounds = ended(search, lambda _: True)
        firsts = [(*asked[0], len(asked)) for asked in rounds]
        assert firsts == [(4, 5.0, 4), (8, 5.0, 8), (16, 5.0, 16), (32, 5.0, 16)]
        assert found == (5.0, 48, 0)


def run_of(rows: list[tuple[int, int, int, int]], block_size: int = 16, slots: int = 160) -> Any:
    """A run of these rows: ticks, waiting, running, and slots held; prompts of 20 tokens, and four places."""
    columns = dict(zip(("ticks", "waiting", "batch_size", "held"), np.array(rows).T, strict=True))
    log = SimpleNamespace(rows=columns, end_ticks=100, block_size=block_size, capacity_slots=slots)
    policy = Policy(Limits(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=100))
    replica = SimpleNamespace(policy=policy, num_blocks=10)
    return SimpleNamespace(log=log, replica=replica, workload=SimpleNamespace(prompt_tokens=np.array([10, 30])))


class TestWaiting:
    def test_a_prompt_and_one_more_block_are_room(self):
        """Prompts of 20 tokens have two blocks of 16, and a third is room: 48 free slots, and not 47."""
        rows = [
            (10, 1, 3, 112),
            (20, 1, 3, 113),
            (5, 1, 4, 113),
            (7, 2, 5, 0),
            (30, 0, 4, 160),
            (3, 9, 0, 160),
            (25, 1, 1, 0),
        ]
        assert detail.waiting_shares(run_of(rows)) == pytest.approx(
            {"max_num_seqs": 0.12, "memory": 0.23, "steps": 0.35}
        )

    def test_of_whole_blocks(self):
        """Of 20 tokens a block: one for the prompt, one more, 40 slots."""
        rows = [(10, 1, 3, 120), (20, 1, 3, 121)]
        found = detail.waiting_shares(run_of(rows, 20))
        assert (found["steps"], found["memory"]) == pytest.approx((0.1, 0.2))

    def test_a_run_without_time_has_no_shares(self):
        run = run_of([(0, 1, 1, 0)])
        run.log.end_ticks = 0
        assert set(detail.waiting_shares(run).values()) == {0.0}


def checks(monkeypatch: pytest.MonkeyPatch, meets: bool, missed: dict[str, int], preempted: int = 0) -> None:
    found = SloCheck(meets, 10, 10 - max(missed.values()), missed)
    monkeypatch.setattr(detail, "check_run", lambda run, goal: found)
    monkeypatch.setattr(detail, "check_times", lambda work, times, goal: found)
    monkeypatch.setattr(detail, "summary", lambda run: {"preemptions": {"recompute": preempted, "swap": 0}})


class TestLimit:
    @pytest.mark.parametrize(
        ("waits", "preempted", "cause"),
        [
            ((5, 5, 0), 0, "steps"),
            ((51, 49, 0), 0, "max_num_seqs"),
            ((49, 51, 0), 0, "memory"),
            ((10, 40, 50), 0, "steps"),
            ((10, 40, 50), 1, "memory"),
            ((0, 0, 0), 0, "steps"),
            ((0, 0, 0), 3, "memory"),
        ],
    )
    def test_more_than_half_of_the_wait_decides_and_else_preemptions(self, waits, preempted, cause, monkeypatch):
        checks(monkeypatch, False, {"ttft": 4, "tpot": 6}, preempted)
        shares = dict(zip(("max_num_seqs", "memory", "steps"), (each / 100 for each in waits), strict=True))
        monkeypatch.setattr(detail, "waiting_shares", lambda run: shares)
        assert detail.limit(None, GOAL) == detail.Bottleneck(
            "tpot", {"ttft": 0.4, "tpot": 0.6}, cause, preempted, shares
        )

    def test_a_run_that_meets_its_goal_misses_no_objective(self, monkeypatch):
        checks(monkeypatch, True, {"ttft": 1})
        assert detail.limit(run_of([(1, 0, 0, 0)]), GOAL).objective is None

    @pytest.mark.parametrize(
        ("missed", "meets", "objective", "cause"),
        [
            ({"ttft": 4, "tpot": 3}, False, "ttft", "prefill"),
            ({"ttft": 3, "tpot": 4}, False, "tpot", "decode"),
            ({"ttft": 1, "e2el": 0}, True, None, "decode"),
        ],
    )
    def test_of_a_divided_fleet(self, missed, meets, objective, cause, monkeypatch):
        checks(monkeypatch, meets, missed)
        beyond = SimpleNamespace(times=None, summary=lambda: {"preemptions": {"recompute": 2, "swap": 3}})
        shares = {name: number / 10 for name, number in missed.items()}
        assert detail.limit_of_split(beyond, None, GOAL) == detail.Bottleneck(objective, shares, cause, 5)

    @pytest.mark.parametrize(
        ("cause", "objective", "still", "relieved", "found", "runs"),
        [
            ("steps", None, 2, "steps", "steps", 1),
            ("max_num_seqs", None, 2, "steps", "max_num_seqs", 1),
            ("memory", None, 2, "steps", "memory", 2),
            ("memory", None, 3, "steps", "steps", 2),
            ("steps", "ttft", 2, "steps", "memory", 2),
            ("steps", "ttft", 3, "steps", "steps", 2),
            ("memory", "ttft", 3, "max_num_seqs", "max_num_seqs", 2),
            ("max_num_seqs", "ttft", 3, "steps", "max_num_seqs", 2),
            ("max_num_seqs", "ttft", 2, "steps", "memory", 2),
        ],
    )
    def test_memory_is_it_where_twice_the_blocks_cure_half_of_the_misses(
        self, cause, objective, still, relieved, found, runs, monkeypatch
    ):
        """Four of eight requests miss, and with 20 blocks in place of 10 this many."""
        blocks = []

        def simulate(chosen, work, cost):
            blocks.append(chosen.num_gpu_blocks_override)
            return run_of([(1, 0, 0, 0)])

        causes = iter([detail.Bottleneck(objective, {}, cause), detail.Bottleneck("ttft", {}, relieved)])
        shares = iter([SloCheck(False, 8, 4, {}), SloCheck(False, 8, 8 - still, {})])
        monkeypatch.setattr(detail, "compiled_cost", lambda _: None)
        monkeypatch.setattr(detail, "simulate", simulate)
        monkeypatch.setattr(detail, "limit", lambda run, goal: next(causes))
        monkeypatch.setattr(detail, "check_run", lambda run, goal: next(shares))
        chosen = settings(num_gpu_blocks_override=10)
        assert detail.limit_of(chosen, None, GOAL) == detail.Bottleneck(objective, {}, found)
        assert blocks == [10, 20][:runs]


class TestDetail:
    """Of three replicas at 12 requests/s."""

    def detail(
        self, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, rate: float = 12.0
    ) -> tuple[detail.Detail, list[Any]]:
        asked: list[Any] = []

        def serve(chosen, work, cluster):
            asked.append(work)
            whole = dict.fromkeys((*detail._RATES, *detail._TIMES), work) | {
                "median_tpot_ms": 0 if work == 3.0 else 50.0
            }
            ledger = {"buckets": {"free": 30.0, "cached": 10.0, "live": 60.0}, "paper_view": {}}
            whole |= {"refused": 0, "preemptions": {"a": 1, "b": 2}, "waste": {"mean_over_time_pct": ledger}}
            return SimpleNamespace(summary=lambda: whole, times="times", run="run", cache_worth=lambda: "worth")

        def saturation(chosen, found, times_of, *, most):
            asked.append(("most", most, times_of(chosen)))
            return "busy", None

        @dataclass
        class Load:
            times: Any = None

        monkeypatch.setattr(detail, "serve", serve)
        monkeypatch.setattr(detail, "saturation", saturation)
        monkeypatch.setattr(detail, "MOST_REQUESTS", 1000)
        monkeypatch.setattr(detail, "ServedLoad", SimpleNamespace(of=lambda run, work, size: Load(size)))
        monkeypatch.setattr(detail, "check_times", lambda work, times, goal: SloCheck(True, 10, 9, {"ttft": 1}))
        monkeypatch.setattr(detail, "limit_of", lambda chosen, work, goal: ("one", work))
        monkeypatch.setattr(detail, "limit_of_split", lambda served, work, goal: ("split", work))
        return detail.detail(settings(), RateOnly(), GOAL, 0, cluster, rate, 40.0), asked

    def test_each_number(self, monkeypatch):
        found, asked = self.detail(monkeypatch, Cluster(num_replicas=3))
        # At shares of the rate and at it, and once more to see how near it is to saturation, of up to 1,000 requests a replica.
        assert asked == [3.0, 6.0, 9.0, 12.0, 12.0, ("most", 3000, "times")]
        assert (found.attained, found.preemptions, found.kv_cache_pct) == (0.9, 3, 60.0)
        assert (found.load, found.near_saturation, found.metrics["request_throughput"]) == ("busy", None, 12.0)
        assert found.limit == ("one", pytest.approx(46.0)) and found.cache_worth == "worth"
        points = ((1.0, 0.0), (2.0, 20.0), (3.0, 20.0), (4.0, 20.0))
        assert found.curve == tuple(detail.Point(rate, user, 3 * rate) for rate, user in points)

    def test_of_a_divided_fleet(self, monkeypatch):
        found, asked = self.detail(monkeypatch, Cluster(prefill_replicas=1, decode_replicas=2))
        assert found.limit == ("split", pytest.approx(46.0)) and asked[-1] == pytest.approx(46.0)

    def test_of_all_requests_at_once(self, monkeypatch):
        found, asked = self.detail(monkeypatch, Cluster(), inf)
        assert found.curve == () and set(asked[:-1]) == {inf}


class Costs:
    """A step that prefills takes 5 ms and 1 us a pair, and much for every decode."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 10**13 * (decodes + decode_context) + 10**7 * prefill_tokens + 5 * 10**9 + 10**6 * prefill_pairs

    def swap_out_ticks(self, blocks: int) -> int:
        return blocks * 10**9

    def swap_in_ticks(self, blocks: int) -> int:
        return blocks * 2 * 10**9


class TestDataSheet:
    """Requests that read for 1, 2, ... 10 ms, and compute for 20, 18, ... 2 ms."""

    @pytest.mark.parametrize(
        ("attainment", "wanted", "replicas"),
        [
            # The cheapest nine of ten compute for 90 ms, which is 9 ms a request of the load; eight for 72 ms, and all for 110.
            (0.9, 1000.0, 9), (0.9, 1000.01, 10), (0.81, 1000.0, 9), (0.8, 1000.0, 8), (1.0, 1000.0, 11), (1.0, 1e-12, 1),
        ],
    )  # fmt: skip
    def test_the_fewest_replicas(self, attainment, wanted, replicas, monkeypatch):
        times = np.arange(1, 11) / 1000, np.arange(20, 0, -2) / 1000
        ideal = SimpleNamespace(seconds=lambda work: times)
        monkeypatch.setattr(least, "ideal_replica", lambda candidate: ideal)
        assert least.fewest(None, range(10), wanted, attainment) == replicas

    def test_where_all_need_too_many_the_cheapest_is_named(self):
        def answer(gpu: str, replicas: int, gpus: int) -> Any:
            launch = SimpleNamespace(num_gpus=gpus, gpu=SimpleNamespace(name=gpu))
            candidate = SimpleNamespace(started=SimpleNamespace(launch=launch), num_gpus=gpus)
            return SimpleNamespace(candidate=candidate, least_replicas=replicas, error="too many")

        priced = Prices("here", "EUR", {"a": 2.0, "b": 3.0}, {})
        answers = [answer("a", 2000, 8), answer("b", 5000, 2), answer("a", 9000, 1), answer("b", 3001, 2)]
        assert least.least_headline(answers, priced).startswith("Buy at least 9,000 x a: ")
        assert least.least_headline(answers[:2], priced).startswith("Buy at least 10,000 x b: ")
        assert (least.whole(10**15 - 1), least.whole(10**15)) == ("999,999,999,999,999", "1e+15")


class TestPrices:
    @pytest.mark.parametrize(
        ("price", "is_price"), [(0, False), (10**12, True), (10**12 + 1, False), (0.01, True), (True, False)]
    )
    def test_a_price_is_above_0_and_at_most_a_million_million(self, price, is_price, tmp_path):
        path = tmp_path / "prices.json"
        path.write_text(json.dumps({"per_gpu_hour": {"h200": price}}))
        if is_price:
            assert prices(path) == Prices(str(path), "USD", {"h200": price}, {})
        else:
            with pytest.raises(SettingError, match="h200 costs"):
                prices(path)

    def test_gpus_without_a_price_are_counted(self):
        known = Prices("here", "EUR", {"h200": 5.0, "l4": 1.0}, {"h200": "a list"})
        counted = known.for_gpus(["mi300x", "h200", "mi300x", "b200"])
        assert (counted.missing, counted.of("h200"), known.of("h200")) == (("mi300x", "b200"), 1.0, 5.0)
        assert known.for_gpus(["h200", "l4"]) is known
        assert known.as_dict() == {"h200": {"price": 5.0, "source": "a list"}, "l4": {"price": 1.0, "source": None}}


class TestCandidates:
    def test_another_policy_keeps_what_the_line_sets(self):
        line = {"max-num-seqs": "7", "max-num-batched-tokens": "512", "block-size": "32", "max-model-len": "512"}
        (set_,) = candidates(ServeLine("llama-3.1-8b", line), ["h200"], {"policy": ["vllm-v0"]})
        assert (set_.settings.max_num_seqs, set_.settings.max_num_batched_tokens, set_.settings.block_size) == (
            7,
            512,
            32,
        )
        plain, v0 = candidates(
            ServeLine("llama-3.1-8b", {"max-model-len": "512"}), ["h200"], {"policy": ["none", "vllm-v0"]}
        )
        slots = plain.settings.num_gpu_blocks_override * plain.settings.block_size
        assert v0.settings.num_gpu_blocks_override * 16 == slots and v0.settings.max_num_seqs is None
        assert v0.settings.max_num_batched_tokens is v0.settings.block_size is None

    def test_number_formats_count(self):
        axes = {"quantization": ["none", "fp8"], "kv_cache_dtype": ["auto", "fp8"]}
        found = candidates(ServeLine("llama-3.1-8b", {"max-model-len": "512"}), ["h200"], axes)
        assert [each.num_lossy for each in found] == [0, 1, 1, 2]
        (alone,) = candidates(ServeLine("llama-3.1-8b", {"quantization": "fp8", "max-model-len": "512"}), ["h200"], {})
        assert (alone.num_lossy, alone.engines, alone.router, alone.prefill_replicas) == (0, 1, "round-robin", "none")

    @pytest.mark.parametrize(("value", "flag"), [("true", True), ("false", False), ("none", None)])
    def test_switches(self, value, flag):
        line = ServeLine("llama-3.1-8b", {"max-model-len": "512"})
        (found,) = candidates(line, ["h200"], {"enable_prefix_caching": [value]})
        assert (found.settings.value("enable_prefix_caching") is False) == (flag is False)
        with pytest.raises(SettingError, match="must be true, false or none"):
            candidates(line, ["h200"], {"enable_prefix_caching": ["1"]})

    def test_at_most_so_many(self, monkeypatch):
        monkeypatch.setattr(candidates_of_plan, "MOST_POINTS", 4)
        line = ServeLine("llama-3.1-8b", {"max-model-len": "512"})
        assert len(candidates(line, ["h200", "a100-80gb"], {"max_num_seqs": ["8", "9"]})) == 4
        with pytest.raises(SettingError, match="more candidates than 4"):
            candidates(line, ["h200"], {"max_num_seqs": ["5", "6", "7", "8", "9"]})


@pytest.mark.parametrize(("seeds", "begins"), [(1, True), (2, False), (3, False), (4, True), (None, True)])
def test_one_seed_or_at_least_four_begin_a_plan(seeds, begins):
    if begins:
        assert Aims(seeds=seeds).seeds == seeds
    else:
        with pytest.raises(SettingError, match="too few to begin"):
            Aims(seeds=seeds)
