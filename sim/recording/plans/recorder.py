"""Records each step of a running engine: the plan's columns, and the contents of its slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...memory.accounting.moves import Moves
from ...types.sequence import Sequence, StepPlan
from ...types.state import State
from ...workload.groups import Group
from .form import OF_ROWS, OFFSETS, PAIRS, ROW, STEP
from .layouts import Layout
from .names import TokenNames
from .recorded import Plan

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
    if decision.pauses:
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
    ended = 0 if decision.pauses else state.batch_size - decodes - len(decision.admitted)
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

    def branch(self, group: Group, replaced: list[tuple[int, int]], held_tokens: int) -> None:
        """Beams die and continue as copies of other beams, with the number of tokens of each."""
        for dead, parent in replaced:
            self._names.replace(group.members[dead], group.members[parent], held_tokens)
            self._recorded.pop(group.members[dead], None)

    def step(self, start_ticks: int, ticks: int, state: State, decision: StepPlan) -> None:
        """A step is about to run."""
        decodes, prefills = [*decoding(state, decision)], [*prefilling(decision)]
        self._layout.settle(state, int(not decision.pauses and bool(state.batch_size)))
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
