"""Lazy import of pyarrow, at the first column that is read: a run of drawn requests needs none of it."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("compute", "csv", "parquet"):
        return importlib.import_module(f"pyarrow.{name}")
    return getattr(importlib.import_module("pyarrow"), name)
