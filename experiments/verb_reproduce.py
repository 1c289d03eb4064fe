"""``fragmeter reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from .fig15 import FIGURE as FIG15
from .fig15 import reproduce_fig15
from .output import RESULTS, JsonTarget, Report
from .paper import source
from .prefix_cache import FIGURE as PREFIX_CACHE
from .prefix_cache import reproduce_prefix_cache
from .reproduction import reproduce as rerun
from .step_time import FIGURE as STEP_TIME
from .step_time import reproduce_step_time


def reproduce(
    figure: Literal["fig2", "fig13a", "waste", "all", "fig15", "prefix-cache", "step-time"],
    /,
    *,
    trace: Path | None = None,
    seeds: int | None = None,
    out: Annotated[Path | None, RESULTS] = None,
    json: JsonTarget = None,
) -> None:
    """Rerun the PagedAttention paper's figures, published beside simulated.

    Args:
        figure: What the KV pool holds (fig2), how many requests are batched (fig13a), the waste of every policy
            on one trace (waste), or all of these. Not in all: fig15, the memory that parallel samples and beams save
            by sharing (half a minute on two cores), prefix-cache, what prefix caches hit of a trace with block
            hashes, beside an independent simulator, and step-time, a decode step of OPT-13B as others measured it
            beside the costs that were fitted to none of that.
        trace: Length pairs to serve, such as the paper's own: CSV, JSONL, Parquet or the artifact's pickle.
            Without it they are drawn from a summary that comes with the package. prefix-cache needs JSON lines with
            hash_ids.
        seeds: How many seeds, from 0, to take the mean over. By default 1 with --trace, as in the paper, and for
            fig15; else 10.
        out: Folder for the page, reproduction.html, and a JSON file for each figure; prefix-cache and step-time have no page.
    """
    report = Report(json)
    if figure == PREFIX_CACHE:
        reproduce_prefix_cache(trace, seeds, report, out)
    elif figure == STEP_TIME:
        reproduce_step_time(trace, seeds, report, out)
    elif figure == FIG15:
        reproduce_fig15(source(trace, 1 if seeds is None else seeds), report, out)
    else:
        rerun(figure, source(trace, seeds), report, out)
