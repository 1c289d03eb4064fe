"""SGLang's radix tree of a model with states (Mamba, linear attention): the state after a node's last token may be kept with the node.

    root === a b c --- d e f === g h      a string that begins with a b c d e f g goes on from c: behind it there is no state before h

A look-up ends at the last node with a state, from which the request goes on with a copy. A node that is split keeps its state at its
end; its new beginning has none. A request locks the state of its node alone, and the tokens up to there.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/components/mamba.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...workload.content import Run
from .component_tree import ComponentTree
from .radix import Place, RadixNode


class StateTree(ComponentTree):
    """As ``ComponentTree``; the unit of a component is a state."""

    @staticmethod
    def _units(node: RadixNode) -> int:
        return 1

    def follow(self, key: Sequence[Run], place: Place) -> Place:
        """See ``RadixTree``; from the root, as states may have gone since."""
        last = best = self.start
        for last in self._walk(key, best):
            if last.node.component:
                best = last
        self.hit = last.tokens
        if key:
            self._use(best.node)
        return best

    def insert(self, key: Sequence[Run], after: RadixNode | None = None, live: int = 0) -> tuple[RadixNode, int]:
        """See ``RadixTree``. The state after ``key`` joins the tree, unless there is one."""
        last = first = Place(after or self.root, 0, 0, 0)
        for last in self._walk(key, first):
            pass
        node, tokens, run, into = last
        if run < len(key):
            stream, start, length = key[run]
            node = self._append(node, ((stream, start + into, length - into), *key[run + 1 :]))
        if node is not self.root and not node.component:
            self._publish(node)
        self._use(node)
        return node, tokens

    def _refresh(self, path: list[RadixNode]) -> None:
        """Of the last node alone, which is all that a request reads."""
        if path and path[0].component:
            self._unlink(path[0])
            self._link(path[0], self._newest)

    def lock(self, node: RadixNode) -> int:
        """See ``RadixTree``."""
        super().lock(node)
        if node is not self.root:
            self._lock_component(node)
        return 0

    def unlock(self, node: RadixNode, bound: int = 0) -> None:
        """See ``RadixTree``."""
        if node is not self.root:
            self._unlock_component(node)
        super().unlock(node)
