"""Decode attention over a paged KV cache: one function for all kernels.

GPU arrays run on their GPU, CPU arrays through the CPU build of the same kernels. No GPU has run this code yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks, source
from .arguments import Argument
from .arrays import Array, empty, on_host, views
from .launching import Kernels, kernels_for
from .prepared import Prepared

#: Threads of a block.
THREADS = 32 * source.DECODE_WARPS
#: Size limits of a partition: below the minimum its merge costs too much, and above the maximum one long sequence would
#: occupy a block alone.
MIN_PARTITION_TOKENS, MAX_PARTITION_TOKENS = 256, 2048
#: Numbers of the attention kernels' arguments that are tensors of a layer: output, queries, keys and values. The kernels that
#: merge partitions take the output alone.
LAYER_ARGUMENTS = (0, 3, 4, 5)
#: Fixed cost of a block, in tokens: the first block table lookup, the first copies, the merge.
PARTITION_OVERHEAD_TOKENS = 64


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
        max_context_len: Upper bound of the context lengths; it determines how the work is split.
        k_scale: float32 ``[num_kv_heads]``, for caches of fp8 only: a key is its number times the scale of its KV head. ``query``
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

    def prepared(self, kernels: Kernels, partition_tokens: int | None = None) -> Prepared:
        """The call without its launch; ``partition_tokens``, a multiple of 16, overrides the split of :func:`partition_size`."""
        batch, heads, head_dim = self.query.shape
        ring, fp8 = source.ring_bytes(kernels.multiprocessor_shared_bytes), bool(self.scales)
        decode = source.decode_attention(self.query.dtype, head_dim, self.group, self.slots.rule, ring, fp8=fp8)
        columns = self.kv_heads * -(-self.group // source.group_tile(self.query.dtype, self.group))
        shared_bytes = source.decode_shared_bytes(self.query.dtype, head_dim, self.group, ring, fp8=fp8)
        places = kernels.places(decode, THREADS, shared_bytes)
        tokens = partition_tokens or partition_size(self.max_context_len, batch * columns, places)
        partitions = max(1, -(-self.max_context_len // tokens))
        states, values = partial_results(batch * heads * partitions, head_dim, partitions, self.query)
        arguments: tuple[Argument, ...] = (
            self.out,
            states,
            values,
            self.query,
            self.key_cache,
            self.value_cache,
            self.slots.ids,
            self.context_lens,
            *map(np.int32, (self.kv_heads, self.group)),
            *map(np.int32, (self.slots.block_size, self.slots.ids_per_sequence, tokens)),
            np.float32(math.log2(math.e) / math.sqrt(head_dim)),
            *self.scales,
        )
        changing = (*LAYER_ARGUMENTS, *range(len(arguments) - len(self.scales), len(arguments)))
        grid, block = (columns, partitions, batch), (THREADS, 1, 1)
        launches = [kernels.prepared(decode, grid, block, arguments, changing, shared_bytes=shared_bytes)]
        if partitions > 1:
            merge = source.merge_partitions(self.query.dtype, head_dim)
            merged = (self.out, states, values, self.context_lens, np.int32(partitions), np.int32(tokens))
            block = (-(-head_dim // 32) * 32, 1, 1)
            launches.append(kernels.prepared(merge, (heads, batch, 1), block, merged, LAYER_ARGUMENTS[:1]))
        layer = (self.out, self.query, self.key_cache, self.value_cache, *self.scales)
        return Prepared(layer, launches, (self.slots.ids, self.context_lens, states, values))


def partial_results(rows: int, head_dim: int, partitions: int, like: Array) -> tuple[Array, Array]:
    """Buffers for the maximum and sum, and for the values, of each row and partition; empty for one partition."""
    if partitions == 1:
        nothing = empty("partial_results", (0,), "float32", like)
        return nothing, nothing
    states = empty("partial_states", (rows, 2), "float32", like)
    return states, empty("partial_values", (rows, head_dim), "float32", like)


@functools.lru_cache(256)  # all layers of a step have the same arguments
def partition_size(max_context_len: int, columns: int, places: int) -> int:
    """Tokens of a partition, chosen so that the blocks fill the device a whole number of times, as nearly as possible.

    Context lengths are on the device and unknown here, so every sequence counts as the longest. Blocks of shorter
    sequences end early and other blocks replace them; no block has more tokens than :data:`MAX_PARTITION_TOKENS`.

    Args:
        max_context_len: Length of the longest sequence, in tokens.
        columns: Sequences x blocks of heads; each is split into partitions.
        places: Number of resident blocks of the device.
    """

    def duration(tokens: int) -> int:
        blocks = columns * -(-max_context_len // tokens)
        return -(-blocks // places) * (tokens + PARTITION_OVERHEAD_TOKENS)

    most = (max(1, waves * places // max(1, columns)) for waves in range(1, 9))
    sizes = {-(-max_context_len // (partitions * 64)) * 64 for partitions in most}
    limited = (min(max(size, MIN_PARTITION_TOKENS), MAX_PARTITION_TOKENS) for size in sizes)
    return min(sorted(limited, reverse=True), key=duration)
