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

from collections.abc import Iterable
from functools import partial

from ...types.errors import Overdrawn, SettingError
from ...types.sequence import LayeredLoad, Sequence
from ...types.state import State
from ...workload.content import Tokens
from ..accounting.ledger import Meter
from ..prefix import HostComponents, HostStateTree, HostTree, HostWindowTree, Place
from ..prefix.host_copies import HostCopies
from ..prefix.host_radix import Copied
from ..prefix.tiers import Offloaded
from .radix_holdings import Holding, States, Windows
from .radix_memory import RadixMemory
from .radix_transaction import RadixTransaction

#: ``load_back_threshold``: fewer tokens are not loaded.
LEAST_LOADED = 10


class HostRadixTransaction(RadixTransaction):
    """As ``RadixTransaction``, with what the host has."""

    __slots__ = ("_lacking", "_loaded", "_on_host", "_place")
    memory: HostRadixMemory
    _place: Place
    # In pages: what the device lacks of the string that was looked up last, and what SGLang counts as hits on the host.
    _lacking: int
    _on_host: int
    _loaded: int

    def match(self, sequence: Sequence) -> tuple[int, int]:
        """See ``RadixTransaction``."""
        super().match(sequence)
        tree, place, size = self.memory.tree, self.memory.known_of(sequence).place, self.memory.block_size
        node, pages = tree.on_device(place)
        return (pages + tree.between(place.node, node)[0]) * size, pages * size

    def _resume(self, found: Place) -> Holding:
        """See ``RadixTransaction``; with what the device has."""
        memory = self.memory
        node, pages = memory.tree.on_device(found)
        self._place, self._loaded = found, 0
        self._on_host, self._lacking = memory.tree.between(found.node, node)
        # SGLang copies the state that the string ends with, and no other.
        states = memory.copy_state(node) if node is found.node else 0
        return Holding(
            node, pages, pages * memory.block_size, branch=memory.branch(pages + self._on_host), states=states
        )

    @property
    def on_host(self) -> int:
        """See ``RadixTransaction``."""
        return self._on_host * self.memory.block_size

    @property
    def windows_on_host(self) -> int:
        """See ``RadixTransaction``."""
        tree = self.memory.tree
        if self.memory.windows is None or not isinstance(tree, HostComponents):
            return 0
        return tree.units(tree.to_load(self._place.node)) * self.memory.block_size

    def load(self) -> int:
        """See ``RadixTransaction``."""
        memory, tree, held, node = self.memory, self.memory.tree, self._found, self._place.node
        components = tree.units(tree.to_load(node)) if isinstance(tree, HostComponents) else 0
        if node is held.node or not (components or self._lacking * memory.block_size >= LEAST_LOADED):
            return 0
        bound = tree.lock(node)
        # The state goes to the tree, and to the request.
        held.states += memory.take_state()
        if not memory.take_for_load(self._lacking, components):
            memory.give_back_states(held)
            tree.unlock(node, bound)
            if isinstance(tree, HostComponents):
                tree.use_on_host(node)
            return 0
        copied = tree.load(node)
        memory.loads.append(copied._replace(components=copied.components + held.states))
        tree.unlock(held.node, held.bound)
        self._loaded = (self._place.tokens - held.pages) * memory.block_size
        held.node, held.bound, held.pages, held.computed = node, bound, self._place.tokens, held.computed + self._loaded
        return self._loaded

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

    def ticks(self, pages: int, components: int, is_store: bool) -> int:
        """Of a copy: kernels copy all at once, at the rate of the link where this is given."""
        host = self._host
        if host.link is None:
            return self._ticks[is_store](pages)
        return host.link.ticks(pages * host.chunk_bytes + components * host.component_bytes, is_store)

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
        pages, components = (sum(numbers) for numbers in zip(*(each[1:3] for each in copied), strict=True))
        ticks = self.ticks(pages, components, is_store)
        return self._copy(-1, now, pages, ticks, is_store, partial(self._acknowledge, copied))

    def _acknowledge(self, copied: list[Copied]) -> None:
        for each in copied:
            self._tree.unpin(each)


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

    trees = (HostTree, HostWindowTree, HostStateTree)
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
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        self._host, self._threshold = host, threshold
        super().__init__(num_blocks, runs, True, block_size, ahead, windows, states)
        self.transfers = HiCache(self.tree, host)
        self.loads: list[Copied] = []
        # Chunks of the last step, which join the tree when the next decision has seen the ends of copies.
        self._chunks: list[tuple[Sequence, int]] = []
        self._transaction = HostRadixTransaction(self)

    def _plant(self, *sizes: int) -> HostTree:
        beside = () if self.windows is None and self.states is None else (self._host.num_components,)
        tree = super()._plant(self._host.num_chunks, self._threshold, *beside)
        assert isinstance(tree, HostTree)
        return tree

    def take_state(self) -> int:
        """A sequence takes a state, if the model has any. Returns their number."""
        if self.states is None:
            return 0
        self._take_states(1)
        return 1

    def take_for_load(self, pages: int, components: int) -> bool:
        """Take pages, and evict for components, if there is room for both; whether there is."""
        self.make_room(pages, 0)
        if self.free < pages:
            return False
        self.free -= pages
        self.make_room(0, components)
        if self.component_free < components:
            self.free += pages
            return False
        return True

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
        return LayeredLoad(self.transfers.load(loads, self.clock()), self._host.layers)

    def _begin_row(self, state: State, steps: int) -> Meter:
        row = super()._begin_row(state, steps)
        if self.ahead:
            self.transfers.write(self.clock())
        return row

    def process_results(self, moment: int | None = None) -> None:
        """See ``RadixMemory``; then the writes begin, with the overlap schedule behind the step that runs then."""
        begins = bool(self._results) or not self.ahead
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

    def _take_states(self, number: int) -> None:
        """See ``RadixMemory``.

        Raises:
            SettingError: Copies lock the rest of the states. SGLang ends with an error then.
        """
        try:
            super()._take_states(number)
        except Overdrawn:
            remedy = "locks what it writes, and no state is left for a request: SGLang ends; give more (max_mamba_cache_size)"
            raise SettingError("enable_hierarchical_cache", True, remedy) from None

    def transaction(self, decode_step: int) -> RadixTransaction:
        """See ``RadixMemory``; the decision begins with the copies, then with the chunks of the last step."""
        if self.tree.writes and not self.ahead:
            self.transfers.write(self.clock())
            self.transfers.complete(self.clock())
        if self._chunks:
            super()._keep_chunks(self._chunks)
            self._chunks = []
        return super().transaction(decode_step)

    def _keep_chunks(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        self._chunks += chunks
