"""Decode attention over a paged cache of latent vectors (MLA, as in DeepSeek-V2 and -V3): one new token per sequence.

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
from .partitions import filling_size, partial_results
from .prepared import Prepared, require_aligned

#: Numbers of the kernel's arguments that are tensors of a layer: output, queries and cache. The kernel that merges partitions
#: takes the output alone.
LAYER_ARGUMENTS = (0, 3, 4)


def forward(
    query: Any,
    kv_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    softmax_scale: float,
    *,
    check_ids: bool = False,
) -> Any:
    """Attention of one new token per sequence over its cached latent vectors, which are keys and values of all heads.

    A score is the product of all 576 scalars of a query and a vector, and an output the weighted sum of the vectors' first
    512. The caller has multiplied queries by the key part of the up-projection, and multiplies outputs by its value part.

    Args:
        query: ``[batch, num_heads, 576]``, bfloat16 or float16: 512 scalars for the latent part, then 64 rotary ones; a torch
            tensor, CuPy or numpy array.
        kv_cache: ``[num_blocks, block_size, 576]``, of the dtype of ``query``; the layout of vLLM's cache of MLA.
        block_tables: int32 ``[batch, max_blocks_per_seq]``; entries past a sequence's end are not read.
        context_lens: int32 ``[batch]``, in tokens; a sequence of length 0 gives zeros.
        block_size: Tokens of a block, 1 to 4096.
        max_context_len: Upper bound of the context lengths; it determines how the work is split.
        softmax_scale: Factor of the scores. It follows from the model's heads before the up-projection is absorbed: in
            DeepSeek-V3 ``192 ** -0.5`` times the square of YaRN's factor.
        check_ids: Check every block id and context length before the launch, which waits for the device.

    Returns:
        A new array ``[batch, num_heads, 512]`` of the dtype of ``query``.

    Raises:
        SettingError: A shape, dtype, device or (if checked) block id or length does not fit.
    """
    (like,) = views(query=query)
    out = empty("out", (*like.shape[:-1], source.LATENT_DIM), like.dtype, like)
    rest = (block_tables, context_lens, block_size, max_context_len, softmax_scale)
    prepare(out.owner, query, kv_cache, *rest, check_ids=check_ids).launch()
    return out.owner


def prepare(
    out: Any,
    query: Any,
    kv_cache: Any,
    block_tables: Any,
    context_lens: Any,
    block_size: int,
    max_context_len: int,
    softmax_scale: float,
    *,
    check_ids: bool = False,
) -> Prepared:
    """The checked call, without its launch; it takes ``out``, ``query`` and ``kv_cache`` of any layer.

    Args and errors are those of :func:`forward`, with ``out`` before them, ``[batch, num_heads, 512]``.
    """
    query, out, kv_cache, block_tables, context_lens = views(
        "out", query=query, out=out, kv_cache=kv_cache, block_tables=block_tables, context_lens=context_lens
    )
    call = Call(query, out, kv_cache, block_tables, context_lens, block_size, max_context_len, softmax_scale)
    call.check()
    if check_ids:
        lengths = on_host(call.context_lens)
        checks.lengths("context_lens", lengths, "max_context_len", max_context_len)
        checks.block_ids(call.block_tables, lengths, block_size, call.kv_cache.shape[0])
    return call.prepared(kernels_for(call.query))


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, under the names of :func:`forward`."""

    query: Array
    out: Array
    kv_cache: Array
    block_tables: Array
    context_lens: Array
    block_size: int
    max_context_len: int
    softmax_scale: float

    def check(self) -> None:
        """Check shapes and dtypes.

        Raises:
            SettingError: A shape or dtype does not fit.
        """
        self.query.expect((None, None, source.LATENT_KEY_DIM), *source.LATENT_DTYPES)
        batch, heads, _ = self.query.shape
        if heads == 0:
            raise SettingError("num_heads", heads, "must be positive")
        self.out.expect((batch, heads, source.LATENT_DIM), self.query.dtype)
        checks.block_size(self.block_size)
        self.kv_cache.expect((None, self.block_size, source.LATENT_KEY_DIM), self.query.dtype)
        for array in (self.query, self.out, self.kv_cache):
            require_aligned(array)
        checks.limit("max_context_len", self.max_context_len)
        checks.tables(self.block_tables, batch, self.block_size, self.max_context_len)
        self.context_lens.expect((batch,), "int32")
        if not 0 < self.softmax_scale < math.inf:
            raise SettingError("softmax_scale", self.softmax_scale, "must be positive and finite")

    def prepared(self, kernels: Kernels, partition_tokens: int | None = None) -> Prepared:
        """The call without its launch; ``partition_tokens`` overrides the split of :func:`partitions.filling_size`."""
        (batch, heads, _), dtype = self.query.shape, self.query.dtype
        block = block_for(heads, kernels.multiprocessor_shared_bytes)
        attention, columns = source.latent_attention(dtype, block), -(-heads // block.heads)
        places = kernels.places(attention, block.threads, block.shared_bytes)
        tokens = partition_tokens or filling_size(self.max_context_len, batch * columns, places)
        partitions = max(1, -(-self.max_context_len // tokens))
        states, values = partial_results(batch * heads * partitions, source.LATENT_DIM, partitions, self.query)
        arguments: tuple[Argument, ...] = (
            self.out,
            states,
            values,
            self.query,
            self.kv_cache,
            self.block_tables,
            self.context_lens,
            *map(np.int32, (heads, self.block_size, *divmod(source.LATENT_TILE, self.block_size))),
            *map(np.int32, (self.block_tables.shape[1], tokens)),
            np.float32(self.softmax_scale * math.log2(math.e)),
        )
        grid, threads = (columns, partitions, batch), (block.threads, 1, 1)
        launches = [
            kernels.prepared(attention, grid, threads, arguments, LAYER_ARGUMENTS, shared_bytes=block.shared_bytes)
        ]
        if partitions > 1:
            merge = source.merge_latent(dtype)
            merged = (self.out, states, values, self.context_lens, np.int32(partitions), np.int32(tokens))
            threads = (source.LATENT_DIM, 1, 1)
            launches.append(kernels.prepared(merge, (heads, batch, 1), threads, merged, LAYER_ARGUMENTS[:1]))
        layer = (self.out, self.query, self.kv_cache)
        return Prepared(layer, launches, (self.block_tables, self.context_lens, states, values))


def block_for(heads: int, shared_bytes: int) -> source.LatentBlock:
    """The block that serves ``heads`` query heads, or of larger numbers a part, on a device with ``shared_bytes``."""
    blocks = source.latent_blocks(shared_bytes)
    return next((block for block in blocks if block.heads >= heads), blocks[-1])
