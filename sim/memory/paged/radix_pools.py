"""The pages of SGLang's pool, and the windows or states beside them: how many are free, and evictions that make room.

pools apart      pages | free          windows or states | free       each kind evicts for itself
one buffer       windows or states ->   free   <- pages               bytes decide; either kind evicts for the other
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from ...spec.startup.sglang_unified import SharedBuffer
from ..accounting.cache_log import CacheLog
from ..accounting.kv_groups import SLIDING, STATE
from ..accounting.ledger import METER, SECOND_METER, SecondPool
from ..interface.memory import Memory
from ..prefix import RadixTree, StateTree, WindowTree
from ..prefix.component_tree import ComponentTree
from .radix_holdings import States, Windows


class RadixPools(Memory):
    """The pools over which a radix tree is kept.

    Args:
        num_blocks: Pages of the pool; of no effect with one buffer, which has its own.
        block_size: Tokens of a page.
        windows: The pool of layers with a window, if it is one of its own. Each leap is then one step.
        states: The pool of layers with a state, if there are any.

    Attributes:
        tree: Computed pages, locked or evictable.
        buffer: What the pool shares with that of windows or states; ``num_blocks`` is then the pages of the whole buffer.
        free: Pages that are neither in the tree nor held by one sequence.
        evicted_blocks: Evicted pages.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail")
    #: Classes of trees: plain, with windows in a pool of their own, with states.
    trees: tuple[Callable[..., RadixTree], Callable[..., WindowTree], Callable[..., StateTree]] = (
        RadixTree,
        WindowTree,
        StateTree,
    )
    tree: RadixTree
    evicted_blocks = 0

    def __init__(self, num_blocks: int, block_size: int, windows: Windows | None, states: States | None) -> None:
        self.block_size, self.windows, self.states = block_size, windows, states
        self.buffer = next((each.buffer for each in (windows, states) if each is not None), None)
        self.num_blocks = self.free = num_blocks if self.buffer is None else self.buffer.most_pages
        if windows is not None:
            self.second_pool = _pool_of(windows, SLIDING, windows.pages * block_size, block_size)
        if states is not None:
            self.second_pool = _pool_of(states, STATE, states.slots)
        if self.second_pool is not None:
            self.meter = (*self.meter, *SECOND_METER[self.second_pool.kind])

    def _plant(self, *sizes: int) -> RadixTree:
        """The tree, empty; ``sizes`` are the first arguments of its class."""
        plain, with_windows, with_states = self.trees
        if self.windows is not None:
            return with_windows(*sizes, self.pages_of(self.windows.tokens))
        return plain(*sizes) if self.states is None else with_states(*sizes)

    @property
    def room(self) -> int:
        """Slots that are free or can be evicted."""
        return (self.available + self.tree.evictable_tokens) * self.block_size

    @property
    def available(self) -> int:
        """Pages that can be taken without evictions."""
        if self.buffer is None:
            return self.free
        return self._left(self.buffer) // self.buffer.page_bytes

    @property
    def window_free(self) -> int:
        """Pages of windows that can be taken without evictions."""
        assert self.windows is not None
        if self.buffer is None:
            return self.windows.pages - self._units
        most = min(self.buffer.ids, self.buffer.most_units)
        return min(most - self._units, self._left(self.buffer) // self.buffer.unit_bytes)

    @property
    def state_free(self) -> int:
        """States that can be taken without evictions."""
        assert self.states is not None
        if self.buffer is None:
            return self.states.slots - self._units
        return self._left(self.buffer) // self.buffer.unit_bytes

    @property
    def _units(self) -> int:
        """Windows (in pages) or states that the tree or a request has, and states taken ahead of the queue."""
        assert isinstance(self.tree, ComponentTree)
        if self.windows is not None:
            return self.tree.components + self.windows.own
        assert self.states is not None
        return self.tree.components + self.states.own + self.states.ahead

    def _left(self, buffer: SharedBuffer, pages: int = 0, units: int = 0) -> int:
        """Bytes of the buffer that are free once so many more pages and units are taken."""
        return buffer.left(self.num_blocks - self.free + pages, self._units + units)

    def fits(self, slots: int) -> bool:
        """Whether so many slots are free, in both pools where there are windows."""
        pages = self.pages_of(slots)
        if self.windows is None:
            return self.available >= pages
        if self.buffer is not None:
            return self._left(self.buffer, pages, pages) >= 0
        return min(self.free, self.window_free) >= pages

    def can_reserve(self, slots: float, windows: float) -> bool:
        """Whether one buffer has room for so many slots and windows once all that can be is evicted."""
        assert self.buffer is not None and isinstance(self.tree, ComponentTree)
        pages, beside = self.pages_of(ceil(slots)), self.pages_of(ceil(windows))
        return self._left(self.buffer, pages - self.tree.evictable_tokens, beside - self.tree.component_evictable) >= 0

    @property
    def state_room(self) -> int:
        """States that are free or can be evicted."""
        assert isinstance(self.tree, ComponentTree)
        return self.state_free + self.tree.component_evictable

    @property
    def component_free(self) -> int:
        """Free pages of the pool of windows, or free states; 0 without such a pool."""
        if self.windows is not None:
            return self.window_free
        return 0 if self.states is None else self.state_free

    @property
    def window_room(self) -> int:
        """Slots of the pool of windows that are free or can be evicted."""
        assert isinstance(self.tree, ComponentTree)
        return (self.window_free + self.tree.component_evictable) * self.block_size

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.block_size)

    @property
    def most_tokens(self) -> int:
        """``max_total_num_tokens`` of SGLang."""
        return self.capacity_slots if self.buffer is None else self.buffer.most_tokens

    def make_free(self, pages: int, states: int = 0) -> None:
        """Evict so many that these are free, as far as there are any to evict; with windows so many pages of both pools."""
        if self.buffer is None:
            self.make_room(pages, states if self.windows is None else pages)
        elif self.windows is not None:
            self._make_windows_free(self.buffer, pages)
        else:
            self._make_free_together(pages, states)

    def make_room(self, pages: int, components: int) -> None:
        """As ``make_free``, with so many pages of windows, or states, in pools of their own."""
        lacking = max(0, pages - self.free)
        if components:
            components = max(0, components - self.component_free)
        if lacking or components:
            self._evict(lacking, components)

    def _make_free_together(self, pages: int, states: int) -> None:
        """As ``make_free`` in one buffer (``evict_for_alloc``): leaves give way to states, too, and states to states where no leaf is left.

        States alone give way where there are no names for more.
        """
        while self.available < pages and self._evict(1):
            pass
        if self.state_free >= states:
            return
        assert self.buffer is not None and isinstance(self.tree, ComponentTree)
        named = self.buffer.ids - states
        while self._units > named and self.state_free < states and self.tree.component_evictable:
            self._evict(0, 1)
        if self._units > named:
            return
        while self.state_free < states and self._evict(1):
            pass
        while self.state_free < states and self.tree.component_evictable:
            self._evict(0, 1)

    def _make_windows_free(self, buffer: SharedBuffer, pages: int) -> None:
        """As ``make_free`` of so many pages of both kinds in one buffer (``evict_to_free_tokens``): leaves as far as they reach, then windows alone.

        Nothing is evicted where all would be too little. What goes with a leaf may make the rest needless.
        """
        tree, lacking = self.tree, -self._left(buffer, pages, pages)
        assert isinstance(tree, ComponentTree)
        beside = max(0, -(-(lacking - tree.evictable_tokens * buffer.page_bytes) // buffer.unit_bytes))
        if lacking <= 0 or beside > tree.component_evictable:
            return
        leaves, before = -(-(lacking - beside * buffer.unit_bytes) // buffer.page_bytes), tree.component_evictable
        while leaves > 0 and self._left(buffer, pages, pages) < 0 and (freed := self._evict(1)):
            leaves -= freed
        while before - tree.component_evictable < beside and self._left(buffer, pages, pages) < 0:
            self._evict(0, 1)

    def _evict(self, pages: int, components: int = 0) -> int:
        """Evict leaves with so many pages, then components. Returns how many pages came free."""
        freed = self.tree.evict(pages, components)
        self.free += freed
        self.evicted_blocks += freed
        return freed


def _pool_of(beside: Windows | States, kind: str, slots: int, unit_slots: int = 1) -> SecondPool:
    """The pool of windows or states with so many slots, or the whole buffer as one."""
    buffer, log = beside.buffer, CacheLog(unit_slots)
    if buffer is None:
        return SecondPool(kind, slots, log, beside.slot_bytes)
    of_both = buffer.slot_bytes, buffer.unit_bytes // unit_slots
    return SecondPool(kind, buffer.most_units * unit_slots, log, of_both, buffer.bytes)
