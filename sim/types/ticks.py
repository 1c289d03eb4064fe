"""Time is an integer: one tick is a picosecond.

Costs are rounded to ticks once, when they are compiled; from then on sums are exact, ties are
ties, and the same settings give the same bits on every machine.
"""

from __future__ import annotations

PER_SECOND = 1_000_000_000_000
PER_MS = 1_000_000_000
PER_US = 1_000_000


def from_seconds(seconds: float) -> int:
    """Ticks nearest to ``seconds``; floats are rounded once, half to even."""
    return round(seconds * PER_SECOND)


def from_ms(milliseconds: float) -> int:
    """Ticks nearest to ``milliseconds``."""
    return round(milliseconds * PER_MS)
