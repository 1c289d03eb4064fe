"""Attention of a step from a calibration: a piecewise linear curve over the context for decodes, a surface over tokens and pairs for prefills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import exp

import numpy as np

from ..spec.deployment import Deployment, element_bytes
from ..spec.gpu import GpuSpec
from ..spec.shape import ModelSpec
from . import op_work
from .backends import FLASH_ATTN_2, TWO_CALLS, Backend, MixedCalls, attention_backend
from .base import prompt_blocks
from .calibration import Calibration
from .curves import RisingCurve, Surface, ticks_of
from .latent import LatentCurves, module_layers
from .op_model import OpModel
from .op_work import Amount
from .operations import OPERATIONS, OpName
from .states import StateOperations

#: Resolution of the factor of a measured operation of mixed attention.
_FACTOR_PARTS = 1_000_000


class AttentionCurves:
    """Attention of all layers on one rank: a curve for each batch size, computed on first use.

    Of ranks that divide the tokens of a sequence each decodes with the query heads of all over its part of the context.

    Args:
        paged: Whether decodes read by block tables. Else their calls are ``contiguous_attention``, where the calibration has it.
        states: Layers with states instead of attention; their time is added.
        modules: Layers of which operations have all of attention, projections included; their time is added.

    Attributes:
        states: As given.
        mixed_model: The operation ``mixed_attention`` of the calibration, where it holds for the model; else None.
        calls: Decodes in mixed calls, where there is no such operation.
    """

    def __init__(
        self,
        calibration: Calibration,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        block_size: int,
        deployment: Deployment = Deployment(),
        paged: bool = True,
        states: StateOperations | None = None,
        modules: LatentCurves | None = None,
    ) -> None:
        self.states, self._modules = states, modules
        shape, context_ranks = model.head_attention(tensor_parallel), deployment.decode_context_parallel
        heads, kv_element_bytes = (shape.heads, shape.kv_heads, shape.head_dim), element_bytes(deployment.kv_dtype)
        gathered, self._ranks = context_ranks * shape.heads, context_ranks
        decoding: OpName = "decode_attention"
        by_table: tuple[float, ...] = (block_size,)
        if not paged and "contiguous_attention" in calibration.ops:
            decoding, by_table = "contiguous_attention", ()
        self._decode_us = _operation_us(calibration, decoding, gathered, *heads[1:], *by_table, kv_element_bytes)
        self._prefill_us = _operation_us(calibration, "prefill_attention", *heads, kv_element_bytes)
        self._token_bytes = 2 * shape.kv_heads * shape.head_dim * kv_element_bytes
        self._step = calibration.ops["step"]
        # A profile stands for vLLM.
        is_profile = calibration.kind == "profile"
        self._heads = shape.heads
        self.backend = attention_backend(model, gpu, deployment, tensor_parallel) if is_profile else TWO_CALLS
        # A measured factor holds for calls of attention alone.
        self.mixed_model = (
            None if states or modules else mixed_model(calibration, gathered // shape.kv_heads, self.backend)
        )
        rate = calibration.ops["prefill_attention"].coefficients.flops_per_s or gpu.fp16_flops_per_s
        self.calls = MixedCalls(self.backend, gpu, gathered, shape.kv_heads, shape.head_dim, rate, self._token_bytes)
        kept = [group for group in model.kv_groups() if group.span.keeps_tokens]
        apart = module_layers(model) if modules else frozenset[int]()
        of_groups = [(len(set(group.layers) - apart), group.span.tokens or None) for group in kept]
        self._groups = [(layers, window) for layers, window in of_groups if layers]
        self._shared = modules.shared if modules else 0
        self._longest = model.max_model_len
        self._curves: dict[tuple[int, bool], RisingCurve] = {}
        self.prefill = Surface(self._prefill)
        self._per_block = 0
        if self.mixed_model is None:
            self._per_block = ticks_of(np.asarray(sum(layers for layers, _ in self._groups) * self.calls.block_us()))

    def decode(self, batch: int) -> RisingCurve:
        """Over the context of ``batch`` sequences, one or more."""
        return self._curve(batch, in_mixed_call=False)

    def mixed_decode(self, batch: int) -> RisingCurve:
        """The same, in a call with prompts; only without an operation ``mixed_attention``."""
        return self._curve(batch, in_mixed_call=True)

    def _curve(self, batch: int, in_mixed_call: bool) -> RisingCurve:
        key = batch, in_mixed_call
        curve = self._curves.get(key)
        if curve is None:
            # Windows are full here, and most knots of residual tables are powers of two.
            knees = [1 << power for power in range(self._longest.bit_length())]
            knees += [window for _, window in self._groups if window]
            bends = [batch * knee for knee in knees]
            us = partial(self._decode, batch, in_mixed_call)
            curve = self._curves[key] = RisingCurve(us, batch * self._longest, bends)
        return curve

    def mixed(self, batch: int, context: int, tokens: int, pairs: int) -> int:
        """Ticks of ``batch`` sequences, one or more, that decode in a call with ``tokens`` prompt tokens, one or more."""
        prefill, found = self.prefill(tokens, pairs), self.mixed_model
        if found is None:
            blocks = batch * prompt_blocks(tokens, pairs)
            decode = self.mixed_decode(batch)(context)
            return max(decode + prefill + self._per_block * blocks - self._shared, decode, prefill)
        decode, factor = self.decode(batch)(context), found.coefficients.each_us
        if found.residuals is not None:
            factor *= exp(found.residuals.single(self._mixed_at(batch, context, tokens, pairs)))
        together = (decode + prefill) * round(factor * _FACTOR_PARTS) // _FACTOR_PARTS
        # A fitted table may fall below that a little, as the launch of one call is saved.
        return max(together, decode, prefill)

    @property
    def caches_shared(self) -> bool:
        """Whether a mixed call is shorter if its decodes have tokens in common."""
        return self.mixed_model is None and self.calls.caches_shared

    def saved(self, batch: int, context: int, repeated: int) -> int:
        """Ticks by which a call with prompts is shorter because ``repeated`` of the tokens are those of other sequences too."""
        if not repeated or self.calls.is_cached(context):
            return 0
        us = 0.0
        for layers, window in self._groups:
            # Which slots within a window are shared is not known.
            if window is None:
                held = np.array(max(context / self._ranks, batch))
                alone, distinct = self._decode_us(batch, held), held - repeated / self._ranks
                longer = self.calls.decode_us(batch, held, alone) - self.calls.decode_us(batch, held, alone, distinct)
                us += layers * float(longer)
        return ticks_of(np.asarray(us))

    def parts(self) -> tuple[Callable[[int], RisingCurve], int, int] | None:
        """``mixed_decode`` by batch, ``per_block`` and ``shared`` of ``StepParts``, by which ``mixed`` adds up; None where it is an operation
        of its own."""
        return None if self.mixed_model is not None else (self.mixed_decode, self._per_block, self._shared)

    def _mixed_at(self, batch: int, context: int, tokens: int, pairs: int) -> Mapping[str, Amount]:
        """Axes, in the table of residuals, of a mixed call with the mean of what all layers read; a layer with a window reads at most that."""
        layers = sum(count for count, _ in self._groups)
        read = sum(count * min(context, batch * (window or context)) for count, window in self._groups) / layers
        seen = sum(count * min(pairs, tokens * (window or pairs)) for count, window in self._groups) / layers
        return OPERATIONS["mixed_attention"](0, batch, read, tokens, seen, self._heads).at

    def _decode(self, batch: int, in_mixed_call: bool, context: np.ndarray) -> np.ndarray:
        us, kv_bytes = np.zeros(context.shape), np.zeros(context.shape)
        for layers, window in self._groups:
            read = context if window is None else np.minimum(context, batch * window)
            held = np.maximum(read / self._ranks, batch)
            alone = self._decode_us(batch, held)
            us += layers * (self.calls.decode_us(batch, held, alone) if in_mixed_call else alone)
            kv_bytes += layers * self._token_bytes * read / self._ranks
        if self.states:
            us = us + self.states.decode_us(batch)
        if self._modules:
            us = us + self._modules.decode_us(batch, context)
        return us + self._evicted_us(batch, kv_bytes)

    def _evicted_us(self, batch: int, kv_bytes: np.ndarray) -> np.ndarray:
        """By how much the GEMMs of a step are longer behind reads of so much KV; 0 where that was not measured."""
        return self._step.us(op_work.step(batch, kv_bytes)) - self._step.us(op_work.step(batch))

    def _prefill(self, tokens: int, pairs: np.ndarray) -> np.ndarray:
        us = np.zeros(pairs.shape)
        for layers, window in self._groups if tokens else ():
            within = pairs if window is None else np.minimum(pairs, window * tokens)
            held = tokens + np.maximum(0, within / tokens - (tokens + 1) / 2)
            us += layers * self._prefill_us(tokens, within, held)
        if self._modules:
            us = us + self._modules.prefill_us(tokens, pairs)
        return us + self.states.prefill_us(tokens, pairs) if self.states and tokens else us


def mixed_model(calibration: Calibration, group: int, backend: Backend) -> OpModel | None:
    """The calibration's operation ``mixed_attention``, where it holds for a model of ``group`` query heads a KV head; None for the rule of
    the backend (``MixedCalls``). That of a profile is of FlashAttention 2."""
    found = calibration.ops.get("mixed_attention")
    if found is None or found.query_group not in (None, group) or backend not in (FLASH_ATTN_2, TWO_CALLS):
        return None
    return found


def _operation_us(calibration: Calibration, name: OpName, *shape: float) -> Callable[..., np.ndarray]:
    """Microseconds of an operation of one shape."""
    model, work = calibration.ops[name], OPERATIONS[name]
    return lambda *amounts: model.us(work(*amounts, *shape))
