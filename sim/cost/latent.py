"""Latent attention (MLA) from a calibration, with the projections of its layers.

The tables that profiles are fitted to time the whole module of a layer: projections, writing the latent vector, attention.
They are of DeepSeek-V3's widths, with any number of heads, and hold for no other, nor for sparse attention (V3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..spec.attention import Latent
from ..spec.matrix import formats_by_part
from ..spec.shape import ModelSpec
from .calibration import Calibration
from .curves import RisingCurve, Surface
from .operations import MLA_HIDDEN_SIZE, MLA_LATENT, OPERATIONS, OpModel, OpName

#: The operations of decodes and prefills, by the number format of the projections.
_OPERATIONS: dict[bool, tuple[OpName, OpName]] = {
    False: ("mla_decode", "mla_prefill"),
    True: ("mla_decode_fp8", "mla_prefill_fp8"),
}

LATENT_OPERATIONS = {name for names in _OPERATIONS.values() for name in names}


def latent_operations(calibration: Calibration, model: ModelSpec, quantization: str | None) -> dict[OpName, OpModel]:
    """The operations of a model's latent attention; none if the calibration has none for its widths."""
    if model.indexer or model.latent != Latent(*MLA_LATENT) or model.hidden_size != MLA_HIDDEN_SIZE:
        return {}
    formats = formats_by_part(quantization) if quantization else {}
    names = _OPERATIONS[formats.get("mixer") == "fp8"]
    return {name: calibration.ops[name] for name in names if name in calibration.ops}


class LatentCurves:
    """Attention of all layers on one rank, projections included; as ``AttentionCurves``.

    In a step with both, decodes and prefills attend in calls of their own and share the projections: together they take what they
    take apart, less the shortest call.

    Of ranks that divide the tokens of a sequence each attends with the heads of all to its part of the context, and projects its
    own heads:

        call of all heads over its part - call of all heads without context + call of its heads without context

    Args:
        ops: As ``latent_operations`` returns them.
        context_ranks: Ranks that divide the tokens of a sequence.
    """

    def __init__(
        self, ops: dict[OpName, OpModel], model: ModelSpec, tensor_parallel: int, context_ranks: int = 1
    ) -> None:
        self._decode_op, self._prefill_op = ops.items()
        self._ranks = context_ranks
        self._heads, self._layers = model.heads_per_rank(tensor_parallel), len(model.attention_layers)
        self._longest = model.max_model_len
        self._curves: dict[int, RisingCurve] = {}
        self.prefill = Surface(self._prefill)
        self._shared = self.decode(1)(1)

    def decode(self, batch: int) -> RisingCurve:
        """Over the context of ``batch`` sequences, one or more."""
        curve = self._curves.get(batch)
        if curve is None:
            bends = [batch << power for power in range(self._longest.bit_length())]
            curve = self._curves[batch] = RisingCurve(partial(self._decode, batch), batch * self._longest, bends)
        return curve

    def mixed(self, batch: int, context: int, tokens: int, pairs: int) -> int:
        """Ticks of ``batch`` sequences, one or more, that decode in a step with ``tokens`` prompt tokens, one or more."""
        decode, prefill = self.decode(batch)(context), self.prefill(tokens, pairs)
        return max(decode + prefill - self._shared, decode, prefill)

    def parts(self) -> tuple[Callable[[int], RisingCurve], int, int] | None:
        """``mixed_decode`` by batch, ``per_block`` and ``shared`` of ``StepParts``, by which ``mixed`` adds up."""
        return self.decode, 0, self._shared

    def _decode(self, batch: int, context: np.ndarray) -> np.ndarray:
        (name, model), heads = self._decode_op, self._heads * self._ranks
        us = model.us(OPERATIONS[name](batch, np.maximum(context / self._ranks, batch), heads))
        if self._ranks > 1:
            empty = np.array([batch])
            us = (
                us
                - model.us(OPERATIONS[name](batch, empty, heads))
                + model.us(OPERATIONS[name](batch, empty, self._heads))
            )
        return self._layers * us

    def _prefill(self, tokens: int, pairs: np.ndarray) -> np.ndarray:
        if not tokens:
            return np.zeros(pairs.shape)
        name, model = self._prefill_op
        held = tokens + np.maximum(0, pairs / tokens - (tokens + 1) / 2)
        return self._layers * model.us(OPERATIONS[name](tokens, pairs, held, self._heads))
