"""Places in one array for the names of the blocks that a prefix cache keeps, and the look-ups that asked for them.

A name is a chain and a place in it (``prefix.chains``), so what a table or a look-up names are few ranges of a chain each:

    look-up 7    chain 1, places 0 to 40    chain 6, places 40 to 52
    array        | chain 1: 0 1 2 ...           | chain 6: 40 41 ... |
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..memory.prefix.chains import PLACE_BITS, Paths
from ..memory.prefix.contents_log import LOOKED_UP, NAMED, RELEASED, TAKEN, Asked, ContentsLog, OneGroup
from ..types.sums import distinct


class Contents(Protocol):
    """What a tier of the cache kept, and what look-ups asked it for: part of ``ContentsKept``."""

    @property
    def num_kv_groups(self) -> int:
        """See ``ContentsKept``."""

    def sealed_contents(self) -> ContentsLog:
        """See ``ContentsKept``."""

    def asked(self) -> Asked:
        """See ``ContentsKept``."""

    def paths_of(self, requests: np.ndarray) -> Paths:
        """See ``ContentsKept``."""


class CachedNames:
    """The names of one run with a prefix cache.

    Args:
        only: The names and events of one group, and of what look-ups ask for only this; None for all.

    Attributes:
        stays, kept, events: Columns of the log of the contents.
        first, stop: Places of the ranges that look-ups ask for, int64 [ranges], in the order of the look-ups.
        ranges: The ranges of each look-up lie between two entries, int64 [look-ups + 1]; none of one that asks for nothing.
    """

    def __init__(self, kept: Contents, only: OneGroup | None = None) -> None:
        log = kept.sealed_contents()
        self.stays, self.kept, self.events = log.stays.columns(), log.kept.columns(), log.events.columns()
        if only is not None:
            # What happens to other groups changes only how many blocks are free.
            kind, chains = self.events["kind"], self.events["name"] >> PLACE_BITS
            others = (kind != LOOKED_UP) & (chains % kept.num_kv_groups != only.place)
            self.events = self.events | {"kind": np.where(others, TAKEN, kind)}
        chain, start, stop = self._asked(kept, only)
        named = (self.events["kind"] == NAMED) | (self.events["kind"] == RELEASED)
        names = np.concatenate([self.stays["name"], self.events["name"][named]])
        ends = names + np.concatenate([self.stays["blocks"], self.events["blocks"][named]])
        places = np.concatenate([(chain << PLACE_BITS) + start, names])
        beyond = np.concatenate([(chain << PLACE_BITS) + stop, ends])
        chains = places >> PLACE_BITS
        self._lowest = int(chains.min(initial=0))
        chains -= self._lowest
        number = int(chains.max(initial=-1)) + 1
        least, most = np.full(number, np.iinfo(np.int64).max), np.full(number, np.iinfo(np.int64).min)
        np.minimum.at(least, chains, places)
        np.maximum.at(most, chains, beyond)
        lengths = np.where(least < most, most - least, 0)
        #: Of each chain, from the lowest number on: subtracted from a name it gives the place.
        self._shift = least - (np.cumsum(lengths) - lengths)
        self.first = self.place_of((chain << PLACE_BITS) + start)
        self.stop = self.first + stop - start
        #: Edges of the ranges, ascending; and the last look-up that asks for what lies before the first, between two, and behind the last.
        self._edges = distinct(np.concatenate([self.first, self.stop]))
        self._last = np.full(len(self._edges) + 1, -1, dtype=np.int64)
        # Of equal ranges the last one counts.
        _, back = np.unique((self.first * (lengths.sum() + 1) + self.stop)[::-1], return_index=True)
        some = np.sort(len(self.first) - 1 - back)
        row = np.repeat(np.arange(len(self.ranges) - 1), np.diff(self.ranges))[some]
        at, until = (np.searchsorted(self._edges, each[some], side="right") for each in (self.first, self.stop))
        long = until - at > 1
        for low, high, number in zip(at[long].tolist(), until[long].tolist(), row[long].tolist(), strict=True):
            self._last[low:high] = number
        np.maximum.at(self._last, at[~long], row[~long])

    def last(self, places: np.ndarray) -> np.ndarray:
        """The last look-up that asks for each place, or -1, int64."""
        return self._last[np.searchsorted(self._edges, places, side="right")]

    def _asked(self, kept: Contents, only: OneGroup | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chain, and first and last place (exclusive), of what each look-up asks for."""
        asked, places = kept.asked(), np.arange(kept.num_kv_groups)
        if only is not None:
            asked, places = asked._replace(stop=only.blocks), places[only.place : only.place + 1]
        row = self.events["name"][self.events["kind"] == LOOKED_UP]
        index, least, most = (column[row] for column in asked)
        paths = kept.paths_of(np.unique(index))
        place = np.searchsorted(paths.requests, index)
        first, lengths = paths.offsets[place], np.diff(paths.offsets)[place]
        # One range each for a sequence that finds its own blocks again.
        own = ~paths.shares[place]
        counts = np.where(own, 1, lengths)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        nth = np.arange(len(before)) - before
        link = np.repeat(first, counts) + nth
        is_own = np.repeat(own, counts)
        numbers, stops = (np.append(column, 0) for column in (paths.numbers, paths.stops))
        link[is_own] = len(paths.numbers)
        chain = np.where(is_own, -(np.repeat(index, counts) + 1), numbers[link])
        until = np.repeat(most, counts)
        stop = np.where(is_own, until, np.minimum(stops[link], until))
        start = np.maximum(np.where(nth > 0, stops[link - 1], 0), np.repeat(least, counts))
        some = start < stop
        of_row, groups = np.repeat(row, counts)[some], len(places)
        self.ranges = np.append(0, np.cumsum(groups * np.bincount(of_row, minlength=len(asked.requests))))
        chains = np.repeat(chain[some], groups) * kept.num_kv_groups + np.tile(places, np.count_nonzero(some))
        return chains, np.repeat(start[some], groups), np.repeat(stop[some], groups)

    def place_of(self, names: np.ndarray) -> np.ndarray:
        """Places of names, which ranges of the run have."""
        return names - self._shift[(names >> PLACE_BITS) - self._lowest]
