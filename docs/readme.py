"""Write the grades of docs/reproduction.md into README.md and README.zh-CN.md, the misses first: ``python docs/readme.py``.

The grades stand between two comments of each page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fragmeter.experiments.paper.grades import GRADES, LIMITS, MISS, PERCENT, POINTS
from fragmeter.experiments.reproduce.scorecard import name_of

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- grades: make docs -->", "<!-- end of the grades -->"


class Grade(NamedTuple):
    """A row of the summary: a figure, its worst error as text, at which value, and its grade."""

    figure: str
    worst: str
    at: str
    grade: str


class Words(NamedTuple):
    """Sentences of a page in its language.

    Attributes:
        front: A sentence at the top of the page, of which only the numbers change.
        counts: Numbers of figures, and the limits of the grades.
        columns: Head of the table of misses.
        points: The unit of an error in percentage points.
        conclusion: That of Fig 19b, which does not come out: ``here`` and ``published`` are block sizes.
        every, some: Block sizes: all of a number of them, or a list.
    """

    front: str
    counts: str
    columns: tuple[str, str, str]
    points: str
    conclusion: str
    every: str
    some: str


PAGES = {
    "README.md": Words(
        "{miss} of {figures} figures miss",
        "Of {figures} figures, drawn lengths, {pass_} pass (within {pass_pct:g} %; percentages, {pass_points:g} points), {near} are near"
        " ({near_pct:g} %, {near_points:g} points), {miss} miss:",
        ("miss", "worst value", "error"),
        "points",
        "**The paper's conclusion of Fig 19b does not come out:** recomputing is quicker than swapping at {here}; in the paper at"
        " {published}.",
        "all {number} block sizes",
        "block sizes {sizes}",
    ),
    "README.zh-CN.md": Words(
        "{figures} 张图中 {miss} 张未达到",
        "按抽样长度,{figures} 张图中 {pass_} 张通过(误差 {pass_pct:g} % 以内;百分比为 {pass_points:g} 个百分点),{near} 张接近({near_pct:g} %,"
        "{near_points:g} 个百分点),{miss} 张未达到:",
        ("未达到", "误差最大的值", "误差"),
        "个百分点",
        "**论文图 19b 的结论未能重现:** 重新计算比换出更快的情况,这里是{here};论文中是{published}。",
        "全部 {number} 种块大小",
        "块大小 {sizes}",
    ),
}


def main() -> None:
    """Write the grades into both pages."""
    text = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_grades(name, path.read_text("utf-8"), text), "utf-8")


def with_grades(page: str, written: str, text: str) -> str:
    """A page with the grades of ``docs/reproduction.md`` in place of its own.

    Args:
        page: Name of the page.
        written: The page as it is.
        text: ``docs/reproduction.md``.
    """
    before, _, rest = written.partition(BEGIN)
    front = re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(PAGES[page].front))
    counted = re.sub(front, PAGES[page].front.format(**_counts(grades(text))), before, count=1)
    return f"{counted}{BEGIN}\n{block(page, text)}\n{END}{rest.partition(END)[2]}"


def _counts(found: Sequence[Grade]) -> dict[str, int]:
    count = Counter(row.grade for row in found)
    return {"figures": len(found), **{name: count[name] for name in GRADES}}


def block(page: str, text: str) -> str:
    """The grades of ``docs/reproduction.md`` in the words of a page: counts, a row for each miss, and the conclusion that fails."""
    words, found = PAGES[page], grades(text)
    limits = {
        f"{grade}_{name}": limit
        for name, unit in (("pct", PERCENT), ("points", POINTS))
        for grade, limit in zip(("pass", "near"), LIMITS[unit], strict=True)
    }
    counts = _counts(found)
    lines = [words.counts.format(pass_=counts["pass"], **counts, **limits)]
    rows = [
        [name_of(row.figure), row.at, row.worst.replace("points", words.points)] for row in found if row.grade == MISS
    ]
    table = [words.columns, *rows]
    head, *body = (f"| {' | '.join(row)} |" for row in table)
    lines += ["", head, "|---|---|---|", *body] if rows else []
    failed = _conclusion(words, text)
    return "\n".join(lines + (["", failed] if failed else []))


def grades(text: str) -> list[Grade]:
    """The rows of the summary of drawn lengths."""
    table = text.partition("\n## Accuracy against the paper\n")[2].partition("\n## ")[0]
    lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [Grade(cells[0], *cells[-3:]) for cells in lines if cells[-1] in GRADES]


def _conclusion(words: Words, text: str) -> str:
    """Fig 19b's: at which block sizes recomputing is quicker; empty if the finding on it passes."""
    section = text.partition("\n## Fig 19b\n")[2].partition("\n## ")[0]
    if not re.search(r"Fail: Recompute or swap", section):
        return ""
    [(here, published)] = re.findall(
        r"lower latency than swapping them at (.+?); published: at (.+?)\.$", section, re.MULTILINE
    )[:1]
    return words.conclusion.format(here=_sizes(words, here), published=_sizes(words, published))


def _sizes(words: Words, text: str) -> str:
    every = re.fullmatch(r"all (\d+) block sizes", text)
    return words.every.format(number=every[1]) if every else words.some.format(sizes=re.sub(r"block sizes? ", "", text))


if __name__ == "__main__":
    main()
