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
from fragmeter.experiments.capacity import day, detail, least, preemption, questions, split
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.confidence import Kind, capped, lower_limit, mean_rate
from fragmeter.experiments.capacity.day import Day, replicas_for, schedule_of, sizes_below
from fragmeter.experiments.capacity.load import DEFAULT_PROMPTS, Load, drawn_rows, traced_gaps_s
from fragmeter.experiments.capacity.prices import Prices, prices
from fragmeter.experiments.capacity.questions import Subject
from fragmeter.experiments.capacity.search import Aims
from fragmeter.experiments.capacity.sensitivity import Change, effect_of, influences
from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim import Workload, settings
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import Pacing, Trace, stream
from fragmeter.traces.arrivals.pacing import unit_gaps

GOAL = Goal(Objectives(ttft=500))


class RateOnly:
    """A load that is not served: at a rate it is the rate."""

    def draw(self, seed: int, replicas: int = 1) -> RateOnly:
        return self

    def at(self, rate: float) -> float:
        return rate


class TestShare:
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


class TestEffect:
    @given(
        st.integers(1, 60), st.sampled_from([1, 2, 8]), st.fractions(Fraction(1, 4), 4, max_denominator=40),
        st.fractions(1, 4, max_denominator=40), st.booleans(),
    )  # fmt: skip
    def test_replicas_are_the_fewest_that_the_rate_needs(self, groups, engines, relative, margin, worse):
        replicas = groups * engines
        found = effect_of(0.9, float(relative), float(margin), replicas, engines, worse=worse)
        needed = replicas * relative / (margin if worse else 1)
        fewest = next(size for size in range(engines, 4 * replicas + engines + 1, engines) if size >= needed)
        assert found.replicas == (max(replicas, fewest) if worse else min(replicas, fewest))
        assert (found.bill, found.percent) == (float(relative), pytest.approx(100 * (float(relative) - 1)))

    def test_what_no_rate_meets_has_none(self):
        assert effect_of(1.1, inf, 1.0, 3, worse=True).replicas is None
        assert effect_of(1.1, inf, 1.0, 3, worse=True).percent is None

    def test_the_price_changes_no_fleet_and_all_are_a_tenth(self):
        price, wanted = influences({}, 10.0, 1.0, 3, 3)
        assert (price.lower.factor, price.higher.factor) == pytest.approx((0.9, 1.1))
        assert (price.lower.bill, price.higher.bill) == pytest.approx((0.9, 1.1))
        assert (price.lower.replicas, price.higher.replicas) == (3, 3)
        assert (wanted.lower.replicas, wanted.higher.replicas) == (3, 6)
        assert (price.name, price.label, price.range) == ("price of a GPU", "price of a GPU", pytest.approx(0.2))

    def test_a_single_side_counts_twice(self):
        slower, *_ = influences({Change("step time", 1.1): 5.0}, 10.0, 1.0, None)
        assert (slower.lower, slower.higher.bill, slower.range) == (None, 2.0, 2.0)
        _, faster = influences({Change("step time", 1.1): 10.5}, 10.0, 1.0, None)
        assert faster.range == pytest.approx(2 * (1 - 10 / 10.5))


class TestRatesOfSeeds:
    def test_infinite_rates_count_as_the_highest_finite_one(self):
        assert capped([inf, 4.0, 9.0]) == [9.0, 4.0, 9.0]
        assert mean_rate([inf, 3.0, 9.0]) == pytest.approx(243 ** (1 / 3))
        assert (mean_rate([inf, inf]), mean_rate([0.0, 5.0]), mean_rate([0.5])) == (inf, 0.0, pytest.approx(0.5))

    def test_seeds_are_doubled_up_to_48(self):
        steps = lower_limit([5.0] * 4, 1.0)
        rounds = [next(steps)]
        with pytest.raises(StopIteration) as ended:
            while True:
                rounds.append(steps.send([True] * len(rounds[-1].seeds)))
        assert [(each.kind, *each.seeds[:1], len(each.seeds), each.rate) for each in rounds] == [
            (Kind.MEETS, 4, 4, 5.0), (Kind.MEETS, 8, 8, 5.0), (Kind.MEETS, 16, 16, 5.0), (Kind.MEETS, 32, 16, 5.0),
        ]  # fmt: skip
        assert ended.value.value == (5.0, 48, 0)


def run_of(rows: list[tuple[int, int, int, int]], block_size: int = 16, slots: int = 160) -> Any:
    """A run of these rows: ticks, waiting, running, and slots held; prompts of 20 tokens, and four places."""
    columns = dict(zip(("ticks", "waiting", "batch_size", "held"), np.array(rows).T, strict=True))
    log = SimpleNamespace(rows=columns, end_ticks=100, block_size=block_size, capacity_slots=slots)
    replica = SimpleNamespace(policy=SimpleNamespace(limits=SimpleNamespace(max_num_seqs=4)), num_blocks=10)
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
        assert detail.limit(None, GOAL) == {
            "objective": "tpot", "missed": {"ttft": 0.4, "tpot": 0.6}, "cause": cause, "preemptions": preempted,
            "waiting": shares,
        }  # fmt: skip

    def test_a_run_that_meets_its_goal_misses_no_objective(self, monkeypatch):
        checks(monkeypatch, True, {"ttft": 1})
        assert detail.limit(run_of([(1, 0, 0, 0)]), GOAL)["objective"] is None

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
        expected = {"objective": objective, "missed": shares, "cause": cause, "preemptions": 5, "waiting": {}}
        assert detail.limit_of_split(beyond, None, GOAL) == expected

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

        causes = iter([{"cause": cause, "objective": objective}, {"cause": relieved, "objective": "ttft"}])
        shares = iter([SloCheck(False, 8, 4, {}), SloCheck(False, 8, 8 - still, {})])
        monkeypatch.setattr(detail, "compiled_cost", lambda _: None)
        monkeypatch.setattr(detail, "simulate", simulate)
        monkeypatch.setattr(detail, "limit", lambda run, goal: next(causes))
        monkeypatch.setattr(detail, "check_run", lambda run, goal: next(shares))
        chosen = settings(num_gpu_blocks_override=10)
        assert detail.limit_of(chosen, None, GOAL) == {"cause": found, "objective": objective}
        assert blocks == [10, 20][:runs]


class TestDetail:
    """Of three replicas at 12 requests/s."""

    def detail(
        self, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, rate: float = 12.0
    ) -> tuple[dict[str, Any], list[Any]]:
        asked: list[Any] = []

        def serve(chosen, work, cluster):
            asked.append(work)
            whole = dict.fromkeys((*detail._RATES, *detail._TIMES), work) | {
                "median_tpot_ms": 0 if work == 3.0 else 50.0
            }
            ledger = {"buckets": {"free": 30.0, "cached": 10.0, "live": 60.0}, "paper_view": {}}
            whole |= {"refused": 0, "preemptions": {"a": 1, "b": 2}, "waste": {"mean_over_time_pct": ledger}}
            return SimpleNamespace(summary=lambda: whole, times="times", run="run")

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
        assert (found["attained"], found["preemptions"], found["kv_cache_pct"]) == (0.9, 3, 60.0)
        assert (found["load"], found["near_saturation"], found["request_throughput"]) == ("busy", None, 12.0)
        assert found["limit"] == ("one", pytest.approx(46.0))
        assert found["curve"] == [
            {"request_rate": rate, "tokens_per_s_per_user": user, "p90_ttft_ms": 3 * rate}
            for rate, user in ((1.0, 0.0), (2.0, 20.0), (3.0, 20.0), (4.0, 20.0))
        ]

    def test_of_a_divided_fleet(self, monkeypatch):
        found, asked = self.detail(monkeypatch, Cluster(prefill_replicas=1, decode_replicas=2))
        assert found["limit"] == ("split", pytest.approx(46.0)) and asked[-1] == pytest.approx(46.0)

    def test_of_all_requests_at_once(self, monkeypatch):
        found, asked = self.detail(monkeypatch, Cluster(), inf)
        assert found["curve"] == [] and set(asked[:-1]) == {inf}


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=9)


class TestDay:
    @given(SPANS, st.lists(st.integers(0, 120), min_size=2, max_size=6, unique=True))
    def test_requests_in_the_system_are_summed_over_time(self, spans, edges):
        """Each request counts in each span for as long as it is there."""
        times = SimpleNamespace(
            arrival_ticks=np.array([begin for begin, _ in spans]), finish_ticks=np.array([sum(each) for each in spans])
        )
        edges = sorted(edges)
        expected = [
            sum(overlap((begin, begin + length), span) for begin, length in spans) for span in zip(edges, edges[1:])
        ]
        assert day._held(times, np.array(edges)).tolist() == expected

    @given(
        st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(0, 12), st.integers(0, 40),
        st.lists(st.integers(0, 45), min_size=12, max_size=12),
    )  # fmt: skip
    def test_replicas_are_paid_for_in_the_step_and_after_the_day_in_the_last(self, sizes, startup, end, finishes):
        one = Day((0.0, 10.0, 20.0), (1.0, 1.0, 1.0), 30.0)
        schedule = schedule_of(one, sizes, startup)
        lives = schedule.lifetimes
        finishes = [finishes[place % 12] * PER_SECOND for place in range(len(lives))]
        run = SimpleNamespace(runs=finishes, end_ticks=end * PER_SECOND)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(day, "request_times", lambda part: SimpleNamespace(finish_ticks=np.array([part])))
            found = day._paid_ticks(run, schedule, [0, 10 * PER_SECOND, 20 * PER_SECOND, 30 * PER_SECOND])
        last = max(30, end) * PER_SECOND
        steps = [(0, 10 * PER_SECOND), (10 * PER_SECOND, 20 * PER_SECOND), (20 * PER_SECOND, last)]
        spans = schedule.paid_spans(finishes, last)
        assert found == [sum(overlap(span, step) for span in spans) for step in steps]

    @given(
        st.dictionaries(st.integers(1, 29), st.floats(1, 9), max_size=4), st.integers(1, 30), st.floats(1, 9),
        st.lists(st.floats(0, 1), min_size=1, max_size=5),
    )  # fmt: skip
    def test_a_step_has_the_smallest_fleet_that_takes_its_rate(self, of_one, most, last, shares):
        """Between two sizes a replica takes what lies between; a larger fleet takes no less than a smaller one."""
        known = {size: rate for size, rate in of_one.items() if size < most} | {most: last}

        def of(size: int) -> float:
            below = max((each for each in known if each <= size), default=min(known))
            above = min(each for each in known if each >= size)
            if below >= above:
                return known[above]
            return known[below] + (known[above] - known[below]) * (size - below) / (above - below)

        takes = [max(of(each) * each for each in range(1, size + 1)) for size in range(1, most + 1)]
        rates = [share * takes[-1] * 0.999999 for share in shares]
        found = replicas_for(rates, {size: size * rate for size, rate in known.items()}, most)
        assert found == [next(size for size, able in enumerate(takes, 1) if able >= rate) for rate in rates]

    def test_sizes_below(self):
        assert (sizes_below(90), sizes_below(2), sizes_below(1)) == ([10, 20, 30, 40, 50, 60, 70, 80], [1], [])

    def test_targets_are_those_of_the_middle_of_the_arrivals(self, monkeypatch):
        """Twelve requests arrive 10 ticks apart, and each takes longer: between the fourth and the tenth on two replicas."""
        arrivals = np.arange(12) * 10
        times = SimpleNamespace(arrival_ticks=arrivals[::-1], finish_ticks=(arrivals + arrivals // 3 + 5)[::-1])
        fleet = SimpleNamespace(runs=(0.25, 0.75))
        monkeypatch.setattr(day, "ClusterRun", SimpleNamespace)
        monkeypatch.setattr(day, "serve", lambda *_: SimpleNamespace(run=fleet, times=times))
        monkeypatch.setattr(day, "pool_use", lambda run: SimpleNamespace(mean_usage=run))
        found = day.full_load(settings(), RateOnly(), GOAL, 0, Cluster(num_replicas=2), 5.0)
        spans = zip(times.arrival_ticks.tolist(), times.finish_ticks.tolist(), strict=True)
        assert found == {
            "concurrency": pytest.approx(sum(overlap(span, (30, 90)) for span in spans) / 60 / 2), "kv_cache_usage": 0.5
        }  # fmt: skip

    def test_a_day_of_two_steps_by_hand(self, monkeypatch):
        """Two requests in the first 10 s and one in the next; one takes 5 s, one is there from the 8th to the 12th, and one takes 10 s,
        which misses. The first step has one replica, the second two."""
        arrivals = np.array([0, 8, 15]) * PER_SECOND
        work = Workload("three", arrivals, np.full(3, 9), np.full(3, 2))
        finish = np.array([5, 12, 25]) * PER_SECOND
        times = SimpleNamespace(
            index=np.array([2, 0, 1]), arrival_ticks=arrivals[[2, 0, 1]], finish_ticks=finish[[2, 0, 1]]
        )
        goal = SimpleNamespace(objectives=SimpleNamespace(met=lambda times: {"all": np.array([False, True, True])}))
        parts = [SimpleNamespace(log=SimpleNamespace(rows={"ticks": [1] * size})) for size in (1, 1, 0)]
        asked = []

        def simulate_cluster(chosen, work, cluster, cost, *, schedule):
            asked.append((cluster, schedule.sizes, schedule.startup_ticks))
            return SimpleNamespace(runs=parts, end_ticks=25 * PER_SECOND)

        uses = iter([([2.0, 3.0], [4.0, 0.0], [0.5, 0.9]), ([1.0, 0.0], [2.0, 0.0], [0.25, 0.75])])
        names = ("used_ticks", "busy_ticks", "peak")
        monkeypatch.setattr(day, "compiled_cost", lambda _: None)
        monkeypatch.setattr(day, "simulate_cluster", simulate_cluster)
        monkeypatch.setattr(day, "cluster_times", lambda run: times)
        monkeypatch.setattr(
            day,
            "usage_over_spans",
            lambda part, edges: SimpleNamespace(
                **{name: np.array(use) for name, use in zip(names, next(uses), strict=True)}
            ),
        )
        monkeypatch.setattr(day, "_paid_ticks", lambda run, schedule, edges: [3600 * PER_SECOND, 1800 * PER_SECOND])
        load = SimpleNamespace(day=lambda *given: asked.append(given) or work)
        two = Day((0.0, 10.0), (0.2, 0.1), 20.0)
        found = day.served_day(settings(), load, goal, 7, Cluster(router="kv-aware"), two, (1, 2), 4.0)
        assert asked == [
            (7, (0.0, 10.0), (0.2, 0.1), 20.0), (Cluster(num_replicas=1, router="kv-aware"), (1, 2), 4 * PER_SECOND),
        ]  # fmt: skip
        assert (found["requests"], found["attained"], found["replica_hours"]) == (3, pytest.approx(2 / 3), 1.5)
        assert found["steps"] == {
            "requests": [2, 1], "attained": [1.0, 0.0], "concurrency": [0.7, pytest.approx(0.35)],
            "kv_cache_usage": [0.5, 3.0], "peak_kv_cache_usage": [0.5, 0.9], "replica_hours": [1.0, 0.5],
        }  # fmt: skip

    def test_a_step_without_requests_has_no_share(self):
        """As ``attained`` of it: see the data of a day."""
        quiet = Day((0.0, 60.0), (0.0, 2.0), 120.0)
        assert (quiet.busiest, quiet.spans_s) == (2.0, [(0.0, 60.0), (60.0, 120.0)])


class TestLoad:
    def test_a_run_has_the_requests_of_one_replica_unless_more_fill_it(self):
        load = Load(Inputs(requests=Requests(dataset="alpaca"))).filling(600.5)
        assert (load.num_prompts(), load.num_prompts(2)) == (6005, 12_010)
        assert len(load.draw(0).gaps) == 6005 and not load.is_short(1)
        assert Load(Inputs(requests=Requests(dataset="alpaca"))).num_prompts() == DEFAULT_PROMPTS


class TestDayOfRequests:
    """Two requests/s for 100 s, none for 50 s, and four for 150 s."""

    STEPS = ((0.0, 100.0, 150.0), (2.0, 0.0, 4.0), 300.0)

    def load(self, tmp_path: Any, rows: int, session: bool = False, **pacing: float) -> Load:
        text = "".join(f"{place},{100 + place},{1 + place}{f',{place}' * session}\n" for place in range(rows))
        (tmp_path / "load.csv").write_text(f"arrival_s,prompt_tokens,output_tokens{',session_id' * session}\n{text}")
        return Load(Inputs(requests=Requests(trace=tmp_path / "load.csv"), pacing=Pacing(request_rate=4.0, **pacing)))

    @pytest.mark.parametrize(("burstiness", "spread"), [(None, 1.0), (0.25, 2.0)])
    def test_its_requests_arrive_along_the_steps(self, burstiness, spread, tmp_path):
        given = {} if burstiness is None else {"burstiness": burstiness}
        work = self.load(tmp_path, 64, **given).day(132, *self.STEPS)
        # Gaps at rate 1, of which 200 pass in the first and 600 in the last step. This seed has many: 869 and 960 requests.
        gaps = unit_gaps(3000, burstiness or 1.0, stream(132, "arrivals"))
        passed = np.cumsum(gaps)
        passed = passed[passed < 800]
        expected = np.where(passed <= 200, passed / 2, 150 + (passed - 200) / 4)
        assert work.arrival_ticks / PER_SECOND == pytest.approx(expected, abs=1e-6)
        assert gaps.std() == pytest.approx(spread, rel=0.2)
        # Prompt and output of a row stay together; rows are drawn one by one.
        assert (work.prompt_tokens == work.output_tokens + 99).all()
        assert (np.diff(work.prompt_tokens) % 64 == 1).mean() < 0.1
        other = self.load(tmp_path, 64, **given).day(6, *self.STEPS)
        assert other.prompt_tokens[:50].tolist() != work.prompt_tokens[:50].tolist()

    def test_requests_that_share_prefixes_have_to_be_enough(self, tmp_path):
        count = len(self.load(tmp_path, 64).day(5, *self.STEPS))
        work = self.load(tmp_path, count, session=True).day(5, *self.STEPS)
        assert work.prompt_tokens.tolist() == [*range(100, 100 + count)]
        with pytest.raises(SettingError, match="keeps its order"):
            self.load(tmp_path, count - 1, session=True).day(5, *self.STEPS)

    def test_those_of_a_data_set_are_drawn_by_the_seed(self):
        load = Load(Inputs(requests=Requests(dataset="alpaca"), pacing=Pacing(request_rate=4.0)))
        one, same, other = (load.day(seed, *self.STEPS) for seed in (5, 5, 6))
        assert one.prompt_tokens.tolist() == same.prompt_tokens.tolist()
        assert one.prompt_tokens[:50].tolist() != other.prompt_tokens[:50].tolist()
        assert len(one) == len(one.arrival_ticks) == pytest.approx(800, rel=0.15)

    def test_gaps_as_traced_and_blocks_of_rows(self, tmp_path):
        """Blocks of 64 rows from anywhere, which go on at the first row."""
        found = drawn_rows(100, 150, True, np.random.default_rng(3))
        starts = np.random.default_rng(3).integers(100, size=3)
        expected = [(int(start) + place) % 100 for start in starts for place in range(64)][:150]
        assert found.tolist() == expected
        assert drawn_rows(100, 9, False, np.random.default_rng(3)).max() < 100
        trace = Trace(
            "three", np.ones(3, dtype=int), np.ones(3, dtype=int), arrival_ticks=np.array([5, 6, 9]) * PER_SECOND
        )
        assert traced_gaps_s(trace).tolist() == [2.0, 1.0, 3.0]
        one = Trace("one", np.ones(1, dtype=int), np.ones(1, dtype=int), arrival_ticks=np.array([5]))
        assert traced_gaps_s(one).tolist() == [0.0]

    def test_the_rate_and_the_lengths_of_a_trace(self, tmp_path):
        load = self.load(tmp_path, 5)
        assert (load.trace_rate, load.mean_tokens, load.longest_tokens) == (1.0, (102.0, 3.0), 109)
        assert (load.num_prompts(3), load.is_short(1), load.is_drawn, load.keeps_order) == (5000, False, False, False)
        assert (self.load(tmp_path, 5, session=True).num_prompts(3), self.load(tmp_path, 1).trace_rate) == (5, None)

    @pytest.mark.parametrize(("rate", "is_rate"), [(0.0, False), (inf, False), (1e-9, True)])
    def test_a_wanted_rate_is_above_0_and_finite(self, rate, is_rate):
        def load() -> Load:
            return Load(Inputs(requests=Requests(dataset="alpaca"), pacing=Pacing(request_rate=rate)))

        if is_rate:
            assert load().pacing.request_rate == rate
        else:
            with pytest.raises(SettingError, match="must be above 0 and finite"):
                load()


class Costs:
    """A step that prefills takes 5 ms and 1 us a pair, and much for every decode."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 10**13 * (decodes + decode_context) + 10**7 * prefill_tokens + 5 * 10**9 + 10**6 * prefill_pairs

    def swap_out_ticks(self, blocks: int) -> int:
        return blocks * 10**9

    def swap_in_ticks(self, blocks: int) -> int:
        return blocks * 2 * 10**9


class TestPreemption:
    def test_a_prompt_alone_is_recomputed(self):
        """Of 100 tokens: 5 ms, 1 ms and 5,050 pairs; of seven blocks there and back."""
        found = preemption.one_preemption(Costs(), 16, 100)
        assert (found.recompute_ms, found.swap_ms) == (11.05, 21.0)
        assert preemption.one_preemption(Costs(), 16, 96).swap_ms == 18.0

    @pytest.mark.parametrize(("longest", "found"), [(352, [16, 32, 352]), (351, [16, 32]), (8, [16])])
    def test_a_break_even_may_be_at_the_longest_sequence(self, longest, found, monkeypatch):
        costs = SimpleNamespace(
            step_ticks=lambda decodes, context, tokens, pairs: 5 * 10**9 + 10**6 * pairs,
            swap_out_ticks=Costs().swap_out_ticks,
            swap_in_ticks=Costs().swap_in_ticks,
        )
        replica = SimpleNamespace(cost=costs, block_size=16, max_model_len=longest)
        monkeypatch.setattr(preemption, "build", lambda _: replica)
        assert [tokens for tokens, _ in preemption.break_evens(settings())] == found

    def test_lengths_of_a_load_are_its_median_and_its_longest(self):
        work = Workload("three", np.zeros(4), np.array([1, 2, 3, 90]), np.array([1, 1, 2, 9]))
        assert preemption.lengths_of(work, None, 5) == [4, 99]
        assert preemption.lengths_of(None, 7, 5) == [5, 7] and preemption.lengths_of(None, 5, 5) == [5]

    @pytest.mark.parametrize(("longest", "budget"), [(64, 2048), (2047, 2048), (2049, 2049)])
    def test_older_releases_run_with_their_own_defaults(self, longest, budget, monkeypatch):
        """A step has at least 2,048 tokens, 4 GiB of the host take blocks, and 1 % of the blocks stay free (vLLM 0.6)."""
        ran = []

        def simulate(chosen, work):
            ran.append(chosen)
            return chosen

        metrics = dict.fromkeys(preemption._METRICS, 2.0)
        results = metrics | {
            "work": {"tokens": {"recomputed": 11}, "seconds": {}}, "preemptions": {"recompute": 3, "swap": 5}
        }  # fmt: skip
        monkeypatch.setattr(preemption, "simulate", simulate)
        monkeypatch.setattr(preemption, "summary", lambda run: results)
        chosen = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="a100-80gb", max_model_len=longest)
        rows = preemption.simulated(chosen, Workload("one", np.zeros(1), np.full(1, 4), np.full(1, 5)))
        assert [each.value("watermark") for each in ran[:4]] == [0.01] * 4
        assert [each.value("swap_space") for each in ran[1:4:2]] == [4, 4]
        assert [each.max_num_batched_tokens for each in ran[:4]] == [budget] * 4
        assert (
            [each.policy for each in ran]
            == [row["policy"] for row in rows]
            == ["vllm-v0"] * 2 + ["vllm-sosp23"] * 2 + ["vllm-v1"]
        )
        counts = {"recomputed": 3, "swapped": 5, "recomputed_tokens": 11, "swapping_s": 0.0}
        assert all(row.items() >= (counts | metrics).items() for row in rows)


class TestQuestions:
    @pytest.mark.parametrize(("tokens", "lengths"), [(1, (1, 1)), (2, (1, 1)), (3, (1, 2)), (9, (4, 5))])
    def test_half_of_a_length_is_prompt(self, tokens, lengths):
        assert Subject(settings(), None, tokens).lengths() == tuple(np.array([each]) for each in lengths)

    def test_three_break_evens_are_named(self):
        breaks = [(16 * place, ("swap", "recompute")[place % 2]) for place in range(1, 7)]
        text = questions._break_even_text(breaks)
        assert [f"from {16 * place} tokens" in text for place in range(1, 7)] == [False, True, True, True, False, False]

    @pytest.mark.parametrize("question", ["samples", "preemption-mode"])
    def test_states_are_refused_with_a_remedy_that_helps(self, question, capsys):
        """Not with a flag for layers with windows, which leaves the states."""
        line = [
            "plan",
            "--gpu",
            "h200",
            "--serve",
            "vllm serve qwen3.6-27b -q fp8",
            "--ask",
            question,
            "--mean-tokens",
            "300",
        ]
        assert status(line) == MISTAKE
        error = capsys.readouterr().err
        assert "fixed-size states; leave it out" in error and "--disable-hybrid" not in error


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
