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
            covered = covered + last.node.tokens if self._has_component(last.node) else 0
            if covered >= self.window:
                best = last
        self.hit = last.tokens
        if key:
            self._use(best.node)
        return best

    def _pass(self, place: Place, live: int, inserted: int) -> None:
        """See ``RadixTree``; ``live`` is the tokens of the string before those of which the request has the windows."""
        if not place.node.component:
            self._fill(place.node, live - place.tokens + place.node.tokens)
        super()._pass(place, live, inserted)

    def _complete(self, node: RadixNode, new: int, live: int, inserted: int) -> None:
        """See ``RadixTree``; a new leaf gets the windows that its request has."""
        if new > (older := max(0, live)):
            if older:
                self._split(node, older)
            # Its lock is to hold no more than a window.
            if node.tokens > self.tail:
                self._publish(self._split(node, node.tokens - self.tail))
            self._publish(node)
        super()._complete(node, new, live, inserted)

    def _fill(self, node: RadixNode, before: int) -> None:
        """Give a tombstone its windows, but of so many first tokens; these become a node of their own."""
        if before < node.tokens:
            if before > 0:
                self._split(node, before)
            self._publish(node)

    def _refresh(self, path: list[RadixNode]) -> None:
        """The windows before its end."""
        last, covered = None, 0
        for each in path:
            if covered <= self.window and each.component:
                self.recency.put(each, last)
                last = each
            covered += each.tokens

    def _last_window(self, node: RadixNode) -> tuple[list[RadixNode], int]:
        """The nodes of the last window of a string that ends at a node, from there upwards, and their tokens."""
        nodes, covered = [], 0
        while node is not self.root and covered < self.window:
            nodes.append(node)
            covered += node.tokens
            node = self._parent_of(node)
        return nodes, covered

    def _to_lock(self, node: RadixNode) -> tuple[list[RadixNode], int]:
        """See ``ComponentTree``; the name is 0 where they go up to the root."""
        nodes, covered = self._last_window(node)
        if covered < self.window:
            return nodes, 0
        if not nodes[-1].bound:
            self._bounds += 1
            nodes[-1].bound = self._bounds
        return nodes, nodes[-1].bound

    def _to_unlock(self, node: RadixNode, bound: int) -> list[RadixNode]:
        nodes = []
        while node is not self.root:
            nodes.append(node)
            if bound and node.bound == bound:
                break
            node = self._parent_of(node)
        return nodes

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        upper.component, upper.component_locks = node.component, node.component_locks
        upper.component_copies = node.component_copies
        upper.bound, node.bound = node.bound, 0
        if upper.component:
            self.recency.put(upper, node)
        return upper
