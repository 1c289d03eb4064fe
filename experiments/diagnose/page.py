"""What a diagnosis leaves: metrics of the simulated server, and a page: the answer, five numbers, the server over time beside its simulation, and what each change does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...reports.data.answer import KeyNumber, duration
from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...sim.metrics.openmetrics import gauges, openmetrics
from ...sim.output import frames as pd
from ...sim.output.files import write_whole
from ...sim.runs.run import Run
from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ...sim.types.ticks import PER_SECOND
from ..measured.scrapes import KV_USAGE, RUNNING, WAITING, Readings, Scrape, total
from ..measured.server_metrics import busiest
from .diagnosis import Diagnosis
from .look import Look
from .run import served
from .text import told
from .window import Now, clock

#: Points of the simulated server.
_POINTS = 240


def write_look(path: Path, look: Look) -> None:
    """Write the page.

    Raises:
        UserError: It cannot be written.
        SimulationFault: As ``simulate``, which serves the first draw once more.
    """
    over_time = _over_time(look)
    if look.found is None:
        write_page(path, _title(look), _text([*look.first, look.lacking]), over_time, numbers=_numbers(look))
        return
    words = told(look.found, look.goal, look.clients)
    effects = "As served and with each change, over the same requests; intervals and what they rest on stand below."
    sections = [
        Section("What to do, and why", _text(words.advice)),
        *over_time,
        Section("Changes", effects, rows=_rows(words.changes.records())),
        *(
            []
            if words.measured is None
            else [Section("Measured beside simulated", rows=_rows(words.measured.records()))]
        ),
        Section("Basis of the diagnosis", _text([*words.basis, *look.assumed])),
    ]
    lead = _text(
        [words.answer, words.served, *look.contradictory, *look.first[len(look.contradictory) + len(look.assumed) :]]
    )
    write_page(path, _title(look), lead, sections, numbers=_numbers(look))


def _title(look: Look) -> str:
    """The question."""
    if look.found is None:
        return f"What does this {not_none(look.now).server} server do?"
    settings = look.found.case.server.settings()
    return f"Why is {settings.model} on {settings.gpu} slow, and what to change?"


def _numbers(look: Look) -> list[KeyNumber]:
    """The numbers of the first screen: measured ones where there are, with the simulated below them."""
    now, found = look.now, look.found
    if found is None:
        return _measured_numbers(not_none(now))
    seen = found.case.seen
    latencies = [
        KeyNumber("p90 TTFT", duration(seen.p90_ttft_ms), "simulated, as served"),
        KeyNumber("p99 ITL", duration(seen.p99_itl_ms), "simulated, as served"),
    ]
    simulated = [
        KeyNumber("KV cache in use", f"{seen.arriving_usage:.0%}", f"{seen.max_usage:.0%} at most, simulated"),
        KeyNumber("Requests running", f"{seen.arriving_running:,.1f}", f"{seen.arriving_waiting:,.1f} wait, simulated"),
        KeyNumber("Preemptions", f"{seen.preemptions:,.1f}", "per 100 requests, simulated"),
    ]
    if now is None:
        return [*simulated, *latencies]
    beside = [f"simulated {each.value}" for each in simulated]
    shown = _measured_numbers(now)
    notes = dict(zip((each.label for each in simulated), beside, strict=True))
    notes.pop("Preemptions")
    return [
        each._replace(note=f"{each.note}; {notes[each.label]}" if each.label in notes else each.note) for each in shown
    ] + latencies


def _measured_numbers(now: Now) -> list[KeyNumber]:
    found = []
    if now.usage is not None:
        found.append(KeyNumber("KV cache in use", f"{now.usage[0]:.0%}", f"{now.usage[1]:.0%} at most"))
    found.append(KeyNumber("Requests running", f"{now.running:,.1f}", f"{now.waiting:,.1f} wait"))
    if now.preemptions is not None:
        passed = "since the server started" if now.passed_s is None else f"in {now.passed_s:,.0f} s"
        found.append(KeyNumber("Preemptions", f"{now.preemptions:,.0f}", passed))
    return found


def _over_time(look: Look) -> list[Section]:
    """The readings with times, and the first draw as simulated, with one scale."""
    tables, notes, turn_s = {}, [], None
    if look.readings is not None and (measured := _measured(look.readings)) is not None:
        start_s, tables["Measured"] = measured
        notes.append(f"Measured: time since {clock(start_s)} UTC.")
        if (turn := not_none(look.now).turn) is not None:
            turn_s = turn.at_s - start_s
            notes.append("The dashed line is the turning point.")
    if look.found is not None:
        tables["Simulated, as served"] = _simulated(look.found)
        notes.append("Simulated: the first draw of the load, from its first request to its last token.")
    if not tables:
        return []
    most = max(float(table[["running", "waiting"]].to_numpy().max()) for table in tables.values())
    drawn = [
        figures.server_over_time(title, table, most, turn_s if title == "Measured" else None)
        for title, table in tables.items()
    ]
    return [Section("The server over time", " ".join(notes), figures=drawn)]


def write_metrics(path: Path, look: Look) -> None:
    """Write the simulated server as vLLM's metrics, in OpenMetrics text whose time begins with the first reading.

    Raises:
        UserError: Nothing was simulated, or the file cannot be written.
        SimulationFault: As ``simulate``, which serves the first draw once more.
    """
    if look.found is None:
        raise UserError(f"{path} is not written, as nothing was simulated: {look.lacking}")
    timed = () if look.readings is None else _timed(look.readings)
    start_s = not_none(timed[0].at_s) if timed else 0.0
    run = _first_draw(look.found)
    write_whole(path, "".join(openmetrics([run], look.found.case.server.settings().model, start_s=start_s)))


def _timed(readings: Readings) -> Sequence[Scrape]:
    """Readings of the busiest engine that have times."""
    return [each for each in busiest(readings)[1] if each.at_s is not None]


def _measured(readings: Readings) -> tuple[float, pd.DataFrame] | None:
    """Time of the first reading, and the readings of the busiest engine; None if fewer than two have times."""
    timed = _timed(readings)
    if len(timed) < 2:
        return None
    start_s = not_none(timed[0].at_s)
    columns = {
        "time_s": [not_none(each.at_s) - start_s for each in timed],
        "running": [total(each.samples, RUNNING) or 0.0 for each in timed],
        "waiting": [total(each.samples, WAITING) or 0.0 for each in timed],
    }
    usage = [total(each.samples, KV_USAGE) for each in timed]
    if None not in usage:
        columns["usage_pct"] = [100 * not_none(each) for each in usage]
    return start_s, pd.DataFrame(columns)


def _first_draw(found: Diagnosis) -> Run:
    """The server as it serves the first draw of its load."""
    return served(found.case.server.settings(), found.case.load.work(found.seeds[0]))


def _simulated(found: Diagnosis) -> pd.DataFrame:
    run = _first_draw(found)
    at = np.linspace(0, run.log.end_ticks, _POINTS).astype(np.int64)
    running, waiting, usage = gauges(run, at)
    return pd.DataFrame({"time_s": at / PER_SECOND, "running": running, "waiting": waiting, "usage_pct": 100 * usage})


def _rows(records: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Records whose headings fit on a line of a page."""
    return [{heading.replace("-\n", "").replace("\n", " "): cell for heading, cell in each.items()} for each in records]


def _text(lines: Sequence[str]) -> str:
    return "\n\n".join(line for line in lines if line)
