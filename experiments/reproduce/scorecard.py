"""The grade of each figure, and the first section of the page, which has all of them beside Fig 2's bars."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_lowercase

from ...reports.figures import figures
from ...reports.page.page import Section
from ...reports.page.scorecard import Score, Scorecard
from ...reports.style.labels import is_percent, metric_label, number, unit
from ..paper.comparison import Payload
from ..paper.grades import GRADES, LIMITS, PERCENT, POINTS
from ..paper.rows import Row, place_text
from .headlines import headline
from .text import RULE, WASTE, for_reports, known_values, predicted_errors, summary_rows, worst_value

KEY, TITLE = "scorecard", "Does it reproduce?"
_NOTE = (
    f"{RULE} Dots are single values, the shaded band is a pass, and a coloured dot is more than two and a half times as far"
    " off."
)
_LEAST_ROWS = 3


def name_of(figure: str) -> str:
    """A figure's name as the paper writes it: Fig 12a, Table 1."""
    found = re.fullmatch(r"(fig|table)(\d+\w?)", figure)
    return f"{found[1].capitalize()} {found[2]}" if found else figure.replace("-", " ").capitalize()


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
    return [(row["grade"], f"All of it: {_in_sentence(_accuracy(document, row))}") for row in graded(document)]


def _in_sentence(text: str) -> str:
    """A sentence behind a colon."""
    return text[0].lower() + text[1:]


def finding(document: Payload) -> str:
    """What the figure shows, in the paper and in the simulation, and the accuracy of its predicted values."""
    return " ".join(filter(None, (headline(document), *(_accuracy(document, row) for row in graded(document)))))


def _accuracy(document: Payload, of_unit: Row) -> str:
    """A sentence on the predicted values of a unit, from a row of ``summary_rows``."""
    count, points = of_unit["predicted"], f"\u00a0{of_unit['unit']}"
    values = f"{count} predicted values" if count > 1 else "predicted value"
    if not of_unit["worst_error"]:
        return f"The {values} equal{'' if count > 1 else 's'} the published."
    worst = worst_value(document, of_unit["unit"])
    metric, quantity = worst["metric"], _unit(worst["metric"])
    found = f"{number(metric, worst['simulated'])}{quantity}, published {number(metric, worst['published'])}"
    which = f"The worst of the {values}" if count > 1 else f"The {values}"
    mean = f"; the mean error is {of_unit['mean_error']:.1f}{points}" if count > 1 else ""
    return f"{which} is {_place(document, worst)}: {found} ({of_unit['worst_error']:+.1f}{points}){mean}."


def _place(document: Payload, row: Row) -> str:
    """The name of a value in a sentence."""
    name = f"{row['series']}, {metric_label(row['metric'])}"
    if row.get("x") is None:
        return name
    return f"{name} at {place_text(row['x'], document.get('x_is', ''))}"


def _unit(metric: str) -> str:
    """The unit behind a value; empty where the metric's label has it."""
    named = "%" if is_percent(metric) else unit(metric)
    return "" if named == metric_label(metric) else f"\u00a0{named}"


def first_section(documents: Mapping[str, Payload], titles: Mapping[str, str]) -> list[Section]:
    """The section, or none with too few graded figures.

    Args:
        documents: By name of the figure, in the order of the page.
        titles: Heading of each figure's section, by name.
    """
    rows = [
        _score(name, document, titles) for name, document in documents.items() if name != WASTE and graded(document)
    ]
    if len(rows) < _LEAST_ROWS:
        return []
    picture = figures.fig2(for_reports(documents["fig2"])) if "fig2" in documents else None
    known = constants(documents)
    notes = [f"{counts_text(known, documents)} Each is named below.", _NOTE] if known else [_NOTE]
    card = Scorecard(picture, rows, notes)
    fold = f"The {len(known)} fitted constants"
    return [Section(TITLE, _answer(documents, rows), widgets=[card], folded_rows=known, fold=fold, key=KEY)]


def constants(documents: Mapping[str, Payload]) -> list[Row]:
    """The fitted numbers of the documents, one row each: its name, its value, on what it was fitted, and where it is used."""
    used: dict[tuple[str, str, str], list[str]] = {}
    for name, document in documents.items():
        for constant in document.get("constants", ()):
            key = constant["name"], f"{constant['value']:.4g}", constant["on"]
            used.setdefault(key, []).append(name)
    return [
        {"Value": value, "Constant": constant, "Fitted on": on, "Used by": _together(names)}
        for (constant, value, on), names in sorted(used.items(), key=lambda one: _figure_number(one[0][2]))
    ]


def _together(figures: Sequence[str]) -> str:
    """Names of figures, with the panels of one together: "Fig 2, Figs 12a to f, Waste"."""
    panels: dict[str, list[str]] = {}
    for name in figures:
        panel = re.fullmatch(r"(Fig \d+)([a-z])", name_of(name))
        panels.setdefault(panel[1] if panel else name_of(name), []).append(panel[2] if panel else "")
    return ", ".join(_panels(figure, letters) for figure, letters in panels.items())


def _panels(figure: str, letters: Sequence[str]) -> str:
    if len(letters) == 1:
        return f"{figure}{letters[0]}"
    in_a_row = len(letters) > 2 and "".join(letters) in ascii_lowercase
    named = f"{letters[0]} to {letters[-1]}" if in_a_row else ", ".join(letters)
    return f"{figure.replace('Fig', 'Figs')}{named}"


def _figure_number(fitted_on: str) -> int:
    found = re.search(r"Fig (\d+)", fitted_on)
    return int(found[1]) if found else 0


def counts_text(known: Sequence[Row], documents: Mapping[str, Payload]) -> str:
    """Sentences: how many constants are fitted, by the figure that decides them, and how many values are predicted.

    Args:
        known: As ``constants`` has them.
    """
    by_figure = Counter(f"Fig {_figure_number(row['Fitted on'])}" for row in known)
    counts = Counter(row["kind"] for name, each in documents.items() if name != WASTE for row in _compared(each))
    on = ", ".join(f"{count} on {figure}" for figure, count in by_figure.items())
    return (
        f"{len(known)} constants are fitted: {on}. The {counts['fitted']} published {_values(counts['fitted'])} that they were"
        f" fitted on {'have' if counts['fitted'] != 1 else 'has'} no grade; the other {counts['predicted']} are predicted."
    )


def _values(count: int) -> str:
    return "value" if count == 1 else "values"


def _compared(document: Payload) -> list[Row]:
    """The rows with a published value that measures accuracy."""
    return [row for one in (POINTS, PERCENT) for row in known_values(document, one)]


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
        sum(row["kind"] == "fitted" for row in _compared(document)),
        errors,
    )


def _answer(documents: Mapping[str, Payload], rows: Sequence[Score]) -> str:
    counts = Counter(row.grade for row in rows)
    worst = max(rows, key=lambda row: max(map(abs, row.errors)))
    parts = [f"{counts[name]} {name}" for name in GRADES if counts[name]]
    answer = f"Grades of {len(rows)} figures: {', '.join(parts)}; the worst is {worst.name} ({worst.worst})."
    if "fig2" not in documents:
        return answer
    [found] = [row for row in summary_rows([documents["fig2"]]) if row["unit"] == POINTS]
    fig2 = (
        f"Fig 2, the waste of the KV cache, has grade {found['grade']}: all {found['predicted']} shares of the pool are within"
        f" {abs(found['worst_error']):.1f} points of the published."
    )
    return f"{fig2} {answer}"
