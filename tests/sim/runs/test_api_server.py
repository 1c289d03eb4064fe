"""Event loops of the API server before and behind the engine: closed forms, a loop that works unit by unit, and served runs."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from importlib import resources
from itertools import product
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.cost import outside_ticks
from fragmeter.sim.engine.replica import build
from fragmeter.sim.metrics.requests import end_of_answers, request_times
from fragmeter.sim.policy.api_times import PARTS, api_server_us, measured_us
from fragmeter.sim.policy.options import CHAT_OUTSIDE_MS, OUTSIDE_MS
from fragmeter.sim.runs.api_server import FIRST_TURN, ApiServer, Steps, second_turns, served
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import NotSimulated, SettingError, UserError
from fragmeter.sim.workload.users import Users

SERVER = {"policy": "vllm-v1", "model": "llama-3.1-8b", "gpu": "h100-80gb", "max_model_len": 4096}
US = {"request": 1000, "prompt_token": 2.5, "step": 50, "token": 12, "chunk": 30}


def times(work: Workload, us: dict[str, float] | None = None, **more: Any):
    chosen = settings(**SERVER, **({} if us is None else {"api_server": us}), **more)
    return request_times(simulate(chosen, work))


def load(rate: float | None, count: int = 60, output: int = 40) -> Workload:
    drawn = np.random.default_rng(1)
    gaps = np.zeros(count) if rate is None else drawn.exponential(1 / rate, count)
    arrivals = np.rint(np.cumsum(gaps) * 1e6).astype(np.int64) * ticks.PER_US
    return Workload("load", arrivals, drawn.integers(10, 400, count), drawn.integers(1, 2 * output, count))


class TestClosedForms:
    @pytest.mark.parametrize("loops", (1, 3))
    def test_a_burst_is_parsed_before_any_of_it_is_delivered(self, loops):
        server = ApiServer(loops, request=1000, prompt_token=3, step=0, token=0, chunk=0)
        at = server.delivered(np.full(9, 50), np.full(9, 100))
        parsed = 50 + 9 // loops * round(FIRST_TURN * 1000)
        assert at.tolist() == [parsed + round(1300 - FIRST_TURN * 1000) * (place // loops + 1) for place in range(9)]

    @pytest.mark.slow
    def test_poisson_arrivals_wait_as_in_m_d_1(self):
        """Where all work is in one turn."""
        service, share = 1000, 0.6
        arrivals = np.cumsum(np.random.default_rng(0).exponential(service / share, 400_000)).astype(np.int64)
        waits = second_turns(arrivals, 0, np.full(len(arrivals), service)) - arrivals - service
        assert waits.mean() == pytest.approx(service * share / (2 * (1 - share)), rel=0.02)

    def test_a_loop_that_is_behind_takes_all_steps_that_are_over(self):
        # 10 for a step, 1 a token and 4 a chunk, of 2 sequences; a step every 5.
        server, none = ApiServer(1, 0, 0, 10, 1, 4), np.zeros(0, dtype=np.int64)
        steps = Steps(np.arange(5, 45, 5), np.full(8, 2), np.zeros(8, dtype=np.int64))
        sent = server.answered(steps, none, none, np.zeros(8, dtype=np.int64), steps.end_ticks)
        # The first alone until 25; the four until then take 40 + 8 + 8; the rest 30 + 6 + 8.
        assert sent.tolist() == [25, *[81] * 4, *[125] * 3]


@st.composite
def scenes(draw):
    """Requests and steps of one loop or two, in units."""
    few = st.integers(0, 6)
    arrivals = np.cumsum(draw(st.lists(few, min_size=0, max_size=6))).astype(np.int64)
    steps = np.cumsum(draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))).astype(np.int64)
    sequences = np.array(draw(st.lists(st.integers(1, 4), min_size=len(steps), max_size=len(steps))))
    prompts = np.array(draw(st.lists(few, min_size=len(arrivals), max_size=len(arrivals))), dtype=np.int64)
    parts = [draw(st.integers(0, 4)) for _ in range(5)]
    begun = np.array([draw(st.integers(0, most)) for most in sequences.tolist()])
    return ApiServer(draw(st.integers(1, 2)), *parts), arrivals, prompts, Steps(steps, sequences, begun)


def by_units(server: ApiServer, loop: int, arrivals, prompts, steps) -> list[int]:
    """When a loop has sent each step's outputs: it works unit by unit, on requests first."""
    intake = [
        [at, server.request + server.prompt_token * prompt]
        for at, prompt in list(zip(arrivals.tolist(), prompts.tolist(), strict=True))[loop :: server.loops]
    ]
    waiting = list(zip(*(column.tolist() for column in steps), strict=True))
    sent, batch, left, now = [], 0, 0, 0
    while len(sent) < len(steps.end_ticks):
        requests = [each for each in intake if each[0] <= now and each[1]]
        if not batch and not requests:
            taken = [step for step in waiting[len(sent) :] if step[0] <= now]
            batch = len(taken)
            if batch:
                chunks = taken[0][1] + sum(step[2] for step in taken[1:])
                shared = server.token * sum(step[1] for step in taken) + server.chunk * chunks
                left = server.step * batch + -(-shared // server.loops)
        if batch and not left:
            sent += [now] * batch
            batch = 0
            continue
        if requests:
            requests[0][1] -= 1
        elif batch:
            left -= 1
            if not left:
                sent += [now + 1] * batch
                batch = 0
        now += 1
    return sent


def turns_by_units(arrivals: list[int], first: int, second: list[int]) -> list[int]:
    """When each job has had both turns: one queue, worked off unit by unit, in which a job stands twice, one time after the other."""
    waiting, queue, done, now = deque(enumerate(arrivals)), deque[list[int]](), {}, 0
    while len(done) < len(arrivals):
        # Those that come at this moment stand before the second turn of a job whose first turn ends now.
        ended = queue.popleft() if queue and not queue[0][1] else None
        while waiting and waiting[0][1] <= now:
            queue.append([waiting.popleft()[0], first, 1])
        if ended:
            job, _, turns_left = ended
            if turns_left:
                queue.append([job, second[job], 0])
            else:
                done[job] = now
        if queue:
            queue[0][1] -= 1
        now += 1
    return [done[job] for job in range(len(arrivals))]


@hypothesis.given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=9), st.integers(1, 5))
def test_jobs_take_turns_as_in_one_queue(jobs, first):
    gaps, second = map(np.array, zip(*jobs, strict=True))
    arrivals = np.cumsum(gaps)
    found = second_turns(arrivals, first, second)
    assert found.tolist() == turns_by_units(arrivals.tolist(), first, second.tolist())
    # The loop is never idle while a job waits: its outputs have the same time as if each job took one turn.
    assert found.max() == served(arrivals, first + second).max()


def test_measured_bursts_leave_the_server_as_computed():
    """CPU time until the engine has the first request over that until it has the last: of vLLM's own API server."""
    rows = json.loads(resources.files("fragmeter.sim.policy").joinpath("api_server.json").read_text("utf-8"))["bursts"]
    errors = []
    for row in rows["loads"]:
        server = ApiServer.of_us(1, measured_us()[row["endpoint"]])
        at = server.delivered(np.zeros(row["requests"], np.int64), np.full(row["requests"], row["prompt_tokens"]))
        errors.append(at[0] / at[-1] - row["first_us"] / row["last_us"])
        assert row["first_us"] > 50 * row["last_us"] / row["requests"]
    assert len(errors) == 8 and np.median(np.abs(errors)) < 0.06 and np.max(np.abs(errors)) < 0.15


@pytest.mark.slow
@hypothesis.given(scenes())
def test_outputs_have_the_time_that_requests_leave(scene):
    server, arrivals, prompts, steps = scene
    hypothesis.assume(server.step + server.token + server.chunk)
    for loop in range(server.loops):
        rows = np.full(len(steps.end_ticks), loop)
        sent = server.answered(steps, arrivals, prompts, rows, steps.end_ticks)
        assert sent.tolist() == by_units(server, loop, arrivals, prompts, steps)


class TestServedRuns:
    def test_a_request_alone_takes_the_sum(self):
        work = Workload("one", np.zeros(1, dtype=np.int64), np.array([100]), np.array([5]))
        plain, served = times(work), times(work, US)
        # 1000 + 2.5 x 100 before the engine; 50 + 12 + 30 after the step.
        assert served.first_token_ticks - plain.first_token_ticks == 1342 * ticks.PER_US
        assert served.finish_ticks - plain.finish_ticks == 1342 * ticks.PER_US

    @pytest.mark.parametrize("rate", (None, 30.0))
    def test_no_time_is_no_api_server(self, rate):
        plain, none = times(load(rate)), times(load(rate), dict.fromkeys(PARTS, 0))
        assert all(np.array_equal(getattr(plain, name), getattr(none, name)) for name in vars(plain))

    @pytest.mark.parametrize("rate, loops", [*product((None, 5.0, 300.0), (1, 3))])
    def test_leaps_and_the_compiled_core_change_nothing(self, rate, loops):
        heavy = US | {"token": 400}
        found = [
            times(load(rate), heavy, api_server_count=loops, **more)
            for more in ({}, {"core": False}, {"core": False, "leap": False})
        ]
        for other in found[1:]:
            assert all(np.array_equal(getattr(found[0], name), getattr(other, name)) for name in vars(other))

    def test_a_burst_is_no_faster_than_its_loops(self):
        """Of 200 requests with one token: the loop's work in all, shared by the loops."""
        work = Workload("burst", np.zeros(200, dtype=np.int64), np.full(200, 16), np.full(200, 1))
        us = {"request": 20_000, "chunk": 5_000}
        spans = []
        for loops in (1, 2, 4):
            run = simulate(settings(**SERVER, outside_ms=0, api_server=us, api_server_count=loops), work)
            spans.append(end_of_answers(run) / ticks.PER_SECOND)
            assert request_times(run).finish_ticks.max() == end_of_answers(run)
        assert spans[0] == pytest.approx(200 * 0.025, rel=0.01)
        assert spans[0] / spans[1] == pytest.approx(2, rel=0.02)
        assert spans[0] / spans[2] == pytest.approx(4, rel=0.05)

    def test_times_do_not_precede_the_engine(self):
        for rate in (None, 20.0, 500.0):
            run = simulate(settings(**SERVER, api_server=US), load(rate))
            bare = request_times(replace(run, replica=replace(run.replica, api_server=None)))
            with_server = request_times(run)
            assert (with_server.first_token_ticks > bare.first_token_ticks).all()
            assert (with_server.finish_ticks > bare.finish_ticks).all()
            assert (with_server.finish_ticks >= with_server.first_token_ticks).all()


class TestSettings:
    def test_chat_has_a_time_of_its_own(self):
        for more, ms in (
            ({}, OUTSIDE_MS),
            ({"endpoint": "chat"}, CHAT_OUTSIDE_MS),
            ({"outside_ms": 20.0}, 20.0),
            ({"outside_ms": 0, "endpoint": "chat"}, 0),
        ):
            assert build(settings(**SERVER, **more)).outside_ticks == round(ms * ticks.PER_MS)
        assert outside_ticks(build(settings(**SERVER)).cost) is None

    def test_measured_times_are_of_the_endpoint(self):
        found = {
            name: build(settings(**SERVER, api_server="measured", endpoint=name)).api_server
            for name in ("completions", "chat")
        }
        assert found["chat"] != found["completions"]
        for name, server in found.items():
            assert server == ApiServer.of_us(1, measured_us()[name])
            assert server.request > 200 * ticks.PER_US and server.token + server.chunk > 10 * ticks.PER_US

    @pytest.mark.parametrize(
        "text, named",
        (
            ("fast", "must be measured, or microseconds"),
            ("[1]", "must be measured, or microseconds"),
            ('{"tokens": 3}', "api_server.tokens = 3"),
            ('{"token": -1}', "api_server.token = -1"),
            ('{"token": true}', "api_server.token = True"),
            ('{"request": 2000000}', "api_server.request = 2000000"),
            ('{"request": NaN}', "api_server.request"),
        ),
    )
    def test_other_values_are_refused(self, text, named):
        with pytest.raises(UserError, match=named):
            settings(**SERVER, api_server=text)

    def test_what_is_not_given_takes_no_time(self):
        assert api_server_us('{"token": 3}', "chat") == dict.fromkeys(PARTS, 0.0) | {"token": 3.0}

    def test_what_it_is_not_simulated_with_is_refused(self):
        work = load(10.0)
        waiting = replace(work, users=Users(2, np.zeros(len(work), dtype=np.int64)))
        with pytest.raises(SettingError, match="api_server"):
            simulate(settings(**SERVER, api_server=US), waiting)
        with pytest.raises(SettingError, match="api_server"):
            simulate_cluster(settings(**SERVER, api_server=US), work, Cluster(num_replicas=2))
        with pytest.raises(SettingError, match="api_server_count"):
            simulate(settings(**SERVER, api_server_count=2), work)
        drafts = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
        drafts |= {"synthetic_acceptance_length": 2}
        with pytest.raises(NotSimulated, match="api_server"):
            build(settings(**SERVER, api_server=US, speculative_config=json.dumps(drafts)))
