"""``fragmeter sweep``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich import box
from rich.table import Table

from ..sim.errors import UserError
from ..sim.settings import Settings
from ..traces import Pacing, Reading
from .grid import axes, points
from .inputs import PACING, REQUESTS, SETTINGS, Inputs, Requests
from .output import RESULTS, JsonTarget, Report
from .parallel import Workers
from .points import Store, row, write_parquet
from .sweeping import Swept, sweep_points
from .trace_files import READING

SWEEP = Group("Sweep", sort_key=-1)
WORKERS = Annotated[Workers, Parameter(name="*", group=Group("Workers", sort_key=8))]
#: Results that the terminal shows, and what it calls them.
_SHOWN = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "mean\nTTFT, ms",
    "p99_ttft_ms": "p99\nTTFT, ms",
    "mean_tpot_ms": "mean\nTPOT, ms",
}
#: Points that the terminal shows; the Parquet has them all.
_MOST_SHOWN = 40


def sweep(
    settings: SETTINGS = Settings(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    workers: WORKERS = Workers(),
    *,
    grid: Annotated[list[str], Parameter(group=SWEEP, negative_iterable="")],
    out: Annotated[Path, RESULTS],
    json: JsonTarget = None,
) -> None:
    """Run every combination of some settings, a row of one Parquet file each.

    What is finished is kept: the same command goes on where it was interrupted, and runs no point a second time.
    The other flags are those of simulate, and hold for every point.

    Args:
        grid: An axis: NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP, its end included, of any flag of simulate, seed and
            trace among them; none leaves it to its default. Give it once for each axis.
        out: Folder for sweep.parquet and the finished points.
    """
    report = Report(json)
    names = axes(grid)
    chosen = points(Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing), names)
    store = Store(out)
    swept = sweep_points(chosen, workers, store)
    failed = [each for each in swept if each.outcome.error]
    if len(failed) == len(swept):
        raise UserError(failed[0].outcome.error)
    rows = [_row(each) for each in swept]
    write_parquet(out / "sweep.parquet", rows)
    report.console.print(_table(names, swept))
    for text in _failures_told(failed):
        report.say(text)
    report.point_to(f"Sweep of {len(swept):,} points", out / "sweep.parquet")
    told = {"grid": names, "points": len(swept), "failed": len(failed)}
    report.data(told | {"rows": [_plain(cells) for cells in rows]})


def _row(swept: Swept) -> dict[str, Any]:
    outcome = swept.outcome
    cells = row(swept.point.inputs, swept.work_sha256, outcome.summary or {})
    return cells | {"error": outcome.error} if outcome.error else cells


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """As JSON can say it."""
    return {name: "inf" if value == float("inf") else value for name, value in cells.items()}


def _table(names: Iterable[str], swept: Sequence[Swept]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in (*names, *_SHOWN.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in swept[:_MOST_SHOWN]:
        told = each.outcome.summary
        table.add_row(*each.point.asked.values(), *(f"{told[name]:,.2f}" if told else "-" for name in _SHOWN))
    return table


def _failures_told(failed: Sequence[Swept]) -> Iterable[str]:
    """How many points cannot be run, and why the first cannot."""
    if failed:
        first = failed[0]
        where = ", ".join(f"{name}={value}" for name, value in first.point.asked.items())
        yield f"Cannot be run: {len(failed)} points; the column error says why."
        yield f"  {where}: {first.outcome.error}"
