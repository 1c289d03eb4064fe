"""A radix tree whose nodes may have a second part, which SGLang calls a *component*, in a pool of its own: the windows of their tokens
(``window_radix``), or a state (``state_radix``).

    root === a b c --- d e f === g h      ===  with its component        ---  a *tombstone*: it is gone

A look-up ends where the component allows it. Evictions of components take the least recently used node without a lock of it: a leaf
goes as a whole, another node becomes a tombstone. A string that is cached again fills tombstones.

Times of nodes are exact here: a look-up touches the path to where it ends, which may be above nodes that it walked through.

Source: SGLang 0.5.23, ``mem_cache/unified_cache``: ``unified_tree_core.py``, ``components``.
"""

from __future__ import annotations

from .radix import RadixNode, RadixTree


class ComponentTree(RadixTree):
    """As ``RadixTree``.

    Attributes:
        component_evictable, component_protected: Units of components without and with locks of these.
        hit: Tokens that the last look-up walked through, also behind where it ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.component_evictable = self.component_protected = self.hit = 0
        # Both ends of the list of nodes with a component.
        self._newest, self._oldest = RadixNode(), RadixNode()
        self._newest.older, self._oldest.newer = self._oldest, self._newest

    @staticmethod
    def _units(node: RadixNode) -> int:
        """Of a node's component."""
        raise NotImplementedError

    def _publish(self, node: RadixNode) -> None:
        """A node has its component now."""
        node.component = True
        self._link(node, self._newest)
        if node.component_locks:
            self.component_protected += self._units(node)
        else:
            self.component_evictable += self._units(node)

    def _bury(self, node: RadixNode) -> None:
        """A node has its component no more."""
        node.component = False
        self._unlink(node)
        self.component_evictable -= self._units(node)

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

    def _lock_component(self, node: RadixNode) -> None:
        if node.component and not node.component_locks:
            self.component_evictable -= self._units(node)
            self.component_protected += self._units(node)
        node.component_locks += 1

    def _unlock_component(self, node: RadixNode) -> None:
        node.component_locks -= 1
        if node.component and not node.component_locks:
            self.component_evictable += self._units(node)
            self.component_protected -= self._units(node)

    def evict(self, tokens: int, components: int = 0) -> int:
        """See ``RadixTree``; then evict components until so many units of these are freed in all."""
        before = self.component_evictable
        freed = super().evict(tokens)
        oldest = self._unlocked(self._oldest)
        while (node := oldest) is not None and before - self.component_evictable < components:
            oldest = self._unlocked(node)
            if node.locks or node.children:
                self._bury(node)
            else:
                freed += node.tokens
                self._remove(node)
        return freed

    def _unlocked(self, node: RadixNode) -> RadixNode | None:
        """The next newer node whose component can be evicted."""
        found = node.newer
        while found is not None and found.component_locks:
            found = found.newer
        return None if found is self._newest else found

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
