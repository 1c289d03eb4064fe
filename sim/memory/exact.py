"""Sums of int64 columns that may overflow int64, as exact Python ints."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LIMB_BITS = 24
_LIMB = (1 << _LIMB_BITS) - 1


def total(values: np.ndarray) -> int:
    """Sum of an int64 column, exactly: the halves are summed apart."""
    values = np.asarray(values, dtype=np.int64)
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def by_limbs(form: Callable[..., np.ndarray], *columns: np.ndarray) -> int:
    """Exact total of a form that is linear in ``columns`` taken together.

    Slots times picoseconds leave int64 behind within minutes of simulated time. The columns are
    split into limbs of 24 bits, the form is evaluated on either, and the totals are put together.
    """
    high = total(form(*(column >> _LIMB_BITS for column in columns)))
    low = total(form(*(column & _LIMB for column in columns)))
    return (high << _LIMB_BITS) + low
