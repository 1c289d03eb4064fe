"""pandas, loaded when a table is first asked for: that takes longer than to load all the rest of the program."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("pandas"), name)
