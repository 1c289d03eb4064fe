"""When the moments that memories note (``accounting.moments``) were: ticks, iterations and rows of a run log."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..memory.accounting.moments import KIND_BITS, MOMENT_KINDS
from .run_log import RunLog


def ticks_of(run_log: RunLog, moments: np.ndarray) -> np.ndarray:
    """Ticks of moments, int64."""
    if run_log.compiled is not None:
        rows = run_log.rows
        steps = (rows[name] for name in ("first_ticks", "next_ticks", "slope_ticks"))
        columns = rows["start_ticks"], rows["ticks"], run_log.row_step, *steps
        return _dated(run_log.compiled, columns, run_log.end_ticks, moments)

    def after(row: np.ndarray) -> np.ndarray:
        return run_log.rows["start_ticks"][row] + run_log.rows["ticks"][row]

    return _by_kind(moments, run_log.start_ticks_at, run_log.start_of, run_log.end_of, after)


def iteration_of(run_log: RunLog, moments: np.ndarray) -> np.ndarray:
    """Number of the first iteration from each moment on, int64."""
    if run_log.compiled is not None:
        columns = (
            run_log.row_iteration,
            run_log.rows["iterations"],
            run_log.row_step,
            *[np.zeros(0, dtype=np.int64)] * 3,
        )
        return _dated(run_log.compiled, columns, run_log.num_steps, moments)

    def after(row: np.ndarray) -> np.ndarray:
        return run_log.row_iteration[row] + run_log.rows["iterations"][row]

    return _by_kind(
        moments, run_log.iteration_at, run_log.iteration_of, lambda step: run_log.iteration_of(step - 1) + 1, after
    )


def _dated(compiled: ModuleType, columns: tuple[np.ndarray, ...], end: int, moments: np.ndarray) -> np.ndarray:
    """What the compiled core says of moments, by columns of the rows."""
    found = np.empty(len(moments), dtype=np.int64)
    compiled.date(columns, end, np.ascontiguousarray(moments), found)
    return found


def _by_kind(moments: np.ndarray, *of_kinds: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What the function of each kind says of the numbers of that kind, int64."""
    number, kind = moments >> KIND_BITS, moments & (MOMENT_KINDS - 1)
    found = np.empty_like(moments)
    for name, of_kind in enumerate(of_kinds):
        some = np.flatnonzero(kind == name)
        if len(some) == len(moments):
            return of_kind(number)
        if len(some):
            found[some] = of_kind(number[some])
    return found


def first_row_of(run_log: RunLog, moments: np.ndarray) -> np.ndarray:
    """The first row that starts at each moment or after it, int64."""

    def in_step(step: np.ndarray) -> np.ndarray:
        # Of rows of one decode step it is the last that has steps.
        last = np.searchsorted(run_log.row_step, step, side="right") - 1
        return last + (run_log.row_step[np.maximum(last, 0)] != step)

    def after_step(step: np.ndarray) -> np.ndarray:
        return np.searchsorted(run_log.row_step, step, side="left")

    return _by_kind(moments, lambda row: row, in_step, after_step, lambda row: row + 1)
