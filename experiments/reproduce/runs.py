"""The documents of figures, each made once, on as many cores as there are.

What is kept and follows from the same is found and not made again. What takes next to nothing is made at once, by this
process: there is soon something to see. The others are made by worker processes, a figure on one core each, figures
that share runs one after another by the same one. Those that take longest are begun first, so that at the end no core
waits long for another. A single one that is left has all cores, for its own runs.

A worker keeps each document itself as soon as that is made: whatever becomes of this process, no more is lost than the
figures that are being made. A document follows from its key alone, so that its bytes do not depend on the process or the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..paper.paper import Source
from ..runs.kept import Kept, key
from ..runs.output import no_bars
from ..runs.parallel import Workers, as_they_finish, at_most
from .figures import FIGURES, Figure

Document = tuple[str, Payload]


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


@dataclass(frozen=True)
class Rerun:
    """A figure to be made.

    Attributes:
        follows_from: The key of its document.
        bench: On which it is run.
        kept: Where its document goes.
    """

    name: str
    follows_from: str
    bench: Bench
    kept: Kept


def documents(names: Sequence[str], benches: Benches, kept: Kept, jobs: int | None) -> Iterator[Document]:
    """The documents of figures, by name, as they are there; ``jobs`` at a time, by default one a core.

    Raises:
        UserError: A document cannot be kept.
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
    return Rerun(name, key(name, bench.source.exact, seeds), bench, kept)


def _made(rerun: Rerun) -> Document:
    document = FIGURES[rerun.name].document(rerun.bench, rerun.kept.within(rerun.name))
    return rerun.name, rerun.kept.keep(rerun.name, rerun.follows_from, document)


def _groups(reruns: Iterator[Rerun]) -> list[list[Rerun]]:
    """Those that share runs together, and those that take longest first."""
    groups: dict[str, list[Rerun]] = {}
    for rerun in reruns:
        groups.setdefault(FIGURES[rerun.name].shares or rerun.name, []).append(rerun)
    return sorted(groups.values(), key=_seconds, reverse=True)


def _seconds(group: list[Rerun]) -> int:
    """What a group takes on one core, about."""
    return sum(FIGURES[rerun.name].seconds or 0 for rerun in group)
