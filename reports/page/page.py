"""One self-contained HTML page: text, figures, and every figure's numbers as a table.

The page needs no network and can reach none: it embeds plotly.js if it has pictures, and its Content-Security-Policy
forbids every other load. The same content gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from numbers import Integral, Real
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from ...sim.output.files import is_stream, write_whole
from ...sim.types.errors import user_paths
from ..blockmap.palette import legend_colours
from ..data.answer import KeyNumber
from ..style.labels import Numbers, file_stem
from ..style.palette import BAD, DARK, GOOD, GRID, INK, LINK, MIDDLING, MUTED, PAPER, dark

_ROLES = {"ink": INK, "paper": PAPER, "muted": MUTED, "grid": GRID, "link": LINK}
_MOST_DECIMALS = 2
_DIFFERENCE = re.compile(r"[-+]?[\d.]+%?|-")
#: Length of a cell's text, in characters, from which it is wrapped.
_LONG = 60


class Widget(Protocol):
    """A part of the page with a script of its own: templates ``KIND.html.j2``, ``KIND.css.j2`` and ``KIND.js.j2``.

    Attributes:
        kind: Name of the templates.
        figures: Its pictures; the page draws them as it does its others.
        data: Input of its script, as JSON.
        constants: Template variables of script and style, the same for each widget of the kind.
    """

    @property
    def kind(self) -> str: ...

    @property
    def figures(self) -> Sequence[go.Figure]: ...

    @property
    def data(self) -> Any: ...

    @property
    def constants(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, shown as a card. Text is shown as written; it holds no HTML.

    Attributes:
        title: Heading, and entry of the index.
        text: Paragraphs, separated by blank lines, before the pictures.
        figures: Pictures.
        rows: Rows of a table below the pictures; they share their keys, which are the headings.
        folded_rows: Rows of a folded table.
        widgets: Parts with scripts, before the pictures.
        finding: Paragraphs below the pictures.
        checks: Grade and text of each check, folded. Grades with colours are pass, near, miss and fail.
        details: Paragraphs, folded.
        folded_figures: Folded pictures, drawn when they are unfolded.
        fold: Name of all that is folded.
        badge: Grade of the whole section.
        is_half: Whether two such cards stand side by side on a wide page.
        key: Anchor of the section; by default section-N.
        definitions: Headings of the table, or names in the finding, each with one line that defines it.
    """

    title: str
    text: str = ""
    figures: Sequence[go.Figure] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    folded_rows: Sequence[Mapping[str, Any]] = ()
    widgets: Sequence[Widget] = ()
    finding: str = ""
    checks: Sequence[tuple[str, str]] = ()
    details: str = ""
    folded_figures: Sequence[go.Figure] = ()
    fold: str = "Details"
    badge: str = ""
    is_half: bool = False
    key: str = ""
    definitions: Sequence[tuple[str, str]] = ()


def write_page(
    path: str | os.PathLike[str],
    title: str,
    lead: str,
    sections: Sequence[Section],
    refresh_s: int | None = None,
    numbers: Sequence[KeyNumber] = (),
) -> Path:
    """Write the page to ``path`` and return the path; missing folders are made.

    The file appears whole or not at all.

    Args:
        refresh_s: Seconds after which a browser loads the page again, while it is not finished. It stops when the file
            has not changed for ten minutes.
        numbers: The numbers of the first screen, below the first paragraph of ``lead``, which then is the answer.

    Raises:
        UserError: It cannot be written.
    """
    target = Path(path)
    if not is_stream(target):
        with user_paths(target):
            target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, render_page(title, lead, sections, refresh_s, numbers))
    return target


def render_page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    refresh_s: int | None = None,
    numbers: Sequence[KeyNumber] = (),
) -> str:
    """The page as text; see ``write_page``."""
    folder = Path(__file__).with_name("templates")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    counter = count(1)
    widgets = [widget for section in sections for widget in section.widgets]
    kinds = dict.fromkeys(widget.kind for widget in widgets)
    constants = {name: value for widget in widgets for name, value in widget.constants.items()}
    has_pictures = any(widget.figures for widget in widgets)
    has_pictures |= any(section.figures or section.folded_figures for section in sections)
    return environment.get_template("page.html.j2").render(
        title=title,
        lead=_paragraphs(lead),
        numbers=numbers,
        sections=[_section(section, at, counter) for at, section in enumerate(sections, start=1)],
        refresh_s=refresh_s,
        good=GOOD,
        middling=MIDDLING,
        bad=BAD,
        # 4.8 MB, which a page without pictures does without.
        plotly_js=get_plotlyjs() if has_pictures else "",
        light=_ROLES,
        dark={role: dark(colour) for role, colour in _ROLES.items()},
        dark_of=json.dumps(DARK | legend_colours(), sort_keys=True),
        scripts=[f"{kind}.js.j2" for kind in kinds],
        styles=[f"{kind}.css.j2" for kind in kinds],
        **constants,
    )


def page_title(kind: str, name: str) -> str:
    """The title of a page on something with a name; a name that only repeats the kind is left out."""
    return kind if name.lower() == kind.lower() else f"{kind} {name}"


def as_script(value: Any) -> str:
    """A value as JSON inside a script. "<" is escaped, because "</script>" or "<!--" would end the script."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _widget(widget: Widget, serials: Iterator[int]) -> dict[str, Any]:
    return {
        "template": f"{widget.kind}.html.j2",
        "of": widget,
        "serial": next(serials),
        "pictures": [_picture(figure, next(serials)) for figure in widget.figures],
        "data": as_script(widget.data),
    }


def _section(section: Section, at: int, counter: Iterator[int]) -> dict[str, Any]:
    widgets = [_widget(widget, counter) for widget in section.widgets]
    pictures = [_picture(figure, next(counter)) for figure in section.figures]
    folded = [_picture(figure, next(counter)) for figure in section.folded_figures]
    shown = [picture for widget in widgets for picture in widget["pictures"]]
    _define_once([*shown, *pictures, *folded], section.definitions)
    return {
        "id": section.key or f"section-{at}",
        "title": section.title,
        "badge": section.badge,
        "finding": _paragraphs(section.finding),
        "checks": section.checks,
        "details": _paragraphs(section.details),
        "paragraphs": _paragraphs(section.text),
        "widgets": widgets,
        "picture_rows": [(small, list(row)) for small, row in groupby(pictures, key=itemgetter("is_small"))],
        "folded_pictures": folded,
        "definitions": section.definitions,
        "fold": section.fold,
        "is_half": section.is_half,
        "table": _table(_rows_as_numbers(section.rows)) if section.rows else None,
        "folded_table": _table(_rows_as_numbers(section.folded_rows)) if section.folded_rows else None,
    }


def _define_once(pictures: Sequence[dict[str, Any]], known: Sequence[tuple[str, str]]) -> None:
    """Keep a definition beside the first picture of a section alone, and none that the section itself has."""
    seen = {label for label, _ in known}
    for picture in pictures:
        picture["definitions"] = [pair for pair in picture["definitions"] if pair[0] not in seen]
        seen |= {label for label, _ in picture["definitions"]}


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


def _picture(figure: go.Figure, serial: int) -> dict[str, Any]:
    # The page prints heading and numbers itself, with line breaks and for screen readers; plotly draws the rest.
    spec = json.loads(plotly.io.to_json(figure, validate=False, engine="json"))
    layout = spec["layout"]
    heading = layout.pop("title")
    meta = layout.pop("meta")
    numbers = meta["numbers"]
    return {
        "serial": serial,
        "title": heading["text"],
        "subtitle": heading["subtitle"]["text"],
        "height_px": layout["height"],
        "is_small": "width" in layout,
        "spec": as_script(spec),
        "table": _table(numbers),
        "data": as_script(meta.get("data", numbers)),
        "closer": as_script(meta["closer"]) if "closer" in meta else "",
        "definitions": meta.get("definitions", []),
        "csv": f"{file_stem(heading['text'])}.csv",
    }


def _rows_as_numbers(rows: Sequence[Mapping[str, Any]]) -> Numbers:
    return {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}


def _table(numbers: Numbers) -> dict[str, Any]:
    columns = list(zip(*numbers["rows"])) or [()] * len(numbers["columns"])
    shown = [_column(values) for values in columns]
    return {
        "columns": numbers["columns"],
        "numeric": [all(_is_figure(value) for value in values) for values in columns],
        "long": [any(isinstance(value, str) and len(value) > _LONG for value in values) for values in columns],
        "rows": list(zip(*shown)),
    }


def _column(values: Sequence[Any]) -> list[str]:
    decimals = max((_decimals(value) for value in values if _is_number(value)), default=0)
    return [_cell(value, decimals) for value in values]


def _cell(value: Any, decimals: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, decimals) + 0:,.{decimals}f}" if _is_number(value) else str(value)


def _is_figure(value: Any) -> bool:
    """Whether a cell is right-aligned: a number, a difference as ``labels`` formats it, or an empty cell."""
    return value is None or _is_number(value) or (isinstance(value, str) and bool(_DIFFERENCE.fullmatch(value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _decimals(value: float) -> int:
    if isinstance(value, Integral) or math.isnan(value):
        return 0
    fraction = f"{value:.{_MOST_DECIMALS}f}".partition(".")[2].rstrip("0")
    return max(1, len(fraction))
