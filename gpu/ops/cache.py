"""Writes to a paged KV cache, copies of its blocks, and swaps to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...sim.types.errors import SettingError
from . import checks, source
from .arguments import Argument
from .arrays import Array, from_host, on_host, view, views
from .cpu_kernels import Span
from .launching import kernels_for
from .prepared import Prepared, require_aligned

#: Threads of a block; together they copy a row of 4,096 bytes in one iteration.
THREADS = 256
LOAD_BYTES = 16


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> None:
    """Write new keys and values into their slots.

    Args:
        key: ``[tokens, num_kv_heads, head_dim]``, of any dtype of :data:`source.SCALARS`, as ``value``.
        value: As ``key``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, as ``value_cache``; changed in place.
        value_cache: As ``key_cache``; changed in place. Both are of the dtype of ``key``, or of fp8: float8_e4m3fn, or its bytes
            as uint8.
        slot_mapping: int64 ``[tokens]``: ``block * block_size + offset``, or -1 for padding, which is skipped.
        k_scale: float32 ``[num_kv_heads]``, above 0, for caches of fp8 only: a key is divided by the scale of its KV head, and rounded to
            nearest; what is then larger than 448 becomes 448. ``head_dim`` is a multiple of 16.
        v_scale: The same for values.
        check_ids: Check every slot before the launch, which waits for the device.

    Raises:
        SettingError: A shape, dtype, device or (if checked) slot does not fit.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    prepare_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, **scales, check_ids=check_ids).launch()


def prepare_reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_ids: bool = False,
) -> Prepared:
    """The checked call of :func:`reshape_and_cache`, without its launch; it takes the first four arguments of any layer, and for
    caches of fp8 ``k_scale`` and ``v_scale`` after them."""
    given = checks.given_scales(k_scale, v_scale)
    key, value, key_cache, value_cache, slot_mapping, *scales = views(
        *("key_cache", "value_cache"),
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        **given,
    )
    key.expect((None, None, None), *source.SCALARS)
    tokens, kv_heads, head_dim = key.shape
    value.expect(key.shape, key.dtype)
    checks.cache_dtypes(key_cache, key.dtype, scales)
    key_cache.expect((None, None, kv_heads, head_dim), key_cache.dtype)
    value_cache.expect(key_cache.shape, key_cache.dtype)
    slot_mapping.expect((tokens,), "int64")
    for scale in scales:
        scale.expect((kv_heads,), "float32")
    if scales and head_dim % LOAD_BYTES:
        raise SettingError("head_dim", head_dim, f"must be a multiple of {LOAD_BYTES} for caches of fp8")
    if check_ids:
        _check_range("slot_mapping", on_host(slot_mapping), -1, key_cache.shape[0] * key_cache.shape[1])
    layer = (key, value, key_cache, value_cache)
    for array in layer:
        require_aligned(array)
    grid, block = (tokens, 1, 1), (THREADS, 1, 1)
    if scales:
        kernel = source.reshape_and_cache_fp8(key.dtype)
        sizes: tuple[Argument, ...] = (np.int32(kv_heads), np.int32(head_dim))
    else:
        kernel = source.plain("reshape_and_cache")
        sizes = (np.int32(_loads("head_dim", key_cache, key_cache.shape[0] * key_cache.shape[1])),)
    arguments = (*layer, slot_mapping, *scales, *sizes)
    changing = (*range(len(layer)), *range(len(layer) + 1, len(layer) + 1 + len(scales)))
    launch = kernels_for(key).prepared(kernel, grid, block, arguments, changing)
    return Prepared((*layer, *scales), [launch], (slot_mapping,))


def copy_blocks(
    key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any, *, check_ids: bool = False
) -> None:
    """Copy whole blocks within each layer's caches, all layers in one launch.

    Args:
        key_caches: One cache per layer, all with the same shape and dtype; changed in place.
        value_caches: As ``key_caches``.
        block_mapping: int64 ``[pairs, 2]``: source and destination block. A destination occurs once,
            and is not a source.
        check_ids: Check every pair before the launch, which waits for the device.

    Raises:
        SettingError: A shape, dtype, device or (if checked) block id does not fit.
    """
    if not key_caches or len(key_caches) != len(value_caches):
        raise SettingError("key_caches", len(key_caches), f"one a layer, as value_caches ({len(value_caches)})")
    named = {f"key_caches[{layer}]": cache for layer, cache in enumerate(key_caches)}
    named |= {f"value_caches[{layer}]": cache for layer, cache in enumerate(value_caches)}
    *caches, mapping = views(*named, **named, block_mapping=block_mapping)
    for cache in caches:
        cache.expect(caches[0].shape, caches[0].dtype)
    mapping.expect((None, 2), "int64")
    blocks = caches[0].shape[0]
    block_loads = _loads("block", caches[0], blocks)
    if check_ids:
        _check_pairs(on_host(mapping), blocks)
    pointers = np.array([cache.pointer for cache in caches], np.int64)
    keys, values = (from_host("pointers", half, mapping) for half in np.split(pointers, 2))
    kernel, grid = source.plain("copy_blocks"), (mapping.shape[0], len(key_caches), 1)
    arguments = (keys, values, mapping, np.int64(block_loads))
    kernels_for(mapping).prepared(kernel, grid, (THREADS, 1, 1), arguments, touched=caches)()


def swap_blocks(source_cache: Any, destination_cache: Any, block_mapping: Any) -> None:
    """Copy whole blocks between two caches, for example between GPU and host memory (vLLM's swap in and out).

    Adjacent blocks in both caches are merged into one copy. The copies run on the caller's current stream. On a GPU
    they overlap computation if another stream computes and the host's cache is pinned.

    Args:
        source_cache: ``[num_blocks, ...]``, one layer's keys or values.
        destination_cache: As ``source_cache``, with any number of blocks; changed in place.
        block_mapping: int64 ``[pairs, 2]``, on the host: source and destination block. A destination occurs once,
            and within one cache is not a source.

    Raises:
        SettingError: A shape, dtype, device or block id does not fit, or host memory is not pinned.
    """
    source_cache = view("source_cache", source_cache)
    destination_cache = view("destination_cache", destination_cache, written=True)
    mapping = view("block_mapping", block_mapping)
    destination_cache.expect((None, *source_cache.shape[1:]), source_cache.dtype)
    mapping.expect((None, 2), "int64")
    if mapping.device != "cpu":
        raise SettingError("block_mapping", mapping.device, "must be on the CPU: the host issues the copies")
    pairs = on_host(mapping)
    _check_range("block_mapping", pairs, 0, [source_cache.shape[0], destination_cache.shape[0]])
    _check_destinations(pairs, one_cache=source_cache.pointer == destination_cache.pointer)
    block_bytes = source_cache.nbytes // max(1, source_cache.shape[0])
    on_device = next((cache for cache in (source_cache, destination_cache) if cache.device != "cpu"), source_cache)
    kernels_for(on_device).copy(source_cache, destination_cache, _spans(pairs, block_bytes))


def _spans(pairs: np.ndarray, block_bytes: int) -> list[Span]:
    """Runs of pairs that are consecutive in both caches, as byte offsets and sizes; the order of the pairs does not matter."""
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    breaks = np.flatnonzero((np.diff(ordered, axis=0) != 1).any(axis=1)) + 1
    runs = np.split(ordered, breaks) if len(ordered) else []
    return [(int(run[0, 0]) * block_bytes, int(run[0, 1]) * block_bytes, len(run) * block_bytes) for run in runs]


def _loads(what: str, cache: Array, parts: int) -> int:
    """Number of 16-byte loads in one of ``parts`` equal parts of the cache."""
    part_bytes = cache.nbytes // max(1, parts)
    if part_bytes % LOAD_BYTES:
        raise SettingError(f"{cache.field}, bytes of a {what}", part_bytes, f"must be a multiple of {LOAD_BYTES}")
    return part_bytes // LOAD_BYTES


def _check_range(field: str, ids: np.ndarray, lowest: int, end: int | list[int]) -> None:
    """Check that every id is at least ``lowest`` and below its column's ``end``."""
    ends = np.broadcast_to(end, ids.shape)
    for place in map(tuple, np.argwhere((ids < lowest) | (ids >= ends))[:1]):
        where = ", ".join(map(str, place))
        raise SettingError(f"{field}[{where}]", int(ids[place]), f"must be from {lowest} to {ends[place] - 1}")


def _check_pairs(pairs: np.ndarray, blocks: int) -> None:
    _check_range("block_mapping", pairs, 0, blocks)
    _check_destinations(pairs, one_cache=True)


def _check_destinations(pairs: np.ndarray, *, one_cache: bool) -> None:
    destinations, counts = np.unique(pairs[:, 1], return_counts=True)
    wrong = counts > 1
    if one_cache:
        wrong |= np.isin(destinations, pairs[:, 0])
    for block in destinations[wrong][:1]:
        raise SettingError("block_mapping", int(block), "a destination is named once, and is not a source")
