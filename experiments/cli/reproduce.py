"""``fragmeter reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from ...sim.output.files import require_apart
from ...sim.types.errors import SettingError
from ..reproduce.figures import FIGURES
from ..reproduce.prefix_cache import FIGURE as PREFIX_CACHE
from ..reproduce.prefix_cache import reproduce_prefix_cache
from ..reproduce.reproduction import ALL, folder_of
from ..reproduce.reproduction import reproduce as rerun
from ..runs.named_files import named_files
from ..runs.output import RESULTS, JsonTarget, Report

#: What there is to rerun.
if TYPE_CHECKING:
    Wanted = str
else:
    Wanted = Literal[(*FIGURES, ALL, PREFIX_CACHE)]


def reproduce(
    figure: Wanted,
    /,
    *,
    trace: Path | None = None,
    seeds: int | None = None,
    jobs: Annotated[int | None, Parameter(group=Group("Workers", sort_key=8))] = None,
    out: Annotated[Path | None, RESULTS] = None,
    json: JsonTarget = None,
) -> None:
    """Rerun the PagedAttention paper's figures, published beside simulated.

    Args:
        figure: A figure of the paper by its number; the waste of every policy on one trace (waste); or all of these.
            Not in all: claims, what is said of paged attention in four popular texts and of other systems, each put
            to the test (two minutes); anyscale, throughput of static and continuous batching by output cap;
            prefix-cache, what prefix caches hit of a trace with block hashes, beside an independent simulator; and
            step-time, a decode step of OPT-13B as others measured it beside the costs that were fitted to none of
            that.
        trace: ShareGPT's length pairs, such as the paper's own: CSV, JSONL, Parquet or the artifact's pickle.
            Without it they are drawn from a summary that comes with the package. prefix-cache needs JSON lines with
            hash_ids.
        seeds: How many seeds, from 0, to take the mean over. By default 1 with --trace, as in the paper; else each
            figure's own number, mostly 10.
        jobs: How many figures at a time, or of a single one how many runs; the same bytes with any number. By default
            as many as there are cores.
        out: Folder for the page, reproduction.html, and a JSON file for each figure. What is there already and follows
            from the same settings, lengths and code is not run again.
    """
    report = Report(json)
    if jobs is not None and jobs < 1:
        raise SettingError("jobs", jobs, "must be 1 or more")
    require_apart({"out": out, "json": json}, named_files(trace=trace))
    folder = folder_of(out)
    if figure == PREFIX_CACHE:
        reproduce_prefix_cache(trace, seeds, report, folder)
    else:
        rerun(figure, trace, seeds, report, folder, jobs)
