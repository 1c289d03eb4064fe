"""The paper rerun: its figures one after another, each told, and kept, as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from ..sim.files import as_json, require_writable, user_paths, write_whole
from .bench import Bench
from .comparison import Payload, compare
from .fit import Fit, fit
from .output import Report
from .pages import PAGE, Page
from .paper import FIG2, FIG13A, Source
from .telling import tell
from .waste import waste_table

FIGURES = ("fig2", "fig13a", "waste")
# The waste table takes two seconds, so that there is soon something to see.
_IN_TURN = ("waste", "fig2", "fig13a")


def reproduce(wanted: str, source: Source, report: Report, out: str | PathLike[str] | None) -> None:
    """Rerun a figure, or ``all``, report it and write the page.

    Into ``out`` go a JSON file for each figure and the page, both renewed whenever a figure is done:
    an interruption leaves what is finished.

    Raises:
        UserError: ``out`` cannot be written.
    """
    if out is not None:
        require_writable(out, out, create=True)
    bench = Bench(source)
    page = None if out is None else Page(bench, wanted == "all")
    done: dict[str, Payload] = {}
    for figure, payload in _payloads(wanted, bench):
        done[figure] = payload
        tell(payload, report)
        document = {"figures": [done[name] for name in FIGURES if name in done]} if wanted == "all" else payload
        report.data_so_far(document)
        if page is not None:
            page.add(payload)
            _keep(Path(out), payload, page)
    if out is not None:
        report.point_to("Page", Path(out) / PAGE)
    report.data(document)


def _payloads(wanted: str, bench: Bench) -> Iterator[tuple[str, Payload]]:
    fitted = fit(bench)
    for figure in _IN_TURN:
        if wanted in (figure, "all"):
            yield figure, _payload(figure, bench, fitted)


def _payload(figure: str, bench: Bench, fitted: Fit) -> Payload:
    if figure == "waste":
        return waste_table(bench, fitted)
    return compare(FIG2 if figure == "fig2" else FIG13A, bench, fitted)


def _keep(out: Path, payload: Payload, page: Page) -> None:
    with user_paths(out):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / f"{payload['figure']}.json", as_json(payload))
        page.write(out / PAGE)
