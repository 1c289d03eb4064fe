"""Prefill attention over a paged KV cache: causal attention of many new tokens per sequence over its cached tokens.

GPU arrays run on their GPU, CPU arrays through the CPU build of the same kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...sim.types.errors import SettingError
from . import checks, source
from .arguments import Argument
from .arrays import Array, empty, on_host, views
from .launching import Kernels, kernels_for
from .paged_attention import LAYER_ARGUMENTS
from .partitions import filling_size, partial_results
from .prepared import Prepared

THREADS = 128


def forward(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_start_loc: Any,
    context_lens: Any,
    block_size: int,
    max_query_len: int,
    max_context_len: int,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Any:
    """Causal attention of each sequence's new tokens over all of its tokens, softmax scale ``1 / sqrt(head_dim)``.

    The new tokens are the sequence's last ones and are already in the cache: new token i of q attends to the first
    ``context - q + i + 1`` tokens.

    Args:
        query: ``[tokens, num_heads, head_dim]``, the new tokens of all sequences, concatenated; float16,
            bfloat16 or float32; a torch tensor, CuPy or numpy array.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, as ``value_cache``; ``num_heads`` is a
            multiple of ``num_kv_heads`` (MHA, GQA and MQA).
        value_cache: As ``key_cache``. Both are of the dtype of ``query``, or of fp8: float8_e4m3fn, or its bytes as uint8.
        block_tables: int32 ``[batch, max_blocks_per_seq]``; entries past a sequence's end are not read.
        query_start_loc: int32 ``[batch + 1]``: index in ``query`` of each sequence's first new token, from 0 to
            ``tokens``; a sequence may have none.
        context_lens: int32 ``[batch]``, in tokens, including the new ones.
        block_size: Tokens of a block, 1 to 4096.
        max_query_len: Upper bound of the new tokens of a sequence; tokens beyond it are not computed.
        max_context_len: Upper bound of the context lengths.
        k_scale: float32 ``[num_kv_heads]``, above 0, for caches of fp8 only: a key is its number times the scale of its KV head. ``query``
            is then float16 or bfloat16, and ``head_dim`` a multiple of 16.
        v_scale: The same for values.
        check_ids: Check every block id and length before the launch, which waits for the device.

    Returns:
        A new array like ``query``.

    Raises:
        SettingError: A shape, dtype, device or (if checked) block id or length does not fit.
    """
    (like,) = views(query=query)
    out = empty("out", like.shape, like.dtype, like)
    caches, lengths = (key_cache, value_cache, block_tables), (query_start_loc, context_lens)
    sizes = block_size, max_query_len, max_context_len
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    prepare(out.owner, query, *caches, *lengths, *sizes, **scales, check_ids=check_ids).launch()
    return out.owner


def prepare(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    query_start_loc: Any,
    context_lens: Any,
    block_size: int,
    max_query_len: int,
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
    query, out, key_cache, value_cache, block_tables, query_start_loc, context_lens, *scales = views(
        "out",
        query=query,
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        context_lens=context_lens,
        **given,
    )
    call = Call(
        query,
        out,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        context_lens,
        block_size,
        max_query_len,
        max_context_len,
        tuple(scales),
    )
    call.check()
    if check_ids:
        call.check_ids()
    return call.prepared(kernels_for(call.query))


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, under the names of :func:`forward`; ``scales`` are those of keys and values in fp8, or none."""

    query: Array
    out: Array
    key_cache: Array
    value_cache: Array
    block_tables: Array
    query_start_loc: Array
    context_lens: Array
    block_size: int
    max_query_len: int
    max_context_len: int
    scales: tuple[Array, ...] = ()

    def check(self) -> None:
        """Check shapes and dtypes.

        Raises:
            SettingError: A shape or dtype does not fit.
        """
        batch = self.block_tables.shape[0] if self.block_tables.shape else 0
        checks.block_size(self.block_size)
        caches = self.key_cache, self.value_cache
        checks.heads(self.query, self.out, *caches, None, self.block_size, scales=self.scales)
        checks.limit("max_query_len", self.max_query_len)
        checks.limit("max_context_len", self.max_context_len)
        checks.tables(self.block_tables, batch, self.block_size, self.max_context_len)
        self.query_start_loc.expect((batch + 1,), "int32")
        self.context_lens.expect((batch,), "int32")

    def check_ids(self) -> None:
        """Check every length, and every block id that a sequence uses.

        Raises:
            SettingError: A value is out of range; names the first one.
        """
        starts, contexts = on_host(self.query_start_loc), on_host(self.context_lens)
        tokens = self.query.shape[0]
        for place in np.flatnonzero(starts[[0, -1]] != [0, tokens])[:1]:
            field, value = f"query_start_loc[{(0, len(starts) - 1)[place]}]", int(starts[[0, -1]][place])
            raise SettingError(field, value, f"must be {(0, tokens)[place]}: query has {tokens} tokens")
        checks.lengths("query_len", np.diff(starts), "max_query_len", self.max_query_len)
        checks.lengths("context_lens", contexts, "max_context_len", self.max_context_len)
        for sequence in np.flatnonzero(contexts < np.diff(starts))[:1]:
            remedy = f"must not be less than its {np.diff(starts)[sequence]} new tokens"
            raise SettingError(f"context_lens[{sequence}]", int(contexts[sequence]), remedy)
        checks.block_ids(self.block_tables, contexts, self.block_size, self.key_cache.shape[0])

    def prepared(self, kernels: Kernels, partition_tokens: int | None = None) -> Prepared:
        """The call without its launch; ``partition_tokens`` overrides the split."""
        tokens, heads, head_dim = self.query.shape
        kv_heads, batch = self.key_cache.shape[2], self.block_tables.shape[0]
        attention = source.prefill_attention(self.query.dtype, head_dim, fp8=bool(self.scales))
        tile = tile_of(self.query.dtype, head_dim)
        columns = kv_heads * -(-self.max_query_len * (heads // kv_heads) // tile.rows)
        if partition_tokens is None:
            places = kernels.places(attention, THREADS, tile.shared_bytes)
            partition_tokens = partition_size(self.max_context_len, batch * columns, places)
        partitions = max(1, -(-self.max_context_len // partition_tokens))
        states, values = partial_results(tokens * heads * partitions, head_dim, partitions, self.query)
        arguments: tuple[Argument, ...] = (
            self.out,
            states,
            values,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_start_loc,
            self.context_lens,
            *map(np.int32, (kv_heads, heads // kv_heads, self.block_size, self.block_tables.shape[1])),
            np.int32(partition_tokens),
            np.float32(math.log2(math.e) / math.sqrt(head_dim)),
            *self.scales,
        )
        grid, block = (columns, batch, partitions), (THREADS, 1, 1)
        changing = (*LAYER_ARGUMENTS, *range(len(arguments) - len(self.scales), len(arguments)))
        launches = [kernels.prepared(attention, grid, block, arguments, changing, shared_bytes=tile.shared_bytes)]
        lengths = self.query_start_loc, self.context_lens
        if partitions > 1:
            merge = source.merge_prefill(self.query.dtype, head_dim)
            merged: tuple[Argument, ...] = (
                self.out,
                states,
                values,
                *lengths,
                *map(np.int32, (partitions, partition_tokens)),
            )
            grid, block = (self.max_query_len, heads, batch), (-(-head_dim // 32) * 32, 1, 1)
            launches.append(kernels.prepared(merge, grid, block, merged, LAYER_ARGUMENTS[:1]))
        layer = (self.out, self.query, self.key_cache, self.value_cache, *self.scales)
        return Prepared(layer, launches, (self.block_tables, *lengths, states, values))


def partition_size(max_context_len: int, columns: int, places: int) -> int:
    """Tokens of a partition: the whole context if the ``columns`` (tiles of rows) fill half of the device's ``places``.

    Few new tokens over a long context would leave most of the device idle. They are split to fill it.
    """
    if 2 * columns >= places:
        return max(1, max_context_len)
    return filling_size(max_context_len, columns, places)


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of a block of threads at a time; ``prefill.cu`` defines the same values.

    Attributes:
        rows: Rows of queries: new tokens times query heads per KV head.
        shared_bytes: Dynamic shared memory in bytes.
    """

    rows: int
    shared_bytes: int


def tile_of(dtype: str, head_dim: int) -> Tile:
    """The tile of an instance of the kernel."""
    scalar_bytes = 4 if dtype == "float32" else 2
    loads = source.width(head_dim) * scalar_bytes // 16
    rows = 128 if scalar_bytes == 2 and head_dim <= 128 else 64
    keys = 64 if loads <= 12 else 32 if loads <= 32 else 16
    return Tile(rows, 16 * (loads + 1) * (rows + 2 * keys) + 2 * 8 * keys + 4 * rows)
