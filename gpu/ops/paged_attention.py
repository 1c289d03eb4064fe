"""Decode attention over a paged KV cache: one function for all kernels.

GPU arrays run on their GPU, CPU arrays through the CPU build of the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks, source
from .arguments import Argument
from .arrays import Array, empty, of_stream, on_host, views, zeros
from .launching import Kernels, kernels_for
from .prepared import Prepared

#: Threads of a block.
THREADS = 32 * source.DECODE_WARPS
#: Pieces of a sequence that are merged at once: ``kFanIn`` of ``balance.cuh``.
FAN_IN = 8
#: Numbers of the attention kernels' arguments that are tensors of a layer: output, queries, keys and values.
LAYER_ARGUMENTS = (0, 3, 4, 5)


def forward(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Any:
    """Attention of one new token per sequence over its cached tokens, softmax scale ``1 / sqrt(head_dim)``.

    Args:
        query: ``[batch, num_heads, head_dim]``, float16, bfloat16 or float32; a torch tensor, CuPy or numpy array.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, as ``value_cache``; ``num_heads`` is a
            multiple of ``num_kv_heads`` (MHA, GQA and MQA).
        value_cache: As ``key_cache``. Both are of the dtype of ``query``, or of fp8: float8_e4m3fn, or its bytes as uint8.
        block_tables: int32 ``[batch, max_blocks_per_seq]``; entries past a sequence's end are not read.
        context_lens: int32 ``[batch]``, in tokens; a sequence of length 0 gives zeros.
        block_size: Tokens of a block, 1 to 4096.
        max_context_len: Upper bound of the context lengths; the tables have ids for it.
        k_scale: float32 ``[num_kv_heads]``, above 0, for caches of fp8 only: a key is its number times the scale of its KV head. ``query``
            is then float16 or bfloat16, and ``head_dim`` a multiple of 16.
        v_scale: The same for values.
        check_ids: Check every block id and context length before the launch, which waits for the device.

    Returns:
        A new array like ``query``.

    Raises:
        SettingError: A shape, dtype, device or (if checked) block id or length does not fit.
    """
    (like,) = views(query=query)
    out = empty("out", like.shape, like.dtype, like)
    paged_attention_cuda_forward(
        out.owner,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        k_scale=k_scale,
        v_scale=v_scale,
        check_ids=check_ids,
    )
    return out.owner


def paged_attention_cuda_forward(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> None:
    """:func:`forward` into ``out``, an array like ``query``."""
    rest = (block_tables, context_lens, block_size, max_context_len)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    prepare(out, query, key_cache, value_cache, *rest, **scales, check_ids=check_ids).launch()


def prepare(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Prepared:
    """The checked call, without its launch; it takes ``out``, ``query``, ``key_cache`` and ``value_cache`` of any layer, and over
    caches of fp8 ``k_scale`` and ``v_scale`` after them.

    Args and errors are those of :func:`forward`, with ``out`` as in :func:`paged_attention_cuda_forward`.
    """
    scales = checks.given_scales(k_scale, v_scale)
    query, out, key_cache, value_cache, block_tables, context_lens, *scales_of = views(
        "out",
        query=query,
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        context_lens=context_lens,
        **scales,
    )
    arguments = (query, out, key_cache, value_cache, block_tables, context_lens, block_size, max_context_len)
    call = checked(*arguments, scales_of)
    if check_ids:
        lengths = on_host(call.context_lens)
        checks.lengths("context_lens", lengths, "max_context_len", max_context_len)
        checks.block_ids(call.slots.ids, lengths, block_size, call.key_cache.shape[0])
    return call.prepared(kernels_for(call.query))


def checked(
    query: Array,
    out: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    block_size: int,
    max_context_len: int,
    scales: Sequence[Array] = (),
) -> Decode:
    """The checked call with the arguments of :func:`forward`; ``scales`` are those of keys and values, or none.

    Raises:
        SettingError: A shape or dtype does not fit.
    """
    checks.block_size(block_size)
    checks.heads(query, out, key_cache, value_cache, None, block_size, scales=scales)
    checks.limit("max_context_len", max_context_len)
    checks.tables(block_tables, query.shape[0], block_size, max_context_len)
    context_lens.expect((query.shape[0],), "int32")
    slots = Slots("PagedSlots" if block_size % source.TILE_TOKENS else "PagedTiles", block_tables, block_size)
    return Decode(query, out, key_cache, value_cache, slots, context_lens, max_context_len, tuple(scales))


@dataclass(frozen=True, slots=True)
class Slots:
    """The rule by which the kernel finds the slots of a sequence's tokens.

    Attributes:
        rule: The kernel's type.
        ids: ``[batch, ids of a sequence]``, or ``[batch]`` with one id each.
        block_size: Tokens per id.
    """

    rule: str
    ids: Array
    block_size: int

    @property
    def ids_per_sequence(self) -> int:
        return math.prod(self.ids.shape[1:])


@dataclass(frozen=True, slots=True)
class Decode:
    """A checked call of the decode kernels; caches are ``[..., num_kv_heads, head_dim]``, of fp8 if there are ``scales``."""

    query: Array
    out: Array
    key_cache: Array
    value_cache: Array
    slots: Slots
    context_lens: Array
    max_context_len: int
    scales: tuple[Array, ...] = ()

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[-2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.kv_heads

    def prepared(self, kernels: Kernels, blocks: int | None = None) -> Prepared:
        """The call without its launch.

        The blocks of the grid divide the work on the device, by the context lengths that are there when the kernel runs.

        Args:
            kernels: Those of the arrays' device.
            blocks: Of the grid; None is as many as the device holds at a time.
        """
        batch, _, head_dim = self.query.shape
        layer = (self.out, self.query, self.key_cache, self.value_cache, *self.scales)
        fp8 = bool(self.scales)
        decode = source.decode_attention(self.query.dtype, head_dim, self.group, self.slots.rule, fp8=fp8)
        tile = source.group_tile(self.query.dtype, self.group)
        shared_bytes = source.decode_shared_bytes(self.query.dtype, head_dim, self.group, fp8=fp8)
        blocks = blocks or kernels.places(decode, THREADS, shared_bytes)
        # Each block has two pieces of sequences at most, and a counter for each on each level of their merge. The zeros are
        # written on the stream of the launch.
        slots, like = 2 * blocks, of_stream(self.query, (self.slots.ids, self.context_lens, *layer))
        states = empty("partial_states", (slots, tile, 2), "float32", like)
        values = empty("partial_values", (slots, tile, head_dim), "float32", like)
        counters = zeros("counters", (merge_levels(blocks), slots), "int32", like)
        arguments: tuple[Argument, ...] = (
            self.out,
            states,
            values,
            self.query,
            self.key_cache,
            self.value_cache,
            counters,
            self.slots.ids,
            self.context_lens,
            *map(np.int32, (batch, self.kv_heads, self.group)),
            *map(np.int32, (self.slots.block_size, self.slots.ids_per_sequence)),
            np.float32(math.log2(math.e) / math.sqrt(head_dim)),
            *self.scales,
        )
        changing = (*LAYER_ARGUMENTS, *range(len(arguments) - len(self.scales), len(arguments)))
        grid, block = (blocks if batch else 0, 1, 1), (THREADS, 1, 1)
        launch = kernels.prepared(decode, grid, block, arguments, changing, shared_bytes=shared_bytes)
        return Prepared(layer, (launch,), (self.slots.ids, self.context_lens, states, values, counters))


def merge_levels(blocks: int) -> int:
    """Levels of the tree by which so many pieces of a sequence are merged."""
    levels = 1
    while FAN_IN**levels < blocks:
        levels += 1
    return levels
