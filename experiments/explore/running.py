"""Run every position of a grid once, in parallel."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...reports.explore.explorer import DECIMALS, FinishedRun
from ...reports.explore.moments import MOST_BLOCKS, MOST_MOMENTS, Moments, moments
from ...sim import Settings, Workload, summary
from ...sim.memory import BUCKETS
from ...sim.metrics.views import nine_buckets
from ...sim.recording.blocks import record
from ...sim.types.errors import SimulationFault, UserError
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.points import Workloads, flat
from ..runs.unread import Unread
from .axes import Grid, Position
from .lines import command, python


@dataclass(frozen=True)
class Outcome:
    """A run in a worker: its numbers and moments, or the reason why there are none. Errors are text, as in a sweep."""

    place: int
    numbers: tuple[float | None, ...] = ()
    shares: tuple[float, ...] = ()
    moments: Moments | None = None
    error: str = ""
    fault: str = ""


def finished_runs(grid: Grid, workers: Workers) -> tuple[list[list[int]], list[FinishedRun]]:
    """The run of each policy at each state, as an index of the runs; and the runs, each of which was made once.

    Policies that do not read what differs between two states have one run for both.

    Raises:
        UserError: Requests that cannot be made, a flag that no run reads, or no run that can be made.
        SimulationFault: A run fails because of an internal fault.
    """
    places: dict[str, int] = {}
    positions: list[Position] = []
    states = []
    for state in grid.states():
        here = []
        for name in grid.policies:
            position = grid.position(name, state)
            line = command(position.inputs)
            if line not in places:
                places[line] = len(positions)
                positions.append(position)
            here.append(places[line])
        states.append(here)
    outcomes = _run(positions, workers)
    if all(each.error for each in outcomes):
        raise UserError(outcomes[0].error)
    runs = [
        FinishedRun(position.policy, command(position.inputs), python(position.inputs), *_content(outcome))
        for position, outcome in zip(positions, outcomes, strict=True)
    ]
    return states, runs


def _content(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.numbers, outcome.shares, outcome.moments, outcome.error


def _run(positions: Sequence[Position], workers: Workers) -> list[Outcome]:
    """The outcomes, in the order of the positions."""
    workloads, unread = Workloads(), Unread()
    # Those of one load beside each other: the last few loads are kept.
    order = sorted(range(len(positions)), key=lambda place: _load_of(positions[place]))
    for place in order:
        unread.see(positions[place].inputs, workloads.of(positions[place].inputs))
    unread.refuse()
    jobs = ((place, positions[place].inputs.settings, workloads.of(positions[place].inputs)) for place in order)
    found: dict[int, Outcome] = {}
    for outcome in track(as_they_finish(run, jobs, len(order), workers, light=True), "runs", len(order)):
        if outcome.fault:
            error = SimulationFault(f"{command(positions[outcome.place].inputs)}: {outcome.fault.splitlines()[-1]}")
            error.add_note(outcome.fault)
            raise error
        found[outcome.place] = outcome
    return [found[place] for place in range(len(positions))]


def _load_of(position: Position) -> str:
    """A text that is the same for positions of one load."""
    inputs = position.inputs
    return repr((inputs.requests, inputs.pacing, inputs.settings.seed))


def run(place: int, settings: Settings, work: Workload) -> Outcome:
    """Serve a load to its end and look at it at ``MOST_MOMENTS`` times; errors are returned, never raised."""
    try:
        found, blocks = record(settings, work, most_columns=2 * MOST_MOMENTS, most_rows=MOST_BLOCKS)
        content = summary(found)
        numbers = dict(flat(content))
        buckets = nine_buckets(content["waste"]["mean_over_iterations_pct"]["buckets"])
        return Outcome(
            place,
            tuple(numbers.get(path) for path in DECIMALS),
            tuple(buckets[bucket] for bucket in BUCKETS),
            moments(found, blocks),
        )
    except UserError as error:
        return Outcome(place, error=str(error))
    except Exception:
        return Outcome(place, fault=traceback.format_exc())
