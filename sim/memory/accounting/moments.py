"""When something happened, as a memory notes it: memories know neither ticks nor iterations.

A memory knows how many rows the ledger has, and the decode step. One number stands for each of

    at_row(r)        when row r was decided: admissions and preemptions
    after_row(r)     when row r was over, its prefill done
    in_step(c)       in step c of the decode step: growth
    after_step(c)    when decode step c began: finishes

and when the run is over its run log says which ticks and which iteration that was (``runs.moments``).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

KIND_BITS = 2
MOMENT_KINDS = 1 << KIND_BITS
AT_ROW, IN_STEP, AFTER_STEP, AFTER_ROW = range(MOMENT_KINDS)
_Steps = TypeVar("_Steps", int, np.ndarray)


def at_row(row: int) -> int:
    """The start of row ``row``."""
    return row * MOMENT_KINDS + AT_ROW


def after_row(row: int) -> int:
    """The end of row ``row``, which may be long before the next one starts."""
    return row * MOMENT_KINDS + AFTER_ROW


def in_step(decode_step: _Steps) -> _Steps:
    """The start of ``decode_step``, or of each of several."""
    return decode_step * MOMENT_KINDS + IN_STEP


def after_step(decode_step: _Steps) -> _Steps:
    """The end of step ``decode_step - 1``, which may be long before the next step starts."""
    return decode_step * MOMENT_KINDS + AFTER_STEP
