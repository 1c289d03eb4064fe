"""Write docs/reproduction.md from what ``fragmeter reproduce all --out FOLDER`` left.

python docs/reproduction.py FOLDER docs/reproduction.md [FOLDER-OF-THE-EXACT-PAIRS]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.headlines import headline
from fragmeter.experiments.reproduce.scorecard import constants, counts_text, paper_order
from fragmeter.experiments.reproduce.text import SUMMARY_NOTE, finding_lines, summary_lines, summary_rows
from fragmeter.reports.page.table import markdown
from fragmeter.reports.style.labels import (
    definitions_of,
    difference,
    metric_label,
    number,
    origin,
    step_text,
    view_metrics,
)
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, View, definition_lines

Document = dict[str, Any]
_HEAD = """# The paper, rerun

Every figure of the PagedAttention paper (Kwon et al., SOSP 2023) that a simulation can rerun, published beside
simulated. This file is written by `make docs`;
`fragmeter reproduce all --out out/reproduction` makes the same as a page with pictures, out/reproduction/reproduction.html.

"how" is how the published value is known: a label in the paper, digitised from its plot (1 to 2 % accurate), or its
text.
"per 1 %" is how far a value moves if all steps are 1 % longer or shorter: in points of a percentage, else in percent of
the value. "seeds" is from the lowest to the highest value that single seeds give; where a figure is run with one, others
are run for this column. Both are empty where no requests are drawn and no steps are taken.
"origin" says whether a number was fitted on this very value, or the value is predicted.
"""
_EXACT = """
Where a column says "exact pairs", it was simulated on the paper's own length pairs of ShareGPT and Alpaca, which are not redistributed
(`--trace`, `--alpaca-trace`); the others drew lengths from the summaries that come with the package. A sentence that differs between the two
is there twice, once for each.
"""
_LIMITS = """
The limits are a choice. The paper's text puts vLLM at least 1.7 times ahead of Orca (Oracle) on ShareGPT; if the two rates are 20 % off in opposite
directions a lead of 1.7 is still one (1.7 x 0.8 / 1.2 = 1.13), so a pass keeps the paper's order. Near is twice as far. 4 points
are 20 % of the smallest share of token states in Fig 2 (20.4 %).
"""
_CONSTANTS = """
## Fitted constants

A constant is fitted if published values of the paper decide it; those of data sheets and of kernel tables are not. With drawn lengths (on the exact
pairs the scales of Fig 12, the shares of Fig 14 and Alpaca's scale in Fig 18b have other values, fitted on the same published ones):

{counts} Three are coefficients of OPT-13B's step, which nearly every figure takes, four are of copies, in runs that swap, and five belong to Fig 19a
alone. The other 16 are one constant for one published value: the scale on Fig 13a, with and without context (only Fig 15 has the latter), 5 on Fig 12,
2 on Fig 14, 2 on Fig 15 and 5 on Fig 18b. They serve the figures from Fig 12 on and Fig 2. [rates.md](rates.md#fitted-numbers) explains them.
"""


def main(folder: str, target: str, exact: str | None = None) -> None:
    """Write the file."""
    drawn = _documents(folder, [name for name, figure in FIGURES.items() if figure.in_all])
    # Other figures are the same with and without the pairs.
    on_pairs = (
        _documents(exact, [name for name in drawn if FIGURES[name].traced or FIGURES[name].alpaca]) if exact else {}
    )
    if not drawn:
        sys.exit(f"{folder}: has no figures; run fragmeter reproduce all --out {folder}")
    parts = [
        _HEAD,
        _EXACT if on_pairs else "",
        _missing(drawn),
        *_summary("Accuracy against the paper", drawn),
        _LIMITS,
    ]
    parts += _summary("Accuracy against the paper on the exact pairs", on_pairs) if on_pairs else []
    parts += _constants(drawn)
    for name, document in drawn.items():
        parts += _figure(name, document, on_pairs.get(name))
    Path(target).write_text("\n".join(filter(None, parts)), "utf-8")


def _documents(folder: str, names: Sequence[str]) -> dict[str, Document]:
    """Those that are there, in the paper's order."""
    paths = {name: Path(folder) / f"{name}.json" for name in sorted(names, key=paper_order)}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def _missing(drawn: dict[str, Document]) -> str:
    names = [heading(name) for name, figure in FIGURES.items() if figure.in_all and name not in drawn]
    return f"\nNot rerun for this page: {', '.join(names)}.\n" if names else ""


def _summary(title: str, documents: dict[str, Document]) -> Iterator[str]:
    lines = summary_lines(summary_rows(documents.values()))
    yield f"\n## {title}\n"
    yield f"{SUMMARY_NOTE}\n"
    yield table(list(lines[0]), [list(line.values()) for line in lines])


def _constants(documents: dict[str, Document]) -> Iterator[str]:
    known = constants(documents)
    if known:
        yield _CONSTANTS.format(counts=counts_text(known, documents))
        yield table(list(known[0]), [list(row.values()) for row in known])


def _figure(name: str, document: Document, on_pairs: Document | None) -> Iterator[str]:
    yield f"\n## {heading(name)}\n"
    yield f"{document['workload']}.\n"
    for view, rows in _by_view(document["rows"]):
        definitions = definition_lines(view.definitions() if view is SLOTS_VIEW else definitions_of(rows))
        if definitions:
            yield f"{view.title.capitalize()}:\n"
            yield "".join(f"- {text}\n" for text in definitions)
        yield f"{_rows(rows, on_pairs['rows'] if on_pairs else [])}\n"
    yield from (f"- {text}" for text in _merged(_sentences(document), _sentences(on_pairs) if on_pairs else None))


def _by_view(rows: Sequence[Document]) -> Iterator[tuple[View, list[Document]]]:
    """The rows slot by slot after those of the paper's view and all others; most figures have none of them."""
    slots = view_metrics(SLOTS_VIEW)
    yield PAPER_VIEW, [row for row in rows if row.get("metric") not in slots]
    of_slots = [row for row in rows if row.get("metric") in slots]
    if of_slots:
        yield SLOTS_VIEW, of_slots


def _sentences(document: Document) -> list[str]:
    found = [headline(document), *finding_lines(document), *document["basis"], *document.get("remarks", ())]
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


def heading(name: str) -> str:
    """A figure's name as the paper writes it: Fig 12a, Table 1."""
    paper = re.fullmatch(r"(fig|table)(.+)", name)
    return f"{paper[1].capitalize()} {paper[2]}" if paper else name.replace("-", " ").capitalize()


def _rows(rows: Sequence[Document], on_pairs: Sequence[Document]) -> str:
    if "published" not in rows[0]:
        return table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])
    exact = {_key(row): row for row in on_pairs}
    columns = ["series", "value", "at", "published", "how", "simulated", "seeds", "per 1 %", "error"]
    columns += [*(["exact pairs", "seeds", "error"] if exact else []), "origin"]
    return table(columns, [_line(row, exact.get(_key(row)), bool(exact)) for row in rows])


def _key(row: Document) -> tuple[Any, ...]:
    return row["series"], row["metric"], row["x"]


def _line(row: Document, on_pairs: Document | None, with_pairs: bool) -> list[str]:
    metric = row["metric"]
    cells = [row["series"], metric_label(metric), "" if row["x"] is None else f"{row['x']:g}"]
    cells += [number(metric, row["published"]), row.get("how") or "", number(metric, row["simulated"])]
    cells += [
        _seeds(row),
        step_text(row),
        difference(row),
    ]
    if with_pairs:
        exact = on_pairs and [number(metric, on_pairs["simulated"]), _seeds(on_pairs), difference(on_pairs)]
        cells += exact or ["", "", ""]
    return [*cells, origin(row | {"fitted": row["kind"] == "fitted"})]


def _seeds(row: Document) -> str:
    """The range of single seeds."""
    low, high = row.get("minimum"), row.get("maximum")
    return "" if low is None else f"{number(row['metric'], low)} to {number(row['metric'], high)}"


def table(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    return "\n".join(markdown(columns, (map(str, line) for line in lines)))


if __name__ == "__main__":
    main(*sys.argv[1:])
