"""Check of the service level objectives of a run: during the run, which ends as soon as the outcome is certain.

The first and the last tenth of the requests are served and not counted: the first find an empty replica, and the last
have no requests behind them. A run meets its goal if at least the share ``attainment`` of the counted requests meets
every objective. A refused request meets none. Of several loads with objectives of their own each must meet its goal, and the
check is of the one that meets it least.

During the run, the time that a request has taken so far is a lower bound. A request beyond a limit has missed it,
finished or not. The goal is missed as soon as too many requests have missed. Once all counted requests are finished,
the outcome is known. Both are certain: a run that ends early has the outcome of the whole run.

Under lenient objectives a replica could pass for the length of a run while its queue grows. So no rate above
``saturated_rate`` counts: the rate at which requests finish while others always wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor

import numpy as np

from ...sim import Run, Settings, Workload, simulate
from ...sim.cost import StepCost
from ...sim.engine.core import CoreEngine
from ...sim.engine.engine import Engine
from ...sim.engine.replica import build
from ...sim.engine.run import run_log_of
from ...sim.metrics.objectives import Objectives
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types.optional import not_none
from ...sim.types.ticks import PER_SECOND

#: Share of the requests at either end that are not counted.
_APART = 0.1
#: The check takes one in this many looks at a run: about twenty.
_LOOK_EVERY = 10
#: Beyond any tick of a run.
_NEVER = 1 << 62


@dataclass(frozen=True)
class Goal:
    """The goal of a replica.

    Attributes:
        objectives: Objectives of every request; of several loads the strictest of each, for estimates.
        attainment: Share of the requests, of each load, that must meet them all. DistServe (OSDI'24) plans for 90 %.
        loads: Name and objectives of each load (``Workload.load``); empty if there is one.
    """

    objectives: Objectives
    attainment: float = 0.9
    loads: tuple[tuple[str, Objectives], ...] = ()

    def scaled(self, factor: float) -> Goal:
        """The goal with all limits times a factor."""
        loads = tuple((load, each.scaled(factor)) for load, each in self.loads)
        return replace(self, objectives=self.objectives.scaled(factor), loads=loads)

    def __str__(self) -> str:
        return ", ".join(f"{name} {each}" for name, each in self.loads) or str(self.objectives)


@dataclass(frozen=True, eq=False)
class Seen:
    """The state of the requests at some time. Times of unfinished requests are lower bounds.

    Attributes:
        first_token_ticks, finish_ticks: int64 [n].
        finished: bool [n].
    """

    first_token_ticks: np.ndarray
    finish_ticks: np.ndarray
    finished: np.ndarray


@dataclass(frozen=True)
class SloCheck:
    """Result of a run against its goal.

    Attributes:
        meets: Whether the run meets the goal.
        counted: Number of counted requests.
        met: Counted requests that meet every objective; an upper bound for a run that was stopped early.
        missed: Counted requests that miss each objective, by name; a lower bound for a run that was stopped early.
        load: Name of the load, of several.
    """

    meets: bool
    counted: int
    met: int
    missed: dict[str, int]
    load: str | None = None

    @property
    def attained(self) -> float:
        """Share of the requests that meet every objective."""
        return self.met / self.counted


def counted(n: int) -> slice:
    """Which of ``n`` requests are counted."""
    apart = floor(_APART * n)
    return slice(apart, n - apart)


@lru_cache(maxsize=16)
def compiled_cost(settings: Settings) -> StepCost:
    """The step cost of these settings. It caches its compilation, which over many runs is most of the work."""
    return build(settings).cost


def check_slo(settings: Settings, work: Workload, goal: Goal, step_cost: StepCost | None = None) -> SloCheck:
    """Serve a workload until the outcome of the goal is certain.

    Args:
        step_cost: Step cost in place of the settings' own.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    watch = _Watch(work, goal)
    run = simulate(settings, work, step_cost or compiled_cost(settings), watch=watch.look, logs_contents=False)
    return watch.certain or check_run(run, goal)


def check_run(run: Run, goal: Goal) -> SloCheck:
    """The check of a finished run."""
    return check_times(run.workload, request_times(run), goal)


def check_times(work: Workload, times: RequestTimes, goal: Goal) -> SloCheck:
    """The check of the served requests of a finished run."""
    return _least(by_load(work, times, goal))


def by_load(work: Workload, times: RequestTimes, goal: Goal) -> list[SloCheck]:
    """As ``check_times``, of each load."""
    n = len(work)
    first, finish, finished = np.full(n, _NEVER), np.full(n, _NEVER), np.zeros(n, dtype=bool)
    first[times.index], finish[times.index], finished[times.index] = times.first_token_ticks, times.finish_ticks, True
    return _checks(work, goal, Seen(first, finish, finished), over=True)


def _least(checks: Sequence[SloCheck]) -> SloCheck:
    """The check with the smallest share: all have one attainment, so it meets the goal only if all do."""
    return min(checks, key=lambda each: each.attained)


def judged(work: Workload, goal: Goal, seen: Seen, over: bool) -> SloCheck | None:
    """The check of the known state; None if the outcome is not certain yet.

    Args:
        over: Whether the run has ended, so that unfinished requests stay unfinished.
    """
    found = _least(_checks(work, goal, seen, over))
    if found.meets and not over and not seen.finished[counted(len(work))].all():
        return None
    return found


def _checks(work: Workload, goal: Goal, seen: Seen, over: bool) -> list[SloCheck]:
    """The check of each load by the known state."""
    count = counted(len(work))
    columns = [work.arrival_ticks, seen.first_token_ticks, seen.finish_ticks, work.output_tokens]
    columns, finished = [each[count] for each in columns], seen.finished[count]
    if not goal.loads:
        return [_check(goal.objectives, goal.attainment, columns, finished, over)]
    checks = []
    for place, (name, limits) in enumerate(goal.loads):
        rows = not_none(work.load)[count] == place
        if rows.any():
            of_load = [each[rows] for each in columns]
            checks.append(replace(_check(limits, goal.attainment, of_load, finished[rows], over), load=name))
    return checks


def _check(
    limits: Objectives, attainment: float, columns: Sequence[np.ndarray], finished: np.ndarray, over: bool
) -> SloCheck:
    """The check of counted requests.

    Args:
        columns: As ``Objectives.missed`` takes them.
    """
    missed = limits.missed(*columns)
    any_missed = np.logical_or.reduce([~finished & over, *missed.values()])
    total, misses = len(any_missed), int(any_missed.sum())
    enough = misses <= total * (1 - attainment) + 1e-9
    return SloCheck(enough, total, total - misses, {name: int(some.sum()) for name, some in missed.items()})


def saturated_rate(settings: Settings, work: Workload, step_cost: StepCost | None = None) -> float | None:
    """Requests/s of a replica that always has requests waiting: all requests arrive at once, and the later half sets the rate.

    None if fewer than half of them finish before the last one starts: so few requests do not fill the replica.
    """
    at_once = replace(work, arrival_ticks=np.zeros(len(work), dtype=np.int64))
    times = request_times(simulate(settings, at_once, step_cost or compiled_cost(settings), logs_contents=False))
    begun = np.sort(times.first_scheduled_ticks)
    if not len(begun) or 2 * (times.finish_ticks <= begun[-1]).sum() < len(begun):
        return None
    middle = len(begun) // 2
    return (len(begun) - 1 - middle) * PER_SECOND / int(begun[-1] - begun[middle])


class _Watch:
    """Checks a run at intervals, through its engine's ledger, and ends it once the outcome is certain.

    Attributes:
        certain: The check, if it was certain before the end of the run.
    """

    def __init__(self, work: Workload, goal: Goal) -> None:
        self._work, self._goal = work, goal
        self._looks = 0
        self.certain: SloCheck | None = None

    def look(self, engine: Engine | CoreEngine) -> bool:
        """End the run if the outcome is certain."""
        self._looks += 1
        if self._looks % _LOOK_EVERY or self._work.shares or self._work.dialogue is not None:
            return False
        seen = seen_so_far(engine, self._work)
        self.certain = None if seen is None else judged(self._work, self._goal, seen, over=False)
        return self.certain is not None


def seen_so_far(engine: Engine | CoreEngine, work: Workload) -> Seen | None:
    """The state of requests of one sequence each in mid-run, from the ledger; None before the first leap ends.

    All times refer to the end of the last complete leap. A request that has not started by then has no token before it,
    and an unfinished request finishes no earlier.
    """
    n = len(work)
    ledger = engine.ledger
    if not len(ledger.rows.columns()["steps"]):
        return None
    run_log = run_log_of(ledger, engine.memory, work, grouped=False, end_ticks=int(engine.env.now))
    rows, residencies = run_log.rows, run_log.residencies
    known, decode_step = int(rows["start_ticks"][-1] + rows["ticks"][-1]), int(rows["steps"].sum())
    begun = np.flatnonzero(residencies["start_ticks"] < known)
    index = residencies["index"][begun]
    first, finish = np.full(n, known), np.full(n, known)
    # Backwards, so that the first of several residencies is kept.
    first[index[::-1]] = run_log.first_token_ticks[begun[::-1]]
    done = run_log.residency_release[begun] <= decode_step
    done &= ~np.isin(begun, run_log.evictions["residency"])
    finished = np.zeros(n, dtype=bool)
    finished[index[done]] = True
    finish[index[done]] = run_log.release_ticks[begun[done]]
    return Seen(first, finish, finished)
