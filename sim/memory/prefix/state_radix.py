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
            if self._has_component(last.node):
                best = last
        self.hit = last.tokens
        if key:
            self._use(best.node)
        return best

    def _complete(self, node: RadixNode, new: int, live: int, inserted: int) -> None:
        """See ``RadixTree``. The state after the string joins the tree, unless there is one."""
        super()._complete(node, new, live, inserted)
        if node is not self.root and not node.component:
            self._publish(node)

    def _refresh(self, path: list[RadixNode]) -> None:
        """Of the last node alone, which is all that a request reads."""
        if path and path[0].component:
            self.recency.put(path[0])

    def _to_lock(self, node: RadixNode) -> tuple[list[RadixNode], int]:
        return self._to_unlock(node, 0), 0

    def _to_unlock(self, node: RadixNode, bound: int) -> list[RadixNode]:
        return [] if node is self.root else [node]
