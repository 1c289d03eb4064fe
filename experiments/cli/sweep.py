"""``fragmeter sweep``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ...reports.page.table import Column, Table
from ...sim.metrics.objectives import objectives
from ...sim.metrics.registry import headings, metric_text
from ...sim.output.files import require_apart
from ...sim.output.folders import OutputFolder
from ...sim.types.errors import UserError
from ...traces import Pacing, Reading
from ..measured.evidence import evidence_lines
from ..runs.grid import axes, points
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files
from ..runs.near_saturation import CHANGE, LatencyRange
from ..runs.output import RESULTS, JsonTarget, Report
from ..runs.parallel import Workers
from ..runs.points import SWEEP as SWEEP_FOLDER
from ..runs.points import TABLE, Store, as_parquet, row
from ..runs.serving import load_in_words
from ..runs.sweeping import Swept, sweep_points
from .replica_flags import SETTINGS, SettingsFlags

SWEEP = Group("Sweep", sort_key=-1)
LISTED = Parameter(group=SWEEP, consume_multiple=True, negative_iterable="")
WORKERS = Annotated[Workers, Parameter(name="*", group=Group("Workers", sort_key=8))]
#: Results in the terminal table, and their labels.
_SHOWN = ("request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
#: Points in the terminal table; the Parquet file has all of them.
_MOST_SHOWN = 40


def sweep(
    replica: SETTINGS = SettingsFlags(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    workers: WORKERS = Workers(),
    *,
    grid: Annotated[list[str], LISTED],
    goodput: Annotated[list[str] | None, LISTED] = None,
    out: Annotated[Path, RESULTS],
    json: JsonTarget = None,
) -> None:
    """Run every combination of settings; write one Parquet file.

    Finished points are stored. The same command continues after an interruption and repeats no point. The other flags
    are those of simulate and apply to every point.

    Args:
        grid: One axis, repeatable: NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP (LAST included), of any flag of simulate,
            seed and trace included. The value none stands for the default.
        goodput: Objectives of every request in ms, as in vllm bench serve: ttft:500 tpot:50 e2el:10000. Adds the
            column request_goodput: the requests/s that meet all of them.
        out: Folder for sweep.parquet and the finished points.
    """
    settings = replica.settings()
    report = Report(json)
    read = named_files(settings=replica, requests=requests, pacing=pacing, reading=reading, grid=grid)
    require_apart({"out": out, "json": json}, read)
    folder = OutputFolder(out, SWEEP_FOLDER)
    goal = None if goodput is None else objectives(goodput)
    base = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    names = axes(grid)
    chosen = points(base, names)
    swept = sweep_points(chosen, workers, Store(folder), goal)
    failed = [each for each in swept if each.outcome.error]
    if len(failed) == len(swept):
        raise UserError(failed[0].outcome.error)
    rows = [_row(each) for each in swept]
    path = folder.write(TABLE, as_parquet(rows))
    load = load_in_words(base)
    if load is not None:
        report.print_line(f"Load, but for what is varied: {load}")
    report.console.print(_table(names, swept, headings(*_SHOWN, *["request_goodput"] * (goal is not None))))
    for text in (*_failure_lines(failed), *_steps_text(swept)):
        report.print_line(text)
    report.point_to(f"Sweep of {len(swept):,} points", path)
    data = ({} if load is None else {"load": load}) | {"grid": names, "points": len(swept), "failed": len(failed)}
    report.data(data | {"rows": [_plain(cells) for cells in rows]})


def _row(swept: Swept) -> dict[str, Any]:
    outcome = swept.outcome
    cells = row(swept.point.inputs, swept.work_sha256, outcome.summary or {}, swept.point.axis_values)
    return cells | {"error": outcome.error} if outcome.error else cells


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """A value as JSON data."""
    return {name: "inf" if value == float("inf") else value for name, value in cells.items()}


def _table(names: Iterable[str], swept: Sequence[Swept], metrics: dict[str, str]) -> Table:
    shown = swept[:_MOST_SHOWN]
    ranges = [LatencyRange.mean([each.outcome.summary] if each.outcome.summary else []) for each in shown]
    near = [f"mean TTFT, ms,\nsteps ±{CHANGE:.0%}"] * any(ranges)
    # A long value, as of JSON, is folded, so that the metrics stay whole.
    axes = [Column(name, wraps=True) for name in names]
    table = Table(*axes, *(Column(label.replace(" ", "\n", 1)) for label in metrics.values()), *near)
    for each, ends in zip(shown, ranges, strict=True):
        results = each.outcome.summary
        cells = (metric_text(name, results[name]) if results else "-" for name in metrics)
        table.add_row(
            *each.point.axis_values.values(), *cells, *[ends.ends("mean_ttft_ms") if ends else ""] * len(near)
        )
    return table


def _steps_text(swept: Sequence[Swept]) -> Iterable[str]:
    """The lines below a sweep: how many of its points are near saturation, and the source and evidence of its step times."""
    done = [(each.point.inputs.settings, each.outcome.summary) for each in swept if each.outcome.summary]
    near = sum("near_saturation" in summary for _, summary in done)
    if near:
        points = "1 point" if near == 1 else f"{near} points"
        yield (
            f"Near saturation: {points}, served again with steps {CHANGE:.0%} shorter and longer (columns"
            " near_saturation.shorter and near_saturation.longer)."
        )
    yield from evidence_lines((settings, summary["load"]) for settings, summary in done)


def _failure_lines(failed: Sequence[Swept]) -> Iterable[str]:
    """The number of points that cannot be run, and the reason for the first one."""
    if failed:
        first = failed[0]
        where = ", ".join(f"{name}={value}" for name, value in first.point.axis_values.items())
        yield f"Failed: {len(failed)} points; the column error says why."
        yield f"  {where}: {first.outcome.error}"
