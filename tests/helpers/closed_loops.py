"""Closed loops: when requests are sent, and checks of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine_runs import settings_of, times_of, workload_of
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.requests import RequestTimes, request_times
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.content import NO_SESSION
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from strategies import LineCost

# A step takes 101 ticks, 13 for each decode and 7 for each token of a prompt.
COST = LineCost()


ROOMY = Pool(1000, 4, 0)


def served(requests: list[Request], users: Users, policy: str = "vllm-sosp23", pool: Pool = ROOMY, **switches) -> Run:
    limits = Limits(64)
    work = replace(workload_of(requests, limits.max_model_len), users=users)
    return simulate(settings_of(policy, pool, limits, **switches), work, COST)


def sent_and_done(run: Run) -> list[tuple[int, int]]:
    times = request_times(run)
    return list(zip(times.arrival_ticks.tolist(), times.finish_ticks.tolist()))


def check_sent(run: Run, users: Users, arrivals: np.ndarray) -> int:
    """Each request is sent when it should be, computed again from the finishes; the ticks that users are idle in all.

    A later turn follows the answer to the one before it; a first one is sent by the user that is ready first, if there
    are so few of them.
    """
    return check_times_sent(request_times(run), run.log.end_ticks, users, arrivals)


def check_times_sent(times: RequestTimes, end_ticks: int, users: Users, arrivals: np.ndarray) -> int:
    """As ``check_sent``, of the times of all requests and the end of the run."""
    columns = times.arrival_ticks, times.finish_ticks
    sent, done = (dict(zip(times.index.tolist(), column.tolist())) for column in columns)
    turns = turns_by_session(users, sent)
    before = {turn: earlier for chain in turns for earlier, turn in zip(chain, chain[1:])}
    last = {chain[-1] for chain in turns}
    think = users.think_ticks.tolist()
    idle, firsts = 0, sorted((sent[chain[0]], chain[0]) for chain in turns)
    for turn, earlier in before.items():
        assert sent[turn] == done[earlier] + think[earlier]
        idle += think[earlier]
    assert [row for _, row in firsts] == sorted(row for _, row in firsts)
    if users.max_concurrency is None:
        assert all(tick == arrivals[row] for tick, row in firsts)
        return idle
    # When each user is ready, and since when.
    ready = [(0, 0)] * users.max_concurrency
    answers = sorted((done[row], done[row] + think[row]) for row in last)
    for tick, row in firsts:
        while answers and answers[0][0] <= tick:
            since, from_then = answers.pop(0)
            ready.append((from_then, since))
        user = min(ready)
        ready.remove(user)
        assert tick == max(user[0], arrivals[row])
        idle += tick - user[1]
    return idle + sum(end_ticks - since for _, since in [*ready, *((then, done) for done, then in answers)])


def check_replayed(run: Run, work: Workload, cost: object) -> None:
    """A source that knew beforehand what is sent, and when, would give the same: rows in the order of the queue."""
    sent = request_times(run).arrival_ticks
    rows = np.flatnonzero(~run.refused)
    queue = np.lexsort((rows, sent))
    names = ("prompt_tokens", "output_tokens", "max_tokens", "n")
    columns = {name: getattr(work, name)[rows[queue]] for name in names if getattr(work, name) is not None}
    known = Workload("known", sent[queue], **columns)
    replayed, seen = times_of(simulate(only_read(run.settings, known), known, cost)), times_of(run)
    assert [replayed[place] for place in range(len(queue))] == [seen[row] for row in rows[queue].tolist()]


def turns_by_session(users: Users, served: dict[int, int]) -> list[list[int]]:
    """The rows of each session, in order."""
    names = [NO_SESSION] * len(users.think_ticks) if users.session_id is None else users.session_id.tolist()
    chains: dict[object, list[int]] = {}
    for row in sorted(served):
        chains.setdefault(("alone", row) if names[row] == NO_SESSION else names[row], []).append(row)
    return list(chains.values())
