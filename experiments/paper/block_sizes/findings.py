"""Findings about latencies by block size, from published and simulated rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rows import Row, as_finding

#: About what reading values off a plot may be wrong by.
_READING = 0.05


def best_size(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    """A finding: whether the block size that is best here, of those not fitted, is nearly the best by the figure.

    Args:
        rows: One series.
        limit: What its published latency may be above the lowest published one, as a share of that.
    """
    mine = min((row for row in rows if row["kind"] == "predicted"), key=lambda row: row["simulated"])
    best = min(rows, key=lambda row: row["published"])
    above = mine["published"] / best["published"] - 1
    text = (
        f"{mine['series']}: the best block size, of those not fitted, is {mine['x']:g}; by the figure its latency is"
        f" {above:.0%} above that of the best there, {best['x']:g}, limit {limit:.0%}."
    )
    return as_finding(text, above <= limit)


def wasted(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    """A finding: whether blocks that are hardly filled cost what the figure says, from the first row to the last.

    Args:
        rows: One series, by block size.
        limit: How far the ratio of the two latencies may be off, as a share of the published one.
    """
    first, last = rows[0], rows[-1]
    found, published = (last[side] / first[side] for side in ("simulated", "published"))
    text = (
        f"{first['series']}: block size {last['x']:g} takes {found:.1f} times as long as {first['x']:g}, in the figure"
        f" {published:.1f} times; limit {limit:.0%}."
    )
    return as_finding(text, abs(found / published - 1) <= limit)


def quicker_series(rows: Sequence[Row], first: str, second: str) -> dict[str, Any]:
    """A finding: whether at each block size the same one of two series is quicker, where the figure's two values differ
    by more than their reading.
    """
    at = {(row["series"], row["x"]): row for row in rows}
    clear, same = 0, []
    for x in sorted({row["x"] for row in rows}):
        one, other = at[first, x], at[second, x]
        if abs(one["published"] / other["published"] - 1) > _READING:
            clear += 1
            # Of a tie here neither is quicker.
            if (one["published"] - other["published"]) * (one["simulated"] - other["simulated"]) > 0:
                same.append(x)
    text = (
        f"{first.capitalize()} or {second}, the same one is quicker at {len(same)} of the {clear} block sizes at which"
        f" the figure's two values differ by more than {_READING:.0%}: {', '.join(f'{x:g}' for x in same) or 'none'}."
    )
    return as_finding(text, len(same) == clear)
