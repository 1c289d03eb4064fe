"""A queue with known laws."""

from __future__ import annotations

TOKEN_TICKS, MEAN_TOKENS = 1000, 1000
