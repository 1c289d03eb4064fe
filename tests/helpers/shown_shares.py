"""Shares of the KV pool as a reader finds them in what the program shows: text of a terminal, and pages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, UNUSED, Category

CATEGORIES: tuple[Category, ...] = (*PAPER_VIEW.categories.values(), *SLOTS_VIEW.categories.values(), UNUSED)
LABELS = {category.label for category in CATEGORIES}
#: A name of a run or system, a label, and percent of the pool.
Share = tuple[str, str, float]


def in_lines(name: str, text: str) -> Iterator[Share]:
    """Lines "label  share ..." of a table of one run."""
    for line in text.splitlines():
        label, *cells = re.split(r"\s{2,}", line.strip())
        if label in LABELS and cells:
            yield name, label, float(cells[0])


def in_columns(text: str) -> Iterator[Share]:
    """A waste table: columns have the order of the definitions below it."""
    before, _, below = text.partition(": slots ")
    labels = [line.partition(": slots ")[0] for line in text.splitlines() if ": slots " in line]
    assert labels and below
    for line in before.splitlines():
        name, *cells = re.split(r"\s{2,}| (?=[\d.]+(?: |$))", line.strip())
        if len(cells) >= len(labels) and all(re.fullmatch(r"[\d.,]+", cell) for cell in cells):
            yield from ((name, label, float(cell)) for label, cell in zip(labels, cells))


class Page(HTMLParser):
    """A page: its tables, and the text that is seen before anything is unfolded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.seen = ""
        self._folds, self._hidden, self._cell = 0, 0, False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._folds += tag == "details"
        self._hidden += tag in ("script", "style")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("th", "td") and self.tables:
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._folds -= tag == "details"
        self._hidden -= tag in ("script", "style")
        self._cell &= tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data
        if not self._folds and not self._hidden:
            self.seen += data

    def shares(self) -> Iterator[Share]:
        """Shares in tables with a column for each category, or a row for each; none of a table over time or over a parameter."""
        for table in self.tables:
            head = [cell.strip() for cell in table[0]]
            for row in table[1:]:
                for heading, cell in zip(head, row):
                    label = heading.removesuffix(", %").lower()
                    if head[0] in ("Policy", "Candidate") and label in LABELS:
                        yield row[0], label, float(cell)
                if "Simulated" in head and row[1].removesuffix(", %") in LABELS:
                    yield row[0], row[1].removesuffix(", %"), float(row[head.index("Simulated")])


def by_name(shares: Iterable[Share]) -> dict[tuple[str, str], list[float]]:
    """All values of each label of each run or system."""
    found = defaultdict(list)
    for name, label, value in shares:
        found[name, label].append(value)
    return dict(found)


def undefined(text: str, shares: Iterable[Share]) -> list[str]:
    """Labels that a text shows a share of and does not define in a line."""
    flat = " ".join(text.split())
    defined = {category.label for category in CATEGORIES if category.defined in flat}
    return sorted({label for _, label, _ in shares} - defined)
