"""Recorded block maps: the contents of every physical block of a pool over a run."""

from __future__ import annotations

from .occupancy import NO_SEQUENCE
from .recorded import GIVEN_UP, SCHEMA_VERSION, BlockMap, load
from .recording import MOST_COLUMNS, MOST_LOOKED_AT, MOST_ROWS, BlockRecording, record

__all__ = [
    "GIVEN_UP",
    "MOST_COLUMNS",
    "MOST_LOOKED_AT",
    "MOST_ROWS",
    "NO_SEQUENCE",
    "SCHEMA_VERSION",
    "BlockMap",
    "BlockRecording",
    "load",
    "record",
]
