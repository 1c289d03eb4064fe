"""What waste costs several settings, over the same seeds: runs, rows, a table and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...sim.engine.unread import only_read
from ...sim.types.errors import SettingError
from ...traces import Pacing
from ..runs.inputs import Inputs
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.unread import refuse_unread
from .waste_cost import ALL, WASTE, Cost, Saturated, waste_cost

Row = dict[str, Any]
#: What a bucket's row is called in which nothing is gone.
AS_IT_IS = "none"
_HOUR_S, _MILLION = 3600, 1_000_000
_TITLE = "What waste costs"
#: What the figures rest on.
BASIS = (
    "All requests are there at the start, and what is done while some wait counts. Without a bucket the pool is so"
    " much larger that all but that bucket takes what there is, in the mean over time."
)


@dataclass(frozen=True)
class Side:
    """Settings that are asked, and what they are called."""

    name: str
    inputs: Inputs


def waste_costs(sides: Sequence[Side], seeds: int, workers: Workers, price: float | None = None) -> list[Row]:
    """A row for each side and bucket, the first of each side with nothing gone; means over seeds from each side's on.

    Args:
        price: Of an hour of one GPU; None where not given.

    Raises:
        UserError: As ``waste_cost``; a setting that no side reads, before anything is run.
    """
    everything = (_seeded(side.inputs, 0) for side in sides)
    refuse_unread((inputs, inputs.workload(inputs.lengths())) for inputs in everything)
    places = product(range(len(sides)), range(seeds))
    jobs = [(place, number, _seeded(sides[place].inputs, number)) for place, number in places]
    found = dict(track(as_they_finish(_run, jobs, len(jobs), workers), "runs", len(jobs)))
    rows: list[Row] = []
    for place, side in enumerate(sides):
        rows += _rows(side, [found[place, number] for number in range(seeds)], price)
    return rows


def _seeded(inputs: Inputs, number: int) -> Inputs:
    """All requests at once, drawn by one of the seeds."""
    settings = inputs.settings
    everything = Pacing(request_rate=float("inf"))
    return replace(inputs, settings=replace(settings, seed=settings.seed + number), pacing=everything)


def _run(place: int, number: int, inputs: Inputs) -> tuple[tuple[int, int], tuple[Saturated, dict[str, Cost]]]:
    work = inputs.workload(inputs.lengths())
    base, costs = waste_cost(only_read(inputs.settings, work), work)
    return (place, number), (base, {cost.bucket: cost for cost in costs})


def _rows(side: Side, runs: Sequence[tuple[Saturated, dict[str, Cost]]], price: float | None) -> list[Row]:
    chosen = side.inputs.settings
    hour = None if price is None else price * chosen.tensor_parallel_size * chosen.pipeline_parallel_size
    bases = [base for base, _ in runs]
    rows = [_row(side.name, AS_IT_IS, [0.0] * len(runs), bases, bases, hour)]
    for bucket in dict.fromkeys(bucket for _, costs in runs for bucket in costs):
        # Where a seed has none of it, it costs that seed nothing.
        without = [costs.get(bucket, base) for base, costs in runs]
        shares = [costs[bucket].share if bucket in costs else 0.0 for _, costs in runs]
        rows.append(_row(side.name, bucket, shares, without, bases, hour))
    return rows


def _row(
    name: str,
    bucket: str,
    shares: Sequence[float],
    servers: Sequence[Saturated | Cost],
    bases: Sequence[Saturated],
    hour: float | None,
) -> Row:
    gains = [server.request_throughput / base.request_throughput for server, base in zip(servers, bases, strict=True)]
    tokens = fmean(server.output_throughput for server in servers)
    return {
        "side": name,
        "without": bucket,
        "share_pct": 100 * fmean(shares),
        "num_gpu_blocks": fmean(server.num_blocks for server in servers),
        "charged_pct": 100 * fmean(getattr(server, "charged", 1.0) for server in servers),
        "request_throughput": fmean(server.request_throughput for server in servers),
        "output_throughput": tokens,
        "gain": fmean(gains),
        "least_gain": min(gains),
        "most_gain": max(gains),
        "cost_per_million_output_tokens": None if hour is None else hour / _HOUR_S / tokens * _MILLION,
    }


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """What the terminal shows, each with a column a side and a line a bucket: how many times the requests/s there are
    without it, its share, and where there is a price what a million tokens cost without it."""
    rate = "request_throughput"
    yield _table(rows, "requests/s", lambda row: f"{row[rate]:.3f}", lambda row: f"x {row['gain']:.2f}")
    if any(row["without"] != AS_IT_IS for row in rows):
        yield _table(rows, "% of the pool", None, lambda row: f"{row['share_pct']:.1f}")
    if rows[0]["cost_per_million_output_tokens"] is not None:
        yield _table(rows, "per million output tokens", _money, _money)


def _money(row: Row) -> str:
    return f"{row['cost_per_million_output_tokens']:,.2f}"


def _table(rows: Sequence[Row], what: str, base: Callable[[Row], str] | None, cell: Callable[[Row], str]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    sides = list(dict.fromkeys(row["side"] for row in rows))
    at = {(row["side"], row["without"]): row for row in rows}
    for place, heading in enumerate((what, *(side.replace("=", "=\n").replace(",", ",\n") for side in sides))):
        found.add_column(heading, justify="right" if place else "left", no_wrap=True)
    if base is not None:
        found.add_row("as it is", *(base(at[side, AS_IT_IS]) for side in sides))
    for bucket in (*WASTE, ALL):
        mine = [at.get((side, bucket)) for side in sides]
        if any(mine):
            found.add_row(f"without {bucket}" if base else bucket, *(cell(row) if row else "-" for row in mine))
    return found


def page(rows: Sequence[Row], load: str, path: str | PathLike[str]) -> Path:
    """Write the rows as a page, and say where it lies."""
    return write_page(path, _TITLE, load, [Section(_TITLE, BASIS, [figures.waste_cost(rows)])])


def check(seeds: int, price: float | None) -> None:
    """Refuse what cannot be.

    Raises:
        SettingError: No seed, or a price that is none.
    """
    if seeds < 1:
        raise SettingError("seeds", seeds, "must be 1 or more")
    if price is not None and not 0 < price < float("inf"):
        raise SettingError("price", price, "must be positive: what an hour of one GPU costs")
