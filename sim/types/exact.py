"""Sums of int64 columns that may overflow int64, as exact Python ints.

Slots times picoseconds exceed int64 within minutes of simulated time.
"""

from __future__ import annotations

import numpy as np

_LIMB_BITS = 24
_LIMB = (1 << _LIMB_BITS) - 1
_INT64 = 1 << 63
#: The sum of this number of products of two limbs fits in int64.
_LONGEST = 1 << 14


def total(values: np.ndarray) -> int:
    """Exact sum of an int64 column; the high and low halves of the values are summed separately."""
    values = np.asarray(values, dtype=np.int64)
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def dot(left: np.ndarray, right: np.ndarray) -> int:
    """Exact sum of ``left * right``, int64 columns of non-negative numbers.

    If the sum could overflow int64, long columns are halved and the larger factor is split into limbs.
    """
    if not len(left):
        return 0
    most_left, most_right = int(left.max()), int(right.max())
    if most_left * most_right * len(left) < _INT64:
        return int((left * right).sum())
    if len(left) > _LONGEST:
        half = len(left) // 2
        return dot(left[:half], right[:half]) + dot(left[half:], right[half:])
    if most_left > most_right:
        left, right = right, left
    return (dot(left, right >> _LIMB_BITS) << _LIMB_BITS) + dot(left, right & _LIMB)
