"""Serves a workload and records its block tables: the columns of each step's plan, and the contents of its slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from ...config.settings import Settings
from ...cost.base import StepCost
from ...engine.observer import Observed, Observer
from ...engine.run import simulate
from ...memory.accounting.ledger import Leap
from ...memory.accounting.moves import Moves
from ...runs.run import Run
from ...spec import gpu, model
from ...types.errors import SettingError
from ...types.sequence import Group, Lineage, Replaced, Sequence, StepPlan
from ...types.state import State
from ...workload.workload import Workload
from .form import OF_ROWS, OFFSETS, PAIRS, ROW, STEP
from .layouts import Layout, PagedLayout, layout_of
from .names import TokenNames
from .recorded import SCHEMA_VERSION, Plan

#: Sets the stream of shuffled ids apart from others that are spawned from the same seed.
_STREAM = 16


def record(
    settings: Settings,
    workload: Workload,
    first_step: int = 0,
    num_steps: int | None = None,
    shuffle_ids: bool = False,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Run, Plan]:
    """Serve a workload as ``simulate`` does, and record a window of steps.

    The run is the one that ``simulate`` gives, bit by bit. Up to the end of the window it goes step by step, with
    block ids: some ten thousand steps a second at most, and less where many sequences run.

    Args:
        first_step, num_steps: The window, in steps from the start of the run, of which those count that only move
            blocks; None is all that follow.
        shuffle_ids: Hand out block ids in a random order, as a pool that has long been in use does.
        step_cost, progress: See ``simulate``.

    Raises:
        SettingError: The policy's memory cannot be recorded, or ids of pieces are to be shuffled.
        UserError, SimulationFault: As ``simulate``.
    """
    recording = PlanRecording(settings, workload, first_step, num_steps, shuffle_ids)
    run = simulate(replace(settings, ids=True), workload, step_cost, progress, (recording,))
    return replace(run, settings=settings), recording.plan(run)


class PlanRecording(Observer):
    """Watches a run, which must have block ids, and records a window of its steps.

    Args:
        settings, workload: Of the run.
        first_step, num_steps, shuffle_ids: See ``record``.

    Raises:
        SettingError: There is no such window.
    """

    every_step = True

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        first_step: int = 0,
        num_steps: int | None = None,
        shuffle_ids: bool = False,
    ) -> None:
        for field, value, least in (("first_step", first_step, 0), ("num_steps", num_steps, 1)):
            if value is not None and value < least:
                raise SettingError(field, value, f"must be {least} or more")
        self._settings, self._workload = settings, workload
        self._steps, self._shuffle_ids = (first_step, num_steps), shuffle_ids

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        """See ``Observer``: from now on the memory tells what it moves."""
        layout = self._layout = layout_of(engine.memory, engine.policy.name)
        if self._shuffle_ids:
            if not isinstance(layout, PagedLayout):
                raise SettingError("shuffle_ids", True, f"{engine.policy.name} hands out no block ids; leave it out")
            seeds = np.random.SeedSequence(self._settings.seed, spawn_key=(_STREAM,))
            layout.shuffle(np.random.default_rng(seeds))
        layout.open()
        names = TokenNames(self._workload.sequences, self._settings.policy_options.pinned_tokens)
        self._state, self._recorder = engine.state, Recorder(layout, names, *self._steps)

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """See ``Observer``: groups that fork are watched for beams that die."""
        for sequence in plan.admitted:
            group = sequence.group
            ancestry = None if group is None else group.ancestry
            if group is not None and ancestry is not None and not isinstance(ancestry, _WatchedAncestry):
                group.ancestry = _WatchedAncestry(ancestry, group, self._state, self._recorder)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: the step is recorded, and when the window is over the run may leap.

        Tokens that are computed in vain (asynchronous scheduling) are not recorded, nor steps of nothing else.
        """
        in_vain_only = not (leap[1] or plan.prefill_tokens or plan.preempted or plan.swapped_out)
        if self.every_step and not in_vain_only:
            self._recorder.step(now, ticks, self._state, plan)
            self.every_step = not self._recorder.is_over

    def plan(self, run: Run) -> Plan:
        """What was recorded of a run that is over."""
        return self._recorder.plan(self._meta(run))

    def _meta(self, run: Run) -> dict[str, Any]:
        """What the plan says of itself."""
        layout, settings = self._layout, self._settings
        return {
            "schema_version": SCHEMA_VERSION,
            "fragmeter": version("fragmeter"),
            "policy": settings.policy,
            "model": settings.model,
            "kv_dtype": settings.kind.kv_dtype(model(settings.model), gpu(settings.gpu), settings.kv_cache_dtype),
            "layout": layout.name,
            "block_size": run.replica.block_size,
            "num_blocks": run.replica.memory.num_blocks,
            "host_blocks": run.replica.host_blocks,
            "num_slots": layout.num_slots,
            "first_step": self._steps[0],
            "shuffle_ids": self._shuffle_ids,
            "seed": settings.seed,
            "trace_sha256": self._workload.sha256(),
        }


class _WatchedAncestry:
    """Tells a recorder of the beams that die, which is known of the draws alone."""

    def __init__(self, ancestry: Lineage, group: Group, state: State, recorder: Recorder) -> None:
        self._ancestry, self._group, self._state, self._recorder = ancestry, group, state, recorder

    def replaced(self, beams: int) -> Replaced:
        """See ``Lineage``."""
        replaced = self._ancestry.replaced(beams)
        self._recorder.branch(self._group, replaced, self._group.leader.held_tokens(self._state.decode_step))
        return replaced


EMPTY = -1


class Contents:
    """Token ids and positions by slot, ``EMPTY`` where nothing was written, as far as anything ever was."""

    def __init__(self) -> None:
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._positions = np.zeros(0, dtype=np.int64)

    def write(self, slots: np.ndarray, token_ids: np.ndarray, first_position: int) -> None:
        """Tokens that follow each other are computed."""
        self._reach(int(slots.max(initial=EMPTY)) + 1)
        self._token_ids[slots] = token_ids
        self._positions[slots] = np.arange(first_position, first_position + len(slots))

    def move(self, start: int, source: Contents, source_start: int, slots: int) -> None:
        """What lies in so many slots elsewhere lies here too."""
        source._reach(source_start + slots)
        self._reach(start + slots)
        self._token_ids[start : start + slots] = source._token_ids[source_start : source_start + slots]
        self._positions[start : start + slots] = source._positions[source_start : source_start + slots]

    def held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots that hold something, and what: slots, token ids, positions."""
        slots = np.flatnonzero(self._token_ids != EMPTY)
        return slots, self._token_ids[slots], self._positions[slots]

    def _reach(self, num_slots: int) -> None:
        if num_slots > len(self._token_ids):
            # By half as much again, so that growing costs little.
            more = np.full(num_slots + num_slots // 2 - len(self._token_ids), EMPTY)
            self._token_ids = np.concatenate([self._token_ids, more])
            self._positions = np.concatenate([self._positions, more])


_TOKEN = ("slot_mapping", "token_ids", "held_token_ids", "copied_slots")
_INITIAL = ("slots", "token_ids", "positions", "host_slots", "host_token_ids", "host_positions")


class PlanColumns:
    """Appended to step by step: the rows of a step, then the step."""

    def __init__(self) -> None:
        self._values = {name: array("q") for name in (*STEP, *ROW, *_TOKEN, *PAIRS)}
        # By far the longest column.
        self._values["block_ids"] = array("i")
        self._ends = {name: array("q", [0]) for name in OFFSETS}

    def add_row(
        self,
        numbers: tuple[int, ...],
        table: Iterable[int],
        slot_mapping: np.ndarray,
        token_ids: np.ndarray,
        held_token_ids: np.ndarray,
    ) -> None:
        """A row, its ``numbers`` in the order of sequence, query_tokens, context_lens, slot_starts."""
        values = self._values
        for name, number in zip(ROW, numbers, strict=True):
            values[name].append(number)
        values["block_ids"].extend(table)
        values["slot_mapping"].frombytes(slot_mapping.tobytes())
        values["token_ids"].frombytes(token_ids.tobytes())
        values["held_token_ids"].frombytes(held_token_ids.tobytes())
        self._end(*OF_ROWS)

    def add_step(self, numbers: tuple[int, ...], moves: Moves) -> None:
        """A step, of the rows added since the last one.

        Args:
            numbers: In the order of start_ticks, ticks, prefill_tokens, decodes, padding_tokens.
            moves: What it begins with.
        """
        values = self._values
        for name, number in zip(STEP, numbers, strict=True):
            values[name].append(number)
        for name, pairs in (("swap_outs", moves.swap_outs), ("swap_ins", moves.swap_ins)):
            for pair in pairs:
                values[name].extend(pair)
        for source, destination, slots in moves.copies:
            values["copies"].extend((source, destination))
            values["copied_slots"].append(slots)
        self._end("row", "swap_out", "swap_in", "copy")

    def _end(self, *names: str) -> None:
        for name in names:
            counted = OFFSETS[name]
            self._ends[name].append(len(self._values[counted]) // (2 if counted in PAIRS else 1))

    def plan(self, meta: Mapping[str, Any], initial: tuple[np.ndarray, ...]) -> Plan:
        """All that was added.

        Args:
            initial: Slots, token ids and positions before the first step, of the device and then of the host.
        """
        arrays = {name: np.array(column) for name, column in self._values.items()}
        for name in PAIRS:
            arrays[name] = arrays[name].reshape(-1, 2)
        offsets = {f"{name}_offsets": np.array(ends) for name, ends in self._ends.items()}
        before = {f"initial_{name}": column for name, column in zip(_INITIAL, initial, strict=True)}
        return Plan(meta, **arrays, **offsets, **before)


_NOTHING = np.zeros(0, dtype=np.int64)


class Row(NamedTuple):
    """A sequence that a step computes: new tokens, and tokens held afterwards."""

    sequence: Sequence
    query_tokens: int
    context_tokens: int

    @property
    def held_tokens(self) -> int:
        """Tokens held before."""
        return self.context_tokens - self.query_tokens


def decoding(state: State, decision: StepPlan) -> Iterator[Row]:
    """Sequences that decode in a step that is about to run; in a static batch those that have not ended."""
    if decision.prefill_only:
        return
    prefills = set(decision.admitted)
    for sequence in state.running:
        if sequence not in prefills and sequence.finish_step > state.decode_step:
            yield Row(sequence, 1, sequence.start_tokens + state.decode_step - sequence.start_step)


def prefilling(decision: StepPlan) -> Iterator[Row]:
    """Sequences with a prompt, or a part of it, that the step computes."""
    for sequence in decision.admitted:
        yield Row(sequence, sequence.start_tokens - sequence.computed_tokens, sequence.start_tokens)
    for sequence, tokens in decision.chunks:
        yield Row(sequence, tokens, sequence.computed_tokens)


def _padding_tokens(state: State, decision: StepPlan, decodes: int, prefill_tokens: int) -> int:
    """Tokens that a static batch computes as padding: the ends of short prompts, and rows that have ended."""
    ended = 0 if decision.prefill_only else state.batch_size - decodes - len(decision.admitted)
    return decision.prefill_tokens - prefill_tokens + ended


class Recorder:
    """Records the steps of a window, and the contents of all slots at its start.

    Args:
        layout: Addresses of tokens.
        names: Ids of tokens.
        first_step: Number of the first recorded step.
        num_steps: Number of recorded steps; None is all that follow.
    """

    def __init__(self, layout: Layout, names: TokenNames, first_step: int = 0, num_steps: int | None = None) -> None:
        self._layout, self._names = layout, names
        self._ahead, self._left = first_step, num_steps
        self._columns = PlanColumns()
        # Tokens that a reader of the plan knows each to hold, and that go on where it goes on.
        self._recorded: dict[Sequence, int] = {}
        self._device, self._host = Contents(), Contents()
        pinned = layout.pinned_slots()
        self._device.write(pinned, names.prefix()[: len(pinned)], 0)
        self._initial = self._held()

    @property
    def is_over(self) -> bool:
        """Whether the window has passed."""
        return self._left == 0

    def branch(self, group: Group, replaced: Replaced, held_tokens: int) -> None:
        """Beams die and continue as copies of other beams, with the number of tokens of each."""
        for dead, parent in replaced:
            self._names.replace(group.members[dead], group.members[parent], held_tokens)
            self._recorded.pop(group.members[dead], None)

    def step(self, start_ticks: int, ticks: int, state: State, decision: StepPlan) -> None:
        """A step is about to run."""
        decodes, prefills = [*decoding(state, decision)], [*prefilling(decision)]
        self._layout.settle(state, int(not decision.prefill_only and bool(state.batch_size)))
        if self._ahead:
            self._carry_out(decodes + prefills)
            self._ahead -= 1
            if not self._ahead:
                self._initial = self._held()
        else:
            for row in decodes + prefills:
                self._add(row)
            tokens = sum(row.query_tokens for row in prefills)
            padding = _padding_tokens(state, decision, len(decodes), tokens)
            self._columns.add_step((start_ticks, ticks, tokens, len(decodes), padding), self._layout.moves)
            self._pass_window()
        self._layout.moves.clear()
        for row in decodes + prefills:
            # The last token of an output is never stored.
            if row.context_tokens == row.sequence.target_tokens - 1:
                self._names.forget(row.sequence)
                self._recorded.pop(row.sequence, None)

    def _pass_window(self) -> None:
        if self._left is not None:
            self._left -= 1
        if self.is_over:
            self._layout.close()

    def _add(self, row: Row) -> None:
        layout, sequence = self._layout, row.sequence
        held, stop, tokens = row.held_tokens, row.context_tokens, self._names.of(sequence)
        unknown = held and self._recorded.get(sequence) != held
        self._columns.add_row(
            (sequence.index, row.query_tokens, stop, layout.start(sequence)),
            layout.table(sequence),
            layout.slots(sequence, held, stop),
            tokens[held:stop],
            tokens[:held] if unknown else _NOTHING,
        )
        self._recorded[sequence] = stop

    def _carry_out(self, rows: list[Row]) -> None:
        """Update the contents of slots by a step before the window."""
        layout, device, host = self._layout, self._device, self._host
        unit, moves = layout.unit_slots, layout.moves
        for source, destination in moves.swap_outs:
            host.move(destination * unit, device, source * unit, unit)
        for source, destination in moves.swap_ins:
            device.move(destination * unit, host, source * unit, unit)
        for source, destination, slots in moves.copies:
            device.move(destination * unit, device, source * unit, slots)
        for row in rows:
            held, stop = row.held_tokens, row.context_tokens
            device.write(layout.slots(row.sequence, held, stop), self._names.of(row.sequence)[held:stop], held)

    def _held(self) -> tuple[np.ndarray, ...]:
        return (*self._device.held(), *self._host.held())

    def plan(self, meta: Mapping[str, Any]) -> Plan:
        """What was recorded."""
        return self._columns.plan(meta, self._initial)
