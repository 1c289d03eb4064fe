"""Our radix tree beside SGLang's ``UnifiedRadixCache``, operation by operation: look-ups, insertions, locks, evictions."""

from __future__ import annotations

import random
from array import array

import pytest

from fragmeter.sim.memory.prefix import Pages, RadixTree

from . import server

#: Operations of a seed. Twenty seeds are 400,000.
_OPERATIONS = 20_000
#: No seed inserts as many tokens in all, so that its pool never runs short.
_SLOTS = 1 << 16


class Real:
    """SGLang's cache over a pool that never runs short, by strings of tokens."""

    def __init__(self, page: int) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as cache

        self._cache = cache
        pool = (server.torch.float16, "cpu", None, False)
        paged = server.PagedTokenToKVPoolAllocator(_SLOTS, page, *pool)
        self.page, self.pool = page, paged if page > 1 else server.TokenToKVPoolAllocator(_SLOTS, *pool)
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
