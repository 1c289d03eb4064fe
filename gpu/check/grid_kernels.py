"""How each kernel is tried at a point of the grid: arguments are made, and the answer is held to what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ops import cache, contiguous, paged_attention, prefill
from .cases import TOLERANCE, Host, OnDevice, case, error, expected, library_of

Make = Host | OnDevice


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        kernel: A key of :data:`KERNELS`.
        dtype: As the kernels name it.
        heads: Query heads and KV heads.
        head_dim: As in the caches.
        block_size: Tokens of a block.
        contexts: Tokens that each sequence holds.
        num_blocks: Of the cache; as few as will do by default.
    """

    kernel: str
    dtype: str
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    contexts: tuple[int, ...]
    num_blocks: int | None = None

    @property
    def tolerance(self) -> float:
        """The error allowed; what only moves values must be exact."""
        return TOLERANCE[self.dtype] if self.kernel in ATTENTION else 0.0

    @property
    def shape(self) -> tuple[str, tuple[int, int], int, int]:
        """What :func:`cases.case` asks for first."""
        return self.dtype, self.heads, self.head_dim, self.block_size


def decode(point: Point, make: Make) -> float:
    """One new token a sequence, over scattered blocks."""
    given = case(*point.shape, point.contexts, num_blocks=point.num_blocks, make=make)
    out = make.full(given.query.shape, np.nan, point.dtype)
    paged_attention.paged_attention_cuda_forward(out, **vars(given))
    return error(out, expected(given))


def prefilled(point: Point, make: Make) -> float:
    """New tokens of each sequence, at most 64: of a prompt as a whole and after a prefix in turns."""
    new = [min(64, -(-context // (1 + 2 * (turn % 2)))) for turn, context in enumerate(point.contexts)]
    given = case(*point.shape, point.contexts, query_lens=new, num_blocks=point.num_blocks, make=make)
    out = make.full(given.query.shape, np.nan, point.dtype)
    starts = make.ints(np.cumsum([0, *new]).astype(np.int32))
    prefill.forward_into(out, **vars(given), query_start_loc=starts, max_query_len=max(new))
    return error(out, expected(given, new))


def contiguously(point: Point, make: Make) -> float:
    """One block a sequence, with room behind its tokens, is a contiguous cache."""
    given = case(*point.shape[:3], max(point.contexts) + 5, point.contexts, make=make)
    out = make.full(given.query.shape, np.nan, point.dtype)
    keys, values = (cache.reshape(-1, *cache.shape[2:]) for cache in (given.key_cache, given.value_cache))
    starts = library_of(out).asarray(given.block_tables[:, 0], dtype=library_of(out).int64) * given.block_size
    # An empty sequence begins nowhere.
    starts[given.context_lens == 0] = -1
    contiguous.forward_into(out, given.query, keys, values, starts, given.context_lens, given.max_context_len)
    return error(out, expected(given))


def written(point: Point, make: Make) -> float:
    """New keys and values in random slots, some of them padding."""
    tokens, (pool, *row) = sum(point.contexts), _pool(point)
    slots = np.random.default_rng(1).permutation(pool * point.block_size)[:tokens]
    slots[::7] = -1
    new = [make.normal((tokens, *row[1:]), point.dtype) for _ in "kv"]
    caches = [make.normal((pool, *row), point.dtype) for _ in "kv"]
    wanted = [_copied(one) for one in caches]
    for right, rows in zip(wanted, new, strict=True):
        right.reshape(-1, *row[1:])[make.ints(slots[slots >= 0])] = rows[make.ints(np.flatnonzero(slots >= 0))]
    cache.reshape_and_cache(new[0], new[1], caches[0], caches[1], make.ints(slots))
    return _wrong(caches, wanted)


def copied(point: Point, make: Make) -> float:
    """Half of the blocks onto the others, in two layers at once."""
    shape = _pool(point)
    caches = [make.normal(shape, point.dtype) for _ in "kvkv"]
    pairs = np.random.default_rng(1).permutation(shape[0] // 2 * 2).reshape(-1, 2)
    wanted = [_copied(one) for one in caches]
    for right in wanted:
        right[make.ints(pairs[:, 1])] = right[make.ints(pairs[:, 0])]
    cache.copy_blocks(caches[:2], caches[2:], make.ints(pairs))
    return _wrong(caches, wanted)


def swapped(point: Point, make: Make) -> float:
    """Blocks out to the host, neighbours among them, and back to other places."""
    shape = _pool(point)
    device, host = make.normal(shape, point.dtype), make.on_host(shape, point.dtype)
    out = np.stack([np.arange(shape[0]), np.roll(np.arange(shape[0]), 3)], axis=1)
    back = np.stack([out[:, 1], np.random.default_rng(1).permutation(shape[0])], axis=1)
    wanted = _copied(device)
    wanted[make.ints(back[:, 1])] = _copied(device)
    cache.swap_blocks(device, host, make.host_ints(out))
    cache.swap_blocks(host, device, make.host_ints(back))
    return _wrong([device], [wanted])


def _pool(point: Point) -> tuple[int, int, int, int]:
    """The shape of a cache with room for all and more."""
    blocks = sum(-(-context // point.block_size) for context in point.contexts)
    return blocks + 4, point.block_size, point.heads[1], point.head_dim


def _copied(array: Any) -> Any:
    return library_of(array).asarray(array, copy=True)


def _wrong(found: list[Any], wanted: list[Any]) -> float:
    """The share of values that are not what they should be."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one != right).sum()) / math.prod(one.shape) for one, right in pairs)


Trial = Callable[[Point, Make], float]
#: How each kernel that computes is tried, and each that only moves values.
ATTENTION: dict[str, Trial] = {
    "decode_attention": decode,
    "prefill_attention": prefilled,
    "contiguous_attention": contiguously,
}
MOVING: dict[str, Trial] = {
    "reshape_and_cache": written,
    "copy_blocks": copied,
    "swap_blocks": swapped,
}
KERNELS = ATTENTION | MOVING
