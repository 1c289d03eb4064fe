"""Objectives and SLO checks: by hand, and of runs that end early against those of whole runs."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import settings_of, workload_of
from fragmeter.experiments.runs import slo_check
from fragmeter.experiments.runs.slo_check import (
    Goal,
    Seen,
    SloCheck,
    check_run,
    check_slo,
    counted,
    judged,
    saturated_rate,
)
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.objectives import Objectives, objectives
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from strategies import Case, LineCost, crowded_cases, long_cases, small_cases

MS = 10**9


class TestObjectives:
    def test_as_vllm_bench_serve_has_them(self):
        found = objectives(["tpot:50", "ttft:500.5"])
        assert found == Objectives(ttft=500.5, tpot=50)
        assert str(found) == "ttft:500.5 tpot:50"

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            ([], "must be KEY:MILLISECONDS"),
            (["ttft"], "must be KEY:MILLISECONDS"),
            (["itl:5"], "goodput = 'itl:5': must be KEY:MILLISECONDS with KEY one of ttft, tpot, e2el"),
            (["ttft:fast"], "must be KEY:MILLISECONDS"),
            (["ttft:-5"], "the limit must be above 0, in ms"),
            (["ttft:0"], "the limit must be above 0"),
            (["ttft:nan"], "the limit must be above 0"),
            (["ttft:5", "ttft:6"], "gives ttft a second time"),
        ],
    )
    def test_what_cannot_be(self, texts, message):
        with pytest.raises(SettingError, match=message):
            objectives(texts)

    def test_misses_by_hand(self):
        """A limit is met if it is not exceeded; an output of one token has a TPOT of 0."""
        arrival = np.array([0, 0, 0, 10]) * MS
        first, finish = np.array([500, 501, 500, 20]) * MS, np.array([550, 601, 7000, 20]) * MS
        missed = Objectives(500, 50, 600).missed(arrival, first, finish, np.array([2, 3, 1, 1]))
        assert {name: some.tolist() for name, some in missed.items()} == {
            "ttft": [False, True, False, False],
            "tpot": [False, False, False, False],
            "e2el": [False, True, True, False],
        }
        (tpot,) = Objectives(tpot=49.9).missed(arrival, first, finish, np.array([2, 3, 1, 1])).values()
        assert tpot.tolist() == [True, True, False, False]


def work_of(n: int, gap: int = MS, prompt: int = 1, output: int = 1) -> Workload:
    ones = np.ones(n, dtype=np.int64)
    return Workload("even", np.arange(n) * gap, prompt * ones, output * ones)


class TestJudged:
    """Twenty requests a ms apart; those from 2 to 17 count, and 90 % of them are 15 of 16."""

    WORK, GOAL = work_of(20), Goal(Objectives(ttft=5))

    def seen(self, *late: int, unknown: tuple[int, ...] = ()) -> Seen:
        first = self.WORK.arrival_ticks + np.where(np.isin(np.arange(20), late), 6, 5) * MS
        finished = ~np.isin(np.arange(20), unknown)
        return Seen(first, first, finished)

    def test_the_ends_do_not_count(self):
        assert counted(20) == slice(2, 18)
        assert judged(self.WORK, self.GOAL, self.seen(0, 1, 18, 19), over=True) == SloCheck(True, 16, 16, {"ttft": 0})

    def test_one_in_sixteen_may_miss(self):
        assert judged(self.WORK, self.GOAL, self.seen(2), over=True) == SloCheck(True, 16, 15, {"ttft": 1})
        found = judged(self.WORK, self.GOAL, self.seen(2, 17), over=True)
        assert found == SloCheck(False, 16, 14, {"ttft": 2})
        assert found.attained == 14 / 16

    def test_nothing_is_certain_while_a_counted_request_may_still_miss(self):
        assert judged(self.WORK, self.GOAL, self.seen(2, unknown=(17, 18, 19)), over=False) is None
        assert judged(self.WORK, self.GOAL, self.seen(2, unknown=(18, 19)), over=False).meets

    def test_enough_misses_are_certain_with_unfinished_requests(self):
        assert not judged(self.WORK, self.GOAL, self.seen(2, 3, unknown=(9, 17)), over=False).meets

    def test_a_refused_request_meets_nothing(self):
        found = judged(self.WORK, self.GOAL, self.seen(unknown=(5, 6)), over=True)
        assert found == SloCheck(False, 16, 14, {"ttft": 0})


def parts(policy: str, case: Case):
    return settings_of(policy, case.pool, case.limits), workload_of(
        case.requests, case.limits.max_model_len, case.content
    )


cases = st.one_of(small_cases(), crowded_cases(), long_cases())
limits = st.one_of(st.none(), st.integers(1, 30_000))


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=8, deadline=None)
@given(
    case=cases,
    ttft=limits,
    tpot=st.one_of(st.none(), st.integers(1, 400)),
    e2el=limits,
    share=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_a_run_that_is_stopped_has_the_outcome_of_the_whole(policy, case, ttft, tpot, e2el, share):
    chosen, work = parts(policy, case)
    goal = Goal(Objectives(*(None if limit is None else limit / MS for limit in (ttft, tpot, e2el))), share)
    with mock.patch.object(slo_check, "_LOOK_EVERY", 1):
        early = check_slo(chosen, work, goal, case.cost)
    whole = check_run(simulate(chosen, work, case.cost), goal)
    assert (early.meets, early.counted) == (whole.meets, whole.counted)
    assert early.met >= whole.met
    assert all(early.missed[name] <= number for name, number in whole.missed.items())


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=8, deadline=None)
@given(case=cases)
def test_what_is_seen_in_mid_run_bounds_what_will_be(policy, case):
    """At every check, finished requests have the times of the whole run; times of the others are lower bounds."""
    check_looks(*parts(policy, case), case.cost)


def check_looks(chosen: Settings, work: Workload, cost: LineCost) -> int:
    """Every look at a run against the whole run; how many saw a request that was out and had had its first token."""
    looks: list[Seen] = []
    keep = mock.patch.object(slo_check, "judged", lambda work, goal, seen, over: looks.append(seen))
    with (
        keep,
        mock.patch.object(slo_check, "_LOOK_EVERY", 1),
        mock.patch.object(slo_check, "check_run", lambda *_: None),
    ):
        check_slo(chosen, work, Goal(Objectives(ttft=1)), cost)
    times = request_times(simulate(chosen, work, cost))
    for seen in looks:
        first, finish, finished = (
            column[times.index] for column in (seen.first_token_ticks, seen.finish_ticks, seen.finished)
        )
        assert (first <= times.first_token_ticks).all() and (finish <= times.finish_ticks).all()
        assert (finish[finished] == times.finish_ticks[finished]).all()
        assert (first[finished] == times.first_token_ticks[finished]).all()
        # As much as can be known: the end of the last leap that is over.
        known = max(seen.first_token_ticks.max(), seen.finish_ticks.max())
        assert (times.finish_ticks[~finished] >= known).all()
        assert finished.sum() >= (times.finish_ticks < known).sum()
    preempted = times.index[times.recomputed > 0]
    return sum(((seen.first_token_ticks < seen.finish_ticks) & ~seen.finished)[preempted].any() for seen in looks)


def test_a_preempted_request_is_not_finished():
    """Two requests outgrow a pool of nine blocks; the later one waits for the first to end, while others come."""
    chosen = settings_of("vllm-sosp23", Pool(9, 16), Limits(128, max_num_seqs=2))
    arrivals = np.concatenate([[0, 1], 5000 + 150 * np.arange(80)])
    outputs = np.where(np.arange(82) < 2, 60, 1)
    work = Workload("two and many", arrivals, np.where(outputs > 1, 32, 1), outputs)
    assert check_looks(chosen, work, LineCost()) > 10


def test_an_overload_is_stopped_early():
    """Of 2,000 requests at twice the rate that one server can bear, most are never served."""
    chosen = settings_of("vllm-sosp23", Pool(64, 16), Limits(64, max_num_seqs=1))
    cost = LineCost()
    work = work_of(2000, gap=cost.step_ticks(0, 0, 1, 0) // 2)
    with mock.patch.object(slo_check, "check_run", side_effect=AssertionError("served to the end")):
        found = check_slo(chosen, work, Goal(Objectives(ttft=1000 / MS)), cost)
    assert not found.meets and 160 < found.missed["ttft"] < 800


def test_a_saturated_replica_delivers_what_its_steps_allow():
    """One at a time, 108 ticks of prefill and two decodes of 114: a request every 336 ticks."""
    chosen = settings_of("vllm-sosp23", Pool(64, 16), Limits(64, max_num_seqs=1))
    assert saturated_rate(chosen, work_of(100, gap=7, output=3), LineCost()) == pytest.approx(1e12 / 336)
    # All together: no request waits for another to finish.
    assert (
        saturated_rate(settings_of("vllm-sosp23", Pool(64, 16), Limits(64)), work_of(9, output=3), LineCost()) is None
    )
