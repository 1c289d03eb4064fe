"""SGLang's radix tree of a model with sliding windows: each node has its tokens' KV of the layers that keep every token, and may have that
of the layers with a window, which lie in a pool of their own.

    root === a b c --- d e f === g h      ===  with windows        ---  a *tombstone*: its windows are gone

A look-up ends at the last node behind which a whole window is there (or all tokens, without a tombstone). A request locks the path to its
node in the one pool, but only the nodes of the last window in the other. Evictions of windows take the least recent node without such a
lock: a leaf goes as a whole, another node becomes a tombstone. A string that is cached again fills tombstones with the windows that its
request still has.

Times of nodes are exact here: a look-up touches the path to where it ends, which may be above nodes that it walked through.

Source: SGLang 0.5.23, ``mem_cache/unified_cache``: ``unified_tree_core.py``, ``components/swa.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...workload.content import Run
from .radix import Place, RadixNode, RadixTree


class WindowTree(RadixTree):
    """As ``RadixTree``.

    Args:
        window: Tokens that a look-up needs before its end.

    Attributes:
        tail: Most tokens with windows of a new leaf.
        window_evictable, window_protected: Tokens of nodes with windows, without and with locks of these.
        hit: Tokens that the last look-up walked through, also behind where it ended.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = self.tail = window
        self.window_evictable = self.window_protected = self.hit = self._bounds = 0
        # Both ends of the list of nodes with windows.
        self._newest, self._oldest = RadixNode(), RadixNode()
        self._newest.older, self._oldest.newer = self._oldest, self._newest

    def follow(self, key: Sequence[Run], place: Place) -> Place:
        """See ``RadixTree``; from the root, as tombstones may have come since."""
        last = best = self.start
        covered: float = float("inf")
        for last in self._walk(key, best):
            covered = covered + last.node.tokens if last.node.windowed else 0
            if last.node.windowed and covered >= self.window:
                best = last
        self.hit = last.tokens
        if key:
            self._use(best.node)
        return best

    def insert(self, key: Sequence[Run], after: RadixNode | None = None, live: int = 0) -> tuple[RadixNode, int]:
        """See ``RadixTree``.

        Args:
            live: Tokens of ``key`` before those of which the request has the windows.
        """
        last = first = Place(after or self.root, 0, 0, 0)
        for last in self._walk(key, first):
            if not last.node.windowed:
                self._fill(last.node, live - last.tokens + last.node.tokens)
        node, tokens, run, into = last
        if run < len(key):
            stream, start, length = key[run]
            node = self._append(node, ((stream, start + into, length - into), *key[run + 1 :]))
            if node.tokens > (older := max(0, live - tokens)):
                if older:
                    self._split(node, older)
                # Its lock is to hold no more than a window.
                if node.tokens > self.tail:
                    self._publish(self._split(node, node.tokens - self.tail))
                self._publish(node)
        self._use(node)
        return node, tokens

    def _fill(self, node: RadixNode, before: int) -> None:
        """Give a tombstone its windows, but of so many first tokens; these become a node of their own."""
        if before < node.tokens:
            if before > 0:
                self._split(node, before)
            self._publish(node)

    def _publish(self, node: RadixNode) -> None:
        """A node has windows now."""
        node.windowed = True
        self._link(node, self._newest)
        if node.window_locks:
            self.window_protected += node.tokens
        else:
            self.window_evictable += node.tokens

    def _use(self, node: RadixNode) -> None:
        """The path to a node was used, and the windows before its end."""
        path = self.path(node)
        self._touches += len(path)
        last, covered = self._newest, 0
        for back, each in enumerate(path):
            each.touch = self._touches - back
            if covered <= self.window and each.windowed:
                self._unlink(each)
                self._link(each, last)
                last = each
            covered += each.tokens

    @staticmethod
    def _link(node: RadixNode, newer: RadixNode) -> None:
        older = newer.older
        assert older is not None
        node.newer, node.older, older.newer, newer.older = newer, older, node, node

    @staticmethod
    def _unlink(node: RadixNode) -> None:
        newer, older = node.newer, node.older
        assert newer is not None and older is not None
        newer.older, older.newer, node.newer, node.older = older, newer, None, None

    def lock(self, node: RadixNode) -> int:
        """See ``RadixTree``. Returns the name of the segment of windows that it locks, for ``unlock``; 0 is up to the root."""
        super().lock(node)
        covered = 0
        while node is not self.root:
            if node.windowed and not node.window_locks:
                self.window_evictable -= node.tokens
                self.window_protected += node.tokens
            node.window_locks += 1
            covered += node.tokens
            if covered >= self.window:
                if not node.bound:
                    self._bounds += 1
                    node.bound = self._bounds
                return node.bound
            node = self._parent_of(node)
        return 0

    def unlock(self, node: RadixNode, bound: int = 0) -> None:
        """See ``RadixTree``."""
        each = node
        while each is not self.root:
            each.window_locks -= 1
            if each.windowed and not each.window_locks:
                self.window_evictable += each.tokens
                self.window_protected -= each.tokens
            if bound and each.bound == bound:
                break
            each = self._parent_of(each)
        super().unlock(node)

    def evict(self, tokens: int, windows: int = 0) -> int:
        """See ``RadixTree``; then evict windows until ``windows`` tokens of these are freed in all."""
        before = self.window_evictable
        freed = super().evict(tokens)
        oldest = self._unlocked(self._oldest)
        while (node := oldest) is not None and before - self.window_evictable < windows:
            oldest = self._unlocked(node)
            if node.locks or node.children:
                self._bury(node)
            else:
                freed += node.tokens
                self._remove(node)
        return freed

    def _unlocked(self, node: RadixNode) -> RadixNode | None:
        """The next newer node whose windows can be evicted."""
        found = node.newer
        while found is not None and found.window_locks:
            found = found.newer
        return None if found is self._newest else found

    def _bury(self, node: RadixNode) -> None:
        """A node has no windows any more."""
        node.windowed = False
        self._unlink(node)
        self.window_evictable -= node.tokens

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        self._touches += 1
        touch = self._touches
        upper = super()._split(node, tokens)
        upper.touch = touch
        upper.windowed, upper.window_locks = node.windowed, node.window_locks
        upper.bound, node.bound = node.bound, 0
        if upper.windowed:
            self._link(upper, node)
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        if leaf.windowed:
            self._bury(leaf)
        super()._remove(leaf)

    def _inherit(self, parent: RadixNode, leaf: RadixNode) -> None:
        """Nothing: the path to it was touched, too."""
