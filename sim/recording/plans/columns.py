"""A plan while it is written: steps, rows and tokens end to end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...memory.accounting.moves import Moves
from .form import OF_ROWS, OFFSETS, PAIRS, ROW, STEP
from .recorded import Plan

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
