"""SGLang's radix tree of a model with sliding windows: each node has its tokens' KV of the layers that keep every token, and may have that
of the layers with a window, which lie in a pool of their own.

A look-up ends at the last node behind which a whole window is there (or all tokens, without a tombstone). A request locks the path to its
node in the one pool, but only the nodes of the last window in the other. Tombstones are filled with the windows that a request still has.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/components/swa.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...workload.content import Run
from .component_tree import ComponentTree
from .radix import Place, RadixNode


class WindowTree(ComponentTree):
    """As ``ComponentTree``; the unit of a component is a token with its windows.

    Args:
        window: Tokens that a look-up needs before its end.

    Attributes:
        tail: Most tokens with windows of a new leaf.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = self.tail = window
        self._bounds = 0

    @staticmethod
    def _units(node: RadixNode) -> int:
        return node.tokens

    def follow(self, key: Sequence[Run], place: Place) -> Place:
        """See ``RadixTree``; from the root, as tombstones may have come since."""
        last = best = self.start
        covered: float = float("inf")
        for last in self._walk(key, best):
            covered = covered + last.node.tokens if last.node.component else 0
            if last.node.component and covered >= self.window:
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
            if not last.node.component:
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

    def _refresh(self, path: list[RadixNode]) -> None:
        """The windows before its end."""
        last, covered = self._newest, 0
        for each in path:
            if covered <= self.window and each.component:
                self._unlink(each)
                self._link(each, last)
                last = each
            covered += each.tokens

    def lock(self, node: RadixNode) -> int:
        """See ``RadixTree``. Returns the name of the segment of windows that it locks, for ``unlock``; 0 is up to the root."""
        super().lock(node)
        covered = 0
        while node is not self.root:
            self._lock_component(node)
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
            self._unlock_component(each)
            if bound and each.bound == bound:
                break
            each = self._parent_of(each)
        super().unlock(node)

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        upper.component, upper.component_locks = node.component, node.component_locks
        upper.bound, node.bound = node.bound, 0
        if upper.component:
            self._link(upper, node)
        return upper
