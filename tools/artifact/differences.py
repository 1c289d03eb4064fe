"""A table of differences: pages that were made again, beside those of the same name in docs/results.

python -m tools.artifact.differences PAGE [PAGE ...]

Every cell of every table of a page is compared with the cell of the same section, table row and column in docs/results. Sections and the
column of the paper's own length pairs, which no archive has, are left out. The exit status is 1 if a cell differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

EXPECTED = Path(__file__).resolve().parents[2] / "docs" / "results"
#: In the names of sections and columns that need the paper's own length pairs.
_PAIRS = "exact pairs"
#: Section, row of the section's tables, column.
Place = tuple[str, int, str]


def cells(text: str) -> dict[Place, str]:
    """Cells of all tables of a page. Of two columns with one name the first counts."""
    found: dict[Place, str] = {}
    section, row, columns = "", 0, list[str]()
    for line in text.splitlines():
        if line.startswith("#"):
            section, row = line.lstrip("# "), 0
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = _split(line)
        elif not re.fullmatch(r"[|:\- ]+", line):
            row += 1
            for column, cell in zip(columns, _split(line), strict=True):
                found.setdefault((section, row, column), cell)
    return found


def differing(expected: str, got: str) -> tuple[dict[str, int], list[tuple[Place, str, str]]]:
    """Number of compared cells by section, and the cells that differ: place, expected, got.

    A cell that only one page has differs, but for those on the paper's own length pairs.
    """
    old, new = cells(expected), cells(got)
    counts: dict[str, int] = {}
    found = []
    for place in dict.fromkeys([*new, *old]):
        section, _, column = place
        if _PAIRS not in section and column != _PAIRS:
            counts[section] = counts.get(section, 0) + 1
            pair = old.get(place, "(none)"), new.get(place, "(none)")
            if pair[0] != pair[1]:
                found.append((place, *pair))
    return counts, found


def table(page: Path) -> Iterator[str]:
    """Lines that say how a page differs from the one in docs/results."""
    counts, found = differing((EXPECTED / page.name).read_text("utf-8"), page.read_text("utf-8"))
    yield f"## {page.name}: {len(found)} of {sum(counts.values())} cells differ\n"
    yield "| section | cells | differ |\n|---|---|---|"
    for section, count in counts.items():
        yield f"| {section} | {count} | {sum(place[0] == section for place, _, _ in found)} |"
    if found:
        yield "\n| section | row | column | expected | got |\n|---|---|---|---|---|"
        for (section, row, column), old, new in found:
            yield f"| {section} | {row} | {column} | {old} | {new} |"


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def main(*pages: str) -> int:
    """Print the table of each page; 1 if any cell differs."""
    lines = [line for page in pages for line in table(Path(page))]
    print("\n".join(lines))
    return int(any(re.match(r"## \S+: [1-9]", line) for line in lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
