"""One request at a time: what a prefix cache of so many blocks would have hit.

A request looks up the longest cached prefix of its blocks, then all its blocks are to be cached. A
block stands for itself and all that precedes it (a node of the trie of prefixes).

``fifo``      A queue of blocks; what was cached first is evicted first, whatever follows it.
``lru``       Only leaves are evicted, so that the beginning of what is cached is cached: the leaf that
              no request has had for longest, of those that the current one has not.
``optimal``   As lru, but the leaf that no request will have for longest; and where all leaves are wanted
              before the new block, that one is left out (Belady with bypass).
``infinite``  Nothing is evicted.

lru and optimal are one cache that evicts the leaf of least worth, if it is worth less than the new
block; worth is the last request that had a block, or minus the next one. There are no ties: blocks of
one request lie on one path, of which a single one can be a leaf.

Source: the rules of ``facts/prefix_cache.json``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise

from ...sim.memory.prefix import HashChain
from ...sim.types.optional import not_none
from ...traces import HashedTrace

POLICIES = ("fifo", "lru", "optimal")
INFINITE = "infinite"


@dataclass(frozen=True)
class PrefixTrace:
    """The blocks of a trace as prefixes.

    Attributes:
        paths: By request, the prefixes that its blocks end, the shortest first.
        parents: By prefix, the one that is a block shorter; 0 is the empty one.
        tokens: By request, tokens of its blocks.
    """

    paths: list[list[int]]
    parents: list[int]
    tokens: list[list[int]]

    @property
    def num_prefixes(self) -> int:
        """Different prefixes, and so the blocks that a cache needs at most."""
        return len(self.parents) - 1

    @cached_property
    def last_requests(self) -> list[list[int]]:
        """By request and block, the last request that had it: this one."""
        return [[request] * len(path) for request, path in enumerate(self.paths)]

    @cached_property
    def next_requests(self) -> list[list[int]]:
        """By request and block, minus the next request that has it; the number of requests stands for none."""
        nearest = [len(self.paths)] * len(self.parents)
        found = []
        for request in reversed(range(len(self.paths))):
            path = self.paths[request]
            found.append([-nearest[prefix] for prefix in path])
            for prefix in path:
                nearest[prefix] = request
        return found[::-1]


def prefix_trace(hashed: HashedTrace) -> PrefixTrace:
    """The prefixes of ``hashed``; ids that are chained already get a prefix each, others as many as they follow on."""
    chain = HashChain()
    spans = [slice(start, end) for start, end in pairwise(hashed.offsets.tolist())]
    ids, tokens = hashed.hash_ids.tolist(), hashed.block_tokens.tolist()
    paths = [chain.extend(ids[span]) for span in spans]
    return PrefixTrace(paths, chain.parents, [tokens[span] for span in spans])


def hit_tokens(trace: PrefixTrace, policy: str, capacity_blocks: int | None = None) -> list[int]:
    """Tokens that each request hits, in a cache of ``capacity_blocks`` (at least 1; none for ``infinite``)."""
    cache, worths = _cache(trace, policy, capacity_blocks)
    served = map(cache.serve, trace.paths, worths)
    return [sum(tokens[:hits]) for tokens, hits in zip(trace.tokens, served, strict=True)]


def _cache(trace: PrefixTrace, policy: str, capacity_blocks: int | None) -> tuple[_Fifo | _Leaves, list[list[int]]]:
    if policy == INFINITE:
        return _Fifo(trace.num_prefixes), trace.last_requests
    if policy == "fifo":
        return _Fifo(not_none(capacity_blocks)), trace.last_requests
    worths = trace.last_requests if policy == "lru" else trace.next_requests
    return _Leaves(not_none(capacity_blocks), trace.parents), worths


class _Fifo:
    """A queue of prefixes."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: Sequence[int], worths: Sequence[int]) -> int:
        """Cache a request's prefixes, whatever they are worth; how many of them it hits."""
        queue = self._queue
        hits = next((place for place, prefix in enumerate(path) if prefix not in queue), len(path))
        # What this request's own blocks drive out is looked for again.
        for prefix in path:
            if prefix not in queue:
                if len(queue) == self._capacity:
                    queue.popitem(last=False)
                queue[prefix] = None
        return hits


class _Leaves:
    """Cached prefixes with cached parents; the leaf of least worth is evicted first."""

    def __init__(self, capacity_blocks: int, parents: Sequence[int]) -> None:
        self._room = capacity_blocks
        self._parents = parents
        self._cached = bytearray(len(parents))
        self._children = [0] * len(parents)
        self._worths = [0] * len(parents)
        # A heap of (worth, prefix). What has changed since it was put there is passed over.
        self._leaves: list[tuple[int, int]] = []

    def serve(self, path: Sequence[int], worths: Sequence[int]) -> int:
        """Cache a request's prefixes as far as they are worth more than what they would replace; how many it hits."""
        cached, kept_worths, children = self._cached, self._worths, self._children
        hits, end = 0, HashChain.EMPTY
        for prefix, worth in zip(path, worths, strict=True):
            if cached[prefix]:
                hits += 1
            elif self._room or self._evict(worth):
                self._room -= 1
                cached[prefix] = True
                children[end] += 1
            else:
                break
            # No block evicts one of its own path: that is worth as much, or more, and the heap is out of date on it.
            kept_worths[prefix] = worth
            end = prefix
        self._offer(end)
        return hits

    def _evict(self, worth: int) -> bool:
        """Make room for a block of ``worth``; False where no leaf is worth less."""
        leaves, children = self._leaves, self._children
        while leaves and leaves[0][0] < worth:
            known_worth, leaf = heappop(leaves)
            if self._cached[leaf] and not children[leaf] and known_worth == self._worths[leaf]:
                self._cached[leaf] = False
                self._room += 1
                parent = self._parents[leaf]
                children[parent] -= 1
                self._offer(parent)
                return True
        return False

    def _offer(self, prefix: int) -> None:
        if prefix != HashChain.EMPTY and not self._children[prefix]:
            heappush(self._leaves, (self._worths[prefix], prefix))
