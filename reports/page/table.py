"""One table, and what it is on a terminal, on a page and in Markdown.

    Table -> __rich__       rich's table, 80 columns wide at most: ``console.print(table)``
          -> records()      rows by heading: for ``page.Section.rows``, and for JSON
          -> markdown()     lines of Markdown

A cell is a text, or a value that each form writes in its own way: the terminal and Markdown with four digits, a page with as many
decimals as its column needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table as RichTable

from ...sim.types.errors import UserError


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: On the terminal it may have several lines.
        is_text: Whether it is left-aligned.
        wraps: Whether a cell may take several lines of a terminal; a word that is too long is divided.
        least_width: Characters that it keeps on a narrow terminal.
    """

    heading: str
    is_text: bool = False
    wraps: bool = False
    least_width: int | None = None


class _Row(NamedTuple):
    cells: tuple[Any, ...]
    bold: bool
    ends_group: bool


class Table:
    """A table that is filled row by row.

    Args:
        columns: A bare heading is a column of numbers, but the first one, of names: neither wraps.
        title: Line above it, on a terminal.
        gap: Blanks between two columns on a terminal, 1 to 3.
    """

    def __init__(self, *columns: str | Column, title: str | None = None, gap: int = 3) -> None:
        self.columns = [
            Column(each, is_text=not place) if isinstance(each, str) else each for place, each in enumerate(columns)
        ]
        self._title, self._gap = title, gap
        self._rows: list[_Row] = []

    @classmethod
    def of_records(cls, rows: Sequence[Mapping[str, Any]]) -> Table:
        """A table of rows that share their keys, the headings. Columns without any text are numbers."""
        texts = [any(isinstance(row[name], str) for row in rows) for name in rows[0]]
        found = cls(*(Column(name, is_text) for name, is_text in zip(rows[0], texts, strict=True)))
        for row in rows:
            found.add_row(*row.values())
        return found

    def add_row(self, *cells: Any, bold: bool = False, ends_group: bool = False) -> None:
        """Add a row; cells that are missing at its end are empty."""
        self._rows.append(_Row(cells, bold, ends_group))

    def records(self) -> list[dict[str, Any]]:
        """The rows by heading."""
        return [dict(zip((each.heading for each in self.columns), row.cells)) for row in self._rows]

    def markdown(self) -> list[str]:
        """The lines of a table of Markdown."""
        return markdown([each.heading for each in self.columns], [row.cells for row in self._rows])

    def __rich__(self) -> RichTable:
        left, right = (self._gap > 2, self._gap > 1)
        found = RichTable(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, int(right), 0, int(left)),
            title=self._title,
            title_justify="left",
        )
        for each in self.columns:
            found.add_column(
                each.heading,
                justify="left" if each.is_text else "right",
                no_wrap=not each.wraps,
                overflow="fold" if each.wraps else "ellipsis",
                min_width=each.least_width,
            )
        for row in self._rows:
            found.add_row(*map(cell_text, row.cells), style="bold" if row.bold else None, end_section=row.ends_group)
        return found


def markdown(headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """The lines of a table of Markdown; cells as on a terminal, and a missing value is empty."""
    texts = (("" if cell is None else cell_text(cell) for cell in row) for row in rows)
    return [_line(headings), "|" + "---|" * len(headings), *map(_line, texts)]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """A page of Markdown with each part between its comments, ``<!-- NAME -->`` and ``<!-- end of NAME -->``; all else stays.

    Raises:
        UserError: The page has no place for a part.
    """
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        old, closed, after = rest.partition(end)
        if not (found and closed):
            raise UserError(f"the page has no {begin} with {end} after it; give a new file to get the parts alone")
        # A number within a sentence stays on its line.
        page = before + begin + (f"\n\n{text}\n\n" if "\n" in old else text) + end + after
    return page


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def cell_text(value: Any) -> str:
    """A value as text: floats with four digits, and a hyphen for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else value
