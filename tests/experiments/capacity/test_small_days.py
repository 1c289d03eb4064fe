"""The day of a plan and its load on small cases, by hand or beside brute force; runs are made up."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity import day
from fragmeter.experiments.capacity.day import Day, replicas_for, schedule_of, sizes_below
from fragmeter.experiments.capacity.load import DEFAULT_PROMPTS, Load, drawn_rows, traced_gaps_s
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.sim import Workload, settings
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import Pacing, Trace, stream
from fragmeter.traces.arrivals.pacing import unit_gaps
from made_up_service import RateOnly

GOAL = Goal(Objectives(ttft=500))


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=9)


class TestDay:
    @pytest.mark.slow
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

    @pytest.mark.slow
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
        assert found == (pytest.approx(sum(overlap(span, (30, 90)) for span in spans) / 60 / 2), 0.5)

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
        assert (found.requests, found.attained, found.replica_hours) == (3, pytest.approx(2 / 3), 1.5)
        assert found.steps == ((2, 1.0, 0.7, 0.5, 0.5, 1.0), (1, 0.0, pytest.approx(0.35), 3.0, 0.9, 0.5))

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
