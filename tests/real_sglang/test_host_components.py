"""Our radix trees of windows and of states with a host tier beside SGLang's ``UnifiedRadixCache`` with HiCache, operation by operation."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import pytest

from fragmeter.sim.memory.prefix import HostComponents, HostStateTree, HostWindowTree, Pages
from fragmeter.sim.types.errors import SimulationFault

from . import hicache, server
from .test_tree import RealStates, RealWindows, _string, _tokens

_OPERATIONS = 5_000
#: Slots of the device, those of its windows, and its states.
_SLOTS, _WINDOW_SLOTS, _STATES = 96, 64, 9


class _Host:
    """Of SGLang's cache with a host, over pools that run short; of the classes that it is joined to."""

    tree: Any
    pool: Any
    page: int
    _cache: Any

    def join(self, host_slots: int, beside: int, policy: str, page: int) -> None:
        self.host = hicache.host_pool(host_slots - self.page, self.page, 1)
        self.beside_host = hicache.host_pool(beside * page - page, page, 1)
        self.link = hicache.Link(1)
        hicache.attach(self.tree, self.host, policy, self.link, beside=self.beside_host)

    def find(self, string: list[int]) -> tuple[tuple[int, ...], Any]:
        """Tokens on the device, those that the host is counted to have behind them, all that it walked through, and what was found."""
        found = self.tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(string)))
        return (found.device_prefix_len, found.host_hit_length, found.full_kv_hit_length), found

    def load(self, found: Any) -> int:
        """As ``add_one_req``, which has locked what the device has: by how many tokens the prefix is longer then."""
        kv = server.SimpleNamespace(mamba_pool_idx=None, holds_mamba=False)
        request = server.SimpleNamespace(
            last_node=found.last_device_node,
            kv=kv,
            rid="0",
            swa_host_hit_length=found.swa_host_hit_length,
            mamba_host_hit_length=found.mamba_host_hit_length,
        )
        tree, best = self.tree, found.best_match_node
        held = tree.lock(found.last_device_node)
        on_host, locked = tree.inc_host_lock_ref(best).to_dec_params(), tree.lock(best)
        params = self._cache.InitLoadBackParams(
            best_match_node=best, host_hit_length=found.host_hit_length, req=request
        )
        loaded, _ = tree.init_load_back(params)
        tree.unlock(locked)
        tree.dec_host_lock_ref(best, on_host)
        tree.unlock(held)
        if kv.mamba_pool_idx is not None:
            self.rows.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
        return int(loaded)

    def acknowledge(self) -> None:
        """All copies so far have ended."""
        self.tree.cache_controller.start_loading()
        self.tree.check_hicache_events()


class _States(_Host, RealStates):
    pools = _SLOTS, _STATES

    def __init__(self, page: int, window: int, host_slots: int, beside: int, policy: str) -> None:
        super().__init__(page)
        self.join(host_slots, beside, policy, 1)

    def insert_of(self, string: list[int], inserted: int, gone: int) -> None:
        value = self.pool.alloc(len(string) // self.page * self.page)
        state = self.rows.mamba_allocator.alloc(1)
        params = self._cache.InsertParams(
            key=self._key(string), value=value, mamba_value=state, inserted_len=inserted * self.page
        )
        if self.tree.insert(params).mamba_exist:
            self.rows.mamba_allocator.free(state)

    def levels(self) -> tuple[int, ...]:
        states = self.rows.mamba_allocator.available_size()
        return (
            *self.sizes(),
            self.pool.available_size() // self.page,
            states,
            self.host.available_size() // self.page,
            self.beside_host.available_size(),
        )


class _Windows(_Host, RealWindows):
    pools = _SLOTS, _WINDOW_SLOTS

    def __init__(self, page: int, window: int, host_slots: int, beside: int, policy: str) -> None:
        super().__init__(page, window)
        self.join(host_slots, beside, policy, page)

    def insert_of(self, string: list[int], inserted: int, gone: int) -> None:
        number = len(string) // self.page * self.page
        value, windows = (each.alloc(number) for each in (self.pool.full_attn_allocator, self.pool.swa_attn_allocator))
        self.pool.set_full_to_swa_mapping(value, windows)
        if gone:
            self.pool.free_swa_segment(value[: gone * self.page], start_pos=0)
        params = self._cache.InsertParams(key=self._key(string), value=value, inserted_len=inserted * self.page)
        params.set_evicted_seqlen(server.ComponentType.SWA, gone * self.page)
        self.tree.insert(params)

    def levels(self) -> tuple[int, ...]:
        sizes = self.pool.full_available_size(), self.pool.swa_available_size(), self.host.available_size()
        return tuple(each // self.page for each in (*self.sizes(), *sizes, self.beside_host.available_size()))


class Ours:
    """Our tree with what a memory does beside it."""

    def __init__(self, page: int, window: int, host_slots: int, beside: int, policy: str) -> None:
        self.page, self.pages, self.free = page, Pages(page), _SLOTS // page
        threshold = 1 if policy == "write_through" else 2
        self.of_states = not window
        self.all_beside = _STATES if self.of_states else _WINDOW_SLOTS // page
        sizes = host_slots // page, threshold, beside
        self.tree: HostComponents = (
            HostStateTree(*sizes) if self.of_states else HostWindowTree(*sizes, -(-window // page))
        )
        self.loads: list[Any] = []

    @property
    def beside(self) -> int:
        return self.all_beside - self.tree.components

    @property
    def has_a_place(self) -> bool:
        """Whether a request of a load finds a state, without which SGLang ends."""
        return self.beside + self.tree.component_evictable > 2

    def insert_of(self, key: Any, inserted: int, gone: int) -> None:
        self.free -= sum(length for *_, length in key)
        self.free += self.tree.insert(key, None, gone, inserted)[1]

    def find(self, key: Any) -> tuple[tuple[int, ...], Any]:
        place = self.tree.follow(key, self.tree.start)
        node, pages = self.tree.on_device(place)
        on_host, _ = self.tree.between(place.node, node)
        return (pages * self.page, on_host * self.page, self.tree.hit * self.page), (place, node, pages)

    def load(self, found: Any) -> int:
        tree, (place, node, pages) = self.tree, found
        if place.node is node:
            return 0
        wanted, (_, lacking) = tree.units(tree.to_load(place.node)), tree.between(place.node, node)
        held, bound = tree.lock(node), tree.lock(place.node)
        copies = int(self.of_states)
        self.make_room(0, copies)
        fits = self.beside >= copies
        if fits:
            self.make_room(lacking, 0)
        fits = fits and self.free >= lacking
        if fits:
            self.make_room(0, wanted + copies)
        if fits and self.beside >= wanted + copies:
            self.free -= lacking
            self.loads.append(tree.load(place.node))
            gained = place.tokens - pages
        else:
            tree.use_on_host(place.node)
            gained = 0
        tree.unlock(place.node, bound)
        tree.unlock(node, held)
        return gained * self.page

    def make_room(self, pages: int, components: int) -> tuple[int, int]:
        before = self.beside
        freed = self.tree.evict(max(0, pages - self.free), max(0, components - before) if components else 0)
        self.free += freed
        return freed, self.beside - before

    def acknowledge(self) -> None:
        for each in (*self.tree.writes, *self.loads):
            self.tree.unpin(each)
        self.tree.writes, self.loads = [], []

    def levels(self) -> tuple[int, ...]:
        tree = self.tree
        locked = tree.protected_tokens + tree.copying_tokens, tree.component_protected + tree.component_copying
        sizes = tree.evictable_tokens, locked[0], tree.component_evictable, locked[1]
        return (*sizes, self.free, self.beside, tree.host_free, tree.components_free)


def _step(kind: str, draw: random.Random, real: Any, ours: Ours, locks: list[Any]) -> tuple[Any, Any]:
    """Both answers to one operation."""
    runs, page = _string(draw), real.page
    key, string = ours.pages.of(runs), _tokens(runs)
    pages = len(string) // page
    if kind in "mlL" and key:
        (theirs, found), (mine, place) = real.find(string), ours.find(key)
        if kind == "l":
            locks.append((real.tree.lock(found.last_device_node), place[1], ours.tree.lock(place[1])))
        elif kind == "L" and theirs == mine and found.best_match_node != found.last_device_node and ours.has_a_place:
            return real.load(found), ours.load(place)
        return theirs, mine
    if kind == "i" and pages:
        components = 1 if ours.of_states else pages
        lacking = max(0, pages - ours.free), max(0, components - ours.beside)
        if any(lacking):
            theirs = real.evict_both(lacking[0] * page, lacking[1] * (1 if ours.of_states else page))
            ours.make_room(pages, components)
            if ours.free < pages or ours.beside < components:
                return 0, 0
        inserted = draw.choice((0, 0, 0, draw.randint(0, pages)))
        gone = 0 if ours.of_states else draw.choice((0, 0, draw.randrange(pages)))
        real.insert_of(string, inserted, gone)
        ours.insert_of(key, inserted, gone)
    elif kind == "u" and locks:
        theirs, node, bound = locks.pop(draw.randrange(len(locks)))
        real.tree.unlock(theirs)
        ours.tree.unlock(node, bound)
    elif kind == "c":
        real.acknowledge()
        ours.acknowledge()
    elif kind == "e":
        wanted = [draw.choice((0, draw.randint(1, most))) for most in (12 // page, 3 if ours.of_states else 12 // page)]
        theirs = real.evict_both(page * wanted[0], wanted[1] * (1 if ours.of_states else page))
        before = ours.beside
        freed = ours.tree.evict(*wanted)
        ours.free += freed
        unit = 1 if ours.of_states else page
        return (theirs[0] // page, theirs[1] // unit), (freed, ours.beside - before)
    return 0, 0


def _published(page: int, window: int) -> AbstractContextManager[None]:
    return server.published(0 if window else 8, page_size=page)


def first_difference(seed: int, page: int, window: int, policy: str, operations: int = _OPERATIONS) -> str:
    """The first operation whose answers or levels differ; empty without any.

    Args:
        window: 0 for states.
    """
    draw = random.Random(f"components/{seed}")
    host_slots = draw.choice((48, 96, 192, 384))
    beside = draw.choice((2, 5, 12, 40)) if not window else draw.choice((32, 64, 160)) // page
    with _published(page, window):
        sizes = page, window, host_slots, beside, policy
        real, ours, locks = (_Windows if window else _States)(*sizes), Ours(*sizes), []
        for number in range(operations):
            kind = draw.choice("mmiiiilLLuueccc" if len(locks) < 4 else "mmiiiLLuuuuueccc")
            theirs, mine = _step(kind, draw, real, ours, locks)
            levels, own = real.levels(), ours.levels()
            if theirs != mine or levels != own:
                return f"operation {number}, {kind}: {theirs}, {levels}, ours {mine}, {own}"
    return ""


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("window", [0])
@pytest.mark.parametrize("seed, page", [(seed, page) for page in (1, 4) for seed in range(10)])
def test_every_operation_is_that_of_the_real_tree(seed: int, page: int, window: int, policy: str, record_property):
    differs = first_difference(seed, page, window, policy)
    kind = f"windows of {window}" if window else "states"
    record_property(
        f"sglang/tree of {kind} with a host, {policy}, pages of {page}", [1, _OPERATIONS, int(bool(differs))]
    )
    assert not differs


def _is_noticed(window: int, policy: str = "write_through") -> bool:
    """Whether one of three seeds differs, or fails."""

    def differs(seed: int) -> bool:
        try:
            return bool(first_difference(seed, 1, window, policy, 3000))
        except (AssertionError, SimulationFault, AttributeError, KeyError):
            return True

    return any(map(differs, range(3)))
