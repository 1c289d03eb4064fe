"""The tables of an HTML page, as a reader sees them."""

from __future__ import annotations

from html.parser import HTMLParser


class _Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._is_cell = False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.tables[-1][-1][-1] += data


def tables_of(html: str) -> list[list[dict[str, str]]]:
    """The rows of each table, as texts by the heading of their column."""
    parser = _Tables()
    parser.feed(html)
    return [[dict(zip(head, row, strict=True)) for row in rows] for head, *rows in parser.tables]


def table_with(html: str, *headings: str) -> list[dict[str, str]]:
    """The rows of the only table that has these headings."""
    (found,) = (rows for rows in tables_of(html) if rows and set(headings) <= set(rows[0]))
    return found
