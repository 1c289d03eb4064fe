"""The section of each figure on the page: sentences, pictures and tables from its document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import plotly.graph_objects as go

from ...reports.figures import figures
from ...reports.page.page import Section
from ...reports.style.labels import (
    PARAMETERS,
    comparison_numbers,
    definitions_of,
    is_percent,
    metric_label,
    parameter_of,
    view_metrics,
)
from ...sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, VIEWS, moved_text, sums
from ...sim.types.optional import not_none
from ..paper.bench import Bench, Case
from ..paper.comparison import Payload
from ..paper.figures.fig3 import BLOCKS, free_slots
from ..paper.figures.waste import NAMES
from ..paper.paper import FIG2
from ..paper.rate_sweep.rate_sweep import TARGET_S
from ..paper.rows import Row
from .scorecard import badge, finding, grades
from .text import checks, for_reports

_BETWEEN = "\n\n"


def shown(title: str, *pictures: Callable[[Payload], go.Figure]) -> Callable[[Payload, Bench], list[Section]]:
    """One section under this title: the workload, the findings, the pictures, and the basis."""

    def show(payload: Payload, _: Bench) -> list[Section]:
        return [replace(compared(title, payload), figures=[picture(for_reports(payload)) for picture in pictures])]

    return show


def rates(title: str) -> Callable[[Payload, Bench], list[Section]]:
    """One section of a rate sweep: its curves with the published crossings, and a folded table of the crossings."""

    def show(payload: Payload, _: Bench) -> list[Section]:
        drawn = figures.curves(for_reports(payload | {"rows": payload["curves"]}))
        pictures = [figures.with_limit(drawn, TARGET_S, f"{TARGET_S:g} s/token")]
        return [replace(compared(title, payload), figures=pictures, folded_rows=_table(for_reports(payload)["rows"]))]

    return show


def tabled(title: str) -> Callable[[Payload, Bench], list[Section]]:
    """One section with a table, for values without a common axis; without the columns that are the same in each row."""

    def show(payload: Payload, _: Bench) -> list[Section]:
        rows = _table(for_reports(payload)["rows"])
        differing = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
        return [replace(compared(title, payload), rows=[{name: row[name] for name in differing} for row in rows])]

    return show


def _table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    numbers = comparison_numbers(rows)
    return [dict(zip(numbers["columns"], line, strict=True)) for line in numbers["rows"]]


def compared(title: str, payload: Payload) -> Section:
    """The section of a document without its pictures: grade, sentence of its accuracy, and folded checks and texts."""
    return Section(
        title,
        finding=finding(payload),
        checks=[*grades(payload), *checks(payload)],
        details=_BETWEEN.join((f"{payload['workload']}.", *payload["basis"], *payload.get("remarks", ()))),
        badge=badge(payload),
        is_half=True,
    )


def fig3(payload: Payload, _: Bench) -> list[Section]:
    """Three requests in one pool, slot by slot: in chunks, and beside them in blocks."""
    groups = {name: parts for pool in payload["pools"] for name, parts in _holdings(pool).items()}
    chunks, blocks = payload["pools"]
    title = "Slots of three requests, reserved whole and in blocks"
    subtitle = (
        f"A square is one of {chunks['slots']:,} slots. In chunks {_listed(chunks['running'])} run and"
        f" {_listed(chunks['waiting'])} waits beside {free_slots(chunks):,} free slots. In blocks {_listed(blocks['running'])} run"
        f" and {free_slots(blocks):,} slots are free."
    )
    section = compared("Fig 3: slots of two requests", payload)
    table = _table(for_reports(payload)["rows"])
    grid = figures.slot_grid(title, subtitle, groups)
    definitions = definitions_of(payload["rows"])
    return [replace(section, figures=[grid], folded_rows=table, definitions=definitions, is_half=False)]


def _holdings(pool: Mapping[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """Name of a group of slots, and its parts: a group for each chunk and for what is free, or for all blocks."""
    found: dict[str, list[tuple[str, int]]] = {}
    for part in pool["parts"]:
        if pool["policy"] == BLOCKS:
            name = f"blocks of<br>{_listed(pool['running'])}"
        elif part["holder"] is None:
            name = f"free,<br>{_listed(pool['waiting'])} waits"
        else:
            name = f"chunk<br>of {_listed([part['holder']])}"
        found.setdefault(name, []).append((part["contents"], part["slots"]))
    return found


def _listed(requests: Iterable[str]) -> str:
    """The letters of "Request A" and others."""
    return ", ".join(name.removeprefix("Request ") for name in requests)


def varied(title: str, picture: Callable[[Payload], go.Figure], of: str) -> Callable[[Payload, Bench], list[Section]]:
    """One section with a picture; folded, a table of the values at other settings of a parameter, which ``of`` says."""

    def show(payload: Payload, bench: Bench) -> list[Section]:
        sensitivity, [section] = payload["sensitivity"], shown(title, picture)(payload, bench)
        details = _BETWEEN.join((section.details, f"{of}: {sensitivity['workload']}."))
        return [replace(section, details=details, folded_rows=_by_parameter(sensitivity["rows"]))]

    return show


def fig2(payload: Payload, bench: Bench) -> list[Section]:
    """The bars; folded, a table of them at other scales of the step time, and the pool over time."""
    text = "One number is fitted, the scale s of the step time. The table shows the bars at other scales"
    [section] = varied("Fig 2: use of the KV pool", figures.fig2, text)(payload, bench)
    over_time, ledgers = _ledgers(payload, bench)
    return [replace(section, details=_BETWEEN.join((section.details, over_time)), folded_figures=ledgers)]


fig13a = varied("Fig 13a: mean batch", figures.fig13a, "The table shows the same at other scales of the step time")
fig15 = varied(
    "Fig 15: memory saved by sharing",
    figures.fig15,
    "The survival q is fitted, on two beams. The table shows the values at others",
)


def waste(payload: Payload, bench: Bench) -> list[Section]:
    """Every policy's pool in the paper's view; folded, the change of each value over seeds and step times, the same slot by slot,
    and the pool over time."""
    bars, slots = waste_pictures(payload)
    slot_metrics = view_metrics(SLOTS_VIEW)
    moving = _table(row for row in payload["rows"] if row["metric"] not in slot_metrics)
    over_time, ledgers = _ledgers(payload, bench)
    section = compared("The waste table: one trace, one pool, every policy", payload)
    details = _BETWEEN.join((section.details, moved_line(payload), over_time))
    folded = [slots, *ledgers]
    return [replace(section, figures=[bars], folded_rows=moving, folded_figures=folded, details=details, is_half=False)]


def waste_pictures(payload: Payload) -> list[go.Figure]:
    """The pictures of a waste table: in the paper's view, and slot by slot."""
    rows = for_reports(payload)["rows"]
    return [figures.waste(rows, view) for view in VIEWS.values()]


def moved_line(payload: Payload) -> str:
    """From the paper's view of a waste table to its slots: the sums, and the numbers of the policy with the most internal."""
    most = max(for_reports(payload)["rows"], key=itemgetter("internal_pct"))
    moved = moved_text({bucket: most[f"{bucket}_pct"] for bucket in SLOTS_VIEW.categories})
    sentence = f" {most['policy']}: {moved}." if moved else ""
    return f"In {PAPER_VIEW.title} {'; '.join(sums())}.{sentence}"


def _ledgers(payload: Payload, bench: Bench) -> tuple[str, list[go.Figure]]:
    """The pool of every system of a document over time, on Fig 2's workload, and what the pictures show."""
    seed = payload["seeds"][0]
    text = (
        f"The ledger over time: every slot of the pool over the {FIG2.duration_s:g} s in which requests arrive:"
        f" {bench.source.description(FIG2, (seed,))}. Fig 2 measures from {FIG2.window_s[0]:g} s to"
        f" {FIG2.window_s[1]:g} s."
    )
    systems = {row["series"] for row in payload["rows"]}
    cases = {name: Case(FIG2, seed, policy, payload["step_scale"]) for policy, name in NAMES.items() if name in systems}
    return text, [figures.ledger_over_time(bench.timeline(case), name) for name, case in cases.items()]


def _by_parameter(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Values at several settings of a parameter: a row for each value, a column for each setting."""
    key = not_none(parameter_of(rows))
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=itemgetter(key)):
        name = metric_label(row["metric"]) + (", %" if is_percent(row["metric"]) else "")
        at = {} if row.get("x") is None else {"At": row["x"]}
        start = {"Series": row["series"], "Value": name, **at, "Published": row["published"]}
        line = found.setdefault((row["series"], row["metric"], row.get("x")), start)
        line[f"{PARAMETERS[key][0]} = {row[key]:.2f}"] = row["simulated"]
    return list(found.values())
