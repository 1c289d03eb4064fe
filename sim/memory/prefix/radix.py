"""SGLang's RadixAttention: a radix tree over token strings, at pages of one token.

An edge carries a string of tokens, not one; where two strings part, the edge is split:

    match(a b c x)             root --- a b c d e        root --- a b c --- d e
                                                   ->

A request locks the path to the node that it has matched, computes the rest, inserts it and, when it
is done, unlocks. Nodes without locks stay for others until tokens are needed: then leaves are
evicted, whole ones, the least recently used first, and a parent that is left without children is a
leaf itself. A walk touches every node that it enters, also one that it then splits, both halves.
Time does not run back, so that the order of touches is that of their times; of nodes touched at one
time, the one touched first is the least recent, as in SGLang: its clock advances between any two.

A token is a position in an abstract stream (a block of a trace, the output of a request), and a
string is written as runs ``(stream, start, length)``; how it is cut into runs does not matter.

Evictable leaves stand in a heap by the touch that they came with. One that has been touched since
goes back with its last touch when it comes up; so no node stands there twice.

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
    """The end of a string, and the edge that leads to it.

    Attributes:
        parent: None for the root, and for a node that is evicted.
        runs: The edge's tokens.
        tokens: How many they are.
        locks: Locks on this node and on nodes below.
        last_access: The caller's time of the last touch.
        touch: That touch's number among all.
        queued: Whether it stands in the heap.
        children: By the first token of their edges.
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
        evictable_tokens: Tokens of nodes without locks.
        protected_tokens: Tokens of nodes with locks.
    """

    def __init__(self) -> None:
        self.root = RadixNode()
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self._now = 0
        self._touches = 0
        self._queue: list[tuple[int, RadixNode]] = []

    def match(self, key: Sequence[Run], now: int) -> tuple[RadixNode, int]:
        """The longest cached prefix of ``key``: the node at its end (made by a split if need be), and its tokens.

        Touches the nodes on the way.

        Raises:
            SimulationFault: ``now`` lies before an earlier call's (invariant 5).
        """
        node, tokens, _, _ = self._walk(key, now)
        return node, tokens

    def insert(self, key: Sequence[Run], now: int) -> tuple[RadixNode, int]:
        """Cache ``key``: the node at its end, and how many of its tokens were cached before.

        Touches the nodes on the way. What is new is not locked.

        Raises:
            SimulationFault: As for ``match``.
        """
        node, tokens, place, into = self._walk(key, now)
        if place < len(key):
            stream, start, length = key[place]
            node = self._append(node, ((stream, start + into, length - into), *key[place + 1 :]), now)
        return node, tokens

    def lock(self, node: RadixNode) -> None:
        """Keep ``node`` and its ancestors from eviction.

        Raises:
            SimulationFault: It has been evicted.
        """
        for step in self.path(node):
            if not step.locks:
                self.evictable_tokens -= step.tokens
                self.protected_tokens += step.tokens
            step.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Take one lock off ``node`` and its ancestors.

        Raises:
            SimulationFault: It has none.
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
        """Evict leaves until ``tokens`` are freed, or no leaf is left without locks; the tokens freed.

        Leaves go whole, so that more may be freed than asked for.
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
        """As far as ``key`` is cached: the node there, the tokens up to it, and where the rest of ``key`` begins, as
        the place of a run and the tokens into it."""
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
        """A new parent for ``node``, with the first ``tokens`` of its edge; ``node`` stays the end of its string."""
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
        """Put an evictable leaf into the heap, if it does not stand there."""
        if node is not self.root and not (node.locks or node.children or node.queued):
            node.queued = True
            heappush(self._queue, (node.touch, node))

    def path(self, node: RadixNode) -> list[RadixNode]:
        """``node`` and its ancestors, without the root.

        Raises:
            SimulationFault: It has been evicted.
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
    """The first ``tokens`` tokens, at least 1, of a string; the string, where it is no longer."""
    for place, (stream, start, length) in enumerate(runs):
        if tokens <= length:
            return (*runs[:place], (stream, start, tokens))
        tokens -= length
    return tuple(runs)


def _shared(runs: Sequence[Run], key: Sequence[Run], place: int, into: int) -> tuple[int, int, int]:
    """How many tokens ``runs`` shares with ``key`` from ``into`` tokens into its run ``place`` on; where they end."""
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
            # Runs that begin with one token go on alike.
            step = min(end - start, ahead - into)
            start += step
            shared += step
            into += step
            if into == ahead:
                place, into = place + 1, 0
    return shared, place, into


def _cut(runs: Sequence[Run], tokens: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """``runs`` cut in two after ``tokens`` tokens."""
    place = 0
    while tokens >= runs[place][2]:
        tokens -= runs[place][2]
        place += 1
    if not tokens:
        return tuple(runs[:place]), tuple(runs[place:])
    stream, start, length = runs[place]
    below = (stream, start + tokens, length - tokens)
    return (*runs[:place], (stream, start, tokens)), (below, *runs[place + 1 :])
