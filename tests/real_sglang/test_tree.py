"""Our radix tree beside SGLang's ``UnifiedRadixCache``, operation by operation: look-ups, insertions, locks, evictions."""

from __future__ import annotations

import random
from array import array

import pytest

from fragmeter.sim.memory.prefix import Pages, RadixTree, StateTree, WindowTree
from fragmeter.sim.memory.prefix.component_tree import ComponentTree

from . import server

#: Operations of a seed. Twenty seeds are 400,000.
_OPERATIONS = 20_000
#: No seed inserts as many tokens in all, so that its pool never runs short.
_SLOTS = 1 << 16


class Real:
    """SGLang's cache, by strings of tokens; by default over a pool that never runs short."""

    def __init__(self, page: int, slots: int = _SLOTS) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as cache

        self._cache = cache
        pool = (server.torch.float16, "cpu", None, False)
        paged = server.PagedTokenToKVPoolAllocator(slots, page, *pool)
        self.page, self.pool = page, paged if page > 1 else server.TokenToKVPoolAllocator(slots, *pool)
        rows = server.ReqToTokenPool(1, 8, "cpu", False)
        params = server.CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.pool,
            page_size=page,
            tree_components=(server.ComponentType.FULL,),
        )
        self.tree = server.UnifiedRadixCache(params)

    def match(self, string: list[int]) -> tuple[int, object]:
        found = self.tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(string)))
        return found.device_prefix_len, found.last_device_node

    def insert(self, string: list[int]) -> int:
        value = self.pool.alloc(len(string) // self.page * self.page)
        return self.tree.insert(self._cache.InsertParams(key=self._key(string), value=value)).prefix_len

    def evict(self, tokens: int) -> int:
        return self.tree.evict(self._cache.EvictParams(num_tokens=tokens)).num_tokens_evicted

    @staticmethod
    def _key(string: list[int]) -> object:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", string))


def _string(draw: random.Random) -> tuple[tuple[int, int, int], ...]:
    """Runs of few streams, so that strings often begin alike."""
    return tuple((draw.randrange(3), 0, draw.randint(1, 6)) for _ in range(draw.randint(1, 4)))


def _tokens(runs: tuple[tuple[int, int, int], ...]) -> list[int]:
    return [1 + stream * 100 + place for stream, start, length in runs for place in range(start, start + length)]


@pytest.mark.parametrize("seed, page", [(seed, page) for page in (1, 4) for seed in range(20)])
def test_every_operation_is_that_of_the_real_tree(seed: int, page: int, record_property):
    draw, ours, pages, differing = random.Random(seed), RadixTree(), Pages(page), 0
    with server.get_context().override_server_args(page_size=page):
        real, locks = Real(page), []
        for _ in range(_OPERATIONS):
            runs, kind = _string(draw), draw.choice("mmiiiluue")
            key = pages.of(runs)
            if kind == "m":
                answers = real.match(_tokens(runs))[0], page * ours.match(key)[1]
            elif kind == "i":
                answers = real.insert(_tokens(runs)), page * ours.insert(key)[1]
            elif kind == "l":
                (found, theirs), (mine, tokens) = real.match(_tokens(runs)), ours.match(key)
                locks.append((real.tree.lock(theirs), mine))
                ours.lock(mine)
                answers = found, page * tokens
            elif kind == "u" and locks:
                theirs, mine = locks.pop(draw.randrange(len(locks)))
                real.tree.unlock(theirs)
                ours.unlock(mine)
                answers = 0, 0
            else:
                wanted = draw.randint(1, 12)
                answers = real.evict(wanted), page * ours.evict(-(-wanted // page))
            sizes = real.tree.evictable_size(), real.tree.protected_size()
            own = page * ours.evictable_tokens, page * ours.protected_tokens
            differing = int(answers[0] != answers[1] or sizes != own)
            if differing:
                break
    record_property(f"sglang/tree, pages of {page}", [1, _OPERATIONS, differing])
    assert not differing, f"{kind} {runs}: {answers}, {sizes}, ours {own}"


class RealWindows(Real):
    """As ``Real``, with sliding windows in a pool of their own.

    Attributes:
        pools: Slots of both pools; by default they never run short.
    """

    pools = _SLOTS, _SLOTS

    def __init__(self, page: int, window: int) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as cache

        self._cache, self.page = cache, page
        self.pool = server.window_allocator(*self.pools, page, "cpu")
        components = (server.ComponentType.FULL, server.ComponentType.SWA)
        params = server.CacheInitParams(
            disable=False,
            req_to_token_pool=server.ReqToTokenPool(1, 8, "cpu", False),
            token_to_kv_pool_allocator=self.pool,
            page_size=page,
            tree_components=components,
            sliding_window_size=window,
        )
        self.tree = server.UnifiedRadixCache(params)

    def look_up(self, string: list[int]) -> tuple[int, int, object]:
        """Tokens found, those walked through, and the node."""
        found = self.tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(string)))
        return found.device_prefix_len, found.full_kv_hit_length, found.last_device_node

    def insert_with(self, string: list[int], gone: int) -> int:
        """As ``insert``; of so many first tokens the windows are gone."""
        number = len(string) // self.page * self.page
        value, windows = (each.alloc(number) for each in (self.pool.full_attn_allocator, self.pool.swa_attn_allocator))
        self.pool.set_full_to_swa_mapping(value, windows)
        if gone:
            self.pool.free_swa_segment(value[:gone], start_pos=0)
        params = self._cache.InsertParams(key=self._key(string), value=value)
        params.set_evicted_seqlen(server.ComponentType.SWA, gone)
        return self.tree.insert(params).prefix_len

    def evict_both(self, tokens: int, windows: int) -> tuple[int, int]:
        """Tokens and windows evicted."""
        found = self.tree.evict(self._cache.EvictParams(num_tokens=tokens, swa_num_tokens=windows))
        return found.num_tokens_evicted, found.swa_num_tokens_evicted

    def sizes(self) -> tuple[int, ...]:
        """Evictable and locked tokens, and windows."""
        tree = self.tree
        return (
            tree.full_evictable_size(),
            tree.full_protected_size(),
            tree.swa_evictable_size(),
            tree.swa_protected_size(),
        )


def _sizes(tree: ComponentTree) -> tuple[int, ...]:
    return tree.evictable_tokens, tree.protected_tokens, tree.component_evictable, tree.component_protected


def _answers(
    kind: str, draw: random.Random, real: RealWindows, ours: WindowTree, pages: Pages, locks: list[tuple]
) -> tuple[object, object]:
    """Of both trees to one operation, in pages."""
    runs, page = _string(draw), real.page
    key, string = pages.of(runs), _tokens(runs)
    if kind in "ml":
        found, walked, theirs = real.look_up(string)
        place = ours.follow(key, ours.start)
        if kind == "l":
            locks.append((real.tree.lock(theirs), place.node, ours.lock(place.node)))
        return (found // page, walked // page), (place.tokens, ours.hit if key else 0)
    if kind == "i":
        gone = draw.choice((0, 0, draw.randrange(len(string)))) // page
        gone = gone if gone < len(string) // page else 0
        return real.insert_with(string, gone * page) // page, ours.insert(key, None, gone)[1]
    if kind == "u":
        if locks:
            lock, node, bound = locks.pop(draw.randrange(len(locks)))
            real.tree.unlock(lock)
            ours.unlock(node, bound)
        return 0, 0
    wanted, before = [draw.choice((0, draw.randint(1, 12 // page))) for _ in range(2)], ours.component_evictable
    theirs = real.evict_both(*(page * each for each in wanted))
    mine = ours.evict(*wanted), before - ours.component_evictable
    return tuple(each // page for each in theirs), mine


@pytest.mark.parametrize(
    "seed, page, window", [(seed, page, window) for page in (1, 4) for window in (1, 3, 6, 9) for seed in range(2)]
)
def test_every_operation_with_windows_is_that_of_the_real_tree(seed: int, page: int, window: int, record_property):
    draw, ours, pages, differing = random.Random(seed), WindowTree(-(-window // page)), Pages(page), 0
    with server.get_context().override_server_args(page_size=page):
        real, locks = RealWindows(page, window), []
        for _ in range(_OPERATIONS // 2):
            kind = draw.choice("mmiiiiluue")
            theirs, mine = _answers(kind, draw, real, ours, pages, locks)
            sizes, own = real.sizes(), tuple(page * each for each in _sizes(ours))
            differing = int(theirs != mine or sizes != own)
            if differing:
                break
    record_property(f"sglang/tree of windows, pages of {page}", [1, _OPERATIONS // 2, differing])
    assert not differing, f"{kind}: {theirs}, {sizes}, ours {mine}, {own}"


class RealStates(RealWindows):
    """As ``Real``, with states in a pool of their own."""

    def __init__(self, page: int) -> None:
        super(RealWindows, self).__init__(page, self.pools[0])
        self.rows = server.state_rows(1, 8, self.pools[1], "cpu", True, True)
        params = server.CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.pool,
            page_size=page,
            tree_components=(server.ComponentType.FULL, server.ComponentType.MAMBA),
            enable_mamba_extra_buffer=True,
        )
        self.tree = server.UnifiedRadixCache(params)

    def insert(self, string: list[int]) -> tuple[int, bool]:
        """Tokens that were cached before, and whether the state was."""
        value = self.pool.alloc(len(string) // self.page * self.page)
        state = self.rows.mamba_allocator.alloc(1)
        found = self.tree.insert(self._cache.InsertParams(key=self._key(string), value=value, mamba_value=state))
        if found.mamba_exist:
            self.rows.mamba_allocator.free(state)
        return found.prefix_len, found.mamba_exist

    def evict_both(self, tokens: int, states: int) -> tuple[int, int]:
        """Tokens and states evicted."""
        found = self.tree.evict(self._cache.EvictParams(num_tokens=tokens, mamba_num=states))
        return found.num_tokens_evicted, found.mamba_num_evicted

    def sizes(self) -> tuple[int, ...]:
        tree = self.tree
        sizes = tree.full_evictable_size(), tree.full_protected_size()
        return (*(size // self.page for size in sizes), tree.mamba_evictable_size(), tree.mamba_protected_size())


def _state_answers(
    kind: str, draw: random.Random, real: RealStates, ours: StateTree, pages: Pages, locks: list[tuple]
) -> tuple[object, object]:
    """Of both trees to one operation, in pages."""
    runs, page = _string(draw), real.page
    key, string = pages.of(runs), _tokens(runs)
    if kind in "ml":
        found, walked, theirs = real.look_up(string)
        place = ours.follow(key, ours.start)
        if kind == "l":
            locks.append((real.tree.lock(theirs), place.node))
            ours.lock(place.node)
        return (found // page, walked // page), (place.tokens, ours.hit if key else 0)
    if kind == "i":
        if not key:
            return 0, 0
        known, there = real.insert(string)
        before = sum(_sizes(ours)[2:])
        return (known // page, there), (ours.insert(key)[1], sum(_sizes(ours)[2:]) == before)
    if kind == "u":
        if locks:
            lock, node = locks.pop(draw.randrange(len(locks)))
            real.tree.unlock(lock)
            ours.unlock(node)
        return 0, 0
    wanted, before = [draw.choice((0, draw.randint(1, most))) for most in (12 // page, 3)], ours.component_evictable
    theirs = real.evict_both(page * wanted[0], wanted[1])
    mine = ours.evict(*wanted), before - ours.component_evictable
    return (theirs[0] // page, theirs[1]), mine


@pytest.mark.parametrize("seed, page", [(seed, page) for page in (1, 4) for seed in range(4)])
def test_every_operation_with_states_is_that_of_the_real_tree(seed: int, page: int, record_property):
    draw, ours, pages, differing = random.Random(seed), StateTree(), Pages(page), 0
    with server.published(8, page_size=page):
        real, locks = RealStates(page), []
        for _ in range(_OPERATIONS // 2):
            kind = draw.choice("mmiiiiluue")
            theirs, mine = _state_answers(kind, draw, real, ours, pages, locks)
            differing = int(theirs != mine or real.sizes() != _sizes(ours))
            if differing:
                break
    record_property(f"sglang/tree of states, pages of {page}", [1, _OPERATIONS // 2, differing])
    assert not differing, f"{kind}: {theirs}, {real.sizes()}, ours {mine}, {_sizes(ours)}"
