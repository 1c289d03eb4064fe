"""Rerun of the paper: each figure is stored as soon as it is done, and reported in the order of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.types.errors import SettingError
from ..paper.comparison import Payload
from ..paper.paper import source
from ..runs.kept import Kept
from ..runs.output import Count, Report
from ..runs.parallel import at_most
from .figures import FIGURES, Figure
from .pages import PAGE, Page
from .prefix_cache import FIGURE as PREFIX_CACHE
from .runs import Benches, documents
from .telling import summary_rows, tell_summary

ALL = "all"


def folder_of(out: str | PathLike[str] | None) -> OutputFolder | None:
    """The folder of ``--out``, which holds a document for each figure, and the page.

    Raises:
        UserError: It holds something else, or cannot be written.
    """
    documents = (f"{name}.json" for name in (*FIGURES, PREFIX_CACHE))
    parts = (f"{name}/*.json" for name, figure in FIGURES.items() if figure.in_parts)
    return None if out is None else OutputFolder(out, FolderKind("reproduction", (PAGE, *documents, *parts)))


def reproduce(
    wanted: str,
    trace: str | PathLike[str] | None,
    seeds: int | None,
    report: Report,
    folder: OutputFolder | None,
    jobs: int | None = None,
) -> None:
    """Rerun a figure, or ``all``, report it and write the page.

    Into the folder go a JSON file for each figure and the page, both renewed whenever a figure is done: an interruption
    leaves what is finished, and what is there already and follows from the same is not run again.

    Args:
        trace: A file of length pairs; None draws them.
        seeds: How many; None takes each figure's own number.
        jobs: How many figures at a time, or runs of a single one; None takes the cores of this machine.

    Raises:
        UserError: The trace or the seeds cannot be, or have no part in the figure; the folder cannot be written.
    """
    if wanted != ALL:
        _require_used(wanted, FIGURES[wanted], trace, seeds)
    benches = Benches(source(trace, seeds), seeds)
    rerun = _all if wanted == ALL else _one
    with at_most(jobs):
        rerun(wanted, benches, report, folder, jobs)


def _one(name: str, benches: Benches, report: Report, folder: OutputFolder | None, jobs: int | None) -> None:
    [(_, document)] = documents([name], benches, Kept(folder), jobs)
    FIGURES[name].tell(document, report)
    page = Page([name], with_stories=False)
    _show(page, name, document, benches, folder)
    _point_to(page, report, folder)
    report.data(document)


def _all(_: str, benches: Benches, report: Report, folder: OutputFolder | None, jobs: int | None) -> None:
    names = [name for name, figure in FIGURES.items() if figure.in_all]
    done = Done(names, report)
    page, count = Page(names, with_stories=True), Count("figures", len(names))
    with count.shown():
        for name, document in documents(names, benches, Kept(folder), jobs):
            done.add(name, document)
            _show(page, name, document, benches, folder)
            count.advance()
            with count.paused():
                done.tell()
    tell_summary(done.documents, report)
    _point_to(page, report, folder)
    report.data(done.data)


class Done:
    """The figures that are done so far, in their order whenever they come.

    Args:
        names: All that will be.
    """

    def __init__(self, names: Sequence[str], report: Report) -> None:
        self._names, self._report = names, report
        self._done: dict[str, Payload] = {}
        self._num_reported = 0

    @property
    def documents(self) -> list[Payload]:
        """Of those that are done."""
        return [self._done[name] for name in self._names if name in self._done]

    @property
    def data(self) -> Payload:
        """What goes into the file of ``--json``."""
        return {"figures": self.documents, "summary": summary_rows(self.documents)}

    def add(self, name: str, document: Payload) -> None:
        """Take in one that is done."""
        self._done[name] = document
        self._report.data_so_far(self.data)

    def tell(self) -> None:
        """Report the finished figures up to the first that is missing."""
        while self._num_reported < len(self._names) and self._names[self._num_reported] in self._done:
            name = self._names[self._num_reported]
            FIGURES[name].tell(self._done[name], self._report)
            self._num_reported += 1


def _show(page: Page, name: str, document: Payload, benches: Benches, folder: OutputFolder | None) -> None:
    """Put a figure on the page, if there is one."""
    show = FIGURES[name].show
    if folder is not None and show is not None:
        page.add(name, document, show(document, benches.of(FIGURES[name])))
        page.write(folder.path / PAGE)


def _point_to(page: Page, report: Report, folder: OutputFolder | None) -> None:
    if page and folder is not None:
        report.point_to("Page", folder.path / PAGE)


def _require_used(name: str, figure: Figure, trace: object, seeds: int | None) -> None:
    """Refuse what would change nothing."""
    if trace is not None and not figure.traced:
        raise SettingError("trace", str(trace), f"{name} does not serve it; leave it out")
    if seeds is not None and figure.seeds is None:
        raise SettingError("seeds", seeds, f"{name} draws nothing; leave it out")
