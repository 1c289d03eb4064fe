"""Decode attention over a contiguous KV cache, in which the tokens of a sequence occupy consecutive slots.

Static batching and reserving allocators use this layout. The kernel is that of :mod:`paged_attention` with another
rule for a token's slot, so a difference in speed is due to the block table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...sim.types.errors import SettingError
from . import checks
from .arrays import empty, on_host, views
from .launching import kernels_for
from .paged_attention import Decode, Slots
from .prepared import Prepared


def forward(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    slot_starts: Any,
    context_lens: Any,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Any:
    """Attention of one new token per sequence over its cached tokens, softmax scale ``1 / sqrt(head_dim)``.

    Args:
        query: ``[batch, num_heads, head_dim]``, float16, bfloat16 or float32; a torch tensor, CuPy or numpy array.
        key_cache: ``[num_slots, num_kv_heads, head_dim]``, as ``value_cache``; ``num_heads`` is a multiple of
            ``num_kv_heads`` (MHA, GQA and MQA).
        value_cache: As ``key_cache``. Both are of the dtype of ``query``, or of fp8: float8_e4m3fn, or its bytes as uint8.
        slot_starts: int64 ``[batch]``: the slot of each sequence's first token; token i is i slots further.
        context_lens: int32 ``[batch]``, in tokens; a sequence of length 0 gives zeros.
        max_context_len: Upper bound of the context lengths; it determines how the work is split.
        k_scale: float32 ``[num_kv_heads]``, above 0, for caches of fp8 only: a key is its number times the scale of its KV head. ``query``
            is then float16 or bfloat16, and ``head_dim`` a multiple of 16.
        v_scale: The same for values.
        check_ids: Check every slot and context length before the launch, which waits for the device.

    Returns:
        A new array like ``query``.

    Raises:
        SettingError: A shape, dtype, device or (if checked) slot or length does not fit.
    """
    (like,) = views(query=query)
    out = empty("out", like.shape, like.dtype, like)
    arguments = query, key_cache, value_cache, slot_starts, context_lens, max_context_len
    prepare(out.owner, *arguments, k_scale=k_scale, v_scale=v_scale, check_ids=check_ids).launch()
    return out.owner


def prepare(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    slot_starts: Any,
    context_lens: Any,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Prepared:
    """The checked call, without its launch; it takes ``out``, ``query``, ``key_cache`` and ``value_cache`` of any layer, and over
    caches of fp8 ``k_scale`` and ``v_scale`` after them.

    Args and errors are those of :func:`forward`, with ``out`` before them, an array like ``query``.
    """
    given = checks.given_scales(k_scale, v_scale)
    query, out, key_cache, value_cache, slot_starts, context_lens, *scales = views(
        "out",
        query=query,
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_starts=slot_starts,
        context_lens=context_lens,
        **given,
    )
    checks.heads(query, out, key_cache, value_cache, None, scales=scales)
    checks.limit("max_context_len", max_context_len)
    slot_starts.expect((query.shape[0],), "int64")
    context_lens.expect((query.shape[0],), "int32")
    slots = Slots("ContiguousSlots", slot_starts, 1)
    call = Decode(query, out, key_cache, value_cache, slots, context_lens, max_context_len, tuple(scales))
    if check_ids:
        _check_slots(call)
    return call.prepared(kernels_for(call.query))


def _check_slots(call: Decode) -> None:
    lengths, starts = on_host(call.context_lens), on_host(call.slots.ids)
    checks.lengths("context_lens", lengths, "max_context_len", call.max_context_len)
    slots = call.key_cache.shape[0]
    for sequence in np.flatnonzero((lengths > 0) & ((starts < 0) | (starts + lengths > slots)))[:1]:
        remedy = f"{lengths[sequence]} tokens from there must lie in slots 0 to {slots - 1}"
        raise SettingError(f"slot_starts[{sequence}]", int(starts[sequence]), remedy)
