"""The grade of each figure, and the first section of the page, which has all of them beside Fig 2's bars."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ...reports.figures import figures
from ...reports.page.page import Section
from ...reports.page.scorecard import Score, Scorecard
from ..paper.comparison import Payload
from ..paper.grades import GRADES, LIMITS, POINTS
from ..paper.rows import Row
from .text import RULE, for_reports, predicted_errors, summary_rows

KEY, TITLE = "scorecard", "Does it reproduce?"
_NOTE = (
    f"{RULE} Dots are single values, the shaded band is a pass, and a coloured dot is more than two and a half times as far"
    " off. Values on which a number was fitted are counted apart and have no grade."
)
_LEAST_ROWS = 3
#: Its published values are Fig 2's, which has a grade of its own.
_AGAIN = "waste"


def name_of(figure: str) -> str:
    """Short name of a figure, e.g. "Fig 12a"."""
    found = re.fullmatch(r"(fig|table)(\d+\w?)", figure)
    return f"{found[1].capitalize()} {found[2]}" if found else figure.capitalize()


def paper_order(figure: str) -> tuple[int, str]:
    """Sorts figures as the paper has them; Table 1 is of the set-up of Fig 11, and what the paper lacks comes last."""
    found = re.fullmatch(r"fig(\d+)(\w?)", figure)
    if found:
        return int(found[1]), found[2]
    return (10, "") if figure == "table1" else (100, figure)


def graded(document: Payload) -> list[Row]:
    """The rows of ``summary_rows`` of one document, worst first."""
    rows = summary_rows([document])
    return sorted(rows, key=lambda row: abs(row["worst_error"]) / LIMITS[row["unit"]][0], reverse=True)


def badge(document: Payload) -> str:
    """The grade of a document: that of its worst value; empty without predicted values."""
    return graded(document)[0]["grade"] if graded(document) else ""


def grades(document: Payload) -> list[tuple[str, str]]:
    """The grade of a document with its reason, one pair for each unit; ``badge`` is the worst."""
    return [(row["grade"], f"All of it: {_accuracy(row)}") for row in graded(document)]


def finding(document: Payload) -> str:
    """One sentence of the accuracy of a document; empty without predicted values."""
    return " ".join(map(_accuracy, graded(document)))


def _accuracy(row: Row) -> str:
    count, unit = row["predicted"], f"\u00a0{row['unit']}"
    values = f"{count} predicted values are" if count > 1 else "1 predicted value is"
    if not row["worst_error"]:
        return f"{values} equal to the published."
    mean = f", {row['mean_error']:.1f}{unit} in the mean" if count > 1 else ""
    return (
        f"{values} within {abs(row['worst_error']):.1f}{unit} of the published{mean}; the worst is {row['worst_at']}."
    )


def first_section(documents: Mapping[str, Payload], titles: Mapping[str, str]) -> list[Section]:
    """The section, or none with too few graded figures.

    Args:
        documents: By name of the figure, in the order of the page.
        titles: Heading of each figure's section, by name.
    """
    rows = [
        _score(name, document, titles) for name, document in documents.items() if name != _AGAIN and graded(document)
    ]
    if len(rows) < _LEAST_ROWS:
        return []
    picture = figures.fig2(for_reports(documents["fig2"])) if "fig2" in documents else None
    known = constants(documents)
    counts = sum(row.fitted for row in rows), sum(row.predicted for row in rows)
    fitted = f"Fitted on {counts[0]} values, for {counts[1]} predicted ones: {_listed(known)}."
    card = Scorecard(picture, rows, [fitted, _NOTE] if known else [_NOTE])
    return [
        Section(TITLE, _answer(documents, rows), widgets=[card], folded_rows=known, fold="Fitted constants", key=KEY)
    ]


def constants(documents: Mapping[str, Payload]) -> list[Row]:
    """The fitted numbers of the documents, one row each: its name, its value, on what it was fitted, and where it is used."""
    used: dict[tuple[str, str, str], list[str]] = {}
    for name, document in documents.items():
        for constant in document.get("constants", ()):
            key = constant["name"], f"{constant['value']:.4g}", constant["on"]
            used.setdefault(key, []).append(name_of(name))
    return [
        {"Constant": constant, "Value": value, "Fitted on": on, "Used by": ", ".join(dict.fromkeys(names))}
        for (constant, value, on), names in used.items()
    ]


def _listed(known: Sequence[Row]) -> str:
    """The kinds of constants with their numbers."""
    counts = Counter(row["Constant"].replace("see ", "constants of ") for row in known)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _score(name: str, document: Payload, titles: Mapping[str, str]) -> Score:
    rows = graded(document)
    errors = [error / LIMITS[row["unit"]][0] for row in rows for error in predicted_errors(document, row["unit"])]
    return Score(
        name,
        name_of(name),
        titles[name],
        rows[0]["grade"],
        f"{rows[0]['worst_error']:+.1f}\u00a0{'%' if rows[0]['unit'] == '%' else 'pts'}",
        sum(row["predicted"] for row in rows),
        sum(row["kind"] == "fitted" for row in document["rows"] if "kind" in row),
        errors,
    )


def _answer(documents: Mapping[str, Payload], rows: Sequence[Score]) -> str:
    counts = Counter(row.grade for row in rows)
    worst = max(rows, key=lambda row: max(map(abs, row.errors)))
    parts = [f"{counts[name]} {name}" for name in GRADES if counts[name]]
    answer = (
        f"Of {len(rows)} figures with predicted values {', '.join(parts)}; the worst is {worst.name} ({worst.worst})."
    )
    if "fig2" not in documents:
        return answer
    [found] = [row for row in summary_rows([documents["fig2"]]) if row["unit"] == POINTS]
    return f"Fig 2, the waste of the KV cache: within {abs(found['worst_error']):.1f} points on {found['predicted']} shares. {answer}"
