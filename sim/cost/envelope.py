"""The upper envelope of straight lines over the integers, exactly."""

from __future__ import annotations

from collections.abc import Sequence

Line = tuple[int, int]
Segment = tuple[int, int, int | None]


def upper_envelope(lines: Sequence[Line]) -> list[Segment]:
    """Segments ``(base, slope, until)`` of the largest of ``base + slope * x`` for x = 0, 1, 2, ...

    A segment is valid from the end of the one before it to before its ``until``; None: without end.
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


def segment_at(segments: Sequence[Segment], x: int) -> Segment:
    """The segment that is valid at ``x``."""
    for segment in segments:
        if segment[2] is None or x < segment[2]:
            break
    return segment


def stretches(starts: Sequence[tuple[int, Sequence[Line]]]) -> list[Segment]:
    """Segments, as ``upper_envelope`` gives them, where the lines change on the way.

    Args:
        starts: ``(x, lines)``: from x on these lines count, up to the next one's x; the first x is 0.
    """
    segments: list[Segment] = []
    ends = [*(start for start, _ in starts[1:]), None]
    for (start, lines), end in zip(starts, ends, strict=True):
        for base, slope, until in upper_envelope(lines):
            if until is not None and until <= start:
                continue
            cut = until if end is None or (until is not None and until < end) else end
            segments.append((base, slope, cut))
            if cut == end:
                break
    return segments


def _overtakes(low: Line, steep: Line) -> int:
    """The first integer at which ``steep`` lies above ``low``."""
    return (low[0] - steep[0]) // (steep[1] - low[1]) + 1
