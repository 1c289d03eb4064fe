"""Writing to a paged KV cache and copying its blocks, on the GPU or the CPU that it lies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..sim.errors import SettingError
from . import source
from .arrays import Array, from_host, on_host, views
from .launching import kernels_for

#: Threads of a block: a row of 4,096 bytes in one go.
THREADS = 256
LOAD_BYTES = 16


def reshape_and_cache(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *, check_ids: bool = False
) -> None:
    """Write new keys and values into their slots.

    Args:
        key: ``[tokens, num_kv_heads, head_dim]``, of any dtype of :data:`source.SCALARS`, as ``value``.
        value: As ``key``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, as ``value_cache``; changed in place.
        value_cache: As ``key_cache``; changed in place.
        slot_mapping: int64 ``[tokens]``: ``block * block_size + offset``, or -1 for padding, which is left out.
        check_ids: Look at every slot first, which waits for the device.

    Raises:
        SettingError: A shape, dtype, device or (where checked) slot that does not fit.
    """
    key, value, key_cache, value_cache, slot_mapping = views(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
    )
    key.expect((None, None, None), *source.SCALARS)
    tokens, kv_heads, head_dim = key.shape
    value.expect(key.shape, key.dtype)
    key_cache.expect((None, None, kv_heads, head_dim), key.dtype)
    value_cache.expect(key_cache.shape, key.dtype)
    slot_mapping.expect((tokens,), "int64")
    row_loads = _loads("head_dim", key_cache, key_cache.shape[0] * key_cache.shape[1])
    if check_ids:
        _check_range("slot_mapping", on_host(slot_mapping), -1, key_cache.shape[0] * key_cache.shape[1])
    kernels_for(key).launch(
        source.plain("reshape_and_cache"),
        (tokens, 1, 1),
        (THREADS, 1, 1),
        (key, value, key_cache, value_cache, slot_mapping, np.int32(row_loads)),
    )


def copy_blocks(
    key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any, *, check_ids: bool = False
) -> None:
    """Copy whole blocks within each layer's caches, all layers in one launch.

    Args:
        key_caches: One cache a layer, all alike; changed in place.
        value_caches: As ``key_caches``.
        block_mapping: int64 ``[pairs, 2]``: source and destination block. A destination is named once,
            and is no source.
        check_ids: Look at every pair first, which waits for the device.

    Raises:
        SettingError: A shape, dtype, device or (where checked) block id that does not fit.
    """
    if not key_caches or len(key_caches) != len(value_caches):
        raise SettingError("key_caches", len(key_caches), f"one a layer, as value_caches ({len(value_caches)})")
    named = {f"key_caches[{layer}]": cache for layer, cache in enumerate(key_caches)}
    named |= {f"value_caches[{layer}]": cache for layer, cache in enumerate(value_caches)}
    *caches, mapping = views(**named, block_mapping=block_mapping)
    for cache in caches:
        cache.expect(caches[0].shape, caches[0].dtype)
    mapping.expect((None, 2), "int64")
    blocks = caches[0].shape[0]
    block_loads = _loads("block", caches[0], blocks)
    if check_ids:
        _check_pairs(on_host(mapping), blocks)
    pointers = np.array([cache.pointer for cache in caches], np.int64)
    keys, values = (from_host("pointers", half, mapping) for half in np.split(pointers, 2))
    kernels_for(mapping).launch(
        source.plain("copy_blocks"),
        (mapping.shape[0], len(key_caches), 1),
        (THREADS, 1, 1),
        (keys, values, mapping, np.int64(block_loads)),
        touched=caches,
    )


def _loads(what: str, cache: Array, parts: int) -> int:
    """16-byte loads of one of the cache's equal parts."""
    part_bytes = cache.nbytes // max(1, parts)
    if part_bytes % LOAD_BYTES:
        raise SettingError(f"{cache.field}, bytes of a {what}", part_bytes, f"must be a multiple of {LOAD_BYTES}")
    return part_bytes // LOAD_BYTES


def _check_range(field: str, ids: np.ndarray, lowest: int, end: int) -> None:
    for place in np.argwhere((ids < lowest) | (ids >= end))[:1]:
        where = ", ".join(map(str, place))
        raise SettingError(f"{field}[{where}]", int(ids[tuple(place)]), f"must be from {lowest} to {end - 1}")


def _check_pairs(pairs: np.ndarray, blocks: int) -> None:
    _check_range("block_mapping", pairs, 0, blocks)
    destinations, counts = np.unique(pairs[:, 1], return_counts=True)
    for block in destinations[(counts > 1) | np.isin(destinations, pairs[:, 0])][:1]:
        raise SettingError("block_mapping", int(block), "a destination is named once, and is no source")
