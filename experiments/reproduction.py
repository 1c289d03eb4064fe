"""The paper rerun: its figures one after another, each told, and kept, as soon as it is done."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ..sim.errors import SettingError
from ..sim.files import require_writable
from .bench import Bench
from .comparison import Payload
from .figures import FIGURES, Figure
from .kept import Kept, key
from .output import Report
from .pages import PAGE, Page
from .paper import Source, source
from .telling import summary_rows, tell_summary

ALL = "all"


def reproduce(
    wanted: str,
    trace: str | PathLike[str] | None,
    seeds: int | None,
    report: Report,
    out: str | PathLike[str] | None,
) -> None:
    """Rerun a figure, or ``all``, report it and write the page.

    Into ``out`` go a JSON file for each figure and the page, both renewed whenever a figure is done: an interruption
    leaves what is finished, and what is there already and follows from the same is not run again.

    Args:
        trace: A file of length pairs; None draws them.
        seeds: How many; None takes each figure's own number.

    Raises:
        UserError: The trace or the seeds cannot be, or have no part in the figure; ``out`` cannot be written.
    """
    names = [name for name, figure in FIGURES.items() if figure.in_all] if wanted == ALL else [wanted]
    if wanted != ALL:
        _require_used(wanted, FIGURES[wanted], trace, seeds)
    benches = Benches(source(trace, seeds), seeds)
    if out is not None:
        require_writable(out, out, create=True)
    kept = Kept(None if out is None else Path(out))
    page = Page(with_stories=wanted == ALL)
    done: list[Payload] = []
    for name in names:
        bench, document = _document(name, benches, kept)
        done.append(document)
        FIGURES[name].tell(document, report)
        report.data_so_far(_told(wanted, done))
        if out is not None and FIGURES[name].show is not None:
            page.add(document, FIGURES[name].show(document, bench))
            page.write(Path(out) / PAGE)
    if wanted == ALL:
        tell_summary(done, report)
    if out is not None and page:
        report.point_to("Page", Path(out) / PAGE)
    report.data(_told(wanted, done))


class Benches:
    """A bench for each number of seeds; figures that take the same number share what it has run.

    Args:
        asked: The lengths and seeds that were asked for.
        seeds: How many seeds were; None leaves it to the figure.
    """

    def __init__(self, asked: Source, seeds: int | None) -> None:
        self._asked, self._seeds = asked, seeds
        self._benches: dict[Source, Bench] = {}

    def of(self, figure: Figure) -> Bench:
        """The bench on which a figure is run."""
        chosen = self._source(figure)
        return self._benches.setdefault(chosen, Bench(chosen))

    def _source(self, figure: Figure) -> Source:
        exact = self._asked.exact if figure.traced else None
        if self._seeds is not None or exact is not None:
            return Source(self._asked.seeds, exact)
        return Source(tuple(range(figure.seeds or 1)))


def _document(name: str, benches: Benches, kept: Kept) -> tuple[Bench, Payload]:
    figure = FIGURES[name]
    bench = benches.of(figure)
    follows_from = key(name, bench.source.exact, None if figure.seeds is None else bench.source.seeds)
    found = kept.find(name, follows_from)
    return bench, kept.keep(name, follows_from, figure.document(bench, kept.within(name))) if found is None else found


def _told(wanted: str, done: list[Payload]) -> Payload:
    return {"figures": done, "summary": summary_rows(done)} if wanted == ALL else done[0]


def _require_used(name: str, figure: Figure, trace: object, seeds: int | None) -> None:
    """Refuse what would change nothing."""
    if trace is not None and not figure.traced:
        raise SettingError("trace", str(trace), f"{name} does not serve it; leave it out")
    if seeds is not None and figure.seeds is None:
        raise SettingError("seeds", seeds, f"{name} draws nothing; leave it out")
