"""The documents of figures in Markdown: ``reproduce --markdown``, and the parts of docs/results/reproduction.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ...reports.page.table import Table, markdown
from ...reports.style.labels import (
    definitions_of,
    difference,
    metric_label,
    number,
    origin,
    step_text,
    view_metrics,
)
from ...sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, View, definition_lines
from ..paper.comparison import Payload
from ..paper.rows import Row
from .headlines import headline
from .scorecard import name_of
from .text import SUMMARY_NOTE, finding_lines, summary_lines, summary_rows

_COLUMNS = ("series", "value", "at", "published", "how", "simulated", "seeds", "per 1 %", "error")
_OF_PAIRS = ("exact pairs", "seeds", "error")
#: Keys of the rows of a comparison; other rows are shown as they are.
_COMPARED = {"series", "metric", "published", "x"}


def document(title: str, lead: str, figures: Mapping[str, Payload]) -> str:
    """All figures under a title, the summary of their errors first where there are several."""
    parts = [f"# {title}\n", lead]
    if len(figures) > 1:
        parts += summary("Accuracy against the paper", figures)
    for name, each in figures.items():
        parts += section(name, each)
    return "\n".join(parts) + "\n"


def summary(title: str, figures: Mapping[str, Payload]) -> Iterator[str]:
    """Accuracy of each figure."""
    yield f"\n## {title}\n"
    yield f"{SUMMARY_NOTE}\n"
    yield "\n".join(Table.of_records(summary_lines(summary_rows(figures.values()))).markdown())


def section(name: str, figure: Payload, on_pairs: Payload | None = None) -> Iterator[str]:
    """A figure: its load, its values by view, and its findings.

    Args:
        on_pairs: The same figure on the paper's own length pairs, whose values stand beside.
    """
    yield f"\n## {name_of(name)}\n"
    yield f"{figure['workload']}.\n"
    for view, rows in _by_view(figure["rows"]):
        definitions = definition_lines(view.definitions() if view is SLOTS_VIEW else definitions_of(rows))
        if definitions:
            yield f"{view.title.capitalize()}:\n"
            yield "".join(f"- {text}\n" for text in definitions)
        yield "\n".join(_table(rows, on_pairs["rows"] if on_pairs else [])) + "\n"
    yield from (f"- {text}" for text in _merged(_sentences(figure), _sentences(on_pairs) if on_pairs else None))


def _by_view(rows: Sequence[Row]) -> Iterator[tuple[View, list[Row]]]:
    """The rows slot by slot after those of the paper's view and all others; most figures have none of them."""
    slots = view_metrics(SLOTS_VIEW)
    yield PAPER_VIEW, [row for row in rows if row.get("metric") not in slots]
    of_slots = [row for row in rows if row.get("metric") in slots]
    if of_slots:
        yield SLOTS_VIEW, of_slots


def _sentences(figure: Payload) -> list[str]:
    found = [headline(figure), *finding_lines(figure), *figure.get("basis", ()), *figure.get("remarks", ())]
    return list(filter(None, found))


def _merged(drawn: Sequence[str], exact: Sequence[str] | None) -> Iterator[str]:
    """Sentences of both lengths: equal ones once, others side by side where they have the same place."""
    if exact is None or drawn == exact:
        yield from drawn
        return
    for one, other in zip_longest(
        [text for text in drawn if text not in exact], [text for text in exact if text not in drawn]
    ):
        yield from (f"{kind}: {text}" for kind, text in (("Drawn lengths", one), ("Exact pairs", other)) if text)
    yield from (text for text in drawn if text in exact)


def _table(rows: Sequence[Row], on_pairs: Sequence[Row]) -> list[str]:
    if not rows[0].keys() >= _COMPARED:
        return markdown([key.replace("_", " ") for key in rows[0]], [map(str, row.values()) for row in rows])
    exact = {_key(row): row for row in on_pairs}
    columns = [*_COLUMNS, *(_OF_PAIRS if exact else ()), "origin"]
    return markdown(columns, [_line(row, exact.get(_key(row)), bool(exact)) for row in rows])


def _key(row: Row) -> tuple[Any, ...]:
    return row["series"], row["metric"], row["x"]


def _line(row: Row, on_pairs: Row | None, with_pairs: bool) -> list[str]:
    metric = row["metric"]
    cells = [row["series"], metric_label(metric), "" if row["x"] is None else f"{row['x']:g}"]
    cells += [number(metric, row["published"]), row.get("how") or "", number(metric, row["simulated"])]
    cells += [_seeds(row), step_text(row), difference(row)]
    if with_pairs:
        exact = on_pairs and [number(metric, on_pairs["simulated"]), _seeds(on_pairs), difference(on_pairs)]
        cells += exact or ["", "", ""]
    return [*cells, origin(row | {"fitted": row["kind"] == "fitted"})]


def _seeds(row: Row) -> str:
    """The range of single seeds."""
    low, high = row.get("minimum"), row.get("maximum")
    return "" if low is None else f"{number(row['metric'], low)} to {number(row['metric'], high)}"
