"""``reproduce --trace`` with a trace that is not the paper's: text, JSON and page, without any comparison with the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path

from ...reports.figures import figures
from ...reports.page.page import Section
from ...sim.metrics.views import ViewName
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.spec import gpu
from ...sim.types.errors import SettingError
from ...traces import Reading, read
from ..paper.comparison import Payload
from ..paper.rate_sweep.rate_sweep import TARGET_S
from ..runs.inputs import say_start
from ..runs.kept import Kept, key
from ..runs.output import Report
from ..runs.parallel import at_most
from ..runs.unread import refuse_unread_reading
from .figures import FIGURES as OF_THE_PAPER
from .own_trace import (
    ALPACA_SHA256,
    FIGURES,
    SHAREGPT_SHA256,
    OwnServer,
    OwnTrace,
    is_papers,
    own_trace,
    requests_text,
    require_gaps,
)
from .reproduction import ALL, Page, Traces, stopping
from .sections import compared, moved_line, waste_pictures
from .text import for_reports, print_figure

TITLE, PAGE = "Your trace, the paper's systems", "your-trace.html"


def own_of(
    figure: str, traces: Traces, server: OwnServer, seeds: int | None, reading: Reading = Reading()
) -> OwnTrace | None:
    """The trace of the user's that a figure is drawn for; None for the figures of the paper.

    A trace is the user's if it is not the paper's, or if a server or a rate is given for it.

    Raises:
        UserError: The trace cannot be read or served; the figure compares with the paper; a server without a trace; pairs
            of Alpaca that are not the paper's.
    """
    if traces.alpaca_trace is not None and not is_papers(read(traces.alpaca_trace), ALPACA_SHA256):
        remedy = "not the paper's pairs of Alpaca; give a trace of your own with --trace"
        raise SettingError("alpaca_trace", str(traces.alpaca_trace), remedy)
    if traces.trace is None:
        for name, value in server.given.items():
            raise SettingError(name, value, "applies only to a trace of your own; give one with --trace")
        return None
    if figure != ALL and not OF_THE_PAPER[figure].traced:
        # It refuses any trace.
        return None
    trace, path = read(traces.trace, reading), str(traces.trace)
    if is_papers(trace, SHAREGPT_SHA256) and not server.given:
        return None
    if figure not in (ALL, *FIGURES):
        remedy = f"{figure} compares with the paper, and this is not its set-up; use {', '.join(FIGURES)} or {ALL}"
        raise SettingError("trace", path, remedy)
    if traces.alpaca_trace is not None:
        raise SettingError(
            "alpaca_trace", str(traces.alpaca_trace), "has no effect on a trace of your own; leave it out"
        )
    refuse_unread_reading(reading, Path(path))
    say_start(trace, path)
    own = own_trace(Path(path).name, trace, server, seeds)
    if figure in (ALL, "fig12a"):
        require_gaps(own)
    return own


def reproduce_own(
    wanted: str,
    own: OwnTrace,
    report: Report,
    out: str | PathLike[str] | None,
    jobs: int | None = None,
    view: ViewName = "paper",
) -> None:
    """Draw a figure, or ``all`` of them, for a trace of the user's; report each, and write the page.

    Args:
        out: Folder for the page and a JSON file for each figure; figures there with the same inputs are not run again.
        jobs: Number of runs at a time; None takes the cores of this machine.
        view: View of the waste table that is printed.

    Raises:
        UserError: The folder cannot be written, or the trace cannot be served.
    """
    folder = (
        None
        if out is None
        else OutputFolder(out, FolderKind("reproduction of a trace", (PAGE, *(f"{n}.json" for n in FIGURES))))
    )
    kept, identity = Kept(folder), own.identity()
    names = list(FIGURES) if wanted == ALL else [wanted]
    documents: list[Payload] = []
    report.print_line(f"{TITLE}: {own.file}", style="bold")
    report.print_line()
    page = Page(names, with_stories=False, head=(f"{TITLE}: {own.file}", _lead(own)), headings=_HEADINGS)
    path = None
    if folder is not None:
        folder.make()
        path = folder.path / PAGE
        page.write(path)
    with at_most(jobs), stopping(page, path):
        for name in names:
            found_by = key(f"{name} {identity}", (own.pairs,), own.seeds)
            document = kept.find(name, found_by) or kept.keep(name, found_by, FIGURES[name](own))
            documents.append(document)
            if path is not None:
                page.add(name, document, [_section(document)])
                page.write(path)
            print_figure(document | {"basis": [document["finding"], *document["basis"]], "view": view}, report)
    if path is not None:
        report.point_to("Page", path)
    report.data({"figures": documents} if wanted == ALL else documents[0])


def _lead(own: OwnTrace) -> str:
    server = own.server
    return (
        f"{requests_text(len(own.trace))} under the systems of the PagedAttention paper (Kwon et al., SOSP 2023), with"
        f" {server.model} on {server.tensor_parallel_size} x {gpu(server.gpu).name}. All values are simulated; no GPU was used."
    )


_HEADINGS = {
    "fig2": "Use of the KV pool",
    "fig12a": "Latency by request rate",
    "fig13a": "Mean batch",
    "waste": "Waste of every policy",
}


def _compared(document: Payload) -> Section:
    return compared(_HEADINGS[document["figure"]], document)


def _pool(document: Payload) -> Section:
    return replace(_compared(document), figures=[figures.fig2(for_reports(document))])


def _rates(document: Payload) -> Section:
    section = _compared(document)
    if not document["curves"]:
        return section
    drawn = figures.curves(for_reports(document | {"rows": document["curves"]}))
    return replace(section, figures=[figures.with_limit(drawn, TARGET_S, f"{TARGET_S:g} s/token")])


def _batch(document: Payload) -> Section:
    return replace(_compared(document), figures=[figures.fig13a(for_reports(document))])


def _waste(document: Payload) -> Section:
    return replace(_compared(document), text=moved_line(document), figures=waste_pictures(document), is_half=False)


_SECTIONS: dict[str, Callable[[Payload], Section]] = {
    "fig2": _pool,
    "fig12a": _rates,
    "fig13a": _batch,
    "waste": _waste,
}


def _section(document: Payload) -> Section:
    section = _SECTIONS[document["figure"]](document)
    return replace(section, finding=document["finding"])
