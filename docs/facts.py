"""Facts that several pages state, measured once: ``python docs/facts.py`` writes docs/facts.json and the pages.

A fact is read from the page that a measuring command writes, or from the code. ``FACTS`` has the phrases that state each on other pages, with
<N> for it: "the public logs of <N> servers". The program writes it there, so that a page is right if the program would not change it; a test
asks just that. docs/facts.json says how often each page states a fact: a phrase that was reworded is missing there, and the test fails.

README.md and README.zh-CN.md also have the grades of the figures, the misses first, between two comments.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
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
        counts: Numbers of figures, and the limits of the grades.
        columns: Head of the table of misses.
        points: The unit of an error in percentage points.
        conclusion: That of Fig 19b, which does not come out: ``here`` and ``published`` are block sizes.
        every, some: Block sizes: all of a number of them, or a list.
    """

    counts: str
    columns: tuple[str, str, str]
    points: str
    conclusion: str
    every: str
    some: str


PAGES = {
    "README.md": Words(
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
        "按抽样长度,{figures} 张图中 {pass_} 张通过(误差 {pass_pct:g} % 以内;百分比为 {pass_points:g} 个百分点),{near} 张接近({near_pct:g} %,"
        "{near_points:g} 个百分点),{miss} 张未达到:",
        ("未达到", "误差最大的值", "误差"),
        "个百分点",
        "**论文图 19b 的结论未能重现:** 重新计算比换出更快的情况,这里是{here};论文中是{published}。",
        "全部 {number} 种块大小",
        "块大小 {sizes}",
    ),
}


class Fact(NamedTuple):
    """A number, or a list of cards, that several pages state.

    Attributes:
        source: The command that measures it.
        value: Reads it.
        said: Phrases that state it, as regular expressions with <N> for it.
        form: What stands in the place of <N>, right or wrong.
    """

    source: str
    value: Callable[[], str]
    said: tuple[str, ...]
    form: str = r"\d+(?:\.\d+)*"


@cache
def _page(name: str) -> str:
    """A page that a command writes, wherever it lies below docs."""
    [path] = (ROOT / "docs").rglob(name)
    return path.read_text("utf-8")


def _found(pattern: str, text: str) -> str:
    [value] = re.findall(pattern, text, re.MULTILINE)
    return str(value)


def _graded(grade: str = "") -> str:
    return str(sum(grade in ("", row.grade) for row in grades(_page("reproduction.md"))))


def _start(row: str, column: int = 0) -> str:
    cells = _found(rf"^\| {row} \| (\d+ \| \d+) \|$", _page("startups.md"))
    return cells.split(" | ")[column]


def _h100(metric: str) -> str:
    """The error of the ten runs that the limits of docs/results/servers.md test."""
    return _found(rf"^\| h100-80gb \(10\) .* \| {metric}, mean \| \S+ \| (\S+)% ", _page("servers.md"))


def _held_out() -> list[tuple[str, str, int]]:
    """Card, model and number of the runs of each row of docs/results/servers.md."""
    section = _page("servers.md").partition("\n## Held-out runs\n")[2]
    rows = re.findall(r"^\| (\S+) (\S+) \((\d+)\)(?: \\\*)? \|", section, re.MULTILINE)
    return [(card, model, int(number)) for card, model, number in rows]


def _cards() -> str:
    """Cards whose results gpu/results has, by NVIDIA's names."""
    found = {
        json.loads(path.read_text("utf-8"))["device"]["name"]
        for path in (ROOT / "gpu" / "results").glob("*/bench.json")
    }
    return ", ".join(sorted({name.removeprefix("NVIDIA ").split()[0] for name in found}))


def _pinned(folder: str, package: str) -> str:
    return _found(rf"^{package}==(\S+)$", (ROOT / "tests" / folder / "requirements.txt").read_text("utf-8"))


_STARTUPS, _SERVERS, _FIGURES = (
    "make startups",
    "make servers",
    "make docs",
)
FACTS = {
    "figures": Fact(_FIGURES, _graded, (r"of <N> figures \[miss", r"<N> 张图中 \d+ 张未达到")),
    "figures_miss": Fact(_FIGURES, lambda: _graded(MISS), (r"<N> of \d+ figures \[miss", r"图中 <N> 张未达到\(")),
    "starts": Fact(
        _STARTUPS,
        lambda: _start("answers that are right", 1),
        (r"<N> \[starts\]", "public logs of <N> servers", r"\d+ of <N> public servers", r"<N> 台\[公开的服务器\]"),
    ),
    "starts_right": Fact(
        _STARTUPS,
        lambda: _start("answers that are right"),
        (r'<N> right \("yes"', r"<N> of \d+ public servers", r"servers: <N> are right", "<N> 台正确"),
    ),
    "starts_yes": Fact(
        _STARTUPS, lambda: _start('"starts" for all would be right'), (r'\("yes": <N>\)', '总答"能":<N>')
    ),
    "starts_depends": Fact(_STARTUPS, lambda: _start('"depends"'), (r'<N> are answered "depends"',)),
    "kv_caches": Fact(
        _STARTUPS,
        lambda: _start("logged KV cache in the interval", 1),
        (r"printed interval for \d+ of <N>", r"<N> 个 KV 缓存中"),
    ),
    "kv_in_interval": Fact(
        _STARTUPS,
        lambda: _start("logged KV cache in the interval"),
        (r"printed interval for <N> of \d+", r"KV 缓存中 <N> 个在区间内"),
    ),
    "server_runs": Fact(
        _SERVERS,
        lambda: _found(
            r"simulates <!-- runs -->(\d+)<!-- end of runs --> published runs of real servers", _page("servers.md")
        ),
        ("<N> runs of real servers", "None of the <N> runs is eager"),
    ),
    "held_out_runs": Fact(
        _SERVERS,
        lambda: str(sum(number for _, _, number in _held_out())),
        (r"\[<N> runs\]\(\S+#held-out-runs\)", r"\[<N> 次运行\]\(\S+#held-out-runs\)"),
    ),
    "held_out_models": Fact(
        _SERVERS,
        lambda: str(len({model for _, model, _ in _held_out()})),
        (r"#held-out-runs\), <N> models", r"种显卡、<N> 个模型的 \["),
    ),
    "held_out_cards": Fact(
        _SERVERS,
        lambda: str(len({card for card, _, _ in _held_out()})),
        (r"#held-out-runs\), \d+ models, <N> cards", r"<N> 种显卡、\d+ 个模型的 \["),
    ),
    "h100_e2e_pct": Fact(_SERVERS, lambda: _h100("E2E"), ("mean E2E <N> %", "平均 E2E <N> %")),
    "h100_tpot_pct": Fact(_SERVERS, lambda: _h100("TPOT"), (r"E2E \S+ %, ?TPOT <N> %",)),
    "h100_ttft_pct": Fact(_SERVERS, lambda: _h100("TTFT"), (r"E2E \S+ %, ?TPOT \S+ %, ?TTFT <N> %",)),
    "cards": Fact(
        "python -m fragmeter.gpu.runbook",
        _cards,
        (r"measured on cards \(<N>\)", r"在显卡 \(<N>\) 上测量", r"ran on cards \(<N>\)"),
        form=r"[A-Z]+\d+(?:, [A-Z]+\d+)*",
    ),
    "vllm": Fact(
        "make test-vllm",
        lambda: _pinned("real_vllm", "vllm").removesuffix(".0"),
        (r"vLLM's own parsers, 0\.8 to <N>", r"`--vllm-release` 0\.9 to <N>", r"unmodified vLLM <N>\.0 wheel"),
    ),
    "sglang": Fact("make test-sglang", lambda: _pinned("real_sglang", "sglang"), ("wheel of SGLang <N>",)),
    "llama_cpp": Fact(
        "make test-llama-cpp",
        lambda: _found(r"--dest \S+ llama-cpp-python==(\S+)$", (ROOT / "Makefile").read_text("utf-8")),
        ("llama-cpp-python <N>",),
    ),
}
#: Pages that commands write: the facts are read from some of them.
_WRITTEN = ("reproduction.md", "startups.md", "servers.md", "CHANGELOG.md")


def measured() -> dict[str, str]:
    """Each fact as pages state it, by its name."""
    return {name: fact.value() for name, fact in FACTS.items()}


def pages() -> Iterator[Path]:
    """Pages that state facts."""
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        if path.name not in _WRITTEN:
            yield path


def with_facts(written: str, values: Mapping[str, str]) -> str:
    """A page with the facts wherever a phrase of ``FACTS`` states one.

    Args:
        written: The page as it is.
        values: Result of ``measured``.
    """
    text = written
    for start, end, name in sorted(_places(written), reverse=True):
        text = text[:start] + values[name] + text[end:]
    return text


def stated(written: str) -> dict[str, int]:
    """How often a page states each fact that it states."""
    return dict(Counter(name for _, _, name in sorted(_places(written))))


def _places(text: str) -> set[tuple[int, int, str]]:
    """Start, end and name of each fact that a page states."""
    places = set()
    for name, fact in FACTS.items():
        for phrase in fact.said:
            before, after = phrase.split("<N>")
            for found in re.finditer(rf"{before}({fact.form}){after}", text):
                places.add((*found.span(1), name))
    return places


def wrong_lines(page: str, written: str, values: Mapping[str, str]) -> list[str]:
    """A sentence for each line of a page that states a fact wrongly."""
    right = with_facts(written, values).split("\n")
    return [
        f"{page}, line {number}: {was.strip()} should be {is_.strip()}; run python docs/facts.py"
        for number, (was, is_) in enumerate(zip(written.split("\n"), right, strict=True), 1)
        if was != is_
    ]


def main() -> None:
    """Write docs/facts.json, the facts into all pages, and the grades into the two front pages."""
    values = measured()
    for path in pages():
        written = path.read_text("utf-8")
        text = with_facts(written, values)
        if path.name in PAGES:
            text = with_grades(path.name, text, _page("reproduction.md"))
        if text != written:
            path.write_text(text, "utf-8")
    (ROOT / "docs" / "facts.json").write_text(json.dumps(listed(values), indent=2) + "\n", "utf-8")


def listed(values: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """docs/facts.json: value, command and pages of each fact."""
    by_page = {str(path.relative_to(ROOT)): stated(path.read_text("utf-8")) for path in pages()}
    return {
        name: {
            "value": values[name],
            "measured_by": fact.source,
            "stated_on": {page: found[name] for page, found in by_page.items() if name in found},
        }
        for name, fact in FACTS.items()
    }


def with_grades(page: str, written: str, text: str) -> str:
    """A page with the grades of docs/results/reproduction.md in place of its own.

    Args:
        page: Name of the page.
        written: The page as it is.
        text: docs/results/reproduction.md.
    """
    before, _, rest = written.partition(BEGIN)
    return f"{before}{BEGIN}\n{block(page, text)}\n{END}{rest.partition(END)[2]}"


def _counts(found: Sequence[Grade]) -> dict[str, int]:
    count = Counter(row.grade for row in found)
    return {"figures": len(found), **{name: count[name] for name in GRADES}}


def block(page: str, text: str) -> str:
    """The grades of ``docs/results/reproduction.md`` in the words of a page: counts, a row for each miss, and the conclusion that fails."""
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
