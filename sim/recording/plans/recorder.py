"""Writes down what every step of a running engine does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...types.sequence import Sequence, StepPlan
from ...types.state import State
from ...workload.groups import Group
from .columns import PlanColumns
from .contents import Contents
from .layouts import Layout
from .names import TokenNames
from .recorded import Plan

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
    """Records the steps of a window, and knows what lies in the slots when it begins.

    Args:
        layout: Where tokens lie.
        names: What they are.
        first_step: Number of the first step that is recorded.
        num_steps: How many; None is all that follow.
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
        """Beams die and go on as copies of others, each of which holds so many tokens."""
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
        """A step before the window leaves something in the slots."""
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
