"""Our radix tree beside SGLang's ``UnifiedRadixCache``, operation by operation: look-ups, insertions, locks, evictions."""

from __future__ import annotations

import random
from array import array

import pytest

from fragmeter.sim.memory.prefix import RadixTree

from . import server

#: Operations of a seed. Twenty seeds are 400,000.
_OPERATIONS = 20_000
_SLOTS = 1 << 20


class Real:
    """SGLang's cache over a pool that never runs short, by strings of tokens."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as cache

        self._cache = cache
        self.pool = server.TokenToKVPoolAllocator(_SLOTS, server.torch.float16, "cpu", None, False)
        rows = server.ReqToTokenPool(1, 8, "cpu", False)
        params = server.CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.pool,
            page_size=1,
            tree_components=(server.ComponentType.FULL,),
        )
        self.tree = server.UnifiedRadixCache(params)

    def match(self, string: list[int]) -> tuple[int, object]:
        found = self.tree.match_prefix(self._cache.MatchPrefixParams(key=self._key(string)))
        return found.device_prefix_len, found.last_device_node

    def insert(self, string: list[int]) -> int:
        value = self.pool.alloc(len(string))
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


@pytest.mark.parametrize("seed", range(20))
def test_every_operation_is_that_of_the_real_tree(seed: int, record_property):
    draw, ours, differing = random.Random(seed), RadixTree(), 0
    with server.get_context().override_server_args():
        real, locks = Real(), []
        for _ in range(_OPERATIONS):
            runs, kind = _string(draw), draw.choice("mmiiiluue")
            if kind == "m":
                answers = real.match(_tokens(runs))[0], ours.match(runs)[1]
            elif kind == "i":
                answers = real.insert(_tokens(runs)), ours.insert(runs)[1]
            elif kind == "l":
                (found, theirs), (mine, tokens) = real.match(_tokens(runs)), ours.match(runs)
                locks.append((real.tree.lock(theirs), mine))
                ours.lock(mine)
                answers = found, tokens
            elif kind == "u" and locks:
                theirs, mine = locks.pop(draw.randrange(len(locks)))
                real.tree.unlock(theirs)
                ours.unlock(mine)
                answers = 0, 0
            else:
                wanted = draw.randint(1, 12)
                answers = real.evict(wanted), ours.evict(wanted)
            sizes = real.tree.evictable_size(), real.tree.protected_size()
            differing = int(answers[0] != answers[1] or sizes != (ours.evictable_tokens, ours.protected_tokens))
            if differing:
                break
    record_property("sglang/tree, operations", [1, _OPERATIONS, differing])
    assert not differing, f"{kind} {runs}: {answers}, {sizes}, ours {ours.evictable_tokens, ours.protected_tokens}"
