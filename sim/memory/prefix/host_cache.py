"""The dictionary of a prefix cache in host memory: names of blocks, in the order in which they are evicted.

A block is in one of three states:

    written    its copy from the GPU is on the way; a look-up finds it and has to wait
    ready      a look-up hits it; it is evicted when its place is needed
    read       copies to the GPU are on the way; it is not evicted before the last of them ends

The order of eviction is that of the last request that used a block, and within a request from its last block to its first, so
that a prefix loses its end first. A request uses a block when it stores it, offers it although it is already there, or loads
it. All its blocks become the most recently used ones when it finishes.

So blocks lie in groups, one for each request that is served and for each one that has finished, in the order of these; within
a group the block of the last place goes first. An eviction takes the first groups, whole or from their ends.

Of blocks at the same place, one of each KV group, that of the first KV group goes first while the request is served, and that of the last
one after it.

Source: vLLM 0.33, vllm/v1/kv_offload/cpu/manager.py (CPUOffloadingManager) and policies/lru.py (LRUCachePolicy), with one block
per chunk and without a store threshold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .contents_log import SettledContentsLog

#: A name, and its place among the blocks of a request. Names of one request and KV group have different places.
Placed = tuple[int, int]

_WRITTEN = -1


@dataclass(eq=False, slots=True)
class _Group:
    """Blocks that were last used by the same request.

    Attributes:
        rank: Its turn of eviction, among groups.
        places: By name: its place, times the number of KV groups, plus its turn among the blocks there.
        in_turn: The names by place, those that have left the group included; None after a block came.
        idle: How many of its blocks are ready, and read by no copy.
        is_served: Whether the request may use blocks yet.
    """

    rank: int
    places: dict[int, int] = field(default_factory=dict)
    in_turn: list[int] | None = None
    idle: int = 0
    is_served: bool = True


@dataclass(slots=True)
class _Use:
    """What one request has used: the places of names, and the group of those that no other request used later."""

    places: dict[int, int] = field(default_factory=dict)
    group: _Group | None = None


class HostCache:
    """Names of the blocks in host memory.

    Args:
        num_blocks: Blocks that it can have.
        num_kv_groups: KV groups; a name modulo this is the block's.

    Attributes:
        contents: Log of what became of each block, by its name, or None.
        on_evicted: Called with the names that are evicted, if any.
        evicted_blocks: Blocks evicted so far.
        refused_stores: Offers that found too few blocks to evict, so that nothing was stored.
    """

    def __init__(self, num_blocks: int, num_kv_groups: int = 1) -> None:
        self.num_blocks, self._kv_groups = num_blocks, num_kv_groups
        self.contents: SettledContentsLog | None = None
        self.on_evicted: Callable[[list[int]], None] | None = None
        self.evicted_blocks = self.refused_stores = 0
        # By name: number of copies that read the block, or ``_WRITTEN``; and its group.
        self._readers: dict[int, int] = {}
        self._group_of: dict[int, _Group] = {}
        #: Groups by rank, in the order of their ranks.
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._evictable = self._last_rank = 0
        self._uses: dict[int, _Use] = {}

    @property
    def used_blocks(self) -> int:
        """Blocks with a name, those on the way included."""
        return len(self._readers)

    @property
    def evictable_blocks(self) -> int:
        """Blocks that are ready and that no copy reads."""
        return self._evictable

    def sealed_contents(self) -> SettledContentsLog | None:
        """The log, complete, when the run has ended; None without one."""
        if self.contents is not None:
            self.contents.seal({name: name for name in self._readers})
        return self.contents

    def has(self, name: int) -> bool:
        """Whether a block with this name is here, ready or on the way."""
        return name in self._readers

    def is_ready(self, name: int) -> bool:
        """Whether it is here and can be loaded."""
        return self._readers.get(name, _WRITTEN) >= 0

    def start_load(self, request: int, blocks: Sequence[Placed]) -> None:
        """A request begins to load blocks that are ready."""
        names = [name for name, _ in blocks]
        self.pin(names)
        self._use(request, blocks)
        if self.contents is not None:
            self.contents.on_stays_ended(names, names, names, True)
            self.contents.on_freed(names)

    def pin(self, names: Iterable[int]) -> None:
        """A copy that is no use of a request begins to read blocks that are ready, until ``end_load``."""
        readers, group_of = self._readers, self._group_of
        for name in names:
            if not readers[name]:
                self._evictable -= 1
                group_of[name].idle -= 1
            readers[name] += 1

    def end_load(self, names: Iterable[int]) -> None:
        """A load has ended."""
        readers, group_of = self._readers, self._group_of
        for name in names:
            readers[name] -= 1
            if not readers[name]:
                self._evictable += 1
                group_of[name].idle += 1

    def start_store(self, request: int, blocks: Sequence[Placed]) -> list[int] | None:
        """A request offers its blocks.

        Returns:
            Names of those that are not here yet, for which there is now a place: they are to be copied. None if too few
            blocks can be evicted for all of them; then none is stored.
        """
        readers = self._readers
        missing = [name for name, _ in blocks if name not in readers]
        # Blocks that are still written are not used.
        use = self._use(request, [block for block in blocks if readers.get(block[0], 0) >= 0])
        if not self._make_room(len(missing), blocks):
            self.refused_stores += 1
            return None
        readers.update(dict.fromkeys(missing, _WRITTEN))
        if self.contents is not None:
            self.contents.on_freed(missing)
        if missing:
            self._put(self._group(use), {name: use.places[name] for name in missing})
        return missing

    def end_store(self, names: Collection[int]) -> None:
        """A store has ended: its blocks are ready."""
        self._readers.update(dict.fromkeys(names, 0))
        self._evictable += len(names)
        for name in names:
            self._group_of[name].idle += 1

    def drop(self, names: Sequence[int]) -> None:
        """A store has failed: its blocks are not here."""
        for name in names:
            del self._readers[name]
            del self._group_of.pop(name).places[name]
        if self.contents is not None:
            self.contents.on_stays_ended(names, names, names, False)

    def finish(self, request: int) -> None:
        """A request has finished: what it used becomes the most recently used."""
        use = self._uses.pop(request, None)
        if use is None:
            return
        if use.group is not None:
            use.group.is_served = False
        last, readers = self._new_group(), self._readers
        last.is_served = False
        places = {name: place for name, place in use.places.items() if name in readers}
        number = self._kv_groups
        if number > 1:
            places = {name: place // number * number + name % number for name, place in places.items()}
        self._move(last, places)

    def _new_group(self) -> _Group:
        self._last_rank += 1
        self._groups[self._last_rank] = group = _Group(self._last_rank)
        return group

    def _group(self, use: _Use) -> _Group:
        if use.group is None:
            use.group = self._new_group()
        return use.group

    def _use(self, request: int, blocks: Iterable[Placed]) -> _Use:
        """A request uses blocks; only its first use of each counts."""
        use = self._uses.setdefault(request, _Use())
        places, number = use.places, self._kv_groups
        new = {name: place for name, place in blocks if name not in places}
        if number > 1:
            new = {name: (place + 1) * number - 1 - name % number for name, place in new.items()}
        if new:
            places.update(new)
            group, group_of = self._group(use), self._group_of
            earlier = {
                name: place for name, place in new.items() if name in group_of and group_of[name].rank < group.rank
            }
            self._move(group, earlier)
        return use

    def _move(self, group: _Group, places: dict[int, int]) -> None:
        """Move blocks that are here to another group."""
        group_of, readers = self._group_of, self._readers
        for name in places:
            former = group_of[name]
            del former.places[name]
            if not readers[name]:
                former.idle -= 1
                group.idle += 1
        self._put(group, places)

    def _put(self, group: _Group, places: dict[int, int]) -> None:
        group.places.update(places)
        group.in_turn = None
        self._group_of.update(dict.fromkeys(places, group))

    def _make_room(self, blocks: int, kept: Iterable[Placed]) -> bool:
        """Evict until ``blocks`` places are free, but none of ``kept``. Returns whether there are so many; else nothing changes."""
        missing = blocks - (self.num_blocks - len(self._readers))
        if missing <= 0:
            return True
        kept_names = {name for name, _ in kept if not self._readers.get(name, _WRITTEN)}
        if missing > self._evictable - len(kept_names):
            return False
        self.evicted_blocks += missing
        self._evictable -= missing
        over = []
        for group in self._groups.values():
            if group.idle:
                missing -= self._evict(group, missing, kept_names)
            if not group.places and not group.is_served:
                over.append(group.rank)
            if not missing:
                break
        for rank in over:
            del self._groups[rank]
        return True

    def _evict(self, group: _Group, most: int, kept: set[int]) -> int:
        """Evict up to ``most`` blocks of a group. Returns their number."""
        places, readers, group_of = group.places, self._readers, self._group_of
        passed: list[int] = []
        evicted: list[int] = []
        if group.in_turn is None:
            group.in_turn = sorted(places, key=places.__getitem__)
        in_turn = group.in_turn
        while in_turn and len(evicted) < most:
            name = in_turn.pop()
            if name not in places:
                continue
            if readers[name] or name in kept:
                passed.append(name)
                continue
            del places[name], readers[name], group_of[name]
            evicted.append(name)
        group.idle -= len(evicted)
        in_turn.extend(reversed(passed))
        if self.contents is not None:
            self.contents.on_stays_ended(evicted, evicted, evicted, False)
        if self.on_evicted is not None:
            self.on_evicted(evicted)
        return len(evicted)
