"""SGLang's radix tree of a model with windows or states in a pool of their own, with a host tier (HiCache).

    device      root === a b c --- d e f === g h          ===  with its component      ---  without
    host        root === a b c === d e f ... g h                                       ...  not on the host

1. A component lies on the device, on the host, or on both, apart from the tokens of its node. On the device it is there with the tokens
   alone; on the host it was written with them, or later.
2. A write takes the components of the node that lack a copy: its state; or the windows of all nodes within a window before its end, up to
   one that is being written. A string that ends with a node whose tokens have a copy, and whose component has none, writes that.
3. A device leaf goes to the host as a whole. A component that is evicted alone stays on the host, if it has a copy there.
4. The host has places for components of their own. When they are too few, it evicts as many as are asked for: the least recently used
   that the device lacks, a host-only leaf as a whole, another one without its tokens.
5. A look-up finds components on either side. A load brings the tokens that the device lacks, and the components that a request needs
   there: the last state, or the last window.

Source: SGLang 0.5.23, ``mem_cache/unified_cache``: ``unified_tree_core.py``, ``components/mamba.py``, ``components/swa.py``
(``build_hicache_transfers``, ``drive_host_eviction``).
"""

from __future__ import annotations

from .component_tree import ComponentTree, Recency
from .host_radix import Copied, HostTree
from .radix import Place, RadixNode
from .state_radix import StateTree
from .window_radix import WindowTree


class HostComponents(HostTree, ComponentTree):
    """As ``HostTree``, with components.

    Args:
        host_components: Units of components that the host holds.

    Attributes:
        host_components: As given.
        components_free, most_components: Units of components for which the host has places left; most that it had at a time.
        component_copying: Units of components on the device that only copies lock.
        host_recency: Nodes whose component the host alone has.
    """

    def __init__(self, host_tokens: int, threshold: int, host_components: int, *others: int) -> None:
        super().__init__(host_tokens, threshold, *others)
        self.host_components = self.components_free = host_components
        self.component_copying = self.most_components = 0
        self.host_recency = Recency()

    @property
    def components(self) -> int:
        """See ``ComponentTree``."""
        return super().components + self.component_copying

    @property
    def component_unlocked(self) -> int:
        """See ``ComponentTree``."""
        return super().component_unlocked + self.component_copying

    def on_device(self, place: Place) -> tuple[RadixNode, int]:
        """See ``HostTree``."""
        raise NotImplementedError

    def _needed(self, node: RadixNode) -> list[RadixNode]:
        """Nodes whose components a request needs that goes on from a node, from there upwards."""
        raise NotImplementedError

    def _unwritten(self, node: RadixNode) -> list[RadixNode]:
        """Nodes whose components are written with a node."""
        raise NotImplementedError

    def _has_component(self, node: RadixNode) -> bool:
        return node.component or node.component_on_host

    def to_load(self, node: RadixNode) -> list[RadixNode]:
        """Nodes whose components a load of a string that ends at a node brings."""
        return [each for each in self._needed(node) if not each.component]

    def units(self, nodes: list[RadixNode]) -> int:
        """Of the components of these."""
        return sum(map(self._units, nodes))

    def use_on_host(self, node: RadixNode) -> None:
        """A load of a string that ends at a node was in vain: its components were locked on the host, and are the most recent there."""
        for each in self.to_load(node):
            self.host_recency.put(each)

    def load(self, node: RadixNode) -> Copied:
        """See ``HostTree``; with components, for which the caller has places, too."""
        nodes = self.to_load(node)
        copied = super().load(node)
        for each in reversed(nodes):
            self._publish(each)
        return copied._replace(components=self.units(nodes))

    def pin(self, node: RadixNode) -> int:
        super().pin(node)
        nodes, bound = self._to_lock(node)
        self._add_copies(nodes, 1)
        return bound

    def unpin(self, copied: Copied) -> None:
        for node in copied.written or ():
            node.written_by = None
        self._add_copies(self._to_unlock(copied.node, copied.bound), -1)
        super().unpin(copied)

    def _add_copies(self, nodes: list[RadixNode], sign: int) -> None:
        for node in nodes:
            self._count_component(node, -1)
            node.component_copies += sign
            self._count_component(node, 1)

    def _is_component_locked(self, node: RadixNode) -> bool:
        return super()._is_component_locked(node) or node.component_copies > 0

    def _count_component(self, node: RadixNode, sign: int) -> None:
        if node.component and node.component_copies and not node.component_locks:
            self.component_copying += sign * self._units(node)
        else:
            super()._count_component(node, sign)

    def _complete(self, node: RadixNode, new: int, live: int, inserted: int) -> None:
        super()._complete(node, new, live, inserted)
        if not new and node.on_host and node.written_by is None and self._unwritten(node):
            self._write(node)

    def _copy_to_host(self, node: RadixNode) -> bool:
        nodes = self._unwritten(node)
        units = self.units(nodes)
        if not (self._make_host_free(node.tokens * (not node.on_host)) and self._make_components_free(units)):
            return False
        super()._copy_to_host(node)
        self.components_free -= units
        self.most_components = max(self.most_components, self.host_components - self.components_free)
        for each in nodes:
            each.component_on_host = True
        written = [*nodes, *[node][: node not in nodes]]
        for each in written:
            each.written_by = written
        self.writes[-1] = self.writes[-1]._replace(components=units, written=written)
        return True

    def _make_components_free(self, units: int) -> bool:
        """Evict so many units from the host, if fewer are free there. Returns whether they are free then."""
        wanted = units if self.components_free < units else 0
        oldest, evicted = self.host_recency.newer(), 0
        while (node := oldest) is not None and evicted < wanted:
            oldest = self.host_recency.newer(node)
            evicted += self._units(node)
            if self._is_host_leaf(node):
                self._evict_from_host(node)
            else:
                self._forget_on_host(node)
        return self.components_free >= units

    def _forget_on_host(self, node: RadixNode) -> None:
        node.component_on_host = False
        self.components_free += self._units(node)
        if node in self.host_recency:
            self.host_recency.remove(node)

    def _evict_from_host(self, leaf: RadixNode) -> None:
        if leaf.component_on_host:
            self._forget_on_host(leaf)
        super()._evict_from_host(leaf)

    def _publish(self, node: RadixNode) -> None:
        super()._publish(node)
        if node in self.host_recency:
            self.host_recency.remove(node)

    def _bury(self, node: RadixNode) -> None:
        """See ``ComponentTree``; a copy on the host stays there."""
        super()._bury(node)
        if node.component_on_host:
            self.host_recency.put(node)

    def _demote(self, leaf: RadixNode) -> None:
        if leaf.component:
            self._bury(leaf)
        super()._demote(leaf)

    def _use(self, node: RadixNode) -> None:
        """See ``ComponentTree``: times are exact on the host, too."""
        ComponentTree._use(self, node)

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        if node.written_by is not None:
            upper.written_by = node.written_by
            upper.written_by.append(upper)
        return upper


class HostStateTree(HostComponents, StateTree):
    """As ``HostComponents``; the unit of a component is a state."""

    def on_device(self, place: Place) -> tuple[RadixNode, int]:
        node, tokens = place.node, place.tokens
        while node is not self.root and not node.component:
            tokens -= node.tokens
            node = self._parent_of(node)
        return node, tokens

    def _needed(self, node: RadixNode) -> list[RadixNode]:
        return self._to_unlock(node, 0)

    def _unwritten(self, node: RadixNode) -> list[RadixNode]:
        return [node] if node.component and not node.component_on_host else []


class HostWindowTree(HostComponents, WindowTree):
    """As ``HostComponents``; the unit of a component is a token with its windows."""

    def on_device(self, place: Place) -> tuple[RadixNode, int]:
        best, found, tokens, covered = self.root, 0, 0, float("inf")
        for node in reversed(self.path(place.node)):
            tokens += node.tokens
            covered = covered + node.tokens if node.component else 0
            if covered >= self.window:
                best, found = node, tokens
        return best, found

    def _needed(self, node: RadixNode) -> list[RadixNode]:
        return self._last_window(node)[0]

    def _unwritten(self, node: RadixNode) -> list[RadixNode]:
        nodes, covered = [], 0
        while node is not self.root and covered < self.window and node.written_by is None and self._has_component(node):
            covered += node.tokens
            if node.component and not node.component_on_host:
                nodes.append(node)
            node = self._parent_of(node)
        return nodes

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        upper.component_on_host = node.component_on_host
        if node in self.host_recency:
            self.host_recency.put(upper, node)
        return upper
