"""Decode attention over a paged KV cache: the kernels behind one function.

GPU arrays run on their GPU, CPU arrays through the CPU build of the same kernels. No GPU has run this code yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sim.errors import SettingError
from . import source
from .arrays import Array, empty, on_host, views
from .launching import Kernels, kernels_for

THREADS = 128
MAX_BLOCK_SIZE = 4096
#: A partition is worth its merge from here on, and no longer than this: a long sequence must not keep a block alone.
MIN_PARTITION_TOKENS, MAX_PARTITION_TOKENS = 256, 4096
#: Blocks that a multiprocessor holds at a time.
RESIDENT_BLOCKS = 4


def forward(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    *,
    check_ids: bool = False,
) -> Any:
    """Attention of one new token a sequence over its cached tokens, softmax scale ``1 / sqrt(head_dim)``.

    Args:
        query: ``[batch, num_heads, head_dim]``, float16, bfloat16 or float32; a torch tensor, CuPy or numpy array.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, as ``value_cache``; ``num_heads`` is a
            multiple of ``num_kv_heads`` (MHA, GQA and MQA).
        value_cache: As ``key_cache``.
        block_tables: int32 ``[batch, max_blocks_per_seq]``; entries past a sequence's end are not read.
        context_lens: int32 ``[batch]``, in tokens; a sequence of none gives zeros.
        block_size: Tokens of a block, 1 to 4096.
        max_context_len: No context is longer. Work is split by it.
        check_ids: Look at every block id and context length first, which waits for the device.

    Returns:
        A new array like ``query``.

    Raises:
        SettingError: A shape, dtype, device or (where checked) block id or length that does not fit.
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
    check_ids: bool = False,
) -> None:
    """:func:`forward` into ``out``, an array like ``query``."""
    arrays = views(
        query=query,
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        context_lens=context_lens,
    )
    call = Call(*arrays, block_size, max_context_len)
    call.check()
    if check_ids:
        call.check_ids()
    call.run(kernels_for(call.query))


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, under the names of :func:`forward`."""

    query: Array
    out: Array
    key_cache: Array
    value_cache: Array
    block_tables: Array
    context_lens: Array
    block_size: int
    max_context_len: int

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.kv_heads

    def check(self) -> None:
        """Shapes and dtypes.

        Raises:
            SettingError: One that does not fit.
        """
        self.query.expect((None, None, None), *source.SCALARS)
        batch, heads, head_dim = self.query.shape
        if head_dim not in source.HEAD_DIMS:
            raise SettingError("head_dim", head_dim, f"must be one of {', '.join(map(str, source.HEAD_DIMS))}")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise SettingError("block_size", self.block_size, f"must be from 1 to {MAX_BLOCK_SIZE}")
        if self.max_context_len < 0:
            raise SettingError("max_context_len", self.max_context_len, "must not be negative")
        self.out.expect(self.query.shape, self.query.dtype)
        self.key_cache.expect((None, self.block_size, None, head_dim), self.query.dtype)
        self.value_cache.expect(self.key_cache.shape, self.query.dtype)
        self.block_tables.expect((batch, None), "int32")
        self.context_lens.expect((batch,), "int32")
        if self.kv_heads == 0 or heads % self.kv_heads:
            raise SettingError("num_heads", heads, f"must be a multiple of the cache's {self.kv_heads} KV heads")
        room = self.block_tables.shape[1] * self.block_size
        if self.max_context_len > room:
            raise SettingError("max_context_len", self.max_context_len, f"block_tables hold {room} tokens a sequence")

    def check_ids(self) -> None:
        """Every length, and every block id that a sequence uses.

        Raises:
            SettingError: The first that is out of range.
        """
        lengths, tables = on_host(self.context_lens), on_host(self.block_tables)
        for sequence in np.flatnonzero((lengths < 0) | (lengths > self.max_context_len))[:1]:
            remedy = f"must be from 0 to max_context_len = {self.max_context_len}"
            raise SettingError(f"context_lens[{sequence}]", int(lengths[sequence]), remedy)
        used = np.arange(tables.shape[1]) < -(-lengths[:, None] // self.block_size)
        blocks = self.key_cache.shape[0]
        for sequence, place in np.argwhere(used & ((tables < 0) | (tables >= blocks)))[:1]:
            remedy = f"the cache has blocks 0 to {blocks - 1}"
            raise SettingError(f"block_tables[{sequence}, {place}]", int(tables[sequence, place]), remedy)

    def run(self, kernels: Kernels, partition_tokens: int | None = None) -> None:
        """Launch the kernels; ``partition_tokens`` overrides the split of :func:`partition_size`."""
        batch, heads, head_dim = self.query.shape
        decode = source.decode_attention(self.query.dtype, head_dim, self.group)
        columns = self.kv_heads * -(-self.group // source.group_tile(self.group))
        tokens = partition_tokens or partition_size(self.max_context_len, batch * columns, kernels.multiprocessors)
        partitions = max(1, -(-self.max_context_len // tokens))
        # With one partition nobody writes these.
        rows = batch * heads * partitions if partitions > 1 else 0
        states = empty("partial_states", (rows, 2), "float32", self.query)
        values = empty("partial_values", (rows, head_dim), "float32", self.query)
        kernels.launch(
            decode,
            (columns, partitions, batch),
            (THREADS, 1, 1),
            (
                self.out,
                states,
                values,
                self.query,
                self.key_cache,
                self.value_cache,
                self.block_tables,
                self.context_lens,
                *map(np.int32, (self.kv_heads, self.group, self.block_size, self.block_tables.shape[1], tokens)),
                np.float32(math.log2(math.e) / math.sqrt(head_dim)),
            ),
        )
        if partitions > 1:
            kernels.launch(
                source.merge_partitions(self.query.dtype, head_dim),
                (heads, batch, 1),
                (head_dim, 1, 1),
                (self.out, states, values, self.context_lens, np.int32(partitions), np.int32(tokens)),
            )


def partition_size(max_context_len: int, columns: int, multiprocessors: int) -> int:
    """Tokens of a partition, so that all ``columns`` (sequences x blocks of heads) fill the device about once."""
    wanted = max(1, multiprocessors * RESIDENT_BLOCKS // max(1, columns))
    tokens = -(-max_context_len // wanted)
    rounded = -(-tokens // MIN_PARTITION_TOKENS) * MIN_PARTITION_TOKENS
    return min(max(rounded, MIN_PARTITION_TOKENS), MAX_PARTITION_TOKENS)
