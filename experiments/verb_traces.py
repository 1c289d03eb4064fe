"""``fragmeter traces``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cyclopts import App
from rich import box
from rich.table import Table

from ..traces import Reading, catalogue, read_with_content, write
from ..traces import stats as stats_of
from .output import JsonTarget, Report
from .trace_files import READING, left_out_told

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
def stats(file: Path, /, reading: READING = Reading(), *, json: JsonTarget = None) -> None:
    """Tell what a trace is like: its lengths, its arrivals, and how much of its prompts was seen before.

    Args:
        file: A trace in any form that we know.
    """
    report = Report(json)
    trace = read_with_content(file, reading)
    found = stats_of(trace)
    lengths = {name: value for name, value in found.items() if name.endswith("_tokens")}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("tokens")
    for name in lengths:
        table.add_column(name.removesuffix("_tokens"), justify="right")
    for statistic in next(iter(lengths.values())):
        table.add_row(statistic, *(_number(values[statistic]) for values in lengths.values()))
    report.say(f"{found['name']}: {found['rows']:,} requests", style="bold")
    report.console.print(table)
    report.say(_arrivals_told(found))
    for text in left_out_told(trace):
        report.say(text)
    report.data(found)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _arrivals_told(found: dict[str, Any]) -> str:
    if found["request_rate"] is None:
        return "No arrivals: give --request-rate to simulate it."
    rate, span_s, spread = (found[name] for name in ("request_rate", "duration_s", "gap_cv"))
    return f"{rate:,.3f} requests/s over {span_s:,.1f} s; the gaps' coefficient of variation is {spread:.2f}."


@traces.command
def convert(source: Path, target: Path, /, reading: READING = Reading(), *, json: JsonTarget = None) -> None:
    """Convert a trace into our own columns: arrival_s, prompt_tokens, output_tokens, and what else it says.

    Args:
        source: A trace in any form that we know.
        target: The new file; its ending says the form: .csv, .jsonl (both also .gz and .zst) or .parquet. CSV has no
            room for hash_ids.
    """
    report = Report(json)
    trace = read_with_content(source, reading)
    write(trace, target)
    report.say(f"{target}: {len(trace):,} requests")
    for text in left_out_told(trace):
        report.say(text)
    report.data({"path": str(target), "rows": len(trace), "left_out": asdict(trace.left_out)})
