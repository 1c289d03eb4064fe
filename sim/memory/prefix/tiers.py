"""Tiers behind the host: blocks by name in a store, and a replica's copies between the store and its host.

    GPU  <-  host  <-  store        a block that a look-up finds here alone is promoted to the host, where it is loaded from
    GPU  ->  host  ->  store        a block that is on the host is written here at once, or when the host evicts it

A look-up finds a block once it is written whole. Those of a store that is shared are found by all replicas; each has a link of its own.
Blocks are evicted in the order of their last write or read, but not while they are read.

Source: vLLM 0.33, vllm/v1/kv_offload/tiering/manager.py and async_lookup.py. vLLM's own stores have no end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...spec.tiers import TierSpec
from ..accounting.ledger import Table
from .chains import Chain
from .contents_log import SettledContentsLog

#: Columns of a copy between host and store.
COPY = ("asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
#: Columns of a change of the blocks of a store.
STORED = ("ticks", "used_blocks")


class Store:
    """Names of the blocks of a tier.

    Args:
        num_blocks: Blocks that it can have; None is without end.
        num_kv_groups: KV groups; a name modulo this is the block's.
        shared: Whether several replicas have it.

    Attributes:
        contents: Log of what became of each block, by its name, or None.
        evicted_blocks, most_used_blocks: Blocks evicted so far; the most at a time.
        levels: Records, by the columns above.
    """

    def __init__(self, num_blocks: int | None, num_kv_groups: int, shared: bool = False) -> None:
        self.num_blocks, self.shared = num_blocks, shared
        self.contents: SettledContentsLog | None = SettledContentsLog(num_kv_groups)
        self.levels, self.evicted_blocks, self.most_used_blocks = Table(STORED), 0, 0
        # By name, the next to be evicted first: since when it is written whole.
        self._ready: OrderedDict[int, int] = OrderedDict()
        self._readers: Counter[int] = Counter()

    @property
    def used_blocks(self) -> int:
        return len(self._ready)

    def has(self, name: int, now: int) -> bool:
        """Whether a block is here as a whole."""
        return name in self._ready and self._ready[name] <= now

    def place(self, names: Iterable[int], now: int) -> list[int]:
        """Names that are not here and have a place from now on; ``write`` says until when they are written. Others become the last
        to be evicted."""
        missing = []
        for name in names:
            if name in self._ready:
                self._ready.move_to_end(name)
            else:
                missing.append(name)
        if self.num_blocks is not None:
            missing = missing[: self._make_room(len(missing), now)]
        return missing

    def write(self, names: Sequence[int], now: int, until: int) -> None:
        """Blocks are written."""
        self._ready.update(dict.fromkeys(names, until))
        self._note(now, freed=names)

    def begin_read(self, names: Sequence[int], now: int) -> None:
        """Blocks are read, and not evicted before ``end_read``."""
        self._readers.update(names)
        for name in names:
            self._ready.move_to_end(name)
        self._note(now, read=names)

    def end_read(self, names: Iterable[int]) -> None:
        self._readers.subtract(names)
        self._readers = +self._readers

    def sealed_contents(self) -> SettledContentsLog | None:
        """The log, complete, when the run has ended; None without one."""
        if self.contents is not None:
            self.contents.seal({name: name for name in self._ready})
        return self.contents

    def _make_room(self, blocks: int, now: int) -> int:
        """Evict until ``blocks`` places are free, or nothing more can be evicted. Returns the free places."""
        assert self.num_blocks is not None
        missing = blocks - (self.num_blocks - len(self._ready))
        gone: list[int] = []
        for name, ready in self._ready.items():
            if len(gone) >= missing:
                break
            if ready <= now and not self._readers[name]:
                gone.append(name)
        for name in gone:
            del self._ready[name]
        self.evicted_blocks += len(gone)
        self._note(now, evicted=gone)
        return self.num_blocks - len(self._ready)

    def _note(self, now: int, freed: Sequence[int] = (), read: Sequence[int] = (), evicted: Sequence[int] = ()) -> None:
        if freed or evicted:
            self.levels.append((now, len(self._ready)))
            self.most_used_blocks = max(self.most_used_blocks, len(self._ready))
        if self.contents is not None:
            self.contents.on_stays_ended(read, read, read, True)
            self.contents.on_stays_ended(evicted, evicted, evicted, False)
            self.contents.on_freed((*read, *freed))
            self.contents.settle(now)


@dataclass(eq=False, slots=True)
class FleetTiers:
    """What the replicas of a fleet with shared tiers have together.

    Attributes:
        chains: The numbers of contents (``Chains``).
        stores: By the place of the tier.
    """

    chains: dict[tuple[int, int, int, int], Chain] = field(default_factory=dict)
    stores: dict[int, Store] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What is behind the GPU of a replica.

    Attributes:
        num_chunks: Chunks on the host.
        chunk_bytes: Of all ranks.
        chunk_blocks: Blocks of a chunk.
        tiers: Behind the host, in the order in which they are asked.
        fleet: What replicas have together, where one of the tiers is shared.
        link: Between the GPU and the host; None where the cost model has the time of its copies.
        layers: Layers of the model, for loads that are over layer by layer.
        num_components, component_bytes: Places on the host for windows or states of a pool of their own, and bytes of each.
    """

    num_chunks: int
    chunk_bytes: int
    chunk_blocks: int = 1
    tiers: tuple[TierSpec, ...] = ()
    fleet: FleetTiers | None = None
    link: TierSpec | None = None
    layers: int = 1
    num_components: int = 0
    component_bytes: int = 0

    def store(self, place: int, num_kv_groups: int) -> Store:
        """The store of a tier, that of the fleet where it is shared."""
        spec = self.tiers[place]
        chunks = None if spec.size_bytes is None else spec.size_bytes // self.chunk_bytes
        if self.fleet is None or not spec.shared:
            return Store(chunks, num_kv_groups)
        return self.fleet.stores.setdefault(place, Store(chunks, num_kv_groups, True))


class Link:
    """A replica's copies to a store and from it, one after the other each way.

    Args:
        chunk_bytes: Of a block.

    Attributes:
        copies: Records, by the columns above.
    """

    def __init__(self, spec: TierSpec, store: Store, chunk_bytes: int) -> None:
        self.spec, self.store, self._chunk_bytes = spec, store, chunk_bytes
        self.copies = Table(COPY)
        self._free_from = [0, 0]
        # Answers by name, None before they are known; and the sequences that asked.
        self._answers: dict[int, bool | None] = {}
        self._asked: dict[int, set[int]] = {}
        self._names_of: dict[int, set[int]] = {}
        self._new: list[int] = []

    def find(self, request: int, name: int, now: int) -> bool | None:
        """Whether a block is here; None where this is known later. An answer holds until no request that asked is left."""
        if not self.spec.answers_later:
            return self.store.has(name, now)
        if name not in self._answers:
            self._answers[name] = None
            self._new.append(name)
        self._asked.setdefault(name, set()).add(request)
        self._names_of.setdefault(request, set()).add(name)
        return self._answers[name]

    def begin_look_ups(self, now: int) -> tuple[int, Callable[[], None]] | None:
        """The look-ups since the last call: when they are answered, and what answers them; None without any."""
        if not self._new:
            return None
        found, self._new = {name: self.store.has(name, now) for name in self._new}, []

        def answer() -> None:
            self._answers.update({name: here for name, here in found.items() if name in self._answers})

        return now + self.spec.latency_ticks, answer

    def forget(self, request: int) -> None:
        """A request has finished."""
        for name in self._names_of.pop(request, ()):
            self._asked[name].discard(request)
            if not self._asked[name]:
                del self._asked[name], self._answers[name]

    def write(self, names: Sequence[int], now: int) -> int:
        """Blocks of the host are written, those that are not here. Returns when that is done."""
        missing = self.store.place(names, now)
        if not missing:
            return now
        until = self._copy(len(missing), now, True)
        self.store.write(missing, now, until)
        return until

    def read(self, names: Sequence[int], now: int) -> tuple[int, int]:
        """Blocks are read, up to the first that has been evicted since the look-up. Returns when that is done, and how many are read."""
        found = next((at for at, name in enumerate(names) if not self.store.has(name, now)), len(names))
        if not found:
            return now, 0
        self.store.begin_read(names[:found], now)
        return self._copy(found, now, False), found

    def mark_miss(self, names: Iterable[int]) -> None:
        """Blocks were not read: look-ups do not find them."""
        self._answers.update({name: False for name in names if self._answers.get(name)})

    def _copy(self, blocks: int, now: int, writes: bool) -> int:
        start = max(now, self._free_from[writes])
        end = self._free_from[writes] = start + self.spec.ticks(blocks * self._chunk_bytes, writes)
        self.copies.append((now, start, end, blocks, writes))
        return end
