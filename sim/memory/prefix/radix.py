"""SGLang's RadixAttention: a radix tree over strings of tokens, or of pages of several tokens each.

An edge has a string of tokens. An edge is split at the token where two strings diverge:

    match(a b c x)             root --- a b c d e        root --- a b c --- d e
                                                   ->

A request locks the path to the node that it has matched, computes the remaining tokens, inserts them, and
unlocks the path when it finishes. Nodes without locks are kept until tokens are needed. Then whole leaves
are evicted, the least recently used first; a parent without remaining children becomes a leaf. In SGLang a walk
touches every node that it enters, including both halves of a node that it splits, and a request locks every node
on its path. Only leaves are evicted, so a touch or a lock is noted here where it ends:

    touch    of the last node of the walk; an evicted leaf leaves its touch to its parent, which is as recent
    lock     of the last node of the path; a node with a locked child is locked, too

A walk can go on where an earlier one of the same string ended, so a prefill of many chunks costs as much as its
tokens, and not as its tokens times its chunks. Of nodes touched in one call, the node touched first is the least
recent, as in SGLang, where the clock advances between any two touches.

A token is a position in an abstract stream (a block of a trace, the output of a request). A string is a
list of runs ``(stream, start, length)``; results do not depend on the division into runs.

With ``page_size`` above 1 the tree has whole pages, which match as a whole: ``Pages`` turns a string of tokens into one of pages, and the
tree itself only ever sees units. What this module calls a token is then a page.

Source: SGLang, python/sglang/srt/mem_cache/radix_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

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
        locks: Locks of strings that end here, and one for each child that is locked.
        touch: Serial number of the last touch here, or of an evicted node below.
        children: Children by the first token of their edges.
        component: Whether its component is there; this and what follows, up to its neighbours, is of ``ComponentTree``.
        component_locks: Locks of it, also while it is missing.
        bound: Names the segments of locks of windows that end here; 0 without any.
        on_device, on_host: Where its KV is; this and what follows is of ``HostTree``.
        copies: Copies in flight that end here, and one for each child with any.
        hits: Requests that inserted it.
        device_children: Children on the device.
        component_on_host: Whether its component has a copy there; this and what follows is of ``HostComponents``.
        component_copies: Copies in flight that lock its component.
        written_by: The write in flight that it is part of.
    """

    parent: RadixNode | None = None
    runs: tuple[Run, ...] = ()
    tokens: int = 0
    locks: int = 0
    touch: int = 0
    children: dict[Token, RadixNode] = field(default_factory=dict)
    component: bool = False
    component_locks: int = 0
    bound: int = 0
    on_device: bool = True
    on_host: bool = False
    copies: int = 0
    hits: int = 0
    device_children: int = 0
    component_on_host: bool = False
    component_copies: int = 0
    written_by: list[RadixNode] | None = None


class Place(NamedTuple):
    """How far a string is cached.

    Attributes:
        node: Where the tree ends it.
        tokens: Its tokens up to there.
        run, into: The rest of the string: index of a run, and tokens into that run.
    """

    node: RadixNode
    tokens: int
    run: int
    into: int


class Leaves:
    """Nodes that can be evicted, the least recently touched first.

    They are in a heap, with their touch at insertion. A leaf that was touched later is pushed again with its last touch when it is popped,
    so no node is in the heap twice.

    Args:
        is_leaf: Whether a node can be evicted now.
    """

    __slots__ = ("_heap", "_is_leaf", "_offered")

    def __init__(self, is_leaf: Callable[[RadixNode], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, RadixNode]] = []
        self._offered: set[RadixNode] = set()

    def offer(self, node: RadixNode) -> None:
        """Add a node, if it can be evicted and is not here yet."""
        if node not in self._offered and self._is_leaf(node):
            self._offered.add(node)
            heappush(self._heap, (node.touch, node))

    def pop(self) -> RadixNode | None:
        """Take the least recently touched one; None without any."""
        while self._heap:
            touch, node = heappop(self._heap)
            self._offered.discard(node)
            if touch == node.touch and self._is_leaf(node):
                return node
            self.offer(node)
        return None


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
        self._touches = 0
        self._leaves = Leaves(self._is_leaf)

    @property
    def unlocked_tokens(self) -> int:
        """Number of tokens of nodes that no string locks."""
        return self.evictable_tokens

    def match(self, key: Sequence[Run]) -> tuple[RadixNode, int]:
        """The longest cached prefix of ``key``: the node at its end (created by a split if necessary), and its tokens.

        Touches the nodes on the path.
        """
        return self.follow(key, self.start)[:2]

    @property
    def start(self) -> Place:
        """The place before the first token of every string."""
        return Place(self.root, 0, 0, 0)

    def follow(self, key: Sequence[Run], place: Place) -> Place:
        """As ``match``, from a place on to which the same ``key`` was followed before, if its node is still there."""
        end = first = place if self.holds(place.node) else self.start
        for end in self._walk(key, first):
            pass
        self._use(end.node)
        return end

    def _walk(self, key: Sequence[Run], place: Place) -> Iterator[Place]:
        """The end of each node on the path of ``key`` after a place; the last one is split where ``key`` leaves it."""
        node, tokens, run, into = place
        while run < len(key):
            stream, start, _ = key[run]
            child = node.children.get((stream, start + into))
            if child is None:
                break
            shared, run, into = _shared(child.runs, key, run, into)
            node = child if shared == child.tokens else self._split(child, shared)
            tokens += shared
            yield Place(node, tokens, run, into)

    def holds(self, node: RadixNode) -> bool:
        """Whether the node has not been evicted."""
        return node is self.root or node.parent is not None

    def insert(
        self, key: Sequence[Run], after: RadixNode | None = None, live: int = 0, inserted: int = 0
    ) -> tuple[RadixNode, int]:
        """Cache ``key``. Returns the node at its end, and the number of its tokens that were cached before.

        Touches the nodes on the path. New nodes are not locked.

        Args:
            after: End of the string that ``key`` goes on with; by default the empty one.
            live: See ``WindowTree``.
            inserted: See ``HostTree``.

        Raises:
            SimulationFault: ``after`` is evicted.
        """
        if after is not None and not self.holds(after):
            raise _evicted()
        last = first = Place(after or self.root, 0, 0, 0)
        for last in self._walk(key, first):
            self._pass(last, live, inserted)
        node, tokens, run, into = last
        new = 0
        if run < len(key):
            stream, start, length = key[run]
            node = self._append(node, ((stream, start + into, length - into), *key[run + 1 :]))
            new = node.tokens
        self._complete(node, new, live - tokens, inserted - tokens)
        self._use(node)
        return node, tokens

    def _pass(self, place: Place, live: int, inserted: int) -> None:
        """A string that is inserted goes on behind a node, or ends there; see ``insert``."""

    def _complete(self, node: RadixNode, new: int, live: int, inserted: int) -> None:
        """A string that is inserted ends with a node.

        Args:
            new: Its tokens, if it is a new one, else 0.
            live, inserted: As of ``insert``, from the first token of a new node on.
        """

    def lock(self, node: RadixNode) -> int:
        """Protect ``node`` and its ancestors from eviction. Returns what ``unlock`` asks for.

        Raises:
            SimulationFault: The node is evicted.
        """
        while node is not self.root:
            self._count(node, -1)
            node.locks += 1
            self._count(node, 1)
            if node.locks > 1:
                break
            node = self._parent_of(node)
        return 0

    def unlock(self, node: RadixNode, bound: int = 0) -> None:
        """Remove one lock of ``node`` and of its ancestors.

        Raises:
            SimulationFault: The node has no lock.
        """
        while node is not self.root:
            if not node.locks:
                raise SimulationFault("a radix node is unlocked more often than locked")
            self._count(node, -1)
            node.locks -= 1
            self._count(node, 1)
            if node.locks:
                break
            self._offer(node)
            node = self._parent_of(node)

    def evict(self, tokens: int, components: int = 0) -> int:
        """Evict leaves until ``tokens`` are freed or no leaf without locks is left. Returns the number of freed tokens.

        Whole leaves are evicted, so more than ``tokens`` may be freed.
        """
        freed = 0
        while freed < tokens and (leaf := self._leaves.pop()) is not None:
            freed += leaf.tokens
            self._remove(leaf)
        return freed

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        """Insert a parent of ``node`` with the first ``tokens`` of its edge; ``node`` remains the end of its string."""
        parent = self._parent_of(node)
        above, below = _cut(node.runs, tokens)
        upper = RadixNode(parent, above, tokens, int(node.locks > 0), children={below[0][:2]: node})
        self._touch(node)
        parent.children[above[0][:2]] = upper
        node.parent, node.runs, node.tokens = upper, below, node.tokens - tokens
        return upper

    def _append(self, parent: RadixNode, runs: tuple[Run, ...]) -> RadixNode:
        leaf = RadixNode(parent, runs, sum(length for _, _, length in runs))
        parent.children[runs[0][:2]] = leaf
        self._count(leaf, 1)
        self._touch(leaf)
        self._leaves.offer(leaf)
        return leaf

    def _remove(self, leaf: RadixNode) -> None:
        self._count(leaf, -1)
        self._leaves.offer(self._detach(leaf))

    def _detach(self, leaf: RadixNode) -> RadixNode:
        """Take a node without children out of the tree. Returns its parent."""
        parent, leaf.parent = self._parent_of(leaf), None
        self._inherit(parent, leaf)
        del parent.children[leaf.runs[0][:2]]
        return parent

    def _inherit(self, parent: RadixNode, leaf: RadixNode) -> None:
        """What an evicted leaf leaves to its parent."""
        parent.touch = max(parent.touch, leaf.touch)

    def _touch(self, node: RadixNode) -> None:
        self._touches += 1
        node.touch = self._touches

    def _use(self, node: RadixNode) -> None:
        """The path to a node was used."""
        self._touch(node)

    def _offer(self, node: RadixNode) -> None:
        """A node may be one to evict now."""
        self._leaves.offer(node)

    def _is_leaf(self, node: RadixNode) -> bool:
        """Whether a node can be evicted."""
        return node.parent is not None and not (node.locks or node.children)

    def _count(self, node: RadixNode, sign: int) -> None:
        """A node counts among those with its locks from now on, or no more."""
        if node.locks:
            self.protected_tokens += sign * node.tokens
        else:
            self.evictable_tokens += sign * node.tokens

    def path(self, node: RadixNode, above: RadixNode | None = None) -> list[RadixNode]:
        """``node`` and its ancestors, up to the one below ``above``, by default the root.

        Raises:
            SimulationFault: The node is evicted.
        """
        path, above = [], above or self.root
        while node is not above:
            path.append(node)
            node = self._parent_of(node)
        return path

    @staticmethod
    def _parent_of(node: RadixNode) -> RadixNode:
        if node.parent is None:
            raise _evicted()
        return node.parent


def _evicted() -> SimulationFault:
    return SimulationFault("a radix node is used after its eviction")


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


class Pages:
    """Strings of tokens as strings of whole pages, which are equal if all of their tokens are.

    A page within one run has the run's stream and its offset in it as stream, so that neighbours are neighbours again:

        size 4       (s, 2, 9) = s2 s3 s4 s5 | s6 s7 s8 s9 | s10      ->  (stream of (s, 2), 0, 2)
        of two runs  (s, 0, 1), (t, 0, 3)                            ->  (stream of both, 0, 1)

    Attributes:
        size: Tokens of a page.
    """

    __slots__ = ("_streams", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._streams: dict[tuple[object, ...], int] = {}

    def of(self, runs: Sequence[Run]) -> tuple[Run, ...]:
        """The whole pages of a string; tokens of a page that is not full are left out."""
        size = self.size
        if size == 1:
            return tuple(runs)
        found: list[Run] = []
        piece: list[Run] = []
        lacking = size
        for stream, start, length in runs:
            if lacking < size or length < size:
                step = min(lacking, length)
                if piece and (piece[-1][0], piece[-1][1] + piece[-1][2]) == (stream, start):
                    piece[-1] = (stream, piece[-1][1], piece[-1][2] + step)
                else:
                    piece.append((stream, start, step))
                lacking -= step
                start, length = start + step, length - step
                if not lacking:
                    found.append(self._page(piece))
                    piece, lacking = [], size
            if length >= size:
                found.append((self._stream((stream, start % size)), start // size, length // size))
                start, length = start + length // size * size, length % size
            if length:
                piece, lacking = [(stream, start, length)], size - length
        return tuple(found)

    def _page(self, piece: list[Run]) -> Run:
        """A page of these tokens."""
        if len(piece) == 1:
            stream, start, _ = piece[0]
            return self._stream((stream, start % self.size)), start // self.size, 1
        return self._stream(tuple(piece)), 0, 1

    def _stream(self, key: tuple[object, ...]) -> int:
        return self._streams.setdefault(key, len(self._streams))


class Rest:
    """What is left of a string that is taken piece by piece."""

    __slots__ = ("_into", "_run", "_runs")

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self._runs, self._run, self._into = runs, 0, 0

    def take(self, tokens: int) -> list[Run]:
        """The next ``tokens`` tokens; no more may be left."""
        taken = []
        while tokens:
            stream, start, length = self._runs[self._run]
            step = min(tokens, length - self._into)
            taken.append((stream, start + self._into, step))
            tokens -= step
            self._into += step
            if self._into == length:
                self._run, self._into = self._run + 1, 0
        return taken


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
