"""All operations of a step, each declared once: its work, the axes of its residuals, and who measures it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..spec.compressed import DENSE
from .layer_work import (
    csa_decode,
    csa_prefill,
    dsa_decode,
    dsa_prefill,
    gdn_decode,
    gdn_prefill,
    hyper_connections,
    mla_decode,
    mla_prefill,
    msa_decode,
    msa_prefill,
)
from .op_work import (
    ELEMENT_BYTES,
    NVFP4_BYTES,
    Work,
    all_reduce,
    contiguous_attention,
    decode_attention,
    elementwise,
    embedding,
    gemm,
    kv_write,
    launches,
    mixed_attention,
    moe,
    prefill_attention,
    prefill_step,
    small_kernel,
    step,
    transfer,
)

#: A name in ``OPERATIONS``.
OpName = str
#: Knots of an axis of a fit's residuals: their spacing in doublings, or themselves; None where only a calibration has a table.
Knots = float | tuple[float, ...] | None


class Operation(NamedTuple):
    """An operation, declared once.

    Attributes:
        work: What a call takes as arguments, and the work that it is.
        knots: Axes that its residuals may have.
        columns: Arguments and axes whose values a fit holds out in turn.
        shape: The sizes that a model has and a load does not change.
        is_measured: Whether ``fragmeter calibrate`` measures it; others are only in profiles that are fitted to tables.
        is_optional: Whether a calibration may lack it: its place is then taken by others, with a stated factor, or by ``step``.
    """

    work: Callable[..., Work]
    knots: Mapping[str, Knots] = {}
    columns: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    is_measured: bool = True
    is_optional: bool = False

    def __call__(self, *arguments: Any, **named: Any) -> Work:
        """The work of a call."""
        return self.work(*arguments, **named)


def _gemm(element_bytes: float, is_measured: bool = False) -> Operation:
    knots = dict.fromkeys(("m", "n", "k"), 2)
    return Operation(partial(gemm, element_bytes=element_bytes), knots, ("m", "n"), ("n", "k"), is_measured)


def _experts(element_bytes: float) -> Operation:
    knots = dict.fromkeys(("rows", "reached", "width", "hidden"), 2)
    shape = ("held", "hidden_size", "width")
    return Operation(partial(moe, element_bytes=element_bytes), knots, ("tokens", "width"), shape, False)


def _decode(work: Callable[..., Work], batch: int = 2) -> Operation:
    """Decodes of one layer with its projections."""
    knots = {"batch": batch, "length": 2, "heads": 1}
    return Operation(work, knots, ("batch", "length", "heads"), ("heads",), False)


def _prefill(work: Callable[..., Work], seen: str = "keys", spacing: int = 2) -> Operation:
    """Prompts in one layer with its projections."""
    knots = {"tokens": 1, seen: spacing, "heads": 1}
    return Operation(work, knots, ("tokens", seen, "heads"), ("heads",), False)


_FP8: dict[str, Any] = {"element_bytes": 1}
_OF_HEADS = ("heads", "kv_heads", "head_dim")
#: Every operation. Weights and activations are in 16 bits, or in those of the name (``w8`` and ``w4`` are weights alone, unpacked to
#: 16 bits); quantising the activations, which come in 16 bits, is part of the call. Of ``mla``, ``dsa`` and ``msa`` fp8 means the
#: projections, with a scale for each block of 128 x 128.
OPERATIONS: dict[OpName, Operation] = {
    "gemm": _gemm(ELEMENT_BYTES, is_measured=True),
    "gemm_fp8": _gemm(1),
    "gemm_nvfp4": _gemm(NVFP4_BYTES),
    "gemm_w8": _gemm(1),
    "gemm_w4": _gemm(1 / 2),
    "moe": Operation(moe, *_experts(ELEMENT_BYTES)[1:]),
    "moe_fp8": _experts(1),
    "moe_nvfp4": _experts(NVFP4_BYTES),
    "moe_mxfp4": _experts(4.25 / 8),
    "moe_mxfp4_mxfp8": _experts(4.25 / 8),
    "moe_int4": _experts(4.15 / 8),
    # FlashAttention-2 never splits a context with one query head per KV head, so a group of 1 has a knot of its own.
    "decode_attention": Operation(
        decode_attention,
        {"lanes": 1, "length": 1, "group": (1, 2, 16), "block_size": 2},
        ("batch", "length"),
        _OF_HEADS,
    ),
    "contiguous_attention": Operation(
        contiguous_attention, {"lanes": 1, "length": 1}, ("batch", "length"), is_optional=True
    ),
    "prefill_attention": Operation(
        prefill_attention, {"rows": 2, "keys": 1, "head_dim": 1, "prefix": 2}, ("tokens", "keys"), _OF_HEADS
    ),
    "mixed_attention": Operation(
        mixed_attention,
        {"lanes": 1, "length": 1, "rows": 2, "span": 2},
        ("batch", "length", "tokens", "span"),
        ("heads",),
        is_optional=True,
    ),
    "mla_decode": _decode(mla_decode, batch=1),
    "mla_decode_fp8": _decode(partial(mla_decode, **_FP8), batch=1),
    "mla_prefill": _prefill(mla_prefill),
    "mla_prefill_fp8": _prefill(partial(mla_prefill, **_FP8)),
    # Four tables each, so with fewer knots.
    "dsa_decode": _decode(dsa_decode),
    "dsa_decode_fp8": _decode(partial(dsa_decode, **_FP8)),
    "dsa_prefill": _prefill(dsa_prefill, spacing=4),
    "dsa_prefill_fp8": _prefill(partial(dsa_prefill, **_FP8), spacing=4),
    "msa_decode": _decode(msa_decode),
    "msa_decode_fp8": _decode(partial(msa_decode, **_FP8)),
    "msa_prefill": _prefill(msa_prefill),
    "msa_prefill_fp8": _prefill(partial(msa_prefill, **_FP8)),
    "csa_decode": _decode(csa_decode, batch=1),
    "csa_prefill": _prefill(csa_prefill, "span"),
    "hca_decode": _decode(partial(csa_decode, ratio=DENSE), batch=1),
    "hca_prefill": _prefill(partial(csa_prefill, ratio=DENSE), "span"),
    "hyper_connections": Operation(hyper_connections, {"tokens": 2}, ("tokens",), ("hidden_size",), False),
    "gdn_decode": Operation(
        gdn_decode, {"lanes": 1, "heads": 2}, ("batch", "value_heads"), ("key_heads", "value_heads"), False
    ),
    "gdn_prefill": Operation(
        gdn_prefill,
        {"tokens": 2, "length": 2, "heads": 1},
        ("tokens", "length", "value_heads"),
        ("key_heads", "value_heads"),
        False,
    ),
    "small_kernel": Operation(small_kernel, is_measured=False),
    "kv_write": Operation(kv_write),
    "elementwise": Operation(elementwise, {"tokens": None}),
    "embedding": Operation(embedding),
    "block_copy": Operation(transfer),
    "swap_out": Operation(transfer),
    "swap_in": Operation(transfer),
    "all_reduce": Operation(all_reduce, {"message": 2, "ranks": 1}, ("message",), ("ranks",), False),
    "step": Operation(step),
    "prefill_step": Operation(prefill_step, is_optional=True),
    "launches": Operation(launches, is_optional=True),
}
FROM_TABLES = frozenset(name for name, each in OPERATIONS.items() if not each.is_measured)


def smallest_call(operation: OpName) -> Work:
    """The work of a call with every size equal to one: the kinds of work that the operation has."""
    sizes = inspect.signature(OPERATIONS[operation].work).parameters.values()
    return OPERATIONS[operation](*(1 for size in sizes if size.default is inspect.Parameter.empty))
