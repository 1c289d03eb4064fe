"""Runs a workload on one replica to the last request, and returns the finished run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import simpy

from ..config.settings import Settings
from ..config.unread import refuse_unread
from ..cost import StepCost
from ..memory import Memory
from ..memory.accounting.ledger import Ledger
from ..runs.replica import Replica
from ..runs.run import Run
from ..runs.run_log import RunLog
from ..types import ticks
from ..types.errors import NotSimulated, SimulationFault, UserError
from ..types.state import State
from ..workload.closed_loop import ClosedLoop, Maker
from ..workload.source import OpenLoop
from ..workload.workload import Workload
from .core import CoreEngine, obstacle, serves
from .engine import Engine
from .grouping import grouped_source, is_grouped, leaders, smallest_pools
from .guard import of_plugins, suspect
from .leap_check import NONE, leaps_to_check, require_same
from .observer import Observer
from .queue_limits import LimitedLoop
from .replica import build

#: Slices of the workload; progress is reported after each.
_SLICES = 200
#: Looks at a run through its engine's ``ledger``, ``memory`` and ``env``; returns whether the run ends.
Watch = Callable[[Engine | CoreEngine], bool]
#: How far a run goes on, at a time, when all that was asked for lies behind it.
_PAST_TICKS = ticks.PER_SECOND


@of_plugins
def simulate(
    settings: Settings,
    workload: Workload,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
    observers: Iterable[Observer] = (),
    watch: Watch | None = None,
    logs_contents: bool = True,
) -> Run:
    """Serve a workload to the last request.

    Args:
        step_cost: Used in place of the settings' own.
        progress: Called now and then with the number of requests that have arrived.
        observers: Notified of plans and steps; one may end the run early.
        watch: Called at the times of ``progress``; ends the run after the step or leap in progress if it returns True. Unlike
            observers, it leaves a run to the compiled core.
        logs_contents: Whether the contents of cached blocks are logged, by which ``cache_worth`` divides cached slots. A run without
            the log takes less time, and has everything else.

    Raises:
        UserError: A request is longer than the model, or a setting cannot be or would not be read.
        SimulationFault: An invariant does not hold.
    """
    stepped = serve_checked(settings, workload, step_cost)
    with no_cycle_collection(), with_leaps(stepped):
        grouped, looks = is_grouped(settings, workload), () if watch is None else tuple(milestones(workload))
        replica, engine, source, needed = _start(
            settings, workload, grouped, step_cost, observers, looks, logs_contents=logs_contents
        )
        _run(engine, source, workload, progress, watch)
    if isinstance(source, ClosedLoop):
        workload = replace(workload, arrival_ticks=source.sent() - replica.outside_ticks)
    run = finished(settings, workload, grouped, replica, engine.ledger, engine.end_ticks, needed)
    run = replace(run, in_python=_in_python(settings, workload, grouped, replica))
    if isinstance(source, LimitedLoop):
        run = replace(run, rejected=source.rejected)
    if not engine.stopped:
        require_served(run)
        if stepped is not None:
            require_same(run.log, stepped.log, replica.policy)
    return run


def _in_python(settings: Settings, workload: Workload, grouped: bool, replica: Replica) -> str | None:
    """See ``Run``. Recordings are not part of it: the result is the same with and without."""
    if grouped:
        return "sequences that share blocks"
    return obstacle(settings, replica) if workload.users is None else "users that wait for answers"


def serve_checked(
    settings: Settings, workload: Workload, step_cost: StepCost | None = None, until: int | None = None
) -> Run | None:
    """Serve the workload once more, with the leaps that are to be checked taken step by step; None if none are.

    Args:
        until: Ticks at which the run may end; None serves every request.

    Raises:
        PluginError, SimulationFault: A leap differs from its single steps.
    """
    which = leaps_to_check(settings)
    if which == NONE:
        return None
    grouped = is_grouped(settings, workload)
    with no_cycle_collection():
        started = _start(replace(settings, core=False), workload, grouped, step_cost, check_leaps=which)
        replica, engine, _, needed = started
        if until is not None:
            _run_past(engine, until)
            return None
        engine.env.run(until=engine.process)
    return finished(settings, workload, grouped, replica, engine.ledger, engine.end_ticks, needed)


@contextmanager
def with_leaps(stepped: Run | None) -> Iterator[None]:
    """Context of the run with leaps, after ``stepped`` has served the same load step by step.

    Raises:
        SimulationFault: The run with leaps fails; the message says that the run in steps did not.
    """
    try:
        yield
    except SimulationFault as error:
        if stepped is None:
            raise
        policy = stepped.replica.policy.name
        raise SimulationFault(f"policy {policy}: a run with leaps fails, and one in steps does not: {error}") from error


def finished(
    settings: Settings,
    workload: Workload,
    grouped: bool,
    replica: Replica,
    ledger: Ledger,
    end_ticks: int,
    smallest_pool_blocks: np.ndarray,
) -> Run:
    """The finished run of an engine.

    Args:
        workload: Requests as they arrived; the ledger's sequences are theirs, by row.
        smallest_pool_blocks: See ``Run``.
    """
    run_log = run_log_of(ledger, replica.memory, workload, grouped, end_ticks)
    run = Run(settings, workload, replica, run_log, smallest_pool_blocks)
    run.accounts.require_conserved()
    if suspect(replica.policy, replica.memory) is not None:
        # Every bucket apart, which takes longer.
        run.accounts.at_rows()
    return run


def require_served(run: Run) -> None:
    """Check that a run served every request that it did not refuse: each was on the device until it finished.

    Raises:
        SimulationFault: Some were not.
    """
    log, left_out = run.log, run.refused if run.rejected is None else run.refused | run.rejected
    begun, ended = log.residencies["index"], log.evictions["index"][log.evictions["residency"] >= 0]
    if run.workload.shares:
        # A leader stands for its siblings, which may end before they begin.
        leads = log.leader == np.arange(len(log.leader))
        begun, ended = begun[leads[begun]], ended[leads[ended]]
        left_out = left_out[np.repeat(np.arange(len(left_out)), run.workload.num_sequences)[leads]]
    served, expected = len(begun) - len(ended), len(left_out) - int(np.count_nonzero(left_out))
    if served != expected:
        raise SimulationFault(f"the run is over, and {served} of {expected} requests are served")


def run_log_of(ledger: Ledger, memory: Memory, workload: Workload, grouped: bool, end_ticks: int) -> RunLog:
    """The run log of everything that a ledger has recorded so far.

    Args:
        memory: The memory of the ledger's engine.
        grouped: See ``finished``.
        end_ticks: End of the run, or the current time.
    """
    sequences = workload.sequences
    return RunLog.of(
        ledger,
        prompt_tokens=sequences.prompt_tokens,
        output_tokens=sequences.output_tokens,
        leader=leaders(workload, grouped),
        capacity_slots=memory.capacity_slots,
        block_size=memory.block_size,
        paged=not memory.reserves,
        residue="block_tail" if memory.placement is None else "round_up",
        together=memory.leaves_together,
        pinned_slots=memory.pinned_slots,
        end_ticks=end_ticks,
        groups=memory.groups,
        cached_level=memory.cached_level,
        second_pool=memory.second_pool,
        drafts=None if memory.speculation is None else memory.speculation.log.columns(),
    )


@of_plugins
def simulate_window(settings: Settings, workload: Workload, step_cost: StepCost | None = None) -> Run:
    """Run to the end of the settings' window. ``window`` of the result equals that of ``simulate``; other attributes do
    not.

    For callers that read only the window, of a load whose last requests are served long after it.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    grouped = is_grouped(settings, workload)
    _, end_ticks = settings.edges
    serve_checked(settings, workload, step_cost, end_ticks)
    with no_cycle_collection():
        replica, engine, _, needed = _start(settings, workload, grouped, step_cost)
        _run_past(engine, end_ticks)
    return finished(settings, workload, grouped, replica, engine.ledger, int(engine.env.now), needed)


def _run_past(engine: Engine | CoreEngine, end_ticks: int) -> None:
    """Run to the end of a leap that begins at ``end_ticks`` or later, so that the ledger is complete up to there."""
    until = end_ticks
    while engine.process.is_alive and (engine.ledger.rows.last("start_ticks") or 0) < end_ticks:
        until += _PAST_TICKS
        engine.env.run(until=until)


class _Started(NamedTuple):
    """An engine before its first event.

    Attributes:
        replica: Its policy, memory and cost model.
        source: Its source of requests; the compiled core is its own.
        needed: int64 [n], blocks of the smallest pool that can serve each request.
    """

    replica: Replica
    engine: Engine | CoreEngine
    source: OpenLoop | ClosedLoop | LimitedLoop | CoreEngine
    needed: np.ndarray


def _start(
    settings: Settings,
    workload: Workload,
    grouped: bool,
    step_cost: StepCost | None = None,
    observers: Iterable[Observer] = (),
    looks: Iterable[int] = (),
    check_leaps: int = NONE,
    logs_contents: bool = True,
) -> _Started:
    """Build the replica and its engine.

    Args:
        looks: Ticks at which the ledger is read during the run.
        check_leaps: As of ``Engine``.
        logs_contents: As of ``simulate``.
    """
    refuse_unread(settings, workload)
    sequences = workload.sequences
    dialogue = workload.dialogue if grouped else None
    replica = build(settings, step_cost, workload if grouped else sequences, grouped, dialogue)
    if not logs_contents:
        replica.memory.log_no_contents()
    check_fits(workload, replica.max_model_len)
    needed = smallest_pools(replica.policy, replica.block_size, workload, grouped)
    refused = needed > replica.num_blocks
    if replica.api_server is not None and workload.users is not None:
        given, reason = settings.value("api_server"), "is not simulated with users that wait for answers"
        raise NotSimulated("api_server", given, reason, "use requests with arrivals of their own, or leave it out")
    workload = as_delivered(workload, replica)
    sequences = workload.sequences
    env = simpy.Environment(initial_time=0)
    observers = tuple(observers)
    mapper = observers[0] if len(observers) == 1 and observers[0].maps_blocks and not tuple(looks) else None
    unobserved = not observers or mapper is not None
    if not grouped and workload.users is None and unobserved and serves(settings, replica, mapper is not None):
        sequence_refused = np.repeat(refused, workload.num_sequences)
        core = CoreEngine(env, sequences, sequence_refused, replica, settings.edges, looks, mapper is not None)
        if mapper is not None:
            mapper.core_started(core, refused)
        return _Started(replica, core, core, needed)
    source: OpenLoop | ClosedLoop | LimitedLoop
    state: State | None = None
    if grouped:
        source, state = grouped_source(settings, workload, replica.policy, replica.memory, refused)
    elif workload.users is not None:
        source = ClosedLoop(workload, refused, Maker(workload, replica.max_model_len))
    else:
        sequence_refused = np.repeat(refused, workload.num_sequences)
        source = loop = OpenLoop(sequences, sequence_refused, replica.max_model_len)
        limits = settings.policy_options.queue_limits
        if limits != (None, None):
            source = LimitedLoop(loop, workload.num_sequences, *limits)
            observers = (source, *observers)
    parts = replica.policy, replica.memory, replica.cost, settings.edges, settings.leap, check_leaps, state
    engine = Engine(env, source, *parts, observers)
    for observer in observers:
        observer.run_started(engine, refused)
    return _Started(replica, engine, source, needed)


def as_delivered(workload: Workload, replica: Replica) -> Workload:
    """A workload with the times at which requests reach the engine, behind HTTP and tokenizer.

    Every request is delayed by all the time that it spends outside the engine, before its first step and after its
    last token: results do not depend on how the two share it. In a closed loop, users send later by the same time.
    Requests then queue for the event loops of the API server, if these take time.
    """
    outside, server = replica.outside_ticks, replica.api_server
    if server is not None:
        arrival = server.delivered(workload.arrival_ticks + outside, workload.prompt_tokens)
        return replace(workload, arrival_ticks=arrival)
    if not outside:
        return workload
    users = workload.users
    if users is not None:
        users = replace(users, think_ticks=users.think_ticks + outside)
    return replace(workload, arrival_ticks=workload.arrival_ticks + outside, users=users)


def check_fits(workload: Workload, max_model_len: int) -> None:
    """Refuse a workload with a request longer than the model.

    Raises:
        UserError: Names the first such request.
    """
    lengths = workload.prompt_tokens + workload.output_tokens
    too_long = np.flatnonzero(lengths > max_model_len)
    if len(too_long):
        first = int(too_long[0])
        raise UserError(
            f"{workload.name}: request {first} has prompt + output = {int(lengths[first])} tokens, more than"
            f" max_model_len = {max_model_len}; drop it or take a longer model"
        )


def _run(
    engine: Engine | CoreEngine,
    source: OpenLoop | ClosedLoop | LimitedLoop | CoreEngine,
    workload: Workload,
    progress: Callable[[int], None] | None,
    watch: Watch | None,
) -> None:
    if progress is not None or watch is not None:
        for tick in milestones(workload):
            engine.env.run(until=tick)
            if progress is not None:
                progress(source.delivered)
            if watch is not None and watch(engine):
                engine.stop()
            if engine.stopped:
                break
    engine.env.run(until=engine.process)
    if progress is not None and not engine.stopped:
        progress(len(workload))
    if watch is not None and not engine.stopped:
        watch(engine)


def milestones(workload: Workload) -> Iterator[int]:
    """Arrival times of evenly spaced requests."""
    last = 0
    for tick in workload.arrival_ticks[:: max(1, len(workload) // _SLICES)].tolist():
        if tick > last:
            last = tick
            yield tick


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cycle collector: a run makes no cycles, and the search takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
