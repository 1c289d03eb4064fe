"""Widths of number formats."""

from __future__ import annotations

from ..types.errors import SettingError

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def dtype_bits(dtype: str) -> int:
    """Width of one element in bits.

    Raises:
        SettingError: The dtype is unknown.
    """
    if dtype not in DTYPE_BITS:
        raise SettingError("dtype", dtype, f"one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[dtype]
