"""The time of a repeated read of KV over that of a first read, from calls of decode attention over tables that share blocks.

A call over C tokens of context, R of them in blocks that it has read before, takes as long as one without such blocks over

    C - R + share * R        tokens, for a share from 0 (from the last-level cache, at no cost) to 1 (all from memory)

by the fitted model of the operation. Each point implies a share; the result is their median. Points in which the repeated reads are
a small part of the time say nothing: the model's error is as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...sim.cost import op_work
from ...sim.cost.op_model import OpModel
from .points import REPEATED

#: Shares at which a call is modelled; between them its time is linear.
_SHARES = np.linspace(0, 1, 101)
#: Least part of a call's modelled time, all from memory, that its repeated reads take.
_LEAST = 0.2
_SIZES = ("batch", "heads", "kv_heads", "head_dim", "block_size", "kv_element_bytes")


def repeated_reads(points: Iterable[Mapping[str, Any]], entry: Mapping[str, Any]) -> float | None:
    """Median of the shares that the points imply, each from 0 to 1; None without points in which repeated reads matter.

    Args:
        points: All measured points.
        entry: The calibration's entry of ``decode_attention``.
    """
    model = OpModel(**entry)
    implied = (_share(point, model) for point in points if REPEATED in point)
    shares = [share for share in implied if share is not None]
    return round(float(np.median(shares)), 3) if shares else None


def _share(point: Mapping[str, Any], model: OpModel) -> float | None:
    sizes = {name: point[name] for name in _SIZES if name in point}
    contexts = point["context_tokens"] - (1 - _SHARES) * point[REPEATED]
    modelled = model.us(op_work.decode_attention(context_tokens=contexts, **sizes))
    # As in a cost's curve, more context takes no less time.
    rising = np.maximum.accumulate(modelled)
    matters = rising[-1] - rising[0] >= _LEAST * rising[-1]
    return float(np.interp(point["us"], rising, _SHARES)) if matters else None
