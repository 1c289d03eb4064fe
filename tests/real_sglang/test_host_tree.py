"""Our radix tree with a host tier beside SGLang's ``UnifiedRadixCache`` with HiCache, operation by operation."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from fragmeter.sim import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.memory.prefix import HostTree, Pages
from fragmeter.sim.spec import model
from fragmeter.sim.types.errors import SimulationFault

from . import hicache, server
from .test_tree import Real, _string, _tokens

_OPERATIONS = 10_000
#: Slots of the device.
_SLOTS = 96


class RealHost(Real):
    """As ``Real``, with a host, over pools that run short."""

    def __init__(self, page: int, host_slots: int, policy: str) -> None:
        super().__init__(page, _SLOTS)
        self.host, self.link = hicache.host_pool(host_slots - page, page, 1), hicache.Link(1)
        hicache.attach(self.tree, self.host, policy, self.link)
        self._requests: dict[object, int] = {}

    def look_up(self, string: list[int]) -> tuple[int, int, Any]:
        """Tokens on the device, those that the host alone has behind them, and what was found."""
        found = self.tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(string)))
        return found.device_prefix_len, found.host_hit_length, found

    def insert_of(self, string: list[int], inserted: int) -> int | None:
        """As ``insert``, of a request that has inserted so many tokens of it; None without slots."""
        value = self.pool.alloc(len(string) // self.page * self.page)
        if value is None:
            return None
        free = self.pool.available_size()
        params = self._cache.InsertParams(key=self._key(string), value=value, inserted_len=inserted)
        self.tree.insert(params)
        return self.pool.available_size() - free

    def load(self, found: Any) -> int:
        """Tokens that are loaded."""
        request = server.SimpleNamespace(
            last_node=found.last_device_node, kv=None, swa_host_hit_length=0, mamba_host_hit_length=0, rid="0"
        )
        request.kv = server.SimpleNamespace(mamba_pool_idx=None)
        loaded, _ = self.tree.init_load_back(
            self._cache.InitLoadBackParams(
                best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
            )
        )
        return int(loaded)

    def sizes(self) -> tuple[int, ...]:
        """Evictable and locked tokens of the device, and free slots of both pools."""
        tree = self.tree
        return tree.evictable_size(), tree.protected_size(), self.pool.available_size(), self.host.available_size()


class Ours:
    """Our tree with what a memory does beside it."""

    def __init__(self, page: int, host_slots: int, policy: str) -> None:
        self.page, self.pages, self.free = page, Pages(page), _SLOTS // page
        self.tree = HostTree(host_slots // page, 1 if policy == "write_through" else 2)
        self.copies: list[list[Any]] = []

    def insert_of(self, key: Any, inserted: int) -> int:
        """Tokens that the request gets back."""
        pages = sum(length for *_, length in key)
        self.free -= pages
        _, known = self.tree.insert(key, inserted=inserted)
        self.free += known
        return known

    def load(self, place: Any, least: int) -> int:
        node, tokens = self.tree.on_device(place)
        wanted = place.tokens - tokens
        if wanted * self.page < least:
            return 0
        self.make_free(wanted)
        if self.free < wanted:
            return 0
        self.free -= wanted
        self.copies.append([self.tree.load(place.node)])
        return wanted

    def make_free(self, pages: int) -> int:
        return self.evict(max(0, pages - self.free))

    def evict(self, pages: int) -> int:
        freed = self.tree.evict(pages)
        self.free += freed
        return freed

    def sizes(self) -> tuple[int, ...]:
        tree = self.tree
        found = tree.evictable_tokens, tree.protected_tokens + tree.copying_tokens, self.free, tree.host_free
        return tuple(self.page * each for each in found)


insert_of = Ours.insert_of


def _step(kind: str, draw: random.Random, real: RealHost, ours: Ours, locks: list[Any]) -> tuple[Any, Any]:
    """Both answers to one operation, in tokens."""
    runs, page = _string(draw), real.page
    key, string = ours.pages.of(runs), _tokens(runs)
    if kind in "mlL":
        device, host, found = real.look_up(string)
        place = ours.tree.follow(key, ours.tree.start)
        node, tokens = ours.tree.on_device(place)
        answers = (device, host), (page * tokens, page * (place.tokens - tokens))
        if kind == "l":
            locks.append((real.tree.lock(found.last_device_node), node))
            ours.tree.lock(node)
        elif kind == "L" and host:
            # As an admission, which has locked what the device has.
            lock = real.tree.lock(found.last_device_node)
            ours.tree.lock(node)
            answers = (*answers[0], real.load(found)), (*answers[1], page * ours.load(place, 10))
            real.tree.unlock(lock)
            ours.tree.unlock(node)
        return answers
    if kind == "i":
        pages = len(string) // page
        if ours.free < pages:
            freed = real.evict((pages - ours.free) * page)
            if freed != page * ours.make_free(pages):
                return freed, "evictions"
            if ours.free < pages:
                return 0, 0
        inserted = draw.choice((0, 0, 0, draw.randint(0, pages)))
        return real.insert_of(string, inserted * page), page * ours.insert_of(key, inserted)
    if kind == "u":
        if locks:
            theirs, mine = locks.pop(draw.randrange(len(locks)))
            real.tree.unlock(theirs)
            ours.tree.unlock(mine)
        return 0, 0
    if kind == "c":
        # All copies so far have ended.
        real.tree.cache_controller.start_loading()
        real.tree.check_hicache_events()
        for each in (*ours.tree.writes, *(copy for copies in ours.copies for copy in copies)):
            ours.tree.unpin(each)
        ours.tree.writes, ours.copies = [], []
        return 0, 0
    wanted = draw.randint(1, 12)
    return real.evict(wanted), page * ours.evict(-(-wanted // page))


def first_difference(seed: int, page: int, policy: str, operations: int = _OPERATIONS) -> str:
    """The first operation whose answers or sizes differ; empty without any."""
    draw = random.Random(f"host/{seed}")
    host_slots = draw.choice((48, 96, 192, 384))
    with server.get_context().override_server_args(page_size=page):
        real, ours, locks = RealHost(page, host_slots, policy), Ours(page, host_slots, policy), []
        for number in range(operations):
            kind = draw.choice("mmiiiilLLuueccc" if len(locks) < 4 else "mmiiiLLuuuuueccc")
            theirs, mine = _step(kind, draw, real, ours, locks)
            sizes, own = real.sizes(), ours.sizes()
            if theirs != mine or sizes != own:
                return f"operation {number}, {kind}: {theirs}, {sizes}, ours {mine}, {own}"
    return ""


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("seed, page", [(seed, page) for page in (1, 4) for seed in range(10)])
def test_every_operation_is_that_of_the_real_tree(seed: int, page: int, policy: str, record_property):
    differs = first_difference(seed, page, policy)
    record_property(f"sglang/tree with a host, {policy}, pages of {page}", [1, _OPERATIONS, int(bool(differs))])
    assert not differs


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("given", [{}, {"hicache_ratio": 0.37}, {"hicache_ratio": 3.3}, {"hicache_size": 7}])
def test_the_host_pool_is_as_large_as_the_real_one(page: int, given: dict[str, Any]):
    slots = 10_000 // page * page
    chosen = settings(
        policy="sglang", enable_hierarchical_cache=True, num_gpu_blocks_override=slots // page, block_size=page, **given
    )
    size = given.get("hicache_size", 0)
    real = hicache.host_pool(slots, page, given.get("hicache_ratio", 2.0), size, model(chosen.model).slot_bytes("fp16"))
    assert build(chosen).memory.transfers.cache.num_blocks * page == real.size


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("given", [{"hicache_ratio": 0.37}, {"hicache_ratio": 3.3}, {"hicache_size": 1}])
def test_both_host_pools_are_as_large_as_the_real_ones(page: int, given: dict[str, Any]):
    """Of windows: SGLang's own device pools, and its division of a size among them."""
    slots = 2560
    pool = {"num_gpu_blocks_override": slots // page, "block_size": page}
    chosen = settings(policy="sglang", model="gpt-oss-20b", enable_hierarchical_cache=True, **pool, **given)
    memory = build(chosen).memory
    kept, sizes = (slots, memory.windows.pages * page), (0.0, 0.0)
    if size := given.get("hicache_size", 0):
        sizes = hicache.shares(size, kept, page)
    real = [
        hicache.host_pool(each, page, given.get("hicache_ratio", 2.0), part, of_slot).page_num
        for each, part, of_slot in zip(kept, sizes, memory.windows.slot_bytes, strict=True)
    ]
    assert [memory.transfers.cache.num_blocks, memory.transfers.beside[0]] == real


def _is_noticed(page: int = 1, policy: str = "write_through") -> bool:
    """Whether one of three seeds differs, or fails."""

    def differs(seed: int) -> bool:
        try:
            return bool(first_difference(seed, page, policy, 3000))
        except (AssertionError, SimulationFault, AttributeError):
            return True

    return any(map(differs, range(3)))


def test_host_leaves_in_the_order_of_insertion_are_noticed(monkeypatch):
    """A look-up that ends on the host touches its nodes."""
    use = HostTree._use
    monkeypatch.setattr(HostTree, "_use", lambda tree, node: use(tree, node) if node.on_device else None)
    assert _is_noticed()


def test_copies_of_what_the_device_has_that_are_evicted_are_noticed(monkeypatch):
    """Under ``write_through`` SGLang keeps them."""
    leaf = HostTree._is_host_leaf
    monkeypatch.setattr(HostTree, "_is_host_leaf", lambda tree, node: node.on_host and not node.children)
    assert _is_noticed()
    monkeypatch.setattr(HostTree, "_is_host_leaf", leaf)
    assert not _is_noticed()


def test_hits_of_what_a_request_has_inserted_before_are_noticed():
    with mock.patch.object(Ours, "insert_of", lambda ours, key, inserted: insert_of(ours, key, 0)):
        assert _is_noticed(policy="write_through_selective")
