"""The upper envelope of straight lines over the integers, exactly."""

from __future__ import annotations

from collections.abc import Sequence

Line = tuple[int, int]
Segment = tuple[int, int, int | None]


def upper_envelope(lines: Sequence[Line]) -> list[Segment]:
    """Segments ``(base, slope, until)`` of the largest of ``base + slope * x`` for x = 0, 1, 2, ...

    A segment holds for x below its ``until``, from where the one before it ends; None: for ever.
    """
    current = max(lines)
    segments: list[Segment] = []
    while steeper := [line for line in lines if line[1] > current[1]]:
        until = min(_overtakes(current, line) for line in steeper)
        segments.append((*current, until))
        # Of several that overtake between two integers, the highest at the second one goes on.
        current = max(steeper, key=lambda line: (line[0] + line[1] * until, line[1]))
    segments.append((*current, None))
    return segments


def _overtakes(low: Line, steep: Line) -> int:
    """The first integer at which ``steep`` lies above ``low``."""
    return (low[0] - steep[0]) // (steep[1] - low[1]) + 1
