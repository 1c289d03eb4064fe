"""Packed integers in a page: deflated and in base64, inflated by its script (``templates/packing.js.j2``).

Multi-byte integers are stored as all lowest bytes, then all next bytes, and so on. The upper bytes are nearly all
equal, so deflate makes them a third smaller than whole integers.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

#: Typed arrays of JavaScript and the numpy types, the smallest first.
_ARRAYS = {"Uint8Array": "u1", "Int8Array": "i1", "Uint16Array": "<u2", "Int16Array": "<i2", "Int32Array": "<i4"}


def packed(values: np.ndarray) -> dict[str, str]:
    """Integers, deflated and in base64, and the type of JavaScript array for them."""
    kind = next(kind for kind, dtype in _ARRAYS.items() if _holds(np.iinfo(dtype), values))
    content = np.ascontiguousarray(values, dtype=_ARRAYS[kind])
    by_place = content.view(np.uint8).reshape(-1, content.itemsize).T
    return {"kind": kind, "text": base64.b64encode(zlib.compress(by_place.tobytes())).decode("ascii")}


def _holds(bounds: np.iinfo, values: np.ndarray) -> bool:
    return bounds.min <= values.min(initial=0) and values.max(initial=0) <= bounds.max
