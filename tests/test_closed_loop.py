"""Users who wait for their answers: stories by hand, laws, and leaps that are the same bits as steps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from engine_runs import settings_of, times_of, workload_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracle import Limits, Pool, Request
from strategies import Case, LineCost, crowded_cases, long_cases
from test_engine_leaps import same

from fragmeter.experiments.cli import DONE, MISTAKE, status
from fragmeter.sim.errors import SettingError
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.requests import request_times
from fragmeter.sim.run import Run, simulate
from fragmeter.sim.users import Users
from fragmeter.traces import Pacing, Trace, paced, users, workload

# A step takes 101 ticks, 13 for each decode and 7 for each token of a prompt.
COST = LineCost()
ROOMY = Pool(1000, 4, 0)


def served(requests: list[Request], asked: Users, policy: str = "vllm-sosp23", pool: Pool = ROOMY, **switches) -> Run:
    limits = Limits(64)
    work = replace(workload_of(requests, limits.max_model_len), users=asked)
    return simulate(settings_of(policy, pool, limits, **switches), work, COST)


def sent_and_done(run: Run) -> list[tuple[int, int]]:
    times = request_times(run)
    return list(zip(times.arrival_ticks.tolist(), times.finish_ticks.tolist()))


class TestStories:
    def test_one_user_is_served_one_request_at_a_time(self):
        requests = [Request(0, 10, 1), Request(0, 20, 2), Request(0, 1, 1)]
        # 101 + 70; 101 + 140 and 101 + 13; 101 + 7.
        assert sent_and_done(served(requests, Users(1, [0, 0, 0]))) == [(0, 171), (171, 526), (526, 634)]

    def test_a_user_thinks(self):
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 10, 1)]
        run = served(requests, Users(1, [1000, 5, 77]))
        assert sent_and_done(run) == [(0, 171), (1171, 1342), (1347, 1518)]

    def test_who_is_ready_first_sends_next(self):
        # Both are answered in the step that ends at 241; the user of the second is back first.
        requests = [Request(0, 10, 1), Request(0, 10, 1), Request(0, 3, 1), Request(0, 4, 1)]
        run = served(requests, Users(2, [900, 100, 0, 0]))
        assert sent_and_done(run) == [(0, 241), (0, 241), (341, 463), (463, 592)]

    def test_a_user_comes_back_in_the_middle_of_a_step(self):
        # From 241 the second goes on with 101 + 13 a step. The third is sent in the first of them, and starts at 355.
        requests = [Request(0, 10, 1), Request(0, 10, 9), Request(0, 2, 1)]
        run = served(requests, Users(2, [30, 0, 0]))
        assert sent_and_done(run)[2] == (271, 355 + 101 + 13 + 14)

    def test_nobody_sends_before_the_request_comes(self):
        requests = [Request(0, 10, 1), Request(5000, 10, 1), Request(5000, 10, 1)]
        run = served(requests, Users(1, [0, 0, 0]))
        assert sent_and_done(run) == [(0, 171), (5000, 5171), (5171, 5342)]

    def test_a_refused_request_costs_its_user_no_time(self):
        requests = [Request(0, 10, 1), Request(0, 40, 9), Request(0, 10, 1)]
        run = served(requests, Users(1, [0, 0, 0]), pool=Pool(5, 4, 0))
        assert run.refused.tolist() == [False, True, False]
        assert sent_and_done(run) == [(0, 171), (171, 342)]

    def test_of_a_static_batch_nobody_has_an_answer_before_all_have(self):
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
    events = sorted([(tick, 1) for tick in times.arrival_ticks] + [(tick, 0) for tick in times.finish_ticks])
    now = most = 0
    for _, sends in events:
        now += 1 if sends else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=12)
@given(case=st.one_of(crowded_cases(), long_cases()), data=st.data())
def test_leap_and_step_are_the_same_bits(policy, case: Case, data):
    """Invariant 6, where each request waits for an answer to another."""
    thinks = [data.draw(st.sampled_from([0, 0, 1, 150, 5000, 200_000])) for _ in case.requests]
    asked = Users(data.draw(st.integers(1, 4)), thinks)
    work = replace(workload_of(case.requests, case.limits.max_model_len, case.content), users=asked)
    leapt, stepped = (
        simulate(settings_of(policy, case.pool, case.limits, leap=leap), work, case.cost) for leap in (True, False)
    )
    same(leapt, stepped)
    assert in_flight(leapt) <= asked.max_concurrency
    check_sent(leapt, asked, work.arrival_ticks)


def check_sent(run: Run, asked: Users, arrivals: np.ndarray) -> None:
    """Each request is sent by the user who is ready first, and not before it comes: told once more from the finishes."""
    times = request_times(run)
    ready = [0] * asked.max_concurrency
    done = sorted(zip(times.finish_ticks.tolist(), times.index.tolist()))
    for index, sent in zip(times.index.tolist(), times.arrival_ticks.tolist()):
        while done and done[0][0] <= sent:
            finish, answered = done.pop(0)
            ready.append(finish + int(asked.think_ticks[answered]))
        first = min(ready)
        ready.remove(first)
        assert sent == max(first, arrivals[index])


def test_the_interactive_response_time_law():
    # N users, each of whom waits for R and thinks for Z, send N / (R + Z) requests a second.
    n, think_s = 3000, 2.0
    pacing = Pacing(max_concurrency=20, think_time=think_s)
    trace = paced(Trace("alike", np.full(n, 100), np.full(n, 20)), pacing)
    chosen = settings_of("vllm-sosp23", Pool(4000, 16, 0), Limits(2048))
    run = simulate(chosen, workload(trace, users=users(pacing, n)))
    times = request_times(run)
    response_s = times.e2el_ms.mean() / 1000
    throughput = n / (run.book.end_ticks / 1e12)
    assert throughput == pytest.approx(20 / (response_s + think_s), rel=0.03)


def test_what_cannot_be_asked():
    work = workload(Trace("two", [5, 5], [1, 1], [0, 0]))
    for asked, more, refused in (
        ((0, [0, 0]), {}, "max_concurrency = 0: must be 1 or more"),
        ((1, [0, -1]), {}, "think_time = -1: must be 0 or more"),
        ((1, [0]), {}, "think_ticks = 1: must be of 2 requests"),
        ((1, [0, 0]), {"n": np.array([2, 1])}, "max_concurrency = 1: is for requests of one sequence"),
    ):
        with pytest.raises(SettingError, match=refused):
            replace(work, users=Users(*asked), **more)


def test_the_program_serves_users(tmp_path, capsys):
    serve = ["simulate", "--num-prompts", "40", "--max-concurrency", "4"]
    assert status([*serve, "--think-time", "0.5", "--json", "-", "--out", str(tmp_path / "out")]) == DONE
    assert json.loads(capsys.readouterr().out)["completed"] == 40
    kept = json.loads((tmp_path / "out" / "run.json").read_text())["workload"]
    assert (kept["max_concurrency"], kept["think_time"]) == (4, 0.5)
    for flags, told in (
        (["simulate", "--think-time", "1"], "think_time = 1.0: is of users; say how many by max_concurrency"),
        ([*serve, "--n", "2"], "max_concurrency = 4: is for requests of one sequence and without parents"),
        ([*serve, "--shared-prefix-tokens", "1"], "max_concurrency = 4: does not go with requests that share memory"),
    ):
        assert status(flags) == MISTAKE
        assert told in capsys.readouterr().err
