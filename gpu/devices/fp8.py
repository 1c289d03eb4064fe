"""Tensors of an fp8 KV cache (e4m3) in torch, which has few operations on them.

A cache is float8_e4m3fn, or its bytes as uint8. torch is imported in calls: it is an extra, and the devices load without it.
"""

from __future__ import annotations

import importlib
from typing import Any

#: The largest number of e4m3.
LARGEST = 448


def indexed(cache: Any) -> Any:
    """The cache for operations by index, which torch does not have for fp8: as integers of the same size."""
    return cache.view(importlib.import_module("torch").uint8) if cache.itemsize == 1 else cache


def numbers(held: Any, scale: Any) -> Any:
    """Keys or values ``[tokens, kv_heads, head_dim]`` of a cache; with ``scale`` those of fp8, times the scale of their KV head."""
    if scale is None:
        return held
    torch = importlib.import_module("torch")
    codes = held.view(torch.float8_e4m3fn) if held.dtype == torch.uint8 else held
    return codes.float() * scale[:, None]


def rounded(new: Any, scale: Any, dtype: Any) -> Any:
    """Keys or values ``[tokens, kv_heads, head_dim]`` as a cache of fp8 holds them: divided by the scale of their KV head, to the
    nearest number, and to the largest one where they are beyond it."""
    within = (new.float() / scale[:, None]).clamp(-LARGEST, LARGEST)
    return within.to(importlib.import_module("torch").float8_e4m3fn).view(dtype)
