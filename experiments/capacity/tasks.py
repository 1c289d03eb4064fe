"""The simulations of a plan: asked for by searches, run on all cores, and kept, so that an interrupted plan continues from there.

A task is a call ``work(settings, load, goal, seed, *more)`` of a module's function. A search is a generator: it yields tasks, is sent
their results in the same order, and returns what it found. An error of one of its tasks is raised where it yielded them.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from hashlib import sha256
from math import inf
from typing import Any, Generic, TypeVar, TypeVarTuple, get_type_hints

from pydantic import TypeAdapter

from ...sim import Settings, Workload
from ...sim.cluster import Cluster
from ...sim.config.unread import only_read
from ...sim.types.errors import SimulationFault, UserError
from ...sim.types.optional import not_none
from ..runs.inputs import Inputs
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.points import Store
from ..runs.points import key as point_key
from ..runs.slo_check import Goal
from ..runs.sweeping import Outcome
from .load import Load
from .steady import rough_rate, rough_sides

_Found = TypeVar("_Found")
_Name = TypeVar("_Name", bound=Hashable)
_More = TypeVarTuple("_More")
#: Works without a run.
_LIGHT = (rough_rate, rough_sides)
_FOUND = "found"


@dataclass(frozen=True)
class Task(Generic[_Found]):
    """One call; ``task`` makes one with checked arguments.

    Attributes:
        work: A function of a module: of settings, load, goal, seed, and ``more``.
    """

    work: Callable[..., _Found]
    settings: Settings
    seed: int
    more: tuple[Any, ...] = ()

    @property
    def replicas(self) -> int:
        """Size of the fleet that it is of."""
        return next((each.size for each in self.more if isinstance(each, Cluster)), 1)


def task(
    work: Callable[[Settings, Load, Goal, int, *_More], _Found], settings: Settings, seed: int, *more: *_More
) -> Task[_Found]:
    """A task; its arguments are those of ``work`` beside load and goal, which are the plan's."""
    return Task(work, settings, seed, more)


Search = Generator[list[Task[Any]], list[Any], _Found]


def results(tasks: Iterable[Task[_Found]]) -> Search[list[_Found]]:
    """Ask for tasks that run side by side."""
    asked = list(tasks)
    if not asked:
        return []
    return (yield [*asked])


def result(asked: Task[_Found]) -> Search[_Found]:
    """Ask for one task."""
    (found,) = yield from results([asked])
    return found


def smallest(
    passes: Callable[[int], Search[bool]],
    numbers: range,
    near: int,
    stride: int,
    may_pass: Callable[[], Search[bool]] | None = None,
) -> Search[int | None]:
    """The smallest number that passes; those above one that passes are taken to pass, too. None if none passes.

    Args:
        near: The first one tried. Strides double from ``stride`` on until they enclose the answer, which is then bisected.
        may_pass: Asked where none passes so far: whether a larger one may.
    """
    low, high, probe = numbers.start - 1, None, near
    while high is None or high - low > 1:
        if (yield from passes(probe)):
            high = probe
        else:
            low = probe
        if high is not None:
            probe = max(high - stride, numbers.start) if low < numbers.start else (low + high) // 2
        elif low >= numbers.stop - 1 or (may_pass is not None and not (yield from may_pass())):
            return None
        else:
            probe = min(low + stride, numbers.stop - 1)
        stride *= 2
    return high


def carry_out(key: str, asked: Task[Any], load: Load, goal: Goal) -> Outcome:
    """Run a task. Unread settings are not refused; errors are returned, never raised."""
    try:
        chosen = only_read(asked.settings, load.draw(asked.seed).at(1.0))
        return Outcome(key, {_FOUND: asked.work(chosen, load, goal, asked.seed, *asked.more)})
    except UserError as error:
        return Outcome(key, error=str(error))
    except Exception:
        return Outcome(key, fault=traceback.format_exc())


class Runner:
    """Runs searches side by side.

    Args:
        load, goal: Of all tasks.
        store: Stores finished tasks; None stores nothing.
    """

    def __init__(self, load: Load, goal: Goal, workers: Workers, store: Store | None) -> None:
        self._load, self._goal, self._workers, self._store = load, goal, workers, store
        #: Loads with runs that fill the replicas of a candidate.
        self._filled: dict[Settings, Load] = {}
        #: By seed and number of requests.
        self._works: dict[tuple[int, int], Workload] = {}
        self._hashes: dict[tuple[int, int], str] = {}

    def fill(self, settings: Settings, in_flight: float) -> None:
        """Make the runs of a candidate long enough to fill its replicas, of which each has so many requests in flight."""
        self._filled[settings] = self._load.filling(in_flight)

    def load_of(self, settings: Settings) -> Load:
        """The load of a candidate, with runs that fill its replicas; those of others do not change it."""
        return self._filled.get(settings, self._load)

    def side_by_side(self, searches: Mapping[_Name, Search[_Found]]) -> dict[_Name, _Found]:
        """Run searches to their ends: what each of them found.

        Raises:
            UserError: A task cannot be carried out, and its search does not catch that.
            SimulationFault: An invariant of the simulator is violated.
        """
        ended: dict[_Name, _Found] = {}
        asked: dict[_Name, list[Task[Any]]] = {}
        left: dict[_Name, list[Outcome]] = {name: [] for name in searches}
        while left:
            for name, outcomes in left.items():
                try:
                    asked[name] = _advance(searches[name], outcomes)
                except StopIteration as end:
                    ended[name] = end.value
                    asked.pop(name, None)
            left = self._outcomes(asked)
        return {name: ended[name] for name in searches}

    def _outcomes(self, asked: Mapping[_Name, Sequence[Task[Any]]]) -> dict[_Name, list[Outcome]]:
        """The outcomes of the next tasks of every search, one kind of task after another."""
        keys = {name: [self.key(each) for each in tasks] for name, tasks in asked.items()}
        by_work: dict[Callable[..., Any], dict[str, Task[Any]]] = {}
        for name, tasks in asked.items():
            for key, each in zip(keys[name], tasks, strict=True):
                by_work.setdefault(each.work, {})[key] = each
        found: dict[str, Outcome] = {}
        for work, of_work in by_work.items():
            found |= self._run(work, of_work)
        return {name: [found[key] for key in of_name] for name, of_name in keys.items()}

    def _run(self, work: Callable[..., Any], tasks: Mapping[str, Task[Any]]) -> dict[str, Outcome]:
        """Run the tasks that are not in the store, and store their results."""
        found = {key: kept for key in tasks if (kept := self._kept(work, key)) is not None}
        missing = {key: each for key, each in tasks.items() if key not in found}
        calls = ((key, each, self.load_of(each.settings), self._goal) for key, each in missing.items())
        done = as_they_finish(carry_out, calls, len(missing), self._workers, light=work in _LIGHT)
        for outcome in track(done, work.__name__.replace("_", " "), len(missing)):
            if outcome.fault:
                error = SimulationFault(outcome.fault.splitlines()[-1])
                error.add_note(outcome.fault)
                raise error
            if outcome.summary is not None:
                self._keep(missing[outcome.key], outcome)
            found[outcome.key] = outcome
        return found

    def _kept(self, work: Callable[..., Any], key: str) -> Outcome | None:
        kept = None if self._store is None else self._store.find(key)
        if kept is None:
            return None
        data = kept[_FOUND]
        return Outcome(key, {_FOUND: inf if data is None else _kind(work).validate_python(data)})

    def _keep(self, done: Task[Any], outcome: Outcome) -> None:
        if self._store is not None:
            found = not_none(outcome.summary)[_FOUND]
            # JSON has no infinity; no other result is None.
            data = None if found == inf else _kind(done.work).dump_python(found, mode="json")
            self._store.keep(outcome.key, Inputs(settings=done.settings), {_FOUND: data})

    def key(self, asked: Task[Any]) -> str:
        """A hash of every input of a task's result."""
        load = self.load_of(asked.settings)
        run = point_key(Inputs(settings=asked.settings), self.work(load, asked.seed))
        more = [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in asked.more]
        served = self._hash(load, asked.seed, asked.replicas)
        parts = [asked.work.__name__, run, served, asdict(self._goal), asked.seed, more]
        return sha256(json.dumps(parts).encode()).hexdigest()

    def work(self, load: Load, seed: int) -> Workload:
        """The requests that a seed has for one replica, at 1 request/s."""
        drawn = seed, load.num_prompts()
        if drawn not in self._works:
            self._works[drawn] = load.draw(seed).at(1.0)
        return self._works[drawn]

    def _hash(self, load: Load, seed: int, replicas: int) -> str:
        """The hash of the requests that a seed has for a fleet."""
        drawn = seed, load.num_prompts(replicas)
        if drawn not in self._hashes:
            work = self._works.get(drawn)
            self._hashes[drawn] = (load.draw(seed, replicas).at(1.0) if work is None else work).sha256()
        return self._hashes[drawn]


def _advance(search: Search[Any], outcomes: Sequence[Outcome]) -> list[Task[Any]]:
    """The tasks that a search asks for next, after these; without any the first."""
    if not outcomes:
        return next(search)
    if error := next((each.error for each in outcomes if each.error), None):
        return search.throw(UserError(error))
    return search.send([not_none(each.summary)[_FOUND] for each in outcomes])


@cache
def _kind(work: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(work)["return"])
