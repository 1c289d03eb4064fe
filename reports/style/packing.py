"""Integers inside a page: deflated and in base64, which its script inflates (``templates/packing.js.j2``).

Of integers of several bytes the lowest bytes come first, then the next ones, ...: the upper ones are nearly all alike,
and deflate makes a third less of them than of whole integers.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

#: Arrays of JavaScript, the smallest first, and numpy's.
_ARRAYS = {"Uint8Array": "u1", "Int8Array": "i1", "Uint16Array": "<u2", "Int16Array": "<i2", "Int32Array": "<i4"}


def packed(values: np.ndarray) -> dict[str, str]:
    """Integers, deflated, in base64, and the kind of JavaScript array that holds them."""
    kind = next(kind for kind, dtype in _ARRAYS.items() if _holds(np.iinfo(dtype), values))
    content = np.ascontiguousarray(values, dtype=_ARRAYS[kind])
    by_place = content.view(np.uint8).reshape(-1, content.itemsize).T
    return {"kind": kind, "text": base64.b64encode(zlib.compress(by_place.tobytes())).decode("ascii")}


def _holds(bounds: np.iinfo, values: np.ndarray) -> bool:
    return bounds.min <= values.min(initial=0) and values.max(initial=0) <= bounds.max
