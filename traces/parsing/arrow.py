"""Lazy import of pyarrow, at the first column that is read: a run of drawn requests needs none of it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def __getattr__(name: str) -> Any:
    if name in ("compute", "csv", "parquet"):
        return importlib.import_module(f"pyarrow.{name}")
    return getattr(importlib.import_module("pyarrow"), name)


def as_numpy(column: Any) -> np.ndarray:
    """A column as numpy's array, as ``numpy.asarray`` makes it; one of numbers may be read-only.

    That loads pandas, which takes longer than most files, and which columns of numbers and of truth values can do without.
    """
    pa = importlib.import_module("pyarrow")
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if whole.null_count or not pa.types.is_primitive(whole.type) or pa.types.is_temporal(whole.type):
        return np.asarray(whole)
    if pa.types.is_boolean(whole.type):
        return np.from_dlpack(whole.cast(pa.uint8())).astype(bool)
    return np.from_dlpack(whole)
