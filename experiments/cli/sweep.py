"""``fragmeter sweep``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ...reports.page.table import Column, Table
from ...sim.metrics.objectives import objectives
from ...sim.metrics.registry import METRICS, headings, metric_text
from ...sim.output.files import require_apart
from ...sim.output.folders import OutputFolder
from ...sim.types.errors import UserError
from ...sim.types.notes import note
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading
from ..measured.evidence import evidence_lines
from ..runs.grid import axes, points
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files
from ..runs.near_saturation import CHANGE, LatencyRange
from ..runs.output import RESULTS, JsonTarget, Report
from ..runs.parallel import Workers
from ..runs.points import SWEEP as SWEEP_FOLDER
from ..runs.points import TABLE, Store, as_parquet, flat, row
from ..runs.serving import load_in_words
from ..runs.sweeping import Swept, sweep_points
from ..sweep.searching import Wanted, check_found, limits, search_axes
from ..sweep.searching import search as searched
from .replica_flags import SETTINGS, SettingsFlags

SWEEP = Group("Sweep", sort_key=-1)
LISTED = Parameter(group=SWEEP, consume_multiple=True, negative_iterable="")
WORKERS = Annotated[Workers, Parameter(name="*", group=Group("Workers", sort_key=8))]
#: Results in the terminal table, and their labels.
_SHOWN = headings("request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
#: Points in the terminal table; the Parquet file has all of them.
_MOST_SHOWN = 40
#: Trials of a search in the terminal table, and the default number of trials.
_BEST_SHOWN, DEFAULT_TRIALS = 10, 50


def sweep(
    replica: SETTINGS = SettingsFlags(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    workers: WORKERS = Workers(),
    *,
    grid: Annotated[list[str] | None, LISTED] = None,
    search: Annotated[list[str] | None, LISTED] = None,
    trials: Annotated[int, Parameter(group=SWEEP)] = DEFAULT_TRIALS,
    maximize: Annotated[str | None, Parameter(group=SWEEP)] = None,
    minimize: Annotated[str | None, Parameter(group=SWEEP)] = None,
    at_most: Annotated[list[str] | None, LISTED] = None,
    goodput: Annotated[list[str] | None, LISTED] = None,
    out: Annotated[Path, RESULTS],
    json: JsonTarget = None,
) -> None:
    """Run every combination of settings, or search for the best; write one Parquet file.

    Finished points are stored. The same command continues after an interruption and repeats no point. The other flags
    are those of simulate and apply to every point.

    Args:
        grid: One axis, repeatable: NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP (LAST included), of any flag of simulate,
            seed and trace included. The value none stands for the default.
        search: One setting to search in place of a grid, repeatable: NAME=VALUE,VALUE or NAME=FIRST:LAST, optionally
            followed by :STEP or :log. Whole ends give whole numbers. Needs optuna.
        trials: Number of points to try, eight at a time. The points do not depend on the number of jobs.
        maximize: Metric of the summary to maximize, such as request_throughput.
        minimize: Metric of the summary to minimize, such as p99_ttft_ms.
        at_most: Upper limit of another metric, METRIC=VALUE.
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
    if search:
        wanted = _wanted(grid, maximize, minimize, at_most or [])
        found = searched(base, search_axes(search), wanted, trials, workers, Store(folder), goal)
        _print_search(report, folder, wanted, load_in_words(base), search, found)
        return
    if not grid or maximize or minimize or at_most or trials != DEFAULT_TRIALS:
        raise UserError("sweep takes --grid, or --search with --maximize or --minimize")
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
    report.console.print(_table(names, swept))
    for text in (*_failure_lines(failed), *_steps_text(swept)):
        report.print_line(text)
    report.point_to(f"Sweep of {len(swept):,} points", path)
    data = ({} if load is None else {"load": load}) | {"grid": names, "points": len(swept), "failed": len(failed)}
    report.data(data | {"rows": [_plain(cells) for cells in rows]})


def _wanted(grid: Sequence[str] | None, maximize: str | None, minimize: str | None, at_most: Sequence[str]) -> Wanted:
    if grid or (maximize is None) == (minimize is None):
        raise UserError("sweep --search takes --maximize or --minimize, and not --grid")
    wanted = Wanted(not_none(minimize if maximize is None else maximize), maximize is not None, limits(at_most))
    known = METRICS.get(wanted.metric)
    if known is not None and known.better == ("less" if wanted.maximize else "more"):
        note(f"{known.better.capitalize()} of {known.label} is better; the search looks for the opposite.")
    return wanted


def _print_search(
    report: Report,
    folder: OutputFolder,
    wanted: Wanted,
    load: str | None,
    searched: Sequence[str],
    found: Sequence[Swept],
) -> None:
    """Write a row for each trial of a search to the Parquet file, and print the best trials and why others failed."""
    check_found(found)
    rows = [{"trial": number} | _row(each) for number, each in enumerate(found)]
    path = folder.write(TABLE, as_parquet(rows))
    best = wanted.best(found)
    if load is not None:
        report.print_line(f"Load, but for what is varied: {load}")
    if best:
        report.console.print(_best_table(wanted, found, best))
    else:
        report.print_line("No trial is within the limits; raise them, search wider, or try more.")
    failed = [each for each in found if each.outcome.error]
    for text in (*_failure_lines(failed), *_steps_text(found)):
        report.print_line(text)
    report.point_to(f"Search of {len(found):,} trials", path)
    report.data(
        {
            **({} if load is None else {"load": load}),
            "search": list(searched),
            "metric": wanted.metric,
            "maximize": wanted.maximize,
            "at_most": dict(wanted.limits),
            "trials": len(found),
            "failed": len(failed),
            "best": found[best[0]].point.axis_values | {wanted.metric: wanted.value(found[best[0]])} if best else None,
            "rows": [_plain(cells) for cells in rows],
        }
    )


def _best_table(wanted: Wanted, found: Sequence[Swept], best: Sequence[int]) -> Table:
    names, shown = list(found[0].point.axis_values), [wanted.metric, *wanted.limits]
    table = Table(Column("trial"), *names, *shown)
    for place in best[:_BEST_SHOWN]:
        each = found[place]
        results = dict(flat(each.outcome.summary))
        table.add_row(
            str(place), *each.point.axis_values.values(), *(metric_text(name, results[name]) for name in shown)
        )
    return table


def _row(swept: Swept) -> dict[str, Any]:
    outcome = swept.outcome
    cells = row(swept.point.inputs, swept.work_sha256, outcome.summary or {}, swept.point.axis_values)
    return cells | {"error": outcome.error} if outcome.error else cells


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """A value as JSON data."""
    return {name: "inf" if value == float("inf") else value for name, value in cells.items()}


def _table(names: Iterable[str], swept: Sequence[Swept]) -> Table:
    shown = swept[:_MOST_SHOWN]
    ranges = [LatencyRange.mean([each.outcome.summary] if each.outcome.summary else []) for each in shown]
    near = [f"mean TTFT, ms,\nsteps ±{CHANGE:.0%}"] * any(ranges)
    # A long value, as of JSON, is folded, so that the metrics stay whole.
    axes = [Column(name, wraps=True) for name in names]
    table = Table(*axes, *(Column(label.replace(" ", "\n", 1)) for label in _SHOWN.values()), *near)
    for each, ends in zip(shown, ranges, strict=True):
        results = each.outcome.summary
        cells = (metric_text(name, results[name]) if results else "-" for name in _SHOWN)
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
