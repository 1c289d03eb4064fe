"""Time as an integer number of ticks; one tick is a picosecond.

Costs are rounded to ticks once, when they are compiled. Sums and comparisons are then exact, and the same
settings give the same bits on every machine.
"""

from __future__ import annotations

PER_SECOND = 1_000_000_000_000
PER_MS = 1_000_000_000
PER_US = 1_000_000


def from_seconds(seconds: float) -> int:
    """Ticks nearest to ``seconds``, rounded half to even."""
    return round(seconds * PER_SECOND)


def from_ms(milliseconds: float) -> int:
    """Ticks nearest to ``milliseconds``."""
    return round(milliseconds * PER_MS)
