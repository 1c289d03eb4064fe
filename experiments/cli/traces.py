"""``fragmeter traces``: conversion, synthesis, statistics and their page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App

from ...reports.figures import figures
from ...reports.page.page import Section, page_title, write_page
from ...reports.page.table import Table
from ...sim.output.files import require_apart, require_writable
from ...sim.types import ticks
from ...sim.types.bounds import Seed
from ...sim.types.optional import not_none
from ...traces import (
    Reading,
    Trace,
    catalogue,
    check_target,
    download,
    draw,
    fit,
    read_load,
    read_with_content,
    write,
    write_load,
)
from ...traces import stats as stats_of
from ...traces.writers import dropped_columns
from ..runs.inputs import READING, left_out_lines, named_files, say_start
from ..runs.output import RESULT_FILE, JsonTarget, Report

_HEADINGS = {"prompt_tokens": "Prompt (tokens)", "output_tokens": "Output (tokens)", "total_tokens": "Both (tokens)"}
_SHARES = np.linspace(0, 1, 101)
#: Most spans in which arrivals are counted, and the least mean number of requests in one: fewer would draw noise.
_MOST_SPANS, _LEAST_REQUESTS = 120, 10


def write_trace_page(trace: Trace, found: dict[str, Any], path: str | PathLike[str]) -> Path:
    """Write the statistics of a trace as a page, and print its path.

    Args:
        found: Result of ``stats``.
    """
    sections = [Section("Lengths", figures=[figures.lengths(length_rows(trace))], rows=_table(found))]
    if found["duration_s"] is not None:
        text = (
            f"{found['request_rate']:,.3f} requests/s over {found['duration_s']:,.1f} s. The gaps' coefficient of"
            f" variation is {found['gap_cv']:.2f}; it is 1 of a Poisson process."
        )
        sections.append(Section("Arrivals", figures=[figures.arrivals(arrival_rows(trace))], finding=text))
    if found["reuse"] is not None:
        text = (
            f"{found['reuse']['share']:.1%} of the prompts' tokens are a prefix that was seen before, by"
            f" {found['reuse']['by']}: so much an endless prefix cache would hit."
        )
        sections.append(Section("Reuse", text))
    count = f"{len(trace):,} request{'' if len(trace) == 1 else 's'}."
    return write_page(path, page_title("Trace", trace.name), count, sections)


def length_rows(trace: Trace) -> list[dict[str, float]]:
    """Quantiles of prompt and output lengths, one row per percent."""
    both = (trace.prompt_tokens, trace.output_tokens)
    columns = [np.quantile(lengths, _SHARES, method="inverted_cdf") for lengths in both]
    return [
        {"share": float(share), "prompt": int(prompt), "output": int(output)}
        for share, prompt, output in zip(_SHARES, *columns, strict=True)
    ]


def arrival_rows(trace: Trace) -> list[dict[str, float]]:
    """Requests per second in equal time spans: at most 120, with ten requests or more on average, and at least one span."""
    times_s = not_none(trace.arrival_ticks) / ticks.PER_SECOND
    spans = min(max(len(times_s) // _LEAST_REQUESTS, 1), _MOST_SPANS)
    counts, edges = np.histogram(times_s, bins=spans)
    return [
        {"start_s": float(start), "end_s": float(end), "requests_per_s": float(count / (end - start))}
        for count, start, end in zip(counts, edges, edges[1:])
    ]


def _table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The percentiles of the lengths, one row per statistic."""
    return [
        {"": statistic} | {heading: found[field][statistic] for field, heading in _HEADINGS.items()}
        for statistic in found["prompt_tokens"]
    ]


traces = App(name="traces", help="Describe, convert, fetch and synthesise request traces.")


@traces.command(name="list")
def list_sets(*, json: JsonTarget = None) -> None:
    """List the length summaries in the package, and the public traces that traces get fetches."""
    report = Report(json)
    table = Table("set", "pairs", "mean prompt", "mean output")
    for entry in catalogue.describe():
        means = (f"{entry.mean_prompt_tokens:,.1f}", f"{entry.mean_output_tokens:,.1f}")
        table.add_row(entry.name, f"{entry.rows:,}", *means)
    report.console.print(table)
    for entry in catalogue.describe():
        report.print_line(f"\n{entry.name}: {entry.description.rstrip('.')}.")
        report.print_line(f"Source: {entry.source}. Licence: {entry.licence}.")
    report.print_line("\nPublic traces, for traces get:", style="bold")
    for public in download.PUBLIC:
        report.print_line(f"{public.name}: {public.description}. Licence: {public.licence}.{_checksum_text(public)}")
    sets = [asdict(entry) for entry in catalogue.describe()]
    report.data({"sets": sets, "public": [asdict(public) for public in download.PUBLIC]})


def _checksum_text(public: download.Public) -> str:
    return "" if public.requests_sha256 else " Unverified: no checksum of it is known here."


@traces.command
def get(name: str, /, *, out: Path = Path(), json: JsonTarget = None) -> None:
    """Fetch a public trace from its publisher, and check its requests by a checksum.

    Args:
        name: Name from traces list.
        out: Folder; by default the current one.
    """
    report = Report(json)
    public = download.public(name)
    require_writable(out, out, create=True)
    path = download.fetch(public, out)
    report.point_to(public.name, path)
    report.print_line(f"{public.description}. Licence: {public.licence}.")
    known = "Its requests are those that are known here."
    report.print_line(known if public.requests_sha256 else _checksum_text(public).strip())
    report.data({"path": str(path), "licence": public.licence, "verified": public.requests_sha256 is not None})


@traces.command
def stats(
    file: Path,
    /,
    reading: READING = Reading(),
    *,
    out: Annotated[Path | None, RESULT_FILE] = None,
    json: JsonTarget = None,
) -> None:
    """Print statistics of a trace: lengths, arrivals, and shared prefixes.

    Args:
        file: Trace file; docs/traces.md lists the formats.
        out: HTML page with pictures.
    """
    report = Report(json, out=out)
    require_apart({"out": out, "json": json}, named_files(file=file, reading=reading))
    trace = read_with_content(file, reading)
    say_start(trace, file)
    found = stats_of(trace)
    lengths = {name: value for name, value in found.items() if name.endswith("_tokens")}
    table = Table("tokens", *(name.removesuffix("_tokens") for name in lengths))
    for statistic in next(iter(lengths.values())):
        table.add_row(statistic, *(_number(values[statistic]) for values in lengths.values()))
    report.print_line(f"{found['name']}: {found['rows']:,} requests", style="bold")
    report.console.print(table)
    for text in (_arrivals_text(trace, found), *_reuse_lines(found), *left_out_lines(trace)):
        report.print_line(text)
    if out is not None:
        report.point_to("Page", write_trace_page(trace, found, out))
    started = trace.start is not None and trace.start.text is not None
    report.data(found | ({"start": asdict(trace.start)} if started and trace.start else {}))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _arrivals_text(trace: Trace, found: dict[str, Any]) -> str:
    if trace.arrival_ticks is None and trace.max_concurrency is not None:
        return f"No arrivals: {trace.max_concurrency:,} requests in flight, each sent after an answer."
    if found["request_rate"] is None and trace.arrival_ticks is not None:
        return "All requests arrive at once."
    if found["request_rate"] is None:
        return "No arrivals: give --request-rate to simulate it."
    rate, span_s, spread = (found[name] for name in ("request_rate", "duration_s", "gap_cv"))
    return f"{rate:,.3f} requests/s over {span_s:,.1f} s; the gaps' coefficient of variation is {spread:.2f}."


def _reuse_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["reuse"] is not None:
        yield f"{found['reuse']['share']:.1%} of the prompts' tokens were seen before, by {found['reuse']['by']}."


@traces.command
def convert(source: Path, target: Path, /, reading: READING = Reading(), *, json: JsonTarget = None) -> None:
    """Convert a trace into fragmeter's own columns: arrival_s, prompt_tokens, output_tokens, and optional ones.

    Args:
        source: Trace file; docs/traces.md lists the formats.
        target: New file, in the format of its ending: .csv, .jsonl (both also .gz and .zst) or .parquet. CSV cannot
            hold hash_ids.
    """
    report = Report(json, target=target)
    check_target(target)
    require_apart({"target": target, "json": json}, named_files(source=source, reading=reading))
    trace = read_with_content(source, reading)
    say_start(trace, source)
    data = _written(trace, target, report)
    for text in left_out_lines(trace):
        report.print_line(text)
    report.data(data | {"left_out": asdict(trace.left_out)})


def _written(trace: Trace, target: Path, report: Report) -> dict[str, Any]:
    """Write a trace, say what the file cannot hold, and return the data of both."""
    write(trace, target)
    report.print_line(f"{target}: {len(trace):,} requests")
    dropped = dropped_columns(trace, target)
    if dropped:
        report.print_line(
            f"Left out, as a CSV has no lists: {', '.join(dropped)}, the prefixes that prompts share; name it .jsonl or .parquet to keep them."
        )
    return {"path": str(target), "rows": len(trace), "dropped_columns": dropped}


@traces.command
def synth(
    file: Path, /, reading: READING = Reading(), *, out: Annotated[Path, RESULT_FILE], json: JsonTarget = None
) -> None:
    """Fit a trace by a small file that can be shared: distributions of the load, and none of its requests.

    simulate --trace and traces sample draw from it.

    Args:
        file: Trace file; docs/traces.md lists the formats.
        out: JSON file for the load.
    """
    report = Report(json, out=out)
    require_apart({"out": out, "json": json}, named_files(file=file, reading=reading))
    trace = read_with_content(file, reading)
    say_start(trace, file)
    load = fit(trace)
    write_load(load, out)
    found, drawn = stats_of(trace), stats_of(draw(load))
    table = Table("", "trace", "drawn")
    for row in zip(_in_short(found), _in_short(drawn), strict=True):
        (name, ours), (_, theirs) = row
        table.add_row(name, ours, theirs)
    report.console.print(table)
    for text in left_out_lines(trace):
        report.print_line(text)
    report.point_to("Load", out)
    report.data({"path": str(out), "trace": found, "drawn": drawn})


def _in_short(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers for comparing two traces, with labels."""
    for field in ("prompt_tokens", "output_tokens", "total_tokens"):
        for statistic in ("mean", "p50", "p90", "p99"):
            yield f"{field.removesuffix('_tokens')} {statistic}", f"{found[field][statistic]:,.1f}"
    for name, label in (("request_rate", "requests/s"), ("gap_cv", "CV of the gaps")):
        yield label, "-" if found[name] is None else f"{found[name]:,.3f}"
    yield "tokens seen before", "-" if found["reuse"] is None else f"{found['reuse']['share']:.1%}"


@traces.command
def sample(
    load: Path, target: Path, /, *, num_prompts: int | None = None, seed: Seed = 0, json: JsonTarget = None
) -> None:
    """Draw requests from a load file of traces synth.

    Args:
        load: Load file of traces synth.
        target: New trace, in the format of its ending, as for convert.
        num_prompts: Number of requests. By default as many as the trace had.
        seed: Seed of the draw.
    """
    report = Report(json, target=target)
    check_target(target)
    require_apart({"target": target, "json": json}, named_files(load=load))
    trace = draw(read_load(load), num_prompts, seed)
    report.data(_written(trace, target, report))
