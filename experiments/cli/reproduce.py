"""``fragmeter reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from ...sim.metrics.views import ViewName
from ...sim.output.files import require_apart
from ...sim.types.bounds import Jobs, Seeds
from ..reproduce.figures import FIGURES
from ..reproduce.prefix_cache import FIGURE as PREFIX_CACHE
from ..reproduce.prefix_cache import reproduce_prefix_cache
from ..reproduce.reproduction import ALL, Traces, folder_of
from ..reproduce.reproduction import reproduce as rerun
from ..reproduce.servers import FIGURE as SERVERS
from ..reproduce.servers import reproduce_servers
from ..reproduce.startups import FIGURE as STARTUPS
from ..reproduce.startups import reproduce_startups
from ..reproduce.text import WASTE
from ..runs.inputs import named_files
from ..runs.output import RESULT_FILE, RESULTS, JsonTarget, Report
from ..runs.unread import refuse_flags

#: Figures that can be rerun.
if TYPE_CHECKING:
    Wanted = str
else:
    Wanted = Literal[(*FIGURES, ALL, PREFIX_CACHE, SERVERS, STARTUPS)]


def reproduce(
    figure: Wanted,
    /,
    *,
    trace: Path | None = None,
    alpaca_trace: Path | None = None,
    runs: Path | None = None,
    add: Path | None = None,
    accept_medians: bool = False,
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
            claims (claims about paged attention in four popular texts and of other systems, two minutes), anyscale
            (throughput of static and continuous batching by output cap), prefix-cache (hits of prefix caches on a
            trace with block hashes, beside an independent simulator), waste-today (today's models under three
            allocators, and published figures of their waste), servers (runs of real servers beside their simulation),
            startups (start-ups of public logs beside the answers of plan --serve).
        trace: The paper's length pairs of ShareGPT: CSV, JSONL, Parquet or the artifact's pickle. By default lengths are
            drawn from a summary in the package. prefix-cache needs JSON lines with hash_ids. Of waste-today a trace with
            hash_ids or sessions: its first 3,000 requests show what cached blocks are worth.
        alpaca_trace: The paper's length pairs of Alpaca, for Figs 11, 12d to f, 13b, 14, 15 and 18b. By default lengths are drawn.
        runs: Of servers: folder with the requests of the runs that need them. By default these are left out.
        add: Of servers: JSON file of more measured runs (docs/results/servers.md describes it), which count as unseen; of
            startups: JSON file of more cases (docs/results/startups.md).
        accept_medians: Of servers: store the median errors by class in the package, for later runs to be compared with. Needs
            --runs.
        seeds: Number of seeds, from 0, for the mean. By default 1 with a trace, as in the paper; else the figure's own
            number, mostly 10.
        jobs: Number of figures at a time, or of runs of a single figure. The bytes do not depend on it. By default the
            number of cores.
        out: Folder for the page, reproduction.html, and a JSON file for each figure. Figures there with the same
            settings, lengths and code are not repeated.
        view: Division of the KV pool in the printed waste table: the paper's four categories, or slots, what becomes of each
            slot. The page has both.
        markdown: Markdown file with the values and findings of each figure; - for standard output. Of servers, startups and
            waste-today a page that has places for their tables gets these alone. Not of prefix-cache.
    """
    report = Report(json, markdown=markdown)
    require_apart(
        {"out": out, "json": json, "markdown": markdown}, named_files(trace=trace, alpaca_trace=alpaca_trace, add=add)
    )
    if figure != SERVERS:
        refuse_flags(f"applies only to {SERVERS}; leave it out", runs=runs, accept_medians=accept_medians)
    if figure not in (SERVERS, STARTUPS):
        refuse_flags(f"applies only to {SERVERS} and {STARTUPS}; leave it out", add=add)
    no_effect = f"has no effect on {figure}; leave it out"
    if view != "paper" and figure not in (WASTE, ALL):
        refuse_flags(no_effect, view=view)
    if figure in (SERVERS, STARTUPS):
        refuse_flags(no_effect, trace=trace, alpaca_trace=alpaca_trace, seeds=seeds, jobs=jobs)
    if figure == SERVERS:
        reproduce_servers(runs, report, folder_of(out), add, accept_medians)
    elif figure == STARTUPS:
        reproduce_startups(report, folder_of(out), add)
    elif figure == PREFIX_CACHE:
        refuse_flags(no_effect, alpaca_trace=alpaca_trace, markdown=markdown)
        reproduce_prefix_cache(trace, seeds, report, folder_of(out))
    else:
        rerun(figure, Traces(trace, alpaca_trace), seeds, report, folder_of(out), jobs, view)
