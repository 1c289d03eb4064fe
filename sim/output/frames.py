"""Lazy import of pandas, at the first use of a table: pandas takes longer to load than all of fragmeter."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("pandas"), name)
