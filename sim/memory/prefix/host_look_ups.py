"""Look-ups of blocks on the host, and in the tiers behind it, from where they are promoted to the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from enum import Enum
from functools import partial

from ...types.errors import SettingError
from ...types.sequence import Sequence
from .host_cache import HostCache, Placed
from .host_copies import HostCopies
from .tiers import Link

#: Decisions to promote while nothing runs, which a later arrival may still end.
_MOST_TURNS = 10_000


class LookUp(Enum):
    """vLLM's ``LookupResult``: what a look-up of a block finds."""

    MISS, HIT, HIT_PENDING, RETRY = range(4)


class HostLookUps(HostCopies):
    """What look-ups on the host find; see ``HostCopies``.

    Args:
        cache: Names of the blocks on the host.
    """

    cache: HostCache

    def __init__(self, cache: HostCache, behind: Values[Link], chunk_blocks: int) -> None:
        super().__init__(cache, behind, chunk_blocks)
        if any(link.spec.writes_back for link in behind):
            cache.on_evicted = self._write_back
        # Of each sequence the blocks that it has promoted, with the place of their tier; promotions of the decision by both.
        self._sources: dict[int, dict[int, int]] = {}
        self._promoting: dict[tuple[int, int], list[int]] = {}
        # Decisions to promote since a step last computed anything.
        self._turns = 0

    def _find(self, request: int, name: int, place: int) -> LookUp:
        """Look a block up on the host, and behind it, from where it is then promoted to the host."""
        cache = self.cache
        if cache.has(name):
            return LookUp.HIT if cache.is_ready(name) else LookUp.HIT_PENDING
        answer = LookUp.MISS
        for tier, link in enumerate(self.behind):
            found = link.find(request, name, self.seen_ticks)
            if found:
                if not cache.start_store(request, [(name, place)]):
                    return LookUp.MISS
                self._promoting.setdefault((tier, request), []).append(name)
                self._sources.setdefault(request, {})[name] = tier
                return LookUp.HIT_PENDING
            if found is None:
                answer = LookUp.RETRY
        return answer

    def prefix(self, request: int, blocks: Iterable[Placed]) -> int | None:
        """Number of blocks, from the first of ``blocks`` on, that are here; None if some of them are still written."""
        found, waits = 0, False
        for name, place in blocks:
            answer = self._find(request, name, place)
            if answer is LookUp.MISS:
                break
            found += 1
            waits = waits or answer is not LookUp.HIT
        return None if waits else found

    def window(self, request: int, blocks: Values[Placed], needed: int, first: int) -> int | None:
        """End of the last run of ``needed`` blocks that are here, as a window or a state needs them.

        A shorter run counts where it begins with the first of ``blocks``.

        Args:
            needed: Blocks of a run.
            first: Blocks of a run that ends with the last of ``blocks``.

        Returns:
            None if a block of the run is still written, or it is not known yet whether one is here.
        """
        run, waits, retries = 0, False, False
        for at in reversed(range(len(blocks))):
            answer = self._find(request, *blocks[at])
            if answer in (LookUp.HIT, LookUp.HIT_PENDING):
                run += 1
                waits = waits or answer is LookUp.HIT_PENDING
            else:
                run, waits, first = 0, False, needed
                retries = retries or answer is LookUp.RETRY
            if run == first:
                return None if waits or retries else at + run
        return None if waits or retries else run

    def sources(self, sequence: Sequence) -> dict[int, int]:
        """The blocks that a sequence has promoted to the host, by name, with the place of their tier."""
        return self._sources.get(sequence.index, {})

    def _look_behind(self, idle: bool) -> None:
        """Submit the promotions and the look-ups of the decision.

        Raises:
            SettingError: Nothing runs, and promoted blocks evict each other again and again.
        """
        now = self.seen_ticks
        self._turns = idle * (self._turns + bool(self._promoting))
        if self._turns > _MOST_TURNS:
            remedy = "is fewer than a request finds behind them: vLLM promotes its blocks for ever; give the host more memory"
            raise SettingError("blocks on the host", self.cache.num_blocks, remedy)
        for (tier, request), names in self._promoting.items():
            until, found = self.behind[tier].read(names, now)
            self._until(until, partial(self._end_promotion, tier, request, names, found))
        self._promoting = {}
        for link in self.behind:
            if (asked := link.begin_look_ups(now)) is not None:
                self._until(*asked)

    def _end_promotion(self, tier: int, request: int, names: list[int], found: int) -> None:
        """Blocks are on the host, the first ``found`` of ``names``; the others are not."""
        read, lost = names[:found], names[found:]
        self.behind[tier].store.end_read(read)
        self.cache.end_store(read)
        self.cache.drop(lost)
        self.behind[tier].mark_miss(lost)
        sources = self._sources.get(request, {})
        for name in lost:
            if sources.get(name) == tier:
                del sources[name]

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has finished, and so have its stores."""
        self._sources.pop(sequence.index, None)
        for link in self.behind:
            link.forget(sequence.index)

    def _write_back(self, names: list[int]) -> None:
        for link in self.behind:
            if link.spec.writes_back:
                link.write(names, self.seen_ticks)
