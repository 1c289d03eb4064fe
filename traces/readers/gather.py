"""Conversion of consecutive tables into a trace; only arrays of numbers are kept."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from ...sim.types.errors import SettingError, TraceError
from ...sim.workload.content import NO_SESSION, PromptContent
from ...sim.workload.dialogue import Dialogue
from ..parsing.checks import DIALOGUE, Arrays, Before, checked, dialogue, failed
from ..parsing.form import SESSION, Form
from ..parsing.lines import Block
from ..parsing.table import Table
from ..types.trace import LeftOut, Rows, Trace
from .order import MOST_APART_S, moved_rows, reordered, widest_gap_s

Piece = Block | Table
#: Number of bad rows that may always be skipped; above it, their maximum ratio to the good rows.
MOST_BAD_ROWS, MOST_BAD_SHARE = 1000, 0.25
_MISSING = {
    "arrival_ticks": "a time, 0 or more",
    "max_tokens": "a number of tokens",
    "n": "a number of sequences",
    "priority": "a whole number",
    "ignore_eos": "1 or 0",
}


class Gathering:
    """The valid rows of a file, and the number of rows left out.

    Args:
        path: The file.
        form: Its format.
        checks: Further arguments of ``checked``.
    """

    def __init__(self, path: str | PathLike[str], form: Form, **checks: Any) -> None:
        self._path, self._form, self._checks = path, form, checks
        self._prepare = form.preparer()
        self._before = Before()
        self._parts: list[Arrays] = []
        self._sessions: dict[str | None, int] = {None: NO_SESSION}
        self._lines: list[np.ndarray] = []
        self._unit = "line"
        self._failed = 0
        self._kept = self._bad = 0
        self._first_bad: TraceError | None = None

    def take(self, table: Table) -> None:
        """Check some rows and add them.

        Raises:
            TraceError: A row is invalid; then no row is added.
        """
        gone = failed(table, self._form) if self._form.failures else np.zeros(len(table), dtype=bool)
        table = self._prepare(table.where(~gone))
        if len(table):
            arrays, before = checked(table, self._form, self._before, **self._checks)
            self._check_alike(table, arrays)
            if SESSION in arrays:
                arrays[SESSION] = self._numbered(arrays[SESSION])
            self._before = before
            self._parts.append(arrays)
            self._lines.append(table.lines)
        self._unit = table.unit
        self._failed += int(gone.sum())
        self._kept += len(table)

    def _check_alike(self, table: Table, arrays: Arrays) -> None:
        """Refuse a column, for example of times, that only some rows have."""
        first = self._parts[0] if self._parts else arrays
        for field in ("arrival_ticks", "max_tokens", "n", "priority", "ignore_eos", "ids"):
            if (field in first) == (field in arrays):
                continue
            remedy = f"is missing; give {_MISSING.get(field, 'a list, one whole number a block')}"
            name = {"ids": "hash_ids", "arrival_ticks": next(iter(self._form.clocks), "arrival_s")}.get(field, field)
            # Either the new rows lack the field, or all earlier rows do.
            line = table.lines[0] if field in first else self._lines[0][0]
            raise TraceError(self._path, int(line), name, None, remedy, table.unit)

    def _numbered(self, names: np.ndarray) -> np.ndarray:
        """Session numbers of the rows, int64 [n]: 1, 2, ... in the order in which names first occur in the file; ``NO_SESSION`` without one."""
        numbers = self._sessions
        return np.array([numbers.setdefault(name, len(numbers)) for name in names.tolist()], dtype=np.int64)

    def skip(self, error: TraceError) -> None:
        """Count a bad row as skipped.

        Raises:
            TraceError: Too many rows are bad, so the file as a whole is likely wrong; raises the first such error.
        """
        self._bad += 1
        if self._first_bad is None:
            # The traceback would keep the rows in memory.
            self._first_bad = error.with_traceback(None)
        if self._bad > max(MOST_BAD_ROWS, MOST_BAD_SHARE * self._kept):
            raise self._first_bad

    def trace(self, name: str, max_concurrency: int | None = None, failed: int = 0) -> Trace:
        """The trace of all valid rows.

        Args:
            max_concurrency: As of ``Trace``.
            failed: Failed requests that are not among the rows.

        Raises:
            TraceError: No row is valid, or a row continues a row that it cannot continue.
        """
        if not self._parts:
            if self._first_bad is not None:
                raise self._first_bad
            raise TraceError(self._path, None, None, None, "has no request that was answered; give another trace")
        lines = np.concatenate(self._lines)
        columns = self._columns()
        columns, lines, sorted_ = self._sorted(columns, lines)
        at_once: tuple[str, ...] = ()
        if self._form.at_once:
            columns["arrival_ticks"] = np.zeros(len(lines), dtype=np.int64)
            at_once = ("a batch has no times: all requests arrive at once",)
        if self._form.subsessions and SESSION in columns:
            columns |= self._spawners(columns[SESSION])
        tree = self._dialogue(columns, lines)
        content, rows = _content(columns), Rows(self._unit, lines)
        plain = {field: column for field, column in columns.items() if field not in DIALOGUE}
        left_out = LeftOut(self._failed + failed, self._bad, None if self._first_bad is None else str(self._first_bad))
        return Trace(
            name,
            **plain,
            rows=rows,
            content=content,
            dialogue=tree,
            left_out=left_out,
            start=self._before.start,
            max_concurrency=max_concurrency,
            remarks=(*self._form.remarks, *at_once, *sorted_),
        )

    def _spawners(self, sessions: np.ndarray) -> Arrays:
        """``spawner`` of ``Trace``: the last request of the agent before the first one of a sub-agent; nothing without sub-agents."""
        numbers = {name: number for name, number in self._sessions.items() if name is not None}
        # Names are JSON texts, in quotation marks.
        parents = {number: numbers.get(name.rpartition("/")[0] + '"') for name, number in numbers.items()}
        last: dict[int | None, int] = {}
        found = np.full(len(sessions), -1, dtype=np.int64)
        for row, session in enumerate(sessions.tolist()):
            if session not in last:
                found[row] = last.get(parents.get(session), -1)
            last[session] = row
        return {"spawner": found} if (found >= 0).any() else {}

    def _sorted(self, columns: Arrays, lines: np.ndarray) -> tuple[Arrays, np.ndarray, tuple[str, ...]]:
        """The columns and the lines by arrival, and what is to be said of it.

        Raises:
            TraceError: Two requests would be more than a week apart, so that a time is likely wrong.
        """
        moved = moved_rows(columns)
        if not moved.any():
            return columns, lines, ()
        order = np.argsort(columns["arrival_ticks"], kind="stable")
        if self._form.side_by_side:
            return reordered(columns, order), lines[order], ()
        row = int(moved.argmax())
        apart_s = widest_gap_s(columns["arrival_ticks"])
        if apart_s > MOST_APART_S:
            days = f"{apart_s / 86_400:.0f} days"
            remedy = f"is before a row above, and sorted two requests would be {days} apart; correct the time, sort the rows, or give --time-unit"
            time = self._before.time(int(columns["arrival_ticks"][row]))
            raise TraceError(self._path, int(lines[row]), self._before.field, time, remedy, self._unit)
        text = f"{int(moved.sum()):,} of {len(lines):,} requests were not in order of time; they are sorted by it"
        return reordered(columns, order), lines[order], (text,)

    def _columns(self) -> Arrays:
        """The arrays of all rows; releases the arrays of the parts one by one to save memory."""
        lengths = [len(part["prompt_tokens"]) for part in self._parts]
        fields = dict.fromkeys(field for part in self._parts for field in part)
        return {
            field: np.concatenate(
                [
                    part.pop(field) if field in part else _absent(field, rows)
                    for part, rows in zip(self._parts, lengths, strict=True)
                ]
            )
            for field in fields
        }

    def _dialogue(self, columns: Arrays, lines: np.ndarray) -> Dialogue | None:
        if "parent" not in columns:
            return None
        if self._bad:
            remedy = f"rows refer to parents by row number; correct the first: {self._first_bad}"
            raise SettingError("skip_bad", True, remedy)
        return dialogue(Table(self._path, {}, lines, self._unit), columns)


def _absent(field: str, rows: int) -> np.ndarray:
    """The values of rows that lack a session, a delay or a parent."""
    return np.full(rows, {SESSION: NO_SESSION, "delay_ticks": 0}.get(field, np.nan))


def _content(columns: Arrays) -> PromptContent | None:
    """The prompt contents; removes their columns from ``columns``."""
    sessions = columns.pop(SESSION, None)
    if sessions is not None and (sessions == NO_SESSION).all():
        sessions = None
    if "pieces" in columns:
        pieces, numbers, tokens = (columns.pop(field) for field in ("pieces", "ids", "tokens"))
        return PromptContent(np.concatenate([[0], np.cumsum(pieces)]), numbers, tokens, sessions)
    return None if sessions is None else PromptContent.of_sessions(sessions)
