"""Every figure that can be rerun, in the order in which they run and stand on the page.

To add one: a module that states its set-up and makes its document from a bench, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..reports.page import Section
from . import sections
from .bench import Bench
from .comparison import Payload, compare
from .fig15 import compare_sharing
from .fit import fit
from .output import Report
from .paper import DEFAULT_SEEDS, FIG2, FIG13A
from .step_time import compare_step_times, tell_step_times
from .telling import tell
from .waste import waste_table


@dataclass(frozen=True)
class Figure:
    """A figure, or a table, and what is done with it.

    Attributes:
        make: Its document, by design.md's form, from a bench over the source of lengths that was asked for.
        tell: Reports the document on the terminal.
        show: The document's sections of the page; none by default has no page.
        seeds: How many it takes where lengths are drawn and none are asked for; None for a figure that draws nothing.
        traced: Whether it serves the pairs of ``--trace``, if there are any.
        in_all: Whether it is one of ``all``.
    """

    make: Callable[[Bench], Payload]
    show: Callable[[Payload, Bench], Sequence[Section]] | None = None
    tell: Callable[[Payload, Report], None] = tell
    seeds: int | None = DEFAULT_SEEDS
    traced: bool = True
    in_all: bool = True


FIGURES: dict[str, Figure] = {
    "waste": Figure(lambda bench: waste_table(bench, fit(bench)), sections.waste),
    "fig2": Figure(lambda bench: compare(FIG2, bench, fit(bench)), sections.fig2),
    "fig13a": Figure(lambda bench: compare(FIG13A, bench, fit(bench)), sections.fig13a),
    "fig15": Figure(lambda bench: compare_sharing(bench.source), sections.fig15, seeds=1),
    "step-time": Figure(
        lambda _: compare_step_times(), tell=tell_step_times, seeds=None, traced=False, in_all=False
    ),
}
