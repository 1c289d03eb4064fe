"""Attention by a calibration: curves over the context for decodes, a surface over tokens and pairs for prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..spec.shape import ModelSpec, dtype_bits
from .calibration import Calibration
from .curve import Curve, Surface
from .operations import OPERATIONS, OpName


class AttentionCurves:
    """Attention of all layers on one rank; a curve for each batch size, made when it is asked for."""

    def __init__(
        self, calibration: Calibration, model: ModelSpec, tensor_parallel: int, block_size: int, kv_dtype: str
    ) -> None:
        shape = model.head_attention(tensor_parallel)
        heads, kv_element_bytes = (shape.heads, shape.kv_heads, shape.head_dim), dtype_bits(kv_dtype) / 8
        self._decode_us = _asked(calibration, "decode_attention", *heads, block_size, kv_element_bytes)
        self._prefill_us = _asked(calibration, "prefill_attention", *heads, kv_element_bytes)
        self._groups = [(group.num_layers, group.span.tokens or None) for group in model.kv_groups()]
        self._longest = model.max_model_len
        self._curves: dict[int, Curve] = {}
        self.prefill = Surface(self._prefill)

    def decode(self, batch: int) -> Curve:
        """Over the context of ``batch`` sequences, one or more."""
        curve = self._curves.get(batch)
        if curve is None:
            # Windows are full here, and most knots of residual tables are powers of two.
            knees = [1 << power for power in range(self._longest.bit_length())]
            knees += [window for _, window in self._groups if window]
            bends = [batch * knee for knee in knees]
            curve = self._curves[batch] = Curve(partial(self._decode, batch), batch * self._longest, bends)
        return curve

    def _decode(self, batch: int, context: np.ndarray) -> np.ndarray:
        us = np.zeros(context.shape)
        for layers, window in self._groups:
            read = context if window is None else np.minimum(context, batch * window)
            us += layers * self._decode_us(batch, np.maximum(read, batch))
        return us

    def _prefill(self, tokens: int, pairs: int) -> float:
        us = 0.0
        for layers, window in self._groups:
            within = pairs if window is None else min(pairs, window * tokens)
            held = tokens + max(0.0, within / max(tokens, 1) - (tokens + 1) / 2)
            us += layers * float(self._prefill_us(max(tokens, 1), within, held))
        return us if tokens else 0.0


def _asked(calibration: Calibration, name: OpName, *shape: float) -> Callable[..., np.ndarray]:
    """Microseconds of an operation of one shape."""
    model, work = calibration.ops[name], OPERATIONS[name]
    return lambda *amounts: model.us(work(*amounts, *shape))
