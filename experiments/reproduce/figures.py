"""Registry of all figures that can be rerun, in the order of the page.

To add a figure, write a module that states its set-up and makes its document from a bench, and add a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from ...reports.figures import figures
from ...reports.page.page import Section
from ..paper.bench import Bench
from ..paper.block_sizes.block_sizes import fig18b, fig19b
from ..paper.comparison import Payload
from ..paper.figures import fig12, fig14
from ..paper.figures.fig1 import fig1
from ..paper.figures.fig2 import fig2
from ..paper.figures.fig3 import fig3
from ..paper.figures.fig11 import fig11
from ..paper.figures.fig13a import fig13a
from ..paper.figures.fig13b import fig13b
from ..paper.figures.fig15 import compare_sharing
from ..paper.figures.fig16 import fig16
from ..paper.figures.fig17 import fig17
from ..paper.figures.fig19a import fig19a
from ..paper.figures.table1 import table1
from ..paper.figures.waste import waste_table
from ..paper.fit import fit
from ..paper.paper import DEFAULT_SEEDS
from ..runs.output import Report
from ..today.tables import markdown_parts as waste_today_parts
from ..today.waste_today import print_waste_today, show_waste_today, waste_today
from . import sections
from .text import print_figure

#: Sections of the page from a document and its bench.
Show = Callable[[Payload, Bench], Sequence[Section]]


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper.

    Attributes:
        make: Makes its document, in design.md's form, from a bench over the requested source of lengths.
        print: Prints the document on the terminal.
        show: Sections of the page for the document; by default the figure has none.
        seeds: Number of seeds for drawn lengths if none is requested; None if the figure draws nothing.
        traced: Whether it serves the pairs of ``--trace``.
        alpaca: Whether it serves the pairs of ``--alpaca-trace``.
        serves_record: Whether it serves the requests of ``--trace`` with the contents of their prompts.
        in_all: Whether ``all`` includes it.
        seconds: Approximate time on one core; figures with long times start first. None takes next to nothing.
        shares: Figures with the same value share runs; one process makes them one after another.
        page: Title and first sentence of its page, if it is not of the paper.
        parts: The parts of its page in Markdown, which has places for them, in place of the document of ``reproduce.markdown``.
    """

    make: Callable[[Bench], Payload]
    show: Show | None = None
    print: Callable[[Payload, Report], None] = print_figure
    seeds: int | None = DEFAULT_SEEDS
    traced: bool = True
    alpaca: bool = False
    serves_record: bool = False
    in_all: bool = True
    seconds: int | None = None
    shares: str | None = None
    page: tuple[str, str] | None = None
    parts: Callable[[Payload], Mapping[str, str]] | None = None


def _fixed(make: Callable[[], Payload], show: Show) -> Figure:
    """A figure without requests."""
    return Figure(lambda _: make(), show, seeds=None, traced=False)


def _rates(
    title: str, make: Callable[[Bench], Payload], seconds: int, alpaca: bool = False, traced: bool = True
) -> Figure:
    """A rate sweep with one seed, because these runs are the longest."""
    return Figure(make, sections.rates(title), seeds=1, seconds=seconds, alpaca=alpaca, traced=traced)


def _panels(module: ModuleType, seconds: dict[str, int], alpaca: str) -> dict[str, Figure]:
    """The panels of a rate-sweep figure, each as a figure of its own, so that an interruption loses few of them.

    Args:
        alpaca: Panels with Alpaca's lengths.
    """
    return {
        f"{module.FIGURE}{letter}": _rates(
            f"Fig {module.FIGURE.removeprefix('fig')}{letter}: {what}",
            partial(module.panel, letter),
            seconds[letter],
            letter in alpaca,
            # ShareGPT is served, or a scale is fitted on it.
            traced=module is not fig14,
        )
        for letter, what in module.TITLES.items()
    }


#: Figures that take no time come first, then the waste table, which takes a few seconds: the first results appear soon.
#: The others are in the paper's order.
FIGURES: dict[str, Figure] = {
    "table1": _fixed(table1, sections.tabled("Table 1: memory of the KV cache")),
    "fig1": _fixed(fig1, sections.shown("Fig 1: throughput by batch size", figures.curves)),
    "fig3": _fixed(fig3, sections.fig3),
    "fig11": Figure(fig11, sections.shown("Fig 11: lengths of prompts and outputs", figures.bars), alpaca=True),
    "fig19a": _fixed(fig19a, sections.shown("Fig 19a: swapping and recomputation", figures.curves)),
    "waste": Figure(
        lambda bench: waste_table(bench, fit(bench)),
        sections.waste,
        page=(
            "Waste of every policy, on the PagedAttention paper's load",
            "The pool of Fig 2 of Kwon et al., SOSP 2023, under every policy, published beside simulated; no GPU was used.",
        ),
    ),
    "fig2": Figure(fig2, sections.fig2, seconds=15),
    **_panels(fig12, {"a": 14, "b": 8, "c": 4, "d": 100, "e": 45, "f": 20}, "def"),
    "fig13a": Figure(fig13a, sections.fig13a, seconds=30),
    "fig13b": Figure(
        fig13b,
        sections.shown("Fig 13b: mean batch, Alpaca", figures.fig13a),
        seeds=1,
        traced=False,
        alpaca=True,
        seconds=70,
    ),
    **_panels(fig14, {"a": 40, "b": 40, "c": 40, "d": 60, "e": 65, "f": 75}, "abcdef"),
    "fig15": Figure(lambda bench: compare_sharing(bench.source), sections.fig15, seeds=1, seconds=100, alpaca=True),
    "fig16": _rates("Fig 16: translation behind a shared prefix", fig16, seconds=18, traced=False),
    "fig17": _rates("Fig 17: a chatbot", fig17, seconds=6, traced=False),
    "fig18b": Figure(
        fig18b,
        sections.shown("Fig 18b: latency by block size", figures.curves),
        seeds=1,
        alpaca=True,
        seconds=30,
        shares="block sizes",
    ),
    "fig19b": Figure(
        fig19b,
        sections.shown("Fig 19b: recomputing or swapping, by block size", figures.curves),
        seeds=1,
        seconds=6,
        shares="block sizes",
    ),
    "waste-today": Figure(
        waste_today,
        show_waste_today,
        print_waste_today,
        seeds=1,
        traced=False,
        serves_record=True,
        in_all=False,
        seconds=120,
        page=(
            "Waste of today's models",
            "Today's models on today's cards under three allocators; no GPU was used.",
        ),
        parts=waste_today_parts,
    ),
}
