"""Users that wait for their answers: stories by hand, laws, and leaps that are the same bits as steps."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from closed_loops import COST, ROOMY, check_replayed, check_sent, sent_and_done, served
from engine_runs import settings_of, times_of, workload_of
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.cluster import Cluster, cluster_times, simulate_cluster
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.prefix_cache import cached_tokens
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import NO_SESSION, PromptContent
from fragmeter.sim.workload.dialogue import Dialogue
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Pacing, Trace, paced, users, workload
from oracle import Limits, Pool, Request
from same_runs import same
from strategies import Case, crowded_cases, long_cases


class TestStories:
    def test_one_user_is_served_one_request_at_a_time(self):
        requests = [Request(0, 10, 1), Request(0, 20, 2), Request(0, 1, 1)]
        # 101 + 70; 101 + 140 and 101 + 13; 101 + 7.
        assert sent_and_done(served(requests, Users(1, [0, 0, 0]))) == [(0, 171), (171, 526), (526, 634)]

    def test_a_user_thinks(self):
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 10, 1)]
        run = served(requests, Users(1, [1000, 5, 77]))
        assert sent_and_done(run) == [(0, 171), (1171, 1342), (1347, 1518)]

    def test_the_user_ready_first_sends_next(self):
        # Both are answered in the step that ends at 241; the user of the second is back first.
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 3, 1), Request(0, 4, 1)]
        run = served(requests, Users(2, [900, 100, 0, 0]))
        assert sent_and_done(run) == [(0, 241), (0, 241), (341, 463), (463, 592)]

    def test_a_user_comes_back_in_the_middle_of_a_step(self):
        # From 241 the second goes on with 101 + 13 a step. The third is sent in the first of them, and starts at 355.
        requests = [Request(0, 10, 1), Request(0, 10, 9), Request(0, 2, 1)]
        run = served(requests, Users(2, [30, 0, 0]))
        assert sent_and_done(run)[2] == (271, 355 + 101 + 13 + 14)

    def test_an_agent_waits_for_its_sub_agents(self):
        """Its answer at 171 starts two, a tick later; the last answer of the longer one comes at 1584, and the agent needs 7 more."""
        requests = [Request(0, 10, 1) for _ in range(5)]
        tree = Users(None, [7, 1000, 0, 0, 0], [0, 1, 2, 1, 0], [-1, 0, 0, -1, -1])
        run = served(requests, tree)
        assert sent_and_done(run) == [(0, 171), (172, 413), (172, 413), (1413, 1584), (1591, 1762)]

    def test_one_user_has_a_whole_tree(self):
        """The next session of the only user begins after the sub-agents that the last answer of its first one has started."""
        requests = [Request(0, 10, 1) for _ in range(4)]
        tree = Users(1, [5, 0, 0, 9], [0, 1, 2, 3], [-1, 0, 1, -1])
        run = served(requests, tree)
        assert sent_and_done(run) == [(0, 171), (172, 343), (344, 515), (520, 691)]

    def test_no_user_sends_before_the_request_comes(self):
        requests = [Request(0, 10, 1), Request(5000, 10, 1), Request(5000, 10, 1)]
        run = served(requests, Users(1, [0, 0, 0]))
        assert sent_and_done(run) == [(0, 171), (5000, 5171), (5171, 5342)]

    def test_a_refused_request_costs_its_user_no_time(self):
        requests = [Request(0, 10, 1), Request(0, 40, 9), Request(0, 10, 1)]
        run = served(requests, Users(1, [0, 0, 0]), pool=Pool(5, 4, 0))
        assert run.refused.tolist() == [False, True, False]
        assert sent_and_done(run) == [(0, 171), (171, 342)]

    def test_in_a_static_batch_no_request_has_an_answer_before_all_have(self):
        requests = [Request(0, 10, 1), Request(0, 10, 3), Request(0, 10, 1)]
        times = sent_and_done(served(requests, Users(2, [0, 0, 0]), policy="static"))
        assert times[0][1] == times[1][1] == times[2][0] < times[2][1]

    def test_more_users_than_requests_are_an_open_loop(self):
        requests = [Request(place * 50, 5 + place, 3) for place in range(6)]
        assert times_of(served(requests, Users(9, [0] * 6))) == times_of(
            simulate(settings_of("vllm-sosp23", ROOMY, Limits(64)), workload_of(requests, 64), COST)
        )


def in_flight(run: Run) -> int:
    """The most requests that were under way at once."""
    times = request_times(run)
    # At one instant an answer comes before what it lets be sent.
    events = sorted([(tick, 1) for tick in times.arrival_ticks] + [(tick, -1) for tick in times.finish_ticks])
    return max(accumulate(change for _, change in events), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=12)
@given(case=st.one_of(crowded_cases(), long_cases()), data=st.data())
def test_leap_and_step_are_the_same_bits(policy, case: Case, data):
    """Invariant 6, where each request waits for an answer to another."""
    leap_and_step(policy, case, data)


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=st.one_of(crowded_cases(), long_cases()), data=st.data())
def test_leap_and_step_are_the_same_bits_where_steps_are_scheduled_ahead(case: Case, data):
    """Also for requests that are preempted as they finish, which are answered."""
    leap_and_step("vllm-v1", case, data, async_scheduling=True)


def leap_and_step(policy: str, case: Case, data: st.DataObject, **switches: bool) -> None:
    """The same runs; the think times of users are drawn."""
    thinks = [data.draw(st.sampled_from([0, 0, 1, 150, 5000, 200_000])) for _ in case.requests]
    users = Users(data.draw(st.integers(1, 4)), thinks)
    work = replace(workload_of(case.requests, case.limits.max_model_len, case.content), users=users)
    leapt, stepped = (
        simulate(settings_of(policy, case.pool, case.limits, leap=leap, **switches), work, case.cost)
        for leap in (True, False)
    )
    same(leapt, stepped)
    assert in_flight(leapt) <= users.max_concurrency
    check_sent(leapt, users, work.arrival_ticks)


class TestSessions:
    """COST: a step takes 101 ticks, 13 for each decode and 7 for each token of a prompt."""

    def test_a_turn_waits_for_the_answer_before_it(self):
        # Both first turns come as traced; that the trace has the second of session 5 come at 20 does not count.
        requests = [Request(0, 10, 1), Request(10, 20, 1), Request(20, 3, 1), Request(30, 4, 1)]
        run = served(requests, Users(None, [1000, 0, 0, 0], [5, 6, 5, 6]))
        # 101 + 70 to 171; 101 + 140 to 412; then the second of 6, 101 + 28; and at 1171 the second of 5, 101 + 21.
        assert sent_and_done(run) == [(0, 171), (10, 412), (1171, 1293), (412, 541)]

    def test_a_user_keeps_a_session_to_its_end(self):
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 3, 1)]
        run = served(requests, Users(1, [500, 0, 40], [1, 2, 1]))
        # The second session begins 40 after the first is over.
        assert sent_and_done(run) == [(0, 171), (833, 1004), (671, 793)]

    def test_requests_without_a_session_are_sessions(self):
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 10, 1)]
        run = served(requests, Users(1, [7, 8, 9], [NO_SESSION, NO_SESSION, NO_SESSION]))
        assert sent_and_done(run) == sent_and_done(served(requests, Users(1, [7, 8, 9])))

    def test_at_one_instant_requests_are_sent_in_order(self):
        # At 171 row 2 is due, the second turn of 1, and row 1 comes. The pool holds one of them.
        requests = [Request(0, 10, 1), Request(171, 10, 1), Request(171, 10, 1)]
        run = served(requests, Users(None, [0, 0, 0], [1, 2, 1]), pool=Pool(3, 4, 0))
        assert sent_and_done(run) == [(0, 171), (171, 342), (171, 513)]

    def test_a_refused_turn_is_none(self):
        requests = [Request(0, 10, 1), Request(1, 40, 9), Request(2, 10, 1)]
        run = served(requests, Users(1, [30, 999, 0], [1, 1, 1]), pool=Pool(5, 4, 0))
        assert run.refused.tolist() == [False, True, False]
        assert sent_and_done(run) == [(0, 171), (201, 372)]

    def test_the_request_sent_last_gives_way(self):
        # Row 2 is sent at 229, while row 3 decodes; it is the last to arrive, though row 3 stands below it.
        requests = [Request(0, 4, 1), Request(1, 4, 1), Request(1, 8, 12), Request(2, 8, 12)]
        run = served(requests, Users(None, [100, 0, 0, 0], [1, 2, 1, 3]), pool=Pool(6, 4, 0))
        assert request_times(run).recomputed.tolist() == [0, 0, 2, 0]

    def test_behind_a_victim_no_request_begins_that_was_sent_after_it(self):
        # Row 2 is sent at 268 and preempts only itself; row 1, sent at 707, waits until it is done.
        requests = [Request(0, 7, 2), Request(46, 2, 1), Request(268, 4, 5)]
        run = served(requests, Users(None, [400, 400, 100], [1, 1, 2]), pool=Pool(4, 2, 0))
        check_replayed(run, run.workload, COST)
        assert sent_and_done(run) == [(0, 307), (707, 1050), (268, 935)]

    def test_victims_wait_in_the_order_in_which_they_were_sent(self):
        # Row 1 is the second turn of row 0's session, and row 2 was sent long before it.
        requests = [Request(0, 5, 6), Request(0, 4, 6), Request(0, 5, 12), Request(118, 4, 2)]
        run = served(requests, Users(None, [100, 0, 0, 0], [1, 1, 2, 3]), pool=Pool(4, 4, 0))
        assert request_times(run).recomputed.any()
        check_replayed(run, run.workload, COST)

    @pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
    def test_a_later_turn_finds_what_the_one_before_left(self, policy):
        requests = [Request(0, 16, 9), Request(0, 32, 2)]
        sessions = PromptContent.of_sessions(np.array([1, 1]))
        work = replace(workload_of(requests, 64, sessions), users=Users(None, [0, 0], [1, 1]))
        run = simulate(settings_of(policy, ROOMY, Limits(64), enable_prefix_caching=True), work, COST)
        # Of 25 tokens the last has no keys yet.
        assert cached_tokens(run, run.replica.cache_log).tolist() == [0, 24]


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=6)
@given(case=st.one_of(crowded_cases(), long_cases()), data=st.data())
def test_sessions_leap_and_step_as_the_same_bits(policy, case: Case, data):
    """Invariants 4, 5 and 6; N users spend their time on N = X (R + Z), to the tick."""
    n = len(case.requests)
    thinks = [data.draw(st.sampled_from([0, 0, 1, 150, 5000, 200_000])) for _ in range(n)]
    names = [data.draw(st.sampled_from([NO_SESSION, 1, 2, 3])) for _ in range(n)]
    users = Users(data.draw(st.sampled_from([None, 1, 2, 3])), thinks, names)
    work = replace(workload_of(case.requests, case.limits.max_model_len, case.content), users=users)
    leapt, stepped = (
        simulate(settings_of(policy, case.pool, case.limits, leap=leap), work, case.cost) for leap in (True, False)
    )
    same(leapt, stepped)
    if case.content is None:
        check_replayed(leapt, work, case.cost)
    idle = check_sent(leapt, users, work.arrival_ticks)
    times = request_times(leapt)
    assert len(times.index) == n - leapt.refused.sum()
    if users.max_concurrency is not None:
        busy = int((times.finish_ticks - times.arrival_ticks).sum())
        assert busy + idle == users.max_concurrency * leapt.log.end_ticks


def test_the_interactive_response_time_law():
    # N users, each of which waits for R and thinks for Z, send N / (R + Z) requests a second.
    n, think_s = 3000, 2.0
    pacing = Pacing(max_concurrency=20, think_time=think_s)
    trace = paced(Trace("alike", np.full(n, 100), np.full(n, 20)), pacing)
    chosen = settings_of("vllm-sosp23", Pool(4000, 16, 0), Limits(2048))
    run = simulate(chosen, workload(trace, users=users(pacing, trace)))
    times = request_times(run)
    response_s = times.e2el_ms.mean() / 1000
    throughput = n / (run.log.end_ticks / 1e12)
    assert throughput == pytest.approx(20 / (response_s + think_s), rel=0.03)


def test_refused_values():
    work = workload(Trace("two", [5, 5], [1, 1], [0, 0]))
    for fields, more, refused in (
        ((0, [0, 0]), {}, "max_concurrency = 0: must be 1 or more"),
        ((1, [0, -1]), {}, "think_time = -1: must be 0 or more"),
        ((1, [0]), {}, "think_ticks = 1: must be of 2 requests"),
        ((1, [0, 0], [1]), {}, "session_id = 1: must be of 2 requests"),
        ((None, [0, 0]), {}, "max_concurrency = None: must be given where there are no sessions"),
        ((1, [0, 0]), {"dialogue": Dialogue([-1, 0], [0, 4], [0, 0])}, "max_concurrency = 1: is for requests without"),
    ):
        with pytest.raises(SettingError, match=refused):
            replace(work, users=Users(*fields), **more)


@pytest.mark.slow
def test_the_program_serves_users(tmp_path, capsys):
    serve = ["simulate", "--num-prompts", "40", "--max-concurrency", "4"]
    assert status([*serve, "--think-time", "0.5", "--json", "-", "--out", str(tmp_path / "out")]) == DONE
    assert json.loads(capsys.readouterr().out)["completed"] == 40
    kept = json.loads((tmp_path / "out" / "run.json").read_text())["workload"]
    assert (kept["max_concurrency"], kept["think_time"]) == (4, 0.5)
    assert status([*serve, "--n", "2", "--shared-prefix-tokens", "1"]) == DONE
    capsys.readouterr()
    for flags, message in (
        (
            ["simulate", "--think-time", "1"],
            "think_time = 1.0: applies only to users; give their number as max_concurrency",
        ),
        ([*serve, "--think-time", "-1"], "think_time"),
    ):
        assert status(flags) == MISTAKE
        assert message in capsys.readouterr().err


def ends_of(row: int, done: list[int], after: dict[int, int], begun: dict[int, list[int]]) -> int:
    """When a request and all sessions that it starts are over."""
    end = done[row]
    for last in begun.get(row, ()):
        while last in after:
            last = after[last]
        end = max(end, ends_of(last, done, after, begun))
    return end


@hypothesis_settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32))
def test_every_turn_of_a_tree_comes_after_all_that_the_turn_before_has_started(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 20))
    session, spawner, after, begun = [0], [-1], {}, {}
    last = {0: 0}
    for row in range(1, count):
        if rng.random() < 0.5:
            known = int(rng.choice([*last]))
            after[last[known]] = row
            session.append(known)
            spawner.append(-1)
        else:
            of = int(rng.integers(-1, row))
            session.append(len(last))
            spawner.append(of)
            if of >= 0:
                begun.setdefault(of, []).append(row)
        last[session[-1]] = row
    requests = [Request(0, int(rng.integers(1, 20)), int(rng.integers(1, 5))) for _ in range(count)]
    think = rng.integers(0, 500, count)
    times = sent_and_done(served(requests, Users(None, think, session, spawner)))
    done = [each for _, each in times]
    for row, (sent, _) in enumerate(times):
        before = next((first for first, later in after.items() if later == row), None)
        if before is not None:
            assert sent == ends_of(before, done, after, begun) + think[before]
        else:
            assert sent == (0 if spawner[row] < 0 else done[spawner[row]] + 1)


def test_a_fleet_serves_trees(tmp_path):
    """Sub-agents on other replicas than their agent, with leaps and without."""
    turns = np.arange(12)
    work = Workload(
        "trees",
        np.zeros(12, dtype=np.int64),
        20 + turns,
        2 + turns % 3,
        users=Users(
            None, 1000 * turns, [0, 1, 2, 1, 0, 3, 4, 4, 3, 0, 5, 5], [-1, 0, 0, -1, -1, -1, 5, -1, -1, -1, 9, -1]
        ),
    )
    chosen = settings_of("vllm-v1", ROOMY, Limits(512, 2048, 4))
    runs = [simulate_cluster(replace(chosen, leap=leap), work, Cluster(num_replicas=2), COST) for leap in (True, False)]
    times = [cluster_times(run) for run in runs]
    assert (times[0].finish_ticks == times[1].finish_ticks).all() and len(times[0].index) == 12
    arrival, done = times[0].arrival_ticks, times[0].finish_ticks
    # Users of a fleet think for a tick at least.
    assert arrival[4] == max(done[0], done[3], done[2]) + 1 and arrival[6] == done[5] + 1
