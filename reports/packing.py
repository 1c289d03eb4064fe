"""Integers inside a page: deflated and in base64, which its script inflates (``templates/packing.js.j2``)."""

from __future__ import annotations

import base64
import zlib

import numpy as np

#: Arrays of JavaScript, the smallest first, and what they hold.
_ARRAYS = {"Uint8Array": (0, 2**8 - 1), "Uint16Array": (0, 2**16 - 1), "Int32Array": (-(2**31), 2**31 - 1)}
_DTYPES = {"Uint8Array": "<u1", "Uint16Array": "<u2", "Int32Array": "<i4"}


def packed(values: np.ndarray) -> dict[str, str]:
    """Integers, deflated, in base64, and the kind of JavaScript array that holds them."""
    lowest, highest = (int(bound) for bound in (values.min(initial=0), values.max(initial=0)))
    kind = next(kind for kind, (least, most) in _ARRAYS.items() if least <= lowest and highest <= most)
    content = np.ascontiguousarray(values, dtype=_DTYPES[kind]).tobytes()
    return {"kind": kind, "text": base64.b64encode(zlib.compress(content)).decode("ascii")}
