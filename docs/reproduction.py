"""Write docs/results/reproduction.md from what ``fragmeter reproduce all --out FOLDER`` left.

python docs/reproduction.py FOLDER docs/results/reproduction.md [FOLDER-OF-THE-EXACT-PAIRS]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.reproduce.markdown import section, summary
from fragmeter.experiments.reproduce.scorecard import constants, counts_text, name_of, paper_order
from fragmeter.reports.page.table import markdown

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
        *summary("Accuracy against the paper", drawn),
        _LIMITS,
    ]
    parts += summary("Accuracy against the paper on the exact pairs", on_pairs) if on_pairs else []
    parts += _constants(drawn)
    for name, document in drawn.items():
        parts += section(name, document, on_pairs.get(name))
    Path(target).write_text("\n".join(filter(None, parts)), "utf-8")


def _documents(folder: str, names: Sequence[str]) -> dict[str, Document]:
    """Those that are there, in the paper's order."""
    paths = {name: Path(folder) / f"{name}.json" for name in sorted(names, key=paper_order)}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def _missing(drawn: dict[str, Document]) -> str:
    names = [name_of(name) for name, figure in FIGURES.items() if figure.in_all and name not in drawn]
    return f"\nNot rerun for this page: {', '.join(names)}.\n" if names else ""


def _constants(documents: dict[str, Document]) -> Iterator[str]:
    known = constants(documents)
    if known:
        yield _CONSTANTS.format(counts=counts_text(known, documents))
        yield "\n".join(markdown(list(known[0]), [map(str, row.values()) for row in known]))


if __name__ == "__main__":
    main(*sys.argv[1:])
