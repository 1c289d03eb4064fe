"""The dictionary of a prefix cache in host memory: names of blocks, in the order in which they are evicted.

A block is in one of three states:

    written    its copy from the GPU is on the way; a look-up finds it and has to wait
    ready      a look-up hits it; it is evicted when its place is needed
    read       copies to the GPU are on the way; it is not evicted before the last of them ends

The order of eviction is that of the last request that used a block, and within a request from its last block to its first, so
that a prefix loses its end first. A request uses a block when it stores it, offers it although it is already there, or loads
it. All its blocks become the most recently used ones when it finishes.

Source: vLLM 0.33, vllm/v1/kv_offload/cpu/manager.py (CPUOffloadingManager) and policies/lru.py (LRUCachePolicy), for one KV
group, with one block per chunk and without a store threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

#: A name, and its place among the blocks of a request.
Placed = tuple[int, int]
#: Order of a block: rank of its last request, and place from the end, or 0 once that request has finished.
Rank = tuple[int, int]

_WRITTEN = -1


@dataclass(slots=True)
class _Use:
    """What one request has used: its rank, and the places of names."""

    rank: int = 0
    places: dict[int, int] = field(default_factory=dict)


class HostCache:
    """Names of the blocks in host memory.

    Args:
        num_blocks: Blocks that it can have.

    Attributes:
        evicted_blocks: Blocks evicted so far.
        refused_stores: Offers that found too few blocks to evict, so that nothing was stored.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evicted_blocks = self.refused_stores = 0
        # By name: number of copies that read the block, or ``_WRITTEN``.
        self._readers: dict[int, int] = {}
        self._ranks: dict[int, Rank] = {}
        self._evictable: set[int] = set()
        # One entry a name, with a rank that it has or had: ranks only rise, so that a stale one is no later than its turn.
        self._heap: list[tuple[Rank, int]] = []
        self._in_heap: set[int] = set()
        self._last_rank = 0
        self._uses: dict[int, _Use] = {}

    @property
    def used_blocks(self) -> int:
        """Blocks with a name, those on the way included."""
        return len(self._readers)

    @property
    def evictable_blocks(self) -> int:
        """Blocks that are ready and that no copy reads."""
        return len(self._evictable)

    def has(self, name: int) -> bool:
        """Whether a block with this name is here, ready or on the way."""
        return name in self._readers

    def is_ready(self, name: int) -> bool:
        """Whether it is here and can be loaded."""
        return self._readers.get(name, _WRITTEN) >= 0

    def start_load(self, request: int, blocks: Sequence[Placed]) -> None:
        """A request begins to load blocks that are ready."""
        for name, _ in blocks:
            self._evictable.discard(name)
            self._readers[name] += 1
        self._use(request, blocks)

    def end_load(self, names: Iterable[int]) -> None:
        """A load has ended."""
        for name in names:
            self._readers[name] -= 1
            if not self._readers[name]:
                self._make_evictable(name)

    def start_store(self, request: int, blocks: Sequence[Placed]) -> list[int] | None:
        """A request offers its blocks.

        Returns:
            Names of those that are not here yet, for which there is now a place: they are to be copied. None if too few
            blocks can be evicted for all of them; then none is stored.
        """
        missing = [name for name, _ in blocks if name not in self._readers]
        wanted = set(missing)
        self._use(request, [block for block in blocks if block[0] in wanted or self.is_ready(block[0])])
        if not self._make_room(len(missing), {name for name, _ in blocks}):
            self.refused_stores += 1
            return None
        use = self._uses[request]
        for name in missing:
            self._readers[name] = _WRITTEN
            self._ranks[name] = self._rank_of(use), -use.places[name]
        return missing

    def end_store(self, names: Iterable[int]) -> None:
        """A store has ended: its blocks are ready."""
        for name in names:
            self._readers[name] = 0
            self._make_evictable(name)

    def finish(self, request: int) -> None:
        """A request has finished: what it used becomes the most recently used."""
        use = self._uses.pop(request, None)
        if use is None:
            return
        for name in sorted(use.places, key=use.places.__getitem__, reverse=True):
            if name in self._readers:
                self._last_rank += 1
                self._ranks[name] = self._last_rank, 0

    def _rank_of(self, use: _Use) -> int:
        if not use.rank:
            self._last_rank += 1
            use.rank = self._last_rank
        return use.rank

    def _use(self, request: int, blocks: Iterable[Placed]) -> None:
        """A request uses blocks; only its first use of each counts."""
        use = self._uses.setdefault(request, _Use())
        new = [block for block in blocks if block[0] not in use.places]
        if not new:
            return
        rank = self._rank_of(use)
        for name, place in new:
            use.places[name] = place
            if name in self._readers and self._ranks[name] < (rank, -place):
                self._ranks[name] = rank, -place

    def _make_evictable(self, name: int) -> None:
        self._evictable.add(name)
        if name not in self._in_heap:
            self._in_heap.add(name)
            heappush(self._heap, (self._ranks[name], name))

    def _make_room(self, blocks: int, kept: set[int]) -> bool:
        """Evict until ``blocks`` places are free, but none of ``kept``. Returns whether there are so many; else nothing changes."""
        missing = blocks - (self.num_blocks - len(self._readers))
        if missing <= 0:
            return True
        if missing > len(self._evictable) - len(self._evictable & kept):
            return False
        passed = []
        while missing:
            rank, name = heappop(self._heap)
            if name in self._evictable and self._ranks[name] != rank:
                heappush(self._heap, (self._ranks[name], name))
                continue
            if name in kept and name in self._evictable:
                passed.append((rank, name))
                continue
            self._in_heap.remove(name)
            if name not in self._evictable:
                continue
            self._evictable.remove(name)
            del self._readers[name], self._ranks[name]
            self.evicted_blocks += 1
            missing -= 1
        for entry in passed:
            heappush(self._heap, entry)
        return True
