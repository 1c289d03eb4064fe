"""SGLang's RadixAttention: a radix tree over token strings, with pages of one token.

An edge has a string of tokens. An edge is split at the token where two strings diverge:

    match(a b c x)             root --- a b c d e        root --- a b c --- d e
                                                   ->

A request locks the path to the node that it has matched, computes the remaining tokens, inserts them, and
unlocks the path when it finishes. Nodes without locks are kept until tokens are needed. Then whole leaves
are evicted, the least recently used first; a parent without remaining children becomes a leaf. A walk
touches every node that it enters, including both halves of a node that it splits. Time does not decrease,
so touches are ordered by time. Of nodes touched at the same time, the node touched first is the least
recent, as in SGLang, where the clock advances between any two touches.

A token is a position in an abstract stream (a block of a trace, the output of a request). A string is a
list of runs ``(stream, start, length)``; results do not depend on the division into runs.

Evictable leaves are in a heap, with their touch at insertion. A leaf that was touched later is pushed again
with its last touch when it is popped, so no node is in the heap twice.

Source: SGLang, python/sglang/srt/mem_cache/radix_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ...types.errors import SimulationFault
from ...workload.content import Run

Token = tuple[int, int]
"""(stream, position)."""


@dataclass(slots=True, eq=False)
class RadixNode:
    """The end of a string, and the edge to it.

    Attributes:
        parent: None for the root and for an evicted node.
        runs: Tokens of the edge.
        tokens: Number of tokens of the edge.
        locks: Number of locks on this node and on nodes below it.
        last_access: Time of the last touch, in the caller's unit.
        touch: Serial number of the last touch.
        queued: Whether it is in the heap.
        children: Children by the first token of their edges.
    """

    parent: RadixNode | None = None
    runs: tuple[Run, ...] = ()
    tokens: int = 0
    locks: int = 0
    last_access: int = 0
    touch: int = 0
    queued: bool = False
    children: dict[Token, RadixNode] = field(default_factory=dict)


class RadixTree:
    """The cached strings.

    Attributes:
        root: The empty string; never evicted.
        evictable_tokens: Number of tokens of nodes without locks.
        protected_tokens: Number of tokens of nodes with locks.
    """

    def __init__(self) -> None:
        self.root = RadixNode()
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self._now = 0
        self._touches = 0
        self._queue: list[tuple[int, RadixNode]] = []

    def match(self, key: Sequence[Run], now: int) -> tuple[RadixNode, int]:
        """The longest cached prefix of ``key``: the node at its end (created by a split if necessary), and its tokens.

        Touches the nodes on the path.

        Raises:
            SimulationFault: ``now`` is before the time of an earlier call (invariant 5).
        """
        node, tokens, _, _ = self._walk(key, now)
        return node, tokens

    def insert(self, key: Sequence[Run], now: int) -> tuple[RadixNode, int]:
        """Cache ``key``. Returns the node at its end, and the number of its tokens that were cached before.

        Touches the nodes on the path. New nodes are not locked.

        Raises:
            SimulationFault: See ``match``.
        """
        node, tokens, place, into = self._walk(key, now)
        if place < len(key):
            stream, start, length = key[place]
            node = self._append(node, ((stream, start + into, length - into), *key[place + 1 :]), now)
        return node, tokens

    def lock(self, node: RadixNode) -> None:
        """Protect ``node`` and its ancestors from eviction.

        Raises:
            SimulationFault: The node is evicted.
        """
        for step in self.path(node):
            if not step.locks:
                self.evictable_tokens -= step.tokens
                self.protected_tokens += step.tokens
            step.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Remove one lock of ``node`` and of its ancestors.

        Raises:
            SimulationFault: The node has no lock.
        """
        for step in self.path(node):
            if not step.locks:
                raise SimulationFault("a radix node is unlocked more often than locked")
            step.locks -= 1
            if not step.locks:
                self.evictable_tokens += step.tokens
                self.protected_tokens -= step.tokens
                self._offer(step)

    def evict(self, tokens: int) -> int:
        """Evict leaves until ``tokens`` are freed or no leaf without locks is left. Returns the number of freed tokens.

        Whole leaves are evicted, so more than ``tokens`` may be freed.
        """
        freed = 0
        while freed < tokens and self._queue:
            touch, node = heappop(self._queue)
            node.queued = False
            if touch == node.touch and not node.locks and not node.children:
                freed += node.tokens
                self._remove(node)
            else:
                self._offer(node)
        return freed

    def _walk(self, key: Sequence[Run], now: int) -> tuple[RadixNode, int, int, int]:
        """Walk along ``key`` as far as it is cached.

        Returns:
            The node there, the number of tokens up to it, and the start of the remaining ``key``: index of a run, and
            tokens into that run.
        """
        if now < self._now:
            raise SimulationFault(f"a radix tree is used at {now} after {self._now}")
        self._now = now
        node, tokens, place, into = self.root, 0, 0, 0
        while place < len(key):
            stream, start, _ = key[place]
            child = node.children.get((stream, start + into))
            if child is None:
                break
            shared, place, into = _shared(child.runs, key, place, into)
            self._touch(child, now)
            node = child if shared == child.tokens else self._split(child, shared, now)
            tokens += shared
        return node, tokens, place, into

    def _split(self, node: RadixNode, tokens: int, now: int) -> RadixNode:
        """Insert a parent of ``node`` with the first ``tokens`` of its edge; ``node`` remains the end of its string."""
        parent = self._parent_of(node)
        above, below = _cut(node.runs, tokens)
        upper = RadixNode(parent, above, tokens, node.locks, children={below[0][:2]: node})
        self._touch(upper, now)
        parent.children[above[0][:2]] = upper
        node.parent, node.runs, node.tokens = upper, below, node.tokens - tokens
        return upper

    def _append(self, parent: RadixNode, runs: tuple[Run, ...], now: int) -> RadixNode:
        leaf = RadixNode(parent, runs, sum(length for _, _, length in runs))
        parent.children[runs[0][:2]] = leaf
        self.evictable_tokens += leaf.tokens
        self._touch(leaf, now)
        self._offer(leaf)
        return leaf

    def _remove(self, leaf: RadixNode) -> None:
        parent, leaf.parent = self._parent_of(leaf), None
        del parent.children[leaf.runs[0][:2]]
        self.evictable_tokens -= leaf.tokens
        self._offer(parent)

    def _touch(self, node: RadixNode, now: int) -> None:
        self._touches += 1
        node.last_access, node.touch = now, self._touches

    def _offer(self, node: RadixNode) -> None:
        """Push ``node`` into the heap if it is an evictable leaf and not yet in the heap."""
        if node is not self.root and not (node.locks or node.children or node.queued):
            node.queued = True
            heappush(self._queue, (node.touch, node))

    def path(self, node: RadixNode) -> list[RadixNode]:
        """``node`` and its ancestors, without the root.

        Raises:
            SimulationFault: The node is evicted.
        """
        path = []
        while node is not self.root:
            if node.parent is None:
                raise SimulationFault("a radix node is used after its eviction")
            path.append(node)
            node = node.parent
        return path

    @staticmethod
    def _parent_of(node: RadixNode) -> RadixNode:
        if node.parent is None:
            raise SimulationFault("a radix node is used after its eviction")
        return node.parent


def all_but_last(runs: Sequence[Run]) -> tuple[Run, ...]:
    """A string without its last token."""
    *before, (stream, start, length) = runs
    return (*before, (stream, start, length - 1)) if length > 1 else tuple(before)


def first_tokens(runs: Sequence[Run], tokens: int) -> tuple[Run, ...]:
    """The first ``tokens`` tokens (at least 1) of a string, or the whole string if it is shorter."""
    for place, (stream, start, length) in enumerate(runs):
        if tokens <= length:
            return (*runs[:place], (stream, start, tokens))
        tokens -= length
    return tuple(runs)


def shared_tokens(runs: Sequence[Run], others: Sequence[Run]) -> int:
    """Number of tokens with which two strings both begin."""
    return _shared(runs, others, 0, 0)[0]


def _shared(runs: Sequence[Run], key: Sequence[Run], place: int, into: int) -> tuple[int, int, int]:
    """Number of tokens that ``runs`` shares with ``key`` from ``into`` tokens into run ``place`` on, and their end."""
    shared = 0
    for run in runs:
        if not into and place < len(key) and key[place] == run:
            place += 1
            shared += run[2]
            continue
        stream, start, length = run
        end = start + length
        while start < end:
            if place == len(key):
                return shared, place, into
            other, begin, ahead = key[place]
            if (other, begin + into) != (stream, start):
                return shared, place, into
            # Runs with the same first token have the same following tokens.
            step = min(end - start, ahead - into)
            start += step
            shared += step
            into += step
            if into == ahead:
                place, into = place + 1, 0
    return shared, place, into


def _cut(runs: Sequence[Run], tokens: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """``runs`` split in two after ``tokens`` tokens."""
    place = 0
    while tokens >= runs[place][2]:
        tokens -= runs[place][2]
        place += 1
    if not tokens:
        return tuple(runs[:place]), tuple(runs[place:])
    stream, start, length = runs[place]
    below = (stream, start + tokens, length - tokens)
    return (*runs[:place], (stream, start, tokens)), (below, *runs[place + 1 :])
