"""Latent attention (MLA), and other sparse attention, from a calibration, with the projections of their layers.

The tables that profiles are fitted to time the whole module of a layer: projections, writing the latent vector, attention.
They are of DeepSeek-V3's widths, with any number of heads, and hold for no other. Those of sparse attention, with its indexer, are of the
widths of DeepSeek V3.2 and of GLM 5, with a KV cache in 16 bits and in fp8 each. Those of compressed attention are of DeepSeek V4 Flash and Pro, with
projections and KV cache in fp8, a table for each kind of layer. MiniMax M3 keeps K and V, and its table is of the layers with an indexer
alone. DeepSeek V4's layers without compressed vectors have none and take the time of those that read
one for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..spec.attention import Indexer, Latent
from ..spec.compressed import DENSE, SPARSE, Compressed
from ..spec.deployment import dtype_bits
from ..spec.matrix import formats_by_part
from ..spec.shape import ModelSpec
from .calibration import Calibration
from .curves import RisingCurve, Surface
from .layer_work import (
    COMPRESSED_WIDTHS,
    COMPRESSED_WINDOW,
    DSA_TOP_K,
    DSA_WIDTHS,
    MLA_HIDDEN_SIZE,
    MLA_LATENT,
    MSA_WIDTHS,
    sparse_name,
)
from .op_model import OpModel
from .operations import OPERATIONS, OpName

#: The operations of decodes and prefills, by the number format of the projections.
_OPERATIONS: dict[bool, tuple[OpName, OpName]] = {
    False: ("mla_decode", "mla_prefill"),
    True: ("mla_decode_fp8", "mla_prefill_fp8"),
}

_SPARSE: dict[bool, tuple[OpName, OpName]] = {
    False: ("dsa_decode", "dsa_prefill"),
    True: ("dsa_decode_fp8", "dsa_prefill_fp8"),
}

#: Of an indexer that chooses blocks.
_SPARSE_BLOCKS: dict[bool, tuple[OpName, OpName]] = {
    False: ("msa_decode", "msa_prefill"),
    True: ("msa_decode_fp8", "msa_prefill_fp8"),
}

#: By tokens of a vector.
_COMPRESSED: dict[int, tuple[OpName, OpName]] = {
    SPARSE: ("csa_decode", "csa_prefill"),
    DENSE: ("hca_decode", "hca_prefill"),
}

LATENT_OPERATIONS = {
    name for known in (_OPERATIONS, _SPARSE, _SPARSE_BLOCKS, _COMPRESSED) for names in known.values() for name in names
}


def latent_operations(
    calibration: Calibration, model: ModelSpec, quantization: str | None, kv_dtype: str = "fp16"
) -> dict[OpName, OpModel]:
    """The operations of a model's latent, compressed or sparse attention, of decodes and of prefills; none if the calibration has none for its widths.

    Args:
        kv_dtype: Number format of the KV cache; tables of dense attention have 16 bits alone.
    """
    formats = formats_by_part(quantization) if quantization else {}
    is_fp8 = formats.get("mixer") == "fp8"
    if model.compressed:
        if not is_fp8 or not _is_compressed(model, model.compressed):
            return {}
        names = [name for pair in _COMPRESSED.values() for name in pair]
        tables = {name: calibration.ops.get(name) for name in names}
        found = {name: entry.shapes.get(str(model.hidden_size)) if entry else None for name, entry in tables.items()}
    elif model.indexer is None:
        if model.latent != Latent(*MLA_LATENT) or model.hidden_size != MLA_HIDDEN_SIZE:
            return {}
        found = {name: calibration.ops.get(name) for name in _OPERATIONS[is_fp8]}
    else:
        in_blocks = bool(model.indexer.block_tokens)
        if not (_is_sparse_in_blocks if in_blocks else _is_sparse)(model, model.indexer):
            return {}
        shape = sparse_name(model.hidden_size, "auto" if dtype_bits(kv_dtype) == 16 else "fp8")
        by_shape = {name: calibration.ops.get(name) for name in (_SPARSE_BLOCKS if in_blocks else _SPARSE)[is_fp8]}
        found = {name: entry.shapes.get(shape) if entry else None for name, entry in by_shape.items()}
    known = {name: entry for name, entry in found.items() if entry is not None}
    return known if len(known) == len(found) else {}


def _is_sparse(model: ModelSpec, indexer: Indexer) -> bool:
    """Whether a model has the widths of a table of sparse attention, and an indexer in every layer."""
    widths, latent = DSA_WIDTHS.get(model.hidden_size), model.latent
    if widths is None or latent is None or indexer.pool_tokens > 1 or indexer.top_k != DSA_TOP_K:
        return False
    everywhere = len(indexer.layers) == model.num_layers and indexer.heads == widths.index_heads
    rank, rope = MLA_LATENT[:2]
    return everywhere and latent == Latent(rank, rope, widths.nope, widths.v, widths.q_rank)


def _is_sparse_in_blocks(model: ModelSpec, indexer: Indexer) -> bool:
    """Whether a model has the widths of the table of sparse attention in blocks (MiniMax M3)."""
    heads, group = model.num_heads, model.num_heads // model.num_kv_heads
    widths = model.hidden_size, model.head_dim, group, indexer.top_k
    return widths == MSA_WIDTHS and indexer.head_dim == model.head_dim and heads == group * indexer.heads


def module_layers(model: ModelSpec) -> frozenset[int]:
    """Layers of which operations as of ``latent_operations`` have all of attention."""
    in_blocks = model.indexer is not None and model.indexer.block_tokens
    return frozenset(model.indexer.layers if model.indexer and in_blocks else model.attention_layers)


def _is_compressed(model: ModelSpec, shape: Compressed) -> bool:
    """Whether a model has the widths of a table of compressed attention."""
    widths = COMPRESSED_WIDTHS.get(model.hidden_size)
    given = (
        model.hidden_size,
        model.num_heads,
        shape.q_rank,
        shape.groups,
        shape.group_rank,
        shape.index_heads,
        shape.top_k,
    )
    return widths == given and shape.window == COMPRESSED_WINDOW


class _Kind(NamedTuple):
    """Layers of one kind, and their operations."""

    layers: int
    decode: tuple[OpName, OpModel]
    prefill: tuple[OpName, OpModel]


class LatentCurves:
    """Attention of all layers on one rank, projections included; as ``AttentionCurves``.

    In a step with both, decodes and prefills attend in calls of their own and share the projections: together they take what they
    take apart, less the shortest call.

    Of ranks that divide the tokens of a sequence each attends with the heads of all to its part of the context, and projects its
    own heads:

        call of all heads over its part - call of all heads without context + call of its heads without context

    Args:
        ops: As ``latent_operations`` returns them, of ``module_layers``.
        context_ranks: Ranks that divide the tokens of a sequence.

    Attributes:
        shared: Ticks of the shortest call.
    """

    def __init__(
        self, ops: dict[OpName, OpModel], model: ModelSpec, tensor_parallel: int, context_ranks: int = 1
    ) -> None:
        decodes, prefills = list(ops.items())[::2], list(ops.items())[1::2]
        layers = len(module_layers(model))
        sparse = model.compressed.count(SPARSE) if model.compressed else layers
        self._kinds = list(map(_Kind, (sparse, layers - sparse), decodes, prefills))
        self._ranks = context_ranks
        indexed = model.indexer is not None and not model.indexer.block_tokens
        self._widths = (model.hidden_size,) if indexed or model.compressed else ()
        self._heads = model.heads_per_rank(tensor_parallel)
        self._longest = model.max_model_len
        self._curves: dict[int, RisingCurve] = {}
        self.prefill = Surface(self.prefill_us)
        self.shared = self.decode(1)(1)

    def decode(self, batch: int) -> RisingCurve:
        """Over the context of ``batch`` sequences, one or more."""
        curve = self._curves.get(batch)
        if curve is None:
            bends = [batch << power for power in range(self._longest.bit_length())]
            curve = self._curves[batch] = RisingCurve(partial(self.decode_us, batch), batch * self._longest, bends)
        return curve

    def mixed(self, batch: int, context: int, tokens: int, pairs: int) -> int:
        """Ticks of ``batch`` sequences, one or more, that decode in a step with ``tokens`` prompt tokens, one or more."""
        decode, prefill = self.decode(batch)(context), self.prefill(tokens, pairs)
        return max(decode + prefill - self.shared, decode, prefill)

    def parts(self) -> tuple[Callable[[int], RisingCurve], int, int] | None:
        """``mixed_decode`` by batch, ``per_block`` and ``shared`` of ``StepParts``, by which ``mixed`` adds up."""
        return self.decode, 0, self.shared

    def decode_us(self, batch: int, context: np.ndarray) -> np.ndarray:
        """Microseconds of ``batch`` sequences, one or more, over their context."""
        heads = self._heads * self._ranks
        us = np.zeros(context.shape)
        for layers, (name, model), _ in self._kinds:

            def call(held: np.ndarray, heads: int, name: OpName = name, model: OpModel = model) -> np.ndarray:
                return model.us(OPERATIONS[name](batch, held, heads, *self._widths))

            each = call(np.maximum(context / self._ranks, batch), heads)
            if self._ranks > 1:
                empty = np.array([batch])
                each = each - call(empty, heads) + call(empty, self._heads)
            us += layers * each
        return us

    def prefill_us(self, tokens: int, pairs: np.ndarray) -> np.ndarray:
        """Microseconds of prompts of ``tokens`` over their pairs."""
        us = np.zeros(pairs.shape)
        held = tokens + np.maximum(0, pairs / tokens - (tokens + 1) / 2) if tokens else us
        for layers, _, (name, model) in self._kinds if tokens else ():
            us += layers * model.us(OPERATIONS[name](tokens, pairs, held, self._heads, *self._widths))
        return us
