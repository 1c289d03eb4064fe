"""SGLang's memory with HiCache: a radix tree whose nodes are copied to the host, and loaded from there at an admission.

    write    what a step computed joins the tree; nodes that hit the threshold are copied when the results of the step are processed, behind
             the step that runs then
    load     an admission loads what the host alone has of its prefix; its step waits for each layer's part before it computes the layer
    ack      the decision after the end of a copy unlocks its nodes

All writes of one step are one copy, and so are all loads of a decision. One link goes each way. The step hides a load as far as layers that
are there are computed meanwhile (``LayeredLoad``).

Source: SGLang 0.5.23, ``mem_cache/unified_radix_cache.py``, ``managers/cache_controller.py`` (``start_writing``, ``start_loading``,
``LayerDoneCounter``), ``managers/schedule_policy.py`` (``add_one_req``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...types.errors import Overdrawn, SettingError
from ...types.sequence import LayeredLoad, Sequence
from ...types.state import State
from ...workload.content import Tokens
from ..accounting.ledger import Meter
from ..prefix import HostTree, Place, RadixNode
from ..prefix.host_copies import HostCopies
from ..prefix.host_radix import Copied
from ..prefix.tiers import Offloaded
from .radix_holdings import Holding
from .radix_memory import RadixMemory
from .radix_transaction import RadixTransaction

#: ``load_back_threshold``: fewer tokens are not loaded.
LEAST_LOADED = 10


class HostRadixTransaction(RadixTransaction):
    """As ``RadixTransaction``, with what the host has."""

    __slots__ = ("_loaded", "_place")
    memory: HostRadixMemory
    _place: Place
    _loaded: int

    def match(self, sequence: Sequence) -> tuple[int, int]:
        """See ``RadixTransaction``."""
        tokens, _ = super().match(sequence)
        _, pages = self.memory.tree.on_device(self.memory.known_of(sequence).place)
        return tokens, pages * self.memory.block_size

    def look_up(self, sequence: Sequence) -> int:
        """See ``RadixTransaction``; tokens that the device has."""
        super().look_up(sequence)
        self._place, self._loaded = self.memory.known_of(sequence).found, 0
        node, pages = self.memory.tree.on_device(self._place)
        self._found = Holding(node, pages, pages * self.memory.block_size)
        return self._found.computed

    @property
    def on_host(self) -> int:
        """See ``RadixTransaction``."""
        return (self._place.tokens - self._found.pages) * self.memory.block_size

    def load(self) -> int:
        """See ``RadixTransaction``."""
        memory, held, place, tokens = self.memory, self._found, self._place, self.on_host
        pages = tokens // memory.block_size
        if tokens < LEAST_LOADED:
            return 0
        memory.make_free(pages)
        if memory.free < pages:
            return 0
        memory.free -= pages
        memory.loads.append(memory.tree.load(place.node))
        memory.tree.lock(place.node)
        memory.tree.unlock(held.node)
        held.node, held.pages, held.computed = place.node, place.tokens, held.computed + tokens
        self._loaded = tokens
        return tokens

    def enter(self, sequence: Sequence) -> None:
        """See ``RadixTransaction``; the look-up on the device and that on the host are logged apart."""
        sequence.computed_tokens = computed = self._found.computed
        found, start = computed - self._loaded, sequence.start_tokens
        self.memory.log.look_up(sequence.index, start, found)
        self.memory.transfers.look_ups.append((sequence.index, start - found, self._loaded))


class HiCache(HostCopies):
    """The copies of a tree with a host.

    Args:
        tree: The tree.
        host: Pages of the host, and the link to it.
    """

    def __init__(self, tree: HostTree, host: Offloaded) -> None:
        super().__init__(_Pages(tree, host.num_chunks))
        self._tree, self._host = tree, host

    def connect(self, clock: Callable[[], int], load: Callable[[int], int], store: Callable[[int], int]) -> None:
        """See ``HostCopies``; a kernel copies all pages at once, at the rate of the link, where this is given."""
        if (link := self._host.link) is not None:
            size = self._host.chunk_bytes
            load, store = lambda pages: link.ticks(pages * size, False), lambda pages: link.ticks(pages * size, True)
        super().connect(clock, load, store)

    def write(self, now: int) -> None:
        """Copy the nodes that are to be written."""
        if self._tree.writes:
            self._submit(self._tree.writes, now, True)
            self._tree.writes = []
        self._note_level(now)

    def load(self, loads: list[Copied], now: int) -> int:
        """Load what an admission asked for. Returns the ticks that it takes."""
        return self._submit(loads, now, False) - now

    def _submit(self, copied: list[Copied], now: int, is_store: bool) -> int:
        return self._copy(-1, now, sum(each.tokens for each in copied), is_store, partial(self._acknowledge, copied))

    def _acknowledge(self, copied: list[Copied]) -> None:
        for each in copied:
            self._tree.unpin(each.node)


class _Pages:
    """See ``HostCounts``."""

    def __init__(self, tree: HostTree, num_blocks: int) -> None:
        self._tree, self.num_blocks = tree, num_blocks

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self._tree.host_free

    @property
    def evicted_blocks(self) -> int:
        return self._tree.host_evicted

    @property
    def refused_stores(self) -> int:
        return self._tree.refused_writes


class HostRadixMemory(RadixMemory):
    """As ``RadixMemory``, with a host.

    Args:
        host: Its pages.
        threshold: Hits at which a node is written: 1 under ``write_through``, 2 under ``write_through_selective``.

    Attributes:
        loads: What the admissions of the decision load.
    """

    tree: HostTree
    transfers: HiCache

    def __init__(
        self,
        num_blocks: int,
        host: Offloaded,
        threshold: int = 1,
        runs: Tokens | None = None,
        block_size: int = 1,
        ahead: bool = False,
    ) -> None:
        super().__init__(num_blocks, runs, True, block_size, ahead)
        self.tree = HostTree(host.num_chunks, threshold)
        self.transfers, self._layers = HiCache(self.tree, host), host.layers
        self.loads: list[Copied] = []
        self._has_new_chunks = False
        self._transaction = HostRadixTransaction(self)

    @property
    def is_settled(self) -> bool:
        """See ``RadixMemory``."""
        return not (self._results or self.tree.writes) and self.transfers.is_settled()

    def room_after(self, state: State, steps: int) -> int:
        """See ``Memory``; what only copies lock is free after them."""
        return super().room_after(state, steps) + self.tree.copying_tokens * self.block_size

    def start_loading(self) -> LayeredLoad | None:
        """Begin the loads of the decision; None without any."""
        if not self.loads:
            return None
        loads, self.loads = self.loads, []
        return LayeredLoad(self.transfers.load(loads, self.clock()), self._layers)

    def _begin_row(self, state: State, steps: int) -> Meter:
        row = super()._begin_row(state, steps)
        self._has_new_chunks = False
        if self.ahead:
            self.transfers.write(self.clock())
        return row

    def process_results(self, moment: int | None = None) -> None:
        """See ``RadixMemory``; then the writes begin, with the overlap schedule behind the step that runs then."""
        # Chunks that have just joined the tree are written with the results of the next step; a chunk in flight has none.
        begins = bool(self._results) if self.ahead else not self._has_new_chunks
        super().process_results(moment)
        if begins:
            self.transfers.write(self.clock())

    def _take(self, pages: int, asked: int) -> None:
        """See ``RadixMemory``.

        Raises:
            SettingError: Copies lock the rest of the pool. SGLang aborts its last request then, which is not simulated.
        """
        try:
            super()._take(pages, asked)
        except Overdrawn:
            remedy = "locks what it writes, and no slot is left for a token: SGLang aborts the request; give more slots"
            raise SettingError("enable_hierarchical_cache", True, remedy) from None

    def _end_prefills(self, decode_step: int) -> None:
        super()._end_prefills(decode_step)
        self._has_new_chunks = True

    def _insert(self, sequence: Sequence, tokens: int) -> RadixNode:
        node, holding, pages = super()._insert(sequence, tokens), self.holdings[sequence], tokens // self.block_size
        self.tree.hit(node, pages, holding.inserted)
        holding.inserted = max(holding.inserted, pages)
        return node
