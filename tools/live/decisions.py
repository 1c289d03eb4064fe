"""Compares what a live vLLM server decided, step by step, with what the simulated one decides.

The simulator serves the requests of a probe's file with steps of one tick; a step that only preempts takes none. A request
arrives in the step in which the server's scheduler first knew it. Which tick a step has does not depend on its duration, so
this is the replay with the server's own step times, and every time can be put back: step k lasted from ``begin_ns`` of step
k to that of step k + 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike

import numpy as np

from fragmeter.sim import Settings, Workload, simulate
from fragmeter.sim.cost.steps import FittedSteps, StepCoefficients
from fragmeter.sim.recording.blocks import BlockMap, BlockRecording
from fragmeter.sim.recording.probe import ProbedRun, ProbedStep, read_probe
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import UserError

from .probed import probed_blocks
from .step_log import Difference, Served, Step, StepLog, first_difference

#: More steps than a block map has: the map has a column for each.
_MOST_STEPS = 1 << 20
#: A step of one tick.
_ONE_TICK = FittedSteps(StepCoefficients(base_us=1 / ticks.PER_US, token_us=(0.0,)))


@dataclass(frozen=True)
class Decisions:
    """A comparison of decisions.

    Attributes:
        requests, steps, preemptions, evicted_blocks, hit_tokens: Of the server.
        difference: The first difference, if any: requests scheduled and their tokens, preemptions, free blocks, prefix
            hits, evictions, block tables and cached blocks of each step, and when requests finish.
        waste: Share of the pool in each bucket over time: the server's, and the simulator's.
    """

    requests: int
    steps: int
    preemptions: int
    evicted_blocks: int
    hit_tokens: int
    difference: Difference | None
    waste: dict[str, tuple[float, float]]


def compare_decisions(probe: ProbedRun, chosen: Settings) -> Decisions:
    """Replay what a server did.

    Args:
        probe: A probe's file, read with digests.
        chosen: The server's settings.

    Raises:
        UserError: The file cannot be replayed: a request was aborted or has not finished.
    """
    steps = _computed(probe)
    log = StepLog(digests=True)
    run = simulate(replace(chosen, ids=True), workload_in_steps(probe, steps), _ONE_TICK, observers=[log])
    # Rows in which requests only arrive, or are only preempted, last no time. A last step that is computed in vain is no
    # part of a simulated run.
    real_rows = run.log.rows["ticks"] > 0
    counted = [step for step in steps if step.tokens][: real_rows.sum()]
    lasted = np.diff([step.begin_ns for step in counted], append=counted[-1].end_ns)
    ours = run.accounts.at_rows()
    waste = {}
    for bucket in steps[0].buckets:
        known = np.array([step.buckets[bucket] for step in counted])
        mine = ours[bucket][real_rows]
        capacity = run.log.capacity_slots * lasted.sum()
        waste[bucket] = (
            float(known @ lasted / capacity),
            float(mine @ lasted / capacity) if len(mine) == len(lasted) else float("nan"),
        )
    return Decisions(
        requests=len(probe.requests),
        steps=len(steps),
        preemptions=len(probe.preemptions),
        evicted_blocks=sum(step.evicted for step in steps),
        hit_tokens=sum(sum(request.hit_tokens) for request in probe.requests),
        difference=first_difference(_served(probe, steps), log.served(run)),
        waste=waste,
    )


def compare_blocks(
    path: str | PathLike[str], chosen: Settings, first_ns: int, most_steps: int
) -> tuple[BlockMap, BlockMap]:
    """Block maps of some steps of a probe's file: the server's and the simulator's. A tick is a step with tokens.

    Args:
        chosen: The server's settings.
        first_ns: No step that is drawn starts earlier.
        most_steps: Maximum number of steps with tokens.

    Raises:
        UserError: No step starts so late, or the file cannot be replayed or drawn: see ``workload_in_steps`` and
            ``probed_blocks``.
    """
    probe = read_probe(path)
    steps = _computed(probe)
    starts = [step.start_ns for step in steps if step.tokens]
    first = bisect_left(starts, first_ns)
    last = min(first + most_steps, len(starts))
    if first == last:
        raise UserError(f"{path}: no step starts at {first_ns} ns or later")
    # Later requests change nothing in these steps.
    known = [request for request in probe.requests if request.added_ns <= starts[last - 1]]
    seen = [step for step in steps if step.start_ns <= starts[last - 1]]
    work = workload_in_steps(replace(probe, requests=known), seen)
    recording = BlockRecording(chosen, work, most_columns=_MOST_STEPS)
    run = simulate(replace(chosen, ids=True), work, _ONE_TICK, observers=[recording])
    maps = probed_blocks(path, last), recording.block_map(run)
    return maps[0].between(first, last), maps[1].between(first, last)


def _computed(probe: ProbedRun) -> list[ProbedStep]:
    """The steps that compute tokens or preempt requests."""
    return [step for step in probe.steps if step.tokens or step.preempted]


def workload_in_steps(probe: ProbedRun, steps: Sequence[ProbedStep]) -> Workload:
    """The requests of a probe, each arriving with the first step that was decided with it in the queue.

    Raises:
        UserError: A request was aborted or has not finished.
    """
    for request in probe.requests:
        if not request.is_complete:
            ended = "has not finished" if request.reason is None else f"ended with {request.reason}"
            raise UserError(f"request {request.name} {ended}; record until all requests are answered")
    starts = [step.start_ns for step in steps]
    # A step that was scheduled ahead is decided, in the simulator, when the step before begins.
    ahead = [False, *(after.start_ns < step.end_ns for step, after in zip(steps, steps[1:]))]
    known = [bisect_left(starts, request.added_ns) for request in probe.requests]
    clock = _clock(steps)
    arrivals = np.array([clock[place - ahead[place]] for place in known], dtype=np.int64)
    return Workload(
        name="probe",
        arrival_ticks=arrivals,
        prompt_tokens=np.array([request.prompt_tokens for request in probe.requests]),
        output_tokens=np.array([request.output_tokens for request in probe.requests]),
        max_tokens=np.array([request.max_tokens for request in probe.requests]),
        content=probe.content(range(len(probe.requests))),
    )


def _clock(steps: Sequence[ProbedStep]) -> list[int]:
    """The tick at which each step begins, and the end of the last: the number of steps before it that computed tokens."""
    return [0, *accumulate(int(bool(step.tokens)) for step in steps)]


def _served(probe: ProbedRun, steps: Sequence[ProbedStep]) -> Served:
    """The server's steps and finishes, in ticks."""
    ends, clock = [step.end_ns for step in steps], _clock(steps)
    finished = [
        (clock[bisect_left(ends, request.finish_ns or 0) + 1], number) for number, request in enumerate(probe.requests)
    ]
    log = [
        Step(
            now=now,
            scheduled=step.tokens,
            preempted=step.preempted,
            free=step.free,
            cached=(),
            hits=step.hits,
            evicted=step.evicted,
            tables=(step.blocks,),
        )
        for now, step in zip(clock, steps)
    ]
    preempted = np.bincount([number for _, number in probe.preemptions], minlength=len(probe.requests))
    return Served(log, sorted(finished), preemptions=tuple(preempted.tolist()))
