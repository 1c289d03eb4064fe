"""``fragmeter reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from ...sim.metrics.views import ViewName
from ...sim.output.files import require_apart
from ...sim.types.bounds import Jobs, Seeds
from ..reproduce.figures import FIGURES
from ..reproduce.reproduction import ALL, Traces, folder_of
from ..reproduce.reproduction import reproduce as rerun
from ..reproduce.text import WASTE
from ..runs.inputs import named_files
from ..runs.output import RESULT_FILE, RESULTS, JsonTarget, Report
from ..runs.unread import refuse_flags

#: Figures that can be rerun.
if TYPE_CHECKING:
    Wanted = str
else:
    Wanted = Literal[(*FIGURES, ALL)]


def reproduce(
    figure: Wanted,
    /,
    *,
    trace: Path | None = None,
    alpaca_trace: Path | None = None,
    seeds: Seeds | None = None,
    jobs: Annotated[Jobs | None, Parameter(group=Group("Workers", sort_key=8))] = None,
    out: Annotated[Path | None, RESULTS] = None,
    view: Annotated[ViewName, RESULTS] = "paper",
    markdown: Annotated[Path | None, RESULT_FILE] = None,
    json: JsonTarget = None,
) -> None:
    """Rerun the figures of the PagedAttention paper, simulated beside published.

    Args:
        figure: Figure or table of the paper; waste (every policy on one trace); or all of these. Not part of all:
            waste-today (today's models under three allocators).
        trace: The paper's length pairs of ShareGPT: CSV, JSONL, Parquet or the artifact's pickle. By default lengths are
            drawn from a summary in the package. Of waste-today a trace with hash_ids or sessions: its first 3,000 requests show
            what cached blocks are worth.
        alpaca_trace: The paper's length pairs of Alpaca, for Figs 11, 12d to f, 13b, 14, 15 and 18b. By default lengths are drawn.
        seeds: Number of seeds, from 0, for the mean. By default 1 with a trace, as in the paper; else the figure's own
            number, mostly 10.
        jobs: Number of figures at a time, or of runs of a single figure. The bytes do not depend on it. By default the
            number of cores.
        out: Folder for the page, reproduction.html, and a JSON file for each figure. Figures there with the same
            settings, lengths and code are not repeated.
        view: Division of the KV pool in the printed waste table: the paper's four categories, or slots, what becomes of each
            slot. The page has both.
        markdown: Markdown file with the values and findings of each figure; - for standard output. Of waste-today a page that has
            places for its tables gets these alone.
    """
    report = Report(json, markdown=markdown)
    require_apart({"out": out, "json": json, "markdown": markdown}, named_files(trace=trace, alpaca_trace=alpaca_trace))
    if view != "paper" and figure not in (WASTE, ALL):
        refuse_flags(f"has no effect on {figure}; leave it out", view=view)
    rerun(figure, Traces(trace, alpaca_trace), seeds, report, folder_of(out), jobs, view)
