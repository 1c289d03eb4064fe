"""Runs the jobs of a plan's steps on all cores, and keeps their results, so that an interrupted plan continues from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from ...sim import Settings, Workload
from ...sim.cluster import Cluster
from ...sim.types.errors import SimulationFault
from ..runs.inputs import Inputs
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.points import Store
from ..runs.points import key as point_key
from ..runs.slo_check import Goal
from ..runs.sweeping import Outcome
from .load import Load
from .max_rate import Ahead
from .stages import carry_out

_Name = TypeVar("_Name")
#: Steps without a run.
_LIGHT = ("rough", "sides")


class Job(NamedTuple):
    """One job of a step; ``more`` are further arguments."""

    settings: Settings
    seed: int
    more: tuple[Any, ...] = ()

    def with_more(self, argument: Any) -> Job:
        """The job with one more argument."""
        return self._replace(more=(*self.more, argument))


class Jobs:
    """Runs jobs.

    Args:
        load, goal: Of all of them.
        store: Stores finished jobs; None stores nothing.
    """

    def __init__(self, load: Load, goal: Goal, workers: Workers, store: Store | None) -> None:
        self._load, self._goal, self._workers, self._store = load, goal, workers, store
        #: Loads with runs that fill the replicas of a candidate.
        self._filled: dict[Settings, Load] = {}
        #: By seed and number of requests.
        self._works: dict[tuple[int, int], Workload] = {}
        self._hashes: dict[tuple[int, int], str] = {}

    def fill(self, in_flight: Mapping[Settings, float]) -> None:
        """Make the runs of fleets long enough to fill their replicas, of which each has so many requests in flight."""
        self._filled |= {settings: self._load.filling(count) for settings, count in in_flight.items()}

    def load_of(self, settings: Settings) -> Load:
        """The load of a candidate, with runs that fill its replicas; those of others do not change it."""
        return self._filled.get(settings, self._load)

    def run(self, stage: str, jobs: Mapping[_Name, Job]) -> dict[_Name, Outcome]:
        """Run the jobs that are not in the store, and store their results."""
        keys = {name: self.key(stage, *job) for name, job in jobs.items()}
        found = {
            name: Outcome(name, kept) for name in keys.values() if self._store and (kept := self._store.find(name))
        }
        missing = {keys[name]: job for name, job in jobs.items() if keys[name] not in found}
        calls = (
            (name, stage, job.settings, self.load_of(job.settings), self._goal, job.seed, *job.more)
            for name, job in missing.items()
        )
        for outcome in track(
            as_they_finish(carry_out, calls, len(missing), self._workers, light=stage in _LIGHT), stage, len(missing)
        ):
            if outcome.fault:
                error = SimulationFault(outcome.fault.splitlines()[-1])
                error.add_note(outcome.fault)
                raise error
            if self._store and outcome.summary is not None:
                self._store.keep(outcome.key, Inputs(settings=missing[outcome.key].settings), outcome.summary)
            found[outcome.key] = outcome
        return {name: found[keys[name]] for name in jobs}

    def key(self, stage: str, chosen: Settings, seed: int, more: tuple[Any, ...] = ()) -> str:
        """A hash of every input of a job's result."""
        load = self.load_of(chosen)
        run = point_key(Inputs(settings=chosen), self.work(load, seed))
        parts = [asdict(each) if isinstance(each, (Ahead, Cluster)) else each for each in more]
        replicas = next((each.size for each in more if isinstance(each, Cluster)), 1)
        served = self._hash(load, seed, replicas)
        return sha256(json.dumps([stage, run, served, asdict(self._goal), seed, parts]).encode()).hexdigest()

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
