"""``fragmeter traces``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cyclopts import App
from rich import box
from rich.table import Table

from ..traces import catalogue, read
from ..traces import stats as stats_of
from ..traces import write
from .output import JsonTarget, Report

traces = App(name="traces", help="Look at request traces, and convert them.")


@traces.command(name="list")
def list_sets(*, json: JsonTarget = None) -> None:
    """List the sets that come with the package: summaries to draw requests from."""
    report = Report(json)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("set", no_wrap=True)
    for heading in ("pairs", "mean prompt", "mean output"):
        table.add_column(heading, justify="right")
    for entry in catalogue.describe():
        means = (f"{entry.mean_prompt_tokens:,.1f}", f"{entry.mean_output_tokens:,.1f}")
        table.add_row(entry.name, f"{entry.rows:,}", *means)
    report.console.print(table)
    for entry in catalogue.describe():
        report.say(f"\n{entry.name}: {entry.description.rstrip('.')}.")
        report.say(f"Source: {entry.source}. Licence: {entry.licence}.")
    report.data([asdict(entry) for entry in catalogue.describe()])


@traces.command
def stats(file: Path, /, *, json: JsonTarget = None) -> None:
    """Tell what a trace is like: its lengths and its arrivals.

    Args:
        file: CSV, JSONL, Parquet or the SOSP'23 artifact's pickle.
    """
    report = Report(json)
    found = stats_of(read(file))
    lengths = {name: value for name, value in found.items() if isinstance(value, dict)}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("tokens")
    for name in lengths:
        table.add_column(name.removesuffix("_tokens"), justify="right")
    for statistic in next(iter(lengths.values())):
        table.add_row(statistic, *(_number(values[statistic]) for values in lengths.values()))
    report.say(f"{found['name']}: {found['rows']:,} requests", style="bold")
    report.console.print(table)
    report.say(_arrivals_told(found))
    report.data(found)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _arrivals_told(found: dict[str, Any]) -> str:
    if found["request_rate"] is None:
        return "No arrivals: give --request-rate to simulate it."
    rate, span_s, spread = (found[name] for name in ("request_rate", "duration_s", "gap_cv"))
    return f"{rate:,.3f} requests/s over {span_s:,.1f} s; the gaps' coefficient of variation is {spread:.2f}."


@traces.command
def convert(source: Path, target: Path, /, *, json: JsonTarget = None) -> None:
    """Convert a trace into our own columns: arrival_s, prompt_tokens, output_tokens, max_tokens.

    Args:
        source: CSV, JSONL, Parquet or the SOSP'23 artifact's pickle.
        target: The new file; its ending says the form: .csv, .csv.gz, .jsonl, .jsonl.gz or .parquet.
    """
    report = Report(json)
    trace = read(source)
    write(trace, target)
    report.say(f"{target}: {len(trace):,} requests")
    report.data({"path": str(target), "rows": len(trace)})
