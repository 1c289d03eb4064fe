"""Rerun of the paper's figures: make each document once, store it, report it, and write the page.

Each document is stored as soon as it is made, and found again by the key of its inputs. Its bytes depend only on the
key, not on the process or the time. Reports follow the order of the registry. The page starts with a summary of the
accuracy, followed by every finished figure.

This process makes the figures that take next to no time, so that the first results appear soon. Worker processes make
the others, one figure per core. One worker makes figures that share runs, one after another. Long figures start first,
which keeps all cores busy to the end. A single remaining figure uses all cores for its own runs.

Workers store documents themselves. If this process dies, only unfinished figures are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from ...reports.page.page import Section, write_page
from ...sim.metrics.views import ViewName
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.types.errors import SettingError, UserError
from ...traces import read_with_content
from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..paper.paper import Source, require_papers, source
from ..runs.kept import Kept, key
from ..runs.output import Count, Report, no_bars
from ..runs.parallel import Workers, as_they_finish, at_most
from .figures import FIGURES, Figure
from .markdown import document as in_markdown
from .scorecard import first_section, name_of, paper_order
from .text import print_summary, summary_rows

Document = tuple[str, Payload]


@dataclass(frozen=True)
class Traces:
    """Files of length pairs; None draws them.

    Attributes:
        trace: ShareGPT's pairs; or the record of a figure that serves one.
        alpaca_trace: Alpaca's pairs.
    """

    trace: str | PathLike[str] | None = None
    alpaca_trace: str | PathLike[str] | None = None


class Benches:
    """One bench for each number of seeds; figures with the same number share its runs.

    Args:
        source: The requested lengths and seeds.
        seeds: The requested number of seeds; None takes each figure's own number.
    """

    def __init__(self, source: Source, seeds: int | None) -> None:
        self._requested, self._seeds = source, seeds
        self._benches: dict[Source, Bench] = {}

    def of(self, figure: Figure) -> Bench:
        """The bench of a figure."""
        chosen = self._source(figure)
        return self._benches.setdefault(chosen, Bench(chosen))

    def _source(self, figure: Figure) -> Source:
        exact = self._requested.exact if figure.traced else None
        alpaca = self._requested.exact_alpaca if figure.alpaca else None
        if figure.serves_record:
            return Source(tuple(range(self._seeds or figure.seeds or 1)), record=self._requested.record)
        if self._seeds is not None or exact is not None or alpaca is not None:
            return Source(self._requested.seeds, exact, exact_alpaca=alpaca)
        return Source(tuple(range(figure.seeds or 1)))


@dataclass(frozen=True)
class Rerun:
    """A figure to be made.

    Attributes:
        follows_from: The key of its document.
        bench: Its bench.
        kept: Store of its document.
    """

    name: str
    follows_from: str
    bench: Bench
    kept: Kept


def documents(names: Sequence[str], benches: Benches, kept: Kept, jobs: int | None) -> Iterator[Document]:
    """Yield the documents of figures by name as they finish; ``jobs`` at a time, by default one per core.

    Raises:
        UserError: A document cannot be stored.
    """
    missing = []
    for name in names:
        rerun = _rerun(name, benches, kept)
        found = kept.find(name, rerun.follows_from)
        if found is None:
            missing.append(rerun)
        else:
            yield name, found
    for rerun in missing:
        if FIGURES[rerun.name].seconds is None:
            yield _made(rerun)
    groups = _groups(rerun for rerun in missing if FIGURES[rerun.name].seconds is not None)
    if len(groups) == 1:
        yield from map(_made, groups[0])
    else:
        for made in as_they_finish(made_on_one_core, [(group,) for group in groups], len(groups), Workers(jobs=jobs)):
            yield from made


def made_on_one_core(group: Sequence[Rerun]) -> list[Document]:
    """The documents of figures that share runs."""
    with at_most(1), no_bars():
        return [_made(rerun) for rerun in group]


def _rerun(name: str, benches: Benches, kept: Kept) -> Rerun:
    figure = FIGURES[name]
    bench = benches.of(figure)
    seeds = None if figure.seeds is None else bench.source.seeds
    return Rerun(
        name, key(name, (bench.source.exact, bench.source.exact_alpaca), seeds, bench.source.record), bench, kept
    )


def _made(rerun: Rerun) -> Document:
    document = FIGURES[rerun.name].make(rerun.bench)
    return rerun.name, rerun.kept.keep(rerun.name, rerun.follows_from, document)


def _groups(reruns: Iterator[Rerun]) -> list[list[Rerun]]:
    """Groups of figures that share runs, longest first."""
    groups: dict[str, list[Rerun]] = {}
    for rerun in reruns:
        groups.setdefault(FIGURES[rerun.name].shares or rerun.name, []).append(rerun)
    return sorted(groups.values(), key=_seconds, reverse=True)


def _seconds(group: list[Rerun]) -> int:
    """Approximate time of a group on one core."""
    return sum(FIGURES[rerun.name].seconds or 0 for rerun in group)


PAGE = "reproduction.html"
TITLE = "The PagedAttention paper, rerun"
_LEAD = (
    "Every figure of Kwon et al., SOSP 2023, that a simulation can rerun, published beside simulated; no GPU was used."
)
_LEAD_OF_ONE = (
    "One figure of Kwon et al., SOSP 2023, published beside simulated; no GPU was used. It does not answer for the others:"
    " fragmeter reproduce all reruns every figure."
)
#: Seconds after which a page that is not finished loads itself again.
_REFRESH_S = 15


class Page:
    """The page: a scorecard, then each figure as it is finished, in the paper's order.

    Args:
        names: The wanted figures.
        head: Title and first sentence.
    """

    def __init__(self, names: Sequence[str], head: tuple[str, str] | None = None) -> None:
        self._title, self._lead = head or (TITLE, _LEAD)
        self._names = sorted(names, key=paper_order)
        self._done: dict[str, tuple[Payload, list[Section]]] = {}

    def __bool__(self) -> bool:
        """Whether the page has any figure."""
        return bool(self._done)

    def add(self, name: str, document: Payload, sections: Iterable[Section]) -> None:
        """Add a figure's document and its sections."""
        self._done[name] = document, _with_keys(name, sections)

    def write(self, path: str | PathLike[str], stopped: bool = False) -> None:
        """Write the finished sections, and a place for each of the others; the file appears whole or not at all.

        Args:
            stopped: Whether the run ends before the page is finished, so that it does not load itself again.
        """
        done = [name for name in self._names if name in self._done]
        documents = {name: self._done[name][0] for name in done}
        first = first_section(documents, {name: self._done[name][1][0].title for name in done})
        shown = [section for name in self._names for section in self._sections(name, stopped)]
        unfinished = len(done) < len(self._names)
        at = f"Stopped at {len(done)} of {len(self._names)} figures; the same command goes on from there."
        lead = f"{self._lead}\n\n{at}" if stopped and unfinished else self._lead
        refresh_s = _REFRESH_S if unfinished and not stopped else None
        write_page(path, self._title, lead, [*first, *shown], refresh_s)

    def _sections(self, name: str, stopped: bool) -> list[Section]:
        if name in self._done:
            return self._done[name][1]
        return [Section(name_of(name), "Not run." if stopped else "Not finished yet.", is_half=True, key=name)]


def _with_keys(name: str, sections: Iterable[Section]) -> list[Section]:
    """Sections with anchors that do not change with their place: the figure's name, then with a number."""
    return [replace(section, key=f"{name}-{at}" if at > 1 else name) for at, section in enumerate(sections, start=1)]


ALL = "all"


def folder_of(out: str | PathLike[str] | None) -> OutputFolder | None:
    """The folder of ``--out``, which holds a document for each figure, and the page.

    Raises:
        UserError: The folder holds other files, or cannot be written.
    """
    documents = (f"{name}.json" for name in FIGURES)
    return None if out is None else OutputFolder(out, FolderKind("reproduction", (PAGE, *documents)))


def reproduce(
    wanted: str,
    traces: Traces,
    seeds: int | None,
    report: Report,
    folder: OutputFolder | None,
    jobs: int | None = None,
    view: ViewName = "paper",
) -> None:
    """Rerun a figure, or ``all``, report it and write the page.

    The folder gets a JSON file for each figure and the page. Both are updated whenever a figure finishes, so an
    interruption keeps finished figures. Figures already there with the same key are not run again.

    Args:
        traces: Files of length pairs.
        seeds: Number of seeds; None takes each figure's own number.
        jobs: Number of figures at a time, or of runs of a single figure; None takes the cores of this machine.
        view: View of the waste table that is printed.

    Raises:
        UserError: The trace or the seeds are invalid, or the figure does not use them; the folder cannot be written.
    """
    if wanted != ALL:
        _require_used(wanted, FIGURES[wanted], traces, seeds)
    if wanted != ALL and FIGURES[wanted].serves_record:
        record = None if traces.trace is None else read_with_content(traces.trace)
        benches = Benches(Source((), record=record), seeds)
    else:
        require_papers(trace=traces.trace, alpaca_trace=traces.alpaca_trace)
        benches = Benches(source(traces.trace, seeds, traces.alpaca_trace), seeds)
    rerun = _all if wanted == ALL else _one
    with at_most(jobs):
        rerun(wanted, benches, report, folder, jobs, view)


def _one(
    name: str, benches: Benches, report: Report, folder: OutputFolder | None, jobs: int | None, view: ViewName
) -> None:
    [(_, document)] = documents([name], benches, Kept(folder), jobs)
    FIGURES[name].print(document | {"view": view}, report)
    page = Page([name], head_of(name))
    _show(page, name, document, benches, folder)
    _point_to(page, report, folder)
    if (parts := FIGURES[name].parts) is None:
        report.markdown(lambda: in_markdown(*head_of(name), {name: document}))
    else:
        report.markdown_parts(head_of(name)[0], lambda: parts(document))
    report.data(document)


def _all(
    _: str, benches: Benches, report: Report, folder: OutputFolder | None, jobs: int | None, view: ViewName
) -> None:
    names = [name for name, figure in FIGURES.items() if figure.in_all]
    done = Done(names, report, view)
    page, count = Page(names), Count("figures", len(names))
    if folder is not None:
        folder.make()
        page.write(folder.path / PAGE)
    with stopping(page, None if folder is None else folder.path / PAGE), count.shown():
        for name, document in documents(names, benches, Kept(folder), jobs):
            done.add(name, document)
            _show(page, name, document, benches, folder)
            count.advance()
            with count.paused():
                done.print()
    print_summary(done.documents, report)
    _point_to(page, report, folder)
    report.markdown(lambda: in_markdown(TITLE, _LEAD, {each["figure"]: each for each in done.documents}))
    report.data(done.data)


def head_of(name: str) -> tuple[str, str]:
    """Title and first sentence of the page of one figure."""
    return FIGURES[name].page or (f"{name_of(name)} of the PagedAttention paper, rerun", _LEAD_OF_ONE)


@contextmanager
def stopping(page: Page, path: Path | None) -> Iterator[None]:
    """If this block ends by an error or an interrupt, say so on the page, which would wait for more figures."""
    try:
        yield
    except BaseException:
        if path is not None:
            with suppress(UserError):
                page.write(path, stopped=True)
        raise


class Done:
    """The finished figures, in the order of the registry.

    Args:
        names: All requested figures.
        view: View of the waste table.
    """

    def __init__(self, names: Sequence[str], report: Report, view: ViewName = "paper") -> None:
        self._names, self._report, self._view = names, report, view
        self._done: dict[str, Payload] = {}
        self._num_reported = 0

    @property
    def documents(self) -> list[Payload]:
        """The documents of the finished figures."""
        return [self._done[name] for name in self._names if name in self._done]

    @property
    def data(self) -> Payload:
        """The content of the ``--json`` file."""
        return {"figures": self.documents, "summary": summary_rows(self.documents)}

    def add(self, name: str, document: Payload) -> None:
        """Add a finished figure."""
        self._done[name] = document
        self._report.data_so_far(self.data)

    def print(self) -> None:
        """Report the finished figures up to the first unfinished one."""
        while self._num_reported < len(self._names) and self._names[self._num_reported] in self._done:
            name = self._names[self._num_reported]
            FIGURES[name].print(self._done[name] | {"view": self._view}, self._report)
            self._num_reported += 1


def _show(page: Page, name: str, document: Payload, benches: Benches, folder: OutputFolder | None) -> None:
    """Put a figure on the page, if there is a page."""
    show = FIGURES[name].show
    if folder is not None and show is not None:
        page.add(name, document, show(document, benches.of(FIGURES[name])))
        page.write(folder.path / PAGE)


def _point_to(page: Page, report: Report, folder: OutputFolder | None) -> None:
    if page and folder is not None:
        report.point_to("Page", folder.path / PAGE)


def _require_used(name: str, figure: Figure, traces: Traces, seeds: int | None) -> None:
    """Refuse arguments without an effect on the figure."""
    for field, trace, used in (
        ("trace", traces.trace, figure.traced or figure.serves_record),
        ("alpaca_trace", traces.alpaca_trace, figure.alpaca),
    ):
        if trace is not None and not used:
            raise SettingError(field, str(trace), f"{name} does not serve it; leave it out")
    if seeds is not None and figure.seeds is None:
        raise SettingError("seeds", seeds, f"{name} draws nothing; leave it out")
