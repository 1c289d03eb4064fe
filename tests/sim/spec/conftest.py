"""Models of ``config.json`` files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_config(tmp_path) -> Callable[[dict[str, Any]], Path]:
    """Writes a ``config.json`` into a folder called tiny; returns its path."""

    def write(keys: dict[str, Any]) -> Path:
        path = tmp_path / "tiny" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(keys))
        return path

    return write
