"""A radix tree whose nodes may have a second part, which SGLang calls a *component*, in a pool of its own: the windows of their tokens
(``window_radix``), or a state (``state_radix``).

    root === a b c --- d e f === g h      ===  with its component        ---  a *tombstone*: it is gone

A look-up ends where the component allows it. Evictions of components take the least recently used node without a lock of it: a leaf
goes as a whole, another node becomes a tombstone. A string that is cached again fills tombstones.

Times of nodes are exact here: a look-up touches the path to where it ends, which may be above nodes that it walked through.

Source: SGLang 0.5.23, ``mem_cache/unified_cache``: ``unified_tree_core.py``, ``components``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .radix import RadixNode, RadixTree


class Recency:
    """Nodes by their last use, in a list linked both ways; None stands for both of its ends."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[RadixNode | None, RadixNode | None] = {None: None}
        self._older: dict[RadixNode | None, RadixNode | None] = {None: None}

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._newer

    def newer(self, node: RadixNode | None = None) -> RadixNode | None:
        """The next newer one; of None the oldest. None behind the newest."""
        return self._newer[node]

    def put(self, node: RadixNode, behind: RadixNode | None = None) -> None:
        """Make it the next older one of another node, by default the newest; where it was before it is no more."""
        if node in self._newer:
            self.remove(node)
        older = self._older[behind]
        self._newer[node], self._older[node] = behind, older
        self._older[behind] = self._newer[older] = node

    def remove(self, node: RadixNode) -> None:
        newer, older = self._newer.pop(node), self._older.pop(node)
        self._older[newer], self._newer[older] = older, newer


class ComponentTree(RadixTree):
    """As ``RadixTree``.

    Attributes:
        component_evictable, component_protected: Units of components without and with locks of these.
        hit: Tokens that the last look-up walked through, also behind where it ended.
        recency: Nodes with a component.
    """

    def __init__(self) -> None:
        super().__init__()
        self.component_evictable = self.component_protected = self.hit = 0
        self.recency = Recency()

    @property
    def components(self) -> int:
        """Units of components on the device."""
        return self.component_evictable + self.component_protected

    @property
    def component_unlocked(self) -> int:
        """Those of them that no string locks."""
        return self.component_evictable

    @staticmethod
    def _units(node: RadixNode) -> int:
        """Of a node's component."""
        raise NotImplementedError

    def _has_component(self, node: RadixNode) -> bool:
        """Whether a look-up finds a node's component."""
        return node.component

    def _publish(self, node: RadixNode) -> None:
        """A node has its component now."""
        node.component = True
        self.recency.put(node)
        self._count_component(node, 1)

    def _bury(self, node: RadixNode) -> None:
        """A node has its component no more."""
        self._count_component(node, -1)
        node.component = False
        self.recency.remove(node)

    def _use(self, node: RadixNode) -> None:
        """The path to a node was used, and the components that ``_refresh`` chooses."""
        path = self.path(node)
        self._touches += len(path)
        for back, each in enumerate(path):
            each.touch = self._touches - back
        self._refresh(path)

    def _refresh(self, path: list[RadixNode]) -> None:
        """Components that a use of a path, from its end upwards, makes the most recently used."""
        raise NotImplementedError

    def _to_lock(self, node: RadixNode) -> tuple[list[RadixNode], int]:
        """The nodes whose components a lock of a string that ends at a node protects, and their name for ``_to_unlock``."""
        raise NotImplementedError

    def _to_unlock(self, node: RadixNode, bound: int) -> list[RadixNode]:
        """These nodes again, of which some may have been split since."""
        raise NotImplementedError

    def lock(self, node: RadixNode) -> int:
        """See ``RadixTree``."""
        super().lock(node)
        nodes, bound = self._to_lock(node)
        self._add_locks(nodes, 1)
        return bound

    def unlock(self, node: RadixNode, bound: int = 0) -> None:
        """See ``RadixTree``."""
        self._add_locks(self._to_unlock(node, bound), -1)
        super().unlock(node)

    def _add_locks(self, nodes: Iterable[RadixNode], sign: int) -> None:
        for node in nodes:
            self._count_component(node, -1)
            node.component_locks += sign
            self._count_component(node, 1)

    def _is_component_locked(self, node: RadixNode) -> bool:
        return node.component_locks > 0

    def _count_component(self, node: RadixNode, sign: int) -> None:
        """A node's component counts among these with its locks from now on, or no more."""
        if not node.component:
            return
        if node.component_locks:
            self.component_protected += sign * self._units(node)
        else:
            self.component_evictable += sign * self._units(node)

    def evict(self, tokens: int, components: int = 0) -> int:
        """See ``RadixTree``; then evict components until so many units of these are freed in all."""
        before = self.component_evictable
        freed = super().evict(tokens)
        oldest = self._unlocked(None)
        while (node := oldest) is not None and before - self.component_evictable < components:
            oldest = self._unlocked(node)
            if self._is_leaf(node):
                freed += node.tokens
                self._remove(node)
            else:
                self._bury(node)
        return freed

    def _unlocked(self, node: RadixNode | None) -> RadixNode | None:
        """The next newer node whose component can be evicted."""
        found = self.recency.newer(node)
        while found is not None and self._is_component_locked(found):
            found = self.recency.newer(found)
        return found

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        self._touches += 1
        touch = self._touches
        upper = super()._split(node, tokens)
        upper.touch = touch
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        if leaf.component:
            self._bury(leaf)
        super()._remove(leaf)

    def _inherit(self, parent: RadixNode, leaf: RadixNode) -> None:
        """Nothing: the path to it was touched, too."""
