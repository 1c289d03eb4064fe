"""When something happened, told by a memory, which knows neither ticks nor iterations.

A memory knows how many rows the ledger has, and the decode clock. One number stands for each of

    at_row(r)        when row r was decided: who came, who was preempted
    after_row(r)     when row r was over, its prefill done
    in_step(c)       in step c of the decode clock: who grew
    after_step(c)    when the clock came to c: who was done

and when the run is over the book says which ticks and which iteration that was.
"""

from __future__ import annotations

import numpy as np

from .book import Book

_KINDS = 4
_AT_ROW, _IN_STEP, _AFTER_STEP, _AFTER_ROW = range(_KINDS)


def at_row(row: int) -> int:
    """The start of row ``row``."""
    return row * _KINDS + _AT_ROW


def after_row(row: int) -> int:
    """The end of row ``row``, which may be long before the next one starts."""
    return row * _KINDS + _AFTER_ROW


def in_step(clock: int) -> int:
    """The start of step ``clock``."""
    return clock * _KINDS + _IN_STEP


def after_step(clock: int) -> int:
    """The end of step ``clock - 1``, which may be long before the next step starts."""
    return clock * _KINDS + _AFTER_STEP


def ticks_of(book: Book, moments: np.ndarray) -> np.ndarray:
    """Ticks of moments, int64."""
    number, kind = np.divmod(moments, _KINDS)
    ticks = np.append(book.rows["start_ticks"], book.end_ticks)[np.where(kind == _AT_ROW, number, 0)]
    for some, of_clock in ((kind == _IN_STEP, book.start_of), (kind == _AFTER_STEP, book.end_of)):
        ticks[some] = of_clock(number[some])
    row = number[kind == _AFTER_ROW]
    ticks[kind == _AFTER_ROW] = book.rows["start_ticks"][row] + book.rows["ticks"][row]
    return ticks


def iteration_of(book: Book, moments: np.ndarray) -> np.ndarray:
    """Number of the first iteration from each moment on, int64."""
    number, kind = np.divmod(moments, _KINDS)
    iteration = np.append(book.row_iteration, book.num_steps)[np.where(kind == _AT_ROW, number, 0)]
    in_step, after = kind == _IN_STEP, kind == _AFTER_STEP
    iteration[in_step] = book.iteration_of(number[in_step])
    iteration[after] = book.iteration_of(number[after] - 1) + 1
    row = number[kind == _AFTER_ROW]
    iteration[kind == _AFTER_ROW] = book.row_iteration[row] + book.rows["iterations"][row]
    return iteration


def first_row_of(book: Book, moments: np.ndarray) -> np.ndarray:
    """The first row that starts at each moment or after it, int64."""
    number, kind = np.divmod(moments, _KINDS)
    row = np.where(kind == _AFTER_STEP, np.searchsorted(book.row_clock, number, side="left"), number)
    row += kind == _AFTER_ROW
    # Of rows with one clock it is the last that has steps.
    last = np.searchsorted(book.row_clock, number, side="right") - 1
    begins = book.row_clock[np.maximum(last, 0)] == number
    return np.where(kind == _IN_STEP, last + ~begins, row)
