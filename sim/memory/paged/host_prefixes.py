"""Prefixes of waiting sequences on the host, in all KV groups, and their loads: how ``offload`` looks blocks up."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...types.sequence import Sequence
from ..prefix.host_cache import Placed
from ..prefix.host_tier import HostTier
from .group_cache import Found
from .paged import PagedMemory


class Seeker(NamedTuple):
    """How look-ups on the host see the blocks of a group.

    Attributes:
        place: The group.
        size: Tokens of its chunks on the host: one block, or several where there is one group.
        window_tokens: Tokens of its window; 0 in another group.
        needed: Blocks that a look-up needs before a token, of a window or a state; 0 where it needs all.
    """

    place: int
    size: int
    window_tokens: int
    needed: int

    def needed_before(self, tokens: int) -> int:
        """``needed`` where the token after ``tokens`` ones is the next, which may be within a block."""
        before = self.window_tokens - 1 + -tokens % self.size
        return max(self.needed, -(-before // self.size)) if self.window_tokens else self.needed


class HostPrefixes(PagedMemory):
    """As ``PagedMemory`` with a prefix cache, with look-ups on the host.

    Attributes:
        tier: The blocks on the host, and the copies.
    """

    tier: HostTier
    # Tokens of a hash, and blocks of a chunk; tokens of a chunk of each group.
    _hashed: int
    _chunk_blocks: int
    _sizes: tuple[int, ...]
    # Of each group that look-ups find, in their order, and in that of a look-up on the host.
    _seekers: list[Seeker]
    _seeking: list[Seeker]

    def on_host(self, sequence: Sequence, known: int) -> int | None:
        """Tokens of a waiting sequence after the ``known`` ones that can be loaded; None if it waits for a copy.

        Each group may shorten the prefix that others have accepted. After a window or a state has, or where a block was still written,
        the groups are asked again.
        """
        cache, tier = self.cache, self.tier
        assert cache is not None
        hashed_tokens = min(sequence.start_tokens, len(cache.names_of(sequence)) * self._hashed)
        most, found, waits, seekers = sequence.start_tokens, 0, False, self._seeking
        sparse = [seeker for seeker in seekers if seeker.needed]
        if sparse:
            most -= 1
            if self.groups.states:
                most -= most % self.block_size
        # The drafter's group is asked for one block more, which is then dropped.
        drops = self.groups.drops_block
        while seekers:
            again: list[Seeker] = []
            any_sparse = False
            for seeker in seekers:
                size = seeker.size
                hashed, start = hashed_tokens // size, known // size
                most = min(most, hashed * size)
                if most - known < size:
                    return 0
                dropped = drops and seeker.place == self.groups.drafter
                stop = min(-(-most // size) + dropped, hashed)
                placed = self._placed(sequence, seeker, start, stop)
                if not seeker.needed:
                    blocks = tier.prefix(sequence.index, placed)
                else:
                    first = seeker.needed_before(min(most, (stop - dropped) * size))
                    blocks = tier.window(sequence.index, [*placed], seeker.needed + dropped, first + dropped)
                waits = waits or blocks is None
                if blocks is not None:
                    most = min(most, (start + blocks - dropped) * size)
                    drops = drops and not dropped
                if most - known < size:
                    return 0
                if most - known < found:
                    drops = drops or (self.groups.drops_block and seeker.place != self.groups.drafter)
                    if waits:
                        waits, again = False, self._seeking
                    elif any_sparse and not again:
                        again = sparse
                any_sparse = any_sparse or seeker.needed > 0
                found = most - known
            seekers = again
        if waits or any(self._loads_now(sequence, seeker, known, known + found) for seeker in self._seekers):
            return None
        return found

    def _loads_now(self, sequence: Sequence, seeker: Seeker, known: int, tokens: int) -> bool:
        """Whether a block that a group needs for the first ``tokens``, beside those of the ``known`` ones, is on its way."""
        assert self.cache is not None
        start, stop = known // seeker.size, -(-tokens // seeker.size)
        if seeker.needed:
            start = max(start, stop - seeker.needed_before(tokens))
        return self.tier.is_loading(self._names(sequence, seeker, start, stop))

    def load(self, sequence: Sequence, found: Found, tokens: int) -> None:
        """A waiting sequence takes the blocks that it found, and new ones up to ``tokens`` that it loads from the host."""
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        known = found.blocks * self.block_size
        kept = tables.passed(found.tables, tokens)
        until = tuple(-(-tokens // size) for size in self._sizes)
        blocks: list[Placed] = []
        behind: dict[int, int] = {}
        num_blocks, promoted = 0, self.tier.sources(sequence)
        for seeker in self._seekers:
            stop = until[seeker.place]
            first = max(known * self._chunk_blocks // seeker.size, len(kept[seeker.place]))
            at = first // self._chunk_blocks
            num_blocks += -(-tokens * self._chunk_blocks // seeker.size) - first
            chunks = [*self._placed(sequence, seeker, at, stop)]
            blocks += chunks
            if promoted:
                self._note_sources(behind, seeker, chunks, at, (known, tokens), promoted)
        cache.enter(sequence, Found(kept, found.blocks))
        tables.enter(sequence, kept)
        tables.take(sequence, tokens, known, loads=True)
        tables.take_after_load(sequence, tokens)
        self._hold_load(sequence, tokens, known)
        by_tier: Counter[int] = Counter()
        for unit, tier in behind.items():
            by_tier[tier] += min((unit + 1) * self._hashed, tokens) - max(unit * self._hashed, known)
        self.tier.on_looked_up(sequence, known, tokens - known, by_tier)
        self.tier.load(sequence, tokens, blocks, num_blocks, until)

    def _names(self, sequence: Sequence, seeker: Seeker, start: int, stop: int) -> list[int]:
        """Names of chunks of a sequence in one group: those of their last blocks."""
        assert self.cache is not None
        each = self._chunk_blocks
        return self.cache.group_names(sequence, seeker.place, start * each, stop * each)[each - 1 :: each]

    def _placed(self, sequence: Sequence, seeker: Seeker, start: int, stop: int) -> Iterator[Placed]:
        places = (self._place(seeker.size, chunk) for chunk in range(start, stop))
        return zip(self._names(sequence, seeker, start, stop), places, strict=True)

    def _note_sources(
        self,
        behind: dict[int, int],
        seeker: Seeker,
        chunks: list[Placed],
        at: int,
        span: tuple[int, int],
        promoted: Mapping[int, int],
    ) -> None:
        """Note the farthest tier that has the tokens of a span in one of the groups; a state stands for all of them.

        Args:
            behind: The place of the tier, by place of a hash.
            chunks: Those that are loaded, from the place ``at`` on.
        """
        unit = self._hashed
        for chunk, (name, _) in enumerate(chunks, at):
            if (tier := promoted.get(name)) is None:
                continue
            own = chunk * seeker.size, (chunk + 1) * seeker.size
            start, stop = span if seeker.needed and not seeker.window_tokens else own
            for place in range(max(start, span[0]) // unit, -(-min(stop, span[1]) // unit)):
                behind[place] = max(tier, behind.get(place, tier))

    def _place(self, size: int, block: int) -> int:
        """Place of a block's last hash among those of its sequence, in a group with blocks of ``size`` tokens."""
        return (block + 1) * size // self._hashed - 1

    @abstractmethod
    def _hold_load(self, sequence: Sequence, tokens: int, known: int) -> None:
        """Count the blocks of a sequence that loads ``tokens``, of which the GPU had ``known``."""
