"""Caches and queries as test cases for the kernels, with the expected results in float64.

The same code builds them from numpy arrays, which run through the kernels' CPU build, and from torch tensors on a GPU,
which also computes the reference.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

#: Maximum relative L2 error of each dtype.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """The arguments of ``paged_attention.forward``, under its names."""

    query: Any
    key_cache: Any
    value_cache: Any
    block_tables: Any
    context_lens: Any
    block_size: int
    max_context_len: int

    def arguments(self) -> dict[str, Any]:
        """By name."""
        return dict(vars(self))

    def expected(self, query_lens: Sequence[int] | None = None) -> Any:
        """As :func:`expected`."""
        return expected(self, query_lens)


class Host:
    """Creates numpy arrays."""

    #: Block id of table entries past a sequence's end: far outside the pool, so that the CPU build reports a read.
    wild_block: int | None = 2**30

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> np.ndarray:
        """An array of one value; memory of zeros is allocated only where it is written."""
        return np.full(shape, value, numpy_dtype(dtype)) if value else np.zeros(shape, numpy_dtype(dtype))

    def normal(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Random numbers."""
        return self._rng.standard_normal(shape).astype(numpy_dtype(dtype))

    def ints(self, values: np.ndarray) -> np.ndarray:
        """Integer arrays."""
        return values

    #: The same, since all arrays are on the host.
    host_ints = ints

    def on_host(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Host memory that blocks can be swapped out to."""
        return self.full(shape, 0, dtype)


class OnDevice:
    """Creates torch tensors on a device."""

    #: A read outside the pool would end the process's GPU context, so such entries point at NaNs instead.
    wild_block = None

    def __init__(self, torch_device: Any, seed: int = 0) -> None:
        self._torch, self._device = importlib.import_module("torch"), torch_device
        self._generator = self._torch.Generator(torch_device).manual_seed(seed)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Any:
        """As :meth:`Host.full`."""
        return self._torch.full(tuple(shape), value, dtype=getattr(self._torch, dtype), device=self._device)

    def normal(self, shape: Sequence[int], dtype: str) -> Any:
        """As :meth:`Host.normal`."""
        made = self._torch.randn(tuple(shape), generator=self._generator, device=self._device)
        return made.to(getattr(self._torch, dtype))

    def ints(self, values: np.ndarray) -> Any:
        """Integers on the device."""
        return self._torch.asarray(values, device=self._device)

    def host_ints(self, values: np.ndarray) -> Any:
        """Integers on the host."""
        return self._torch.asarray(values)

    def on_host(self, shape: Sequence[int], dtype: str) -> Any:
        """As :meth:`Host.on_host`, pinned if there is a GPU."""
        pinned = self._torch.cuda.is_available()
        return self._torch.zeros(tuple(shape), dtype=getattr(self._torch, dtype), pin_memory=pinned)


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of this name; bfloat16 comes from ml_dtypes."""
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)


def case(
    dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    contexts: Sequence[int],
    seed: int = 0,
    *,
    query_lens: Sequence[int] | None = None,
    num_blocks: int | None = None,
    make: Host | OnDevice | None = None,
) -> Case:
    """Sequences over a shuffled cache; the first two share all blocks that are full in both.

    Every unused slot is NaN, and table entries past a sequence's end must not be read.

    Args:
        dtype: The kernels' name of the dtype.
        heads: Query heads and KV heads.
        head_dim: Head dimension of the caches.
        block_size: Tokens of a block.
        contexts: Tokens of each sequence.
        seed: Seed of ids and values.
        query_lens: New tokens of each sequence, at its end; default: one each, as in decoding.
        num_blocks: Size of the cache, with its last block in use; default: the smallest that suffices. With a given size
            the unused slots are zeros, as the cache may be larger than memory.
        make: Creates the arrays; default: numpy arrays.
    """
    make = make or Host(seed)
    num_heads, kv_heads = heads
    tables, pool = _tables(contexts, block_size, num_blocks, make.wild_block, np.random.default_rng(seed))
    held = zip(tables, contexts, strict=True)
    slots = make.ints(np.concatenate([slots_of(table, context, block_size) for table, context in held]))
    fill = 0 if num_blocks else np.nan
    key_cache, value_cache = (make.full((pool, block_size, kv_heads, head_dim), fill, dtype) for _ in "kv")
    for cache in (key_cache, value_cache):
        cache.reshape(-1, kv_heads, head_dim)[slots] = make.normal((sum(contexts), kv_heads, head_dim), dtype)
    queries = len(contexts) if query_lens is None else sum(query_lens)
    query = make.normal((queries, num_heads, head_dim), dtype)
    lengths = make.ints(np.array(contexts, np.int32))
    return Case(query, key_cache, value_cache, make.ints(tables), lengths, block_size, max(contexts))


def _tables(
    contexts: Sequence[int], block_size: int, num_blocks: int | None, wild: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Tables in random order, and the number of blocks of the pool; by default two more than are in use."""
    blocks = [-(-context // block_size) for context in contexts]
    pool = num_blocks or sum(blocks) + 2
    ids = rng.permutation(pool)
    # Without num_blocks no sequence uses block 0: a kernel that wrongly reads from the start of the cache gets NaNs.
    swapped = [0, int(np.argmax(ids))] if num_blocks else [-1, int(np.argmin(ids))]
    ids[swapped] = ids[swapped[::-1]]
    unheld = int(ids[-1]) if wild is None else wild
    tables = np.full((len(contexts), max(blocks) + 1), unheld, np.int32)
    for table, end, count in zip(tables, np.cumsum(blocks), blocks, strict=True):
        table[:count] = ids[end - count : end]
    if len(contexts) > 1:
        shared = min(contexts[:2]) // block_size
        tables[1, :shared] = tables[0, :shared]
    return tables, pool


def slots_of(table: np.ndarray, context: int, block_size: int) -> np.ndarray:
    """Slots of the tokens of a sequence, as indices into the whole cache."""
    tokens = np.arange(context)
    return table[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def expected(given: Case, query_lens: Sequence[int] | None = None, softmax_scale: float | None = None) -> Any:
    """Attention gathered by the block table, in float64; a query that attends to no token gives zeros.

    Args:
        given: The arguments.
        query_lens: New tokens of each sequence, at its end; default: one each.
        softmax_scale: Factor of the scores; default: ``1 / sqrt(head_dim)``.
    """
    library, tables = library_of(given.query), on_host(given.block_tables)
    contexts = on_host(given.context_lens).tolist()
    counts = [1] * len(contexts) if query_lens is None else query_lens
    out = library.zeros_like(given.query[..., : given.value_cache.shape[-1]], dtype=library.float64)
    for sequence, (context, count, end) in enumerate(zip(contexts, counts, np.cumsum(counts), strict=True)):
        if not context or not count:
            continue
        slots = slots_of(tables[sequence], context, given.block_size)
        slots = library.asarray(slots, device=given.query.device)
        keys, values = (cache.reshape(-1, *cache.shape[2:])[slots] for cache in (given.key_cache, given.value_cache))
        rows = slice(int(end) - count, int(end))
        out[rows] = dense_attention(given.query[rows], keys, values, softmax_scale)
    return out


def dense_attention(query: Any, keys: Any, values: Any, softmax_scale: float | None = None) -> Any:
    """Causal attention in float64: the last ``[queries, heads, head_dim]`` over all ``[tokens, kv_heads, head_dim]``.

    ``values`` may have fewer dimensions than ``keys``. ``softmax_scale`` is ``1 / sqrt(head_dim)`` by default.
    """
    library = library_of(query)
    query, keys, values = (library.asarray(one, dtype=library.float64) for one in (query, keys, values))
    (queries, heads, head_dim), (tokens, kv_heads, _) = query.shape, keys.shape
    grouped = query.reshape(queries, kv_heads, heads // kv_heads, head_dim)
    scores = library.einsum("qkgd,tkd->qkgt", grouped, keys) * (softmax_scale or 1 / math.sqrt(head_dim))
    places = library.arange(tokens, device=query.device)
    seen = places[None, :] <= places[tokens - queries :, None]
    scores = library.where(seen[:, None, None, :], scores, -math.inf)
    weights = library.exp(scores - library.amax(scores, axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return library.einsum("qkgt,tkd->qkgd", weights, values).reshape(queries, heads, -1)


def error(out: Any, wanted: Any) -> float:
    """Relative L2 error of the worst row; NaN if any value is NaN."""
    library = library_of(out)
    norm = library.linalg.vector_norm
    difference = norm(library.asarray(out, dtype=library.float64) - wanted, axis=-1)
    return float((difference / library.clip(norm(wanted, axis=-1), 1e-30, None)).max())


def library_of(array: Any) -> ModuleType:
    """The array's library: numpy or torch."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def on_host(array: Any) -> np.ndarray:
    """The values as a numpy array; waits for the device."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
