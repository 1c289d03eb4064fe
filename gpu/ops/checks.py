"""Shared argument checks of the attention functions. Each raises one :class:`SettingError` that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...sim.types.errors import SettingError
from . import source
from .arrays import Array, on_host
from .prepared import require_aligned

MAX_BLOCK_SIZE = 4096


def heads(
    query: Array, out: Array, key_cache: Array, value_cache: Array, *slots: int | None, scales: Sequence[Array] = ()
) -> None:
    """Check shapes and dtypes of queries ``[any, num_heads, head_dim]`` and caches ``[*slots, num_kv_heads, head_dim]``.

    ``scales`` are those of keys and values if the caches are of fp8, or none.

    Raises:
        SettingError: A shape or dtype does not fit; caches are of fp8 without scales; ``num_heads`` is not a multiple of ``num_kv_heads``; or the address of an
            array is not a multiple of 16 bytes, the size of the kernels' loads.
    """
    query.expect((None, None, None), *(source.FP8_QUERIES if scales else source.SCALARS))
    _, num_heads, head_dim = query.shape
    head_dims = source.FP8_HEAD_DIMS if scales else source.HEAD_DIMS
    if head_dim not in head_dims:
        raise SettingError("head_dim", head_dim, f"must be one of {', '.join(map(str, head_dims))}")
    out.expect(query.shape, query.dtype)
    cache_dtypes(key_cache, query.dtype, scales)
    key_cache.expect((*slots, None, head_dim), key_cache.dtype)
    value_cache.expect(key_cache.shape, key_cache.dtype)
    for array in (query, out, key_cache, value_cache):
        require_aligned(array)
    kv_heads = key_cache.shape[-2]
    for scale in scales:
        scale.expect((kv_heads,), "float32")
    if kv_heads == 0 or num_heads % kv_heads:
        raise SettingError("num_heads", num_heads, f"must be a multiple of the cache's {kv_heads} KV heads")


def given_scales(k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """The scales of caches of fp8 by name; none without them.

    Raises:
        SettingError: One of them alone is given.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    missing = [name for name, scale in scales.items() if scale is None]
    if len(missing) == 1:
        raise SettingError(missing[0], None, "caches of fp8 have both scales, others none")
    return {} if missing else scales


def cache_dtypes(key_cache: Array, dtype: str, scales: Sequence[Array]) -> None:
    """Check that the cache is of ``dtype``, or with scales of fp8.

    Raises:
        SettingError: It is not.
    """
    if not scales and key_cache.dtype == source.FP8_CACHES[0]:
        raise SettingError(
            f"{key_cache.field}.dtype", key_cache.dtype, "needs k_scale and v_scale, float32 [num_kv_heads]"
        )
    key_cache.expect((None,) * len(key_cache.shape), *(source.FP8_CACHES if scales else (dtype,)))


def limit(field: str, value: int) -> None:
    """Check an upper bound of lengths, for example ``max_context_len``.

    Raises:
        SettingError: It is negative.
    """
    if value < 0:
        raise SettingError(field, value, "must not be negative")


def block_size(value: int) -> None:
    """Check the tokens of a block.

    Raises:
        SettingError: The value is not in 1 to 4096.
    """
    if not 1 <= value <= MAX_BLOCK_SIZE:
        raise SettingError("block_size", value, f"must be from 1 to {MAX_BLOCK_SIZE}")


def tables(block_tables: Array, batch: int, block_size: int, max_context_len: int) -> None:
    """Check shape and dtype of the block tables, which must have room for the longest sequence.

    Raises:
        SettingError: The shape or dtype does not fit.
    """
    block_tables.expect((batch, None), "int32")
    room = block_tables.shape[1] * block_size
    if max_context_len > room:
        raise SettingError("max_context_len", max_context_len, f"block_tables hold {room} tokens a sequence")


def lengths(field: str, values: np.ndarray, limit_field: str, most: int) -> None:
    """Check the number of tokens of each sequence, on the host.

    Raises:
        SettingError: A length is out of range; names the first one.
    """
    for sequence in np.flatnonzero((values < 0) | (values > most))[:1]:
        remedy = f"must be from 0 to {limit_field} = {most}"
        raise SettingError(f"{field}[{sequence}]", int(values[sequence]), remedy)


def block_ids(block_tables: Array, context_lens: np.ndarray, block_size: int, num_blocks: int) -> None:
    """Check every block id that a sequence uses; waits for the device.

    Raises:
        SettingError: A block id is not in the cache; names the first one.
    """
    ids = on_host(block_tables)
    used = np.arange(ids.shape[1]) < -(-context_lens[:, None] // block_size)
    for sequence, place in np.argwhere(used & ((ids < 0) | (ids >= num_blocks)))[:1]:
        remedy = f"the cache has blocks 0 to {num_blocks - 1}"
        raise SettingError(f"block_tables[{sequence}, {place}]", int(ids[sequence, place]), remedy)
