"""A recorded plan: for each step of a window the computed tokens, the slots of their keys and values, and the moves.

A row is a sequence that a step computes; decoding sequences come first. Lists of different lengths are stored one
after the other, and ``*_offsets`` gives the start of each. Every array holds integers:

    step     start_ticks ticks prefill_tokens decodes padding_tokens
             row_offsets swap_out_offsets swap_in_offsets copy_offsets
    row      sequence query_tokens context_lens table_offsets or slot_starts, slot_offsets held_offsets
    token    slot_mapping token_ids (the new ones of a row)    held_token_ids (those it held before)
    moves    swap_outs swap_ins copies [n, 2], copied_slots
    before   initial_slots initial_token_ids initial_positions, and the same of the host

A step first moves blocks: swap-outs, then swap-ins, then copies. Then it writes the keys and values of the new tokens,
and each new token attends to all tokens of its sequence up to itself.

A token id names a token together with all tokens before it: equal ids have equal keys and values. Ids follow from the
requests (contents of prompts, forks), never from tables. So attention over the tables can be compared with attention
over ``logical_tokens`` (invariant 8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ...output.archives import load_archive, save_archive
from ...types.errors import UserError
from .form import PAGED, complaints

#: Raised when an array changes its meaning.
SCHEMA_VERSION = 1


class PlanStep(NamedTuple):
    """One step of a plan; arrays are views.

    Attributes:
        start_ticks, ticks: When it starts and how long it takes in simulated time.
        decodes: Rows that decode: the first ones. The others prefill.
        sequence, query_tokens, context_lens: int64 [rows]; tokens computed now, and held afterwards.
        query_start_loc: int64 [rows + 1], where each row's new tokens begin.
        slot_mapping, token_ids: int64 [new tokens].
        swap_outs, swap_ins, copies: int64 [n, 2], (source, destination).
        copied_slots: int64 [n], slots of each copy.
    """

    start_ticks: int
    ticks: int
    decodes: int
    sequence: np.ndarray
    query_tokens: np.ndarray
    context_lens: np.ndarray
    query_start_loc: np.ndarray
    slot_mapping: np.ndarray
    token_ids: np.ndarray
    swap_outs: np.ndarray
    swap_ins: np.ndarray
    copies: np.ndarray
    copied_slots: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan, as ``plan.npz`` holds it.

    Attributes:
        meta: ``schema_version``, ``fragmeter`` (its version), ``policy``, ``model``, ``layout`` ("paged" or
            "contiguous"), ``block_size``, ``num_blocks``, ``host_blocks``, ``num_slots``, ``first_step``,
            ``shuffle_ids``, ``seed``, ``trace_sha256``, ``kv_dtype`` (not in files of earlier versions).
        start_ticks, ticks: int64 [steps].
        prefill_tokens, decodes: int64 [steps], new tokens of the rows that prefill, and rows that decode.
        padding_tokens: int64 [steps], tokens that a static batch computes as padding, which have no rows.
        row_offsets: int64 [steps + 1].
        sequence: int64 [rows], row in the workload's ``sequences``.
        query_tokens, context_lens: int64 [rows].
        table_offsets, block_ids: Paged: int64 [rows + 1] and int32, the block table of each row as it stands when
            attention runs; it may name blocks beyond the context.
        slot_starts: Contiguous: int64 [rows], the slot of each row's first token.
        slot_offsets, slot_mapping, token_ids: int64 [rows + 1] and int64 [new tokens].
        held_offsets, held_token_ids: int64 [rows + 1] and int64: the tokens that a row held before the step, where it
            does not go on from the sequence's last row.
        swap_out_offsets, swap_outs: int64 [steps + 1] and [n, 2]: (device block, host block).
        swap_in_offsets, swap_ins: Likewise (host block, device block).
        copy_offsets, copies: Likewise (source, destination), blocks or, in a contiguous layout, first slots. The
            copies of a step may be made in any order.
        copied_slots: int64 [copies], slots of each.
        initial_slots, initial_token_ids, initial_positions: int64, what the pool holds before the first step.
        initial_host_slots, initial_host_token_ids, initial_host_positions: And the host.
    """

    meta: Mapping[str, Any]
    start_ticks: np.ndarray
    ticks: np.ndarray
    prefill_tokens: np.ndarray
    decodes: np.ndarray
    padding_tokens: np.ndarray
    row_offsets: np.ndarray
    sequence: np.ndarray
    query_tokens: np.ndarray
    context_lens: np.ndarray
    table_offsets: np.ndarray
    block_ids: np.ndarray
    slot_starts: np.ndarray
    slot_offsets: np.ndarray
    slot_mapping: np.ndarray
    token_ids: np.ndarray
    held_offsets: np.ndarray
    held_token_ids: np.ndarray
    swap_out_offsets: np.ndarray
    swap_outs: np.ndarray
    swap_in_offsets: np.ndarray
    swap_ins: np.ndarray
    copy_offsets: np.ndarray
    copies: np.ndarray
    copied_slots: np.ndarray
    initial_slots: np.ndarray
    initial_token_ids: np.ndarray
    initial_positions: np.ndarray
    initial_host_slots: np.ndarray
    initial_host_token_ids: np.ndarray
    initial_host_positions: np.ndarray

    @property
    def num_steps(self) -> int:
        return len(self.ticks)

    @property
    def is_paged(self) -> bool:
        """Whether rows have block tables; else they have first slots."""
        return self.meta["layout"] == PAGED

    def step(self, step: int) -> PlanStep:
        """Step ``step`` of the window."""
        rows = slice(*self.row_offsets[step : step + 2])
        starts = self.slot_offsets[rows.start : rows.stop + 1]
        new = slice(starts[0], starts[-1])
        copies = slice(*self.copy_offsets[step : step + 2])
        return PlanStep(
            start_ticks=int(self.start_ticks[step]),
            ticks=int(self.ticks[step]),
            decodes=int(self.decodes[step]),
            sequence=self.sequence[rows],
            query_tokens=self.query_tokens[rows],
            context_lens=self.context_lens[rows],
            query_start_loc=starts - starts[0],
            slot_mapping=self.slot_mapping[new],
            token_ids=self.token_ids[new],
            swap_outs=self.swap_outs[slice(*self.swap_out_offsets[step : step + 2])],
            swap_ins=self.swap_ins[slice(*self.swap_in_offsets[step : step + 2])],
            copies=self.copies[copies],
            copied_slots=self.copied_slots[copies],
        )

    def block_table(self, step: int, row: int) -> np.ndarray:
        """The block table of a row of a step, int32 [blocks]."""
        place = self.row_offsets[step] + row
        return self.block_ids[slice(*self.table_offsets[place : place + 2])]

    def block_tables(self, step: int) -> np.ndarray:
        """The block tables of a step as kernels take them: int32 [rows, blocks of the longest], filled up with 0."""
        first, last = self.row_offsets[step : step + 2]
        lengths = np.diff(self.table_offsets[first : last + 1])
        tables = np.zeros((len(lengths), lengths.max(initial=0)), dtype=np.int32)
        named = np.arange(tables.shape[1]) < lengths[:, None]
        tables[named] = self.block_ids[self.table_offsets[first] : self.table_offsets[last]]
        return tables

    def logical_tokens(self, step: int, row: int) -> np.ndarray:
        """Ids of the tokens that a row of a step holds afterwards, in order; int64 [context_len].

        They follow from the tokens that the sequence computed and from what it was said to hold, not from tables.
        """
        row = int(self.row_offsets[step]) + row
        lines = self._lines
        place, first = lines.place[row], lines.first[row]
        held = self.held_token_ids[slice(*self.held_offsets[first : first + 2])]
        new = lines.token_ids[lines.offsets[lines.place[first]] : lines.offsets[place + 1]]
        return np.concatenate([held, new])

    @cached_property
    def _lines(self) -> _Lines:
        return _Lines.of(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write ``plan.npz``; the same plan gives the same bytes.

        Raises:
            UserError: It cannot be written.
        """
        save_archive(path, self.meta, {name: getattr(self, name) for name in _ARRAYS})


_ARRAYS = tuple(field.name for field in fields(Plan) if field.name != "meta")
#: A plan lies in memory whole, where it is recorded and where it is run.
_MOST_BYTES = 2**33


def load(path: str | PathLike[str]) -> Plan:
    """Read a plan that ``Plan.save`` wrote.

    Raises:
        UserError: It is no plan, one of another schema, or its arrays do not belong together.
        OSError: It cannot be read.
    """
    remedy = "record it anew with fragmeter simulate --record-plan"
    meta, arrays = load_archive(path, "recorded plan", _ARRAYS, SCHEMA_VERSION, remedy, _MOST_BYTES)
    for complaint in complaints(meta, arrays):
        raise UserError(f"{path}: {complaint}; {remedy}")
    return Plan(meta, **arrays)


class _Lines(NamedTuple):
    """The rows of each sequence one after the other.

    Attributes:
        place: Of each row, its place in that order.
        first: Of each row, the row from which on the sequence goes on without a break.
        offsets, token_ids: New tokens in that order.
    """

    place: np.ndarray
    first: np.ndarray
    offsets: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def of(cls, plan: Plan) -> _Lines:
        """Rows sorted by sequence, and for each the row with which its sequence last began anew."""
        order = np.argsort(plan.sequence, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        starts_anew = (np.diff(plan.held_offsets) > 0) | (plan.context_lens == plan.query_tokens)
        anew = np.where(starts_anew[order], np.arange(len(order)), 0)
        first = order[np.maximum.accumulate(anew)][place]
        lengths = np.diff(plan.slot_offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        begin = np.repeat(plan.slot_offsets[:-1][order] - offsets[:-1], lengths)
        return cls(place, first, offsets, plan.token_ids[begin + np.arange(offsets[-1])])
