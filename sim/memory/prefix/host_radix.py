"""SGLang's radix tree with a host tier (HiCache): the KV of a node is on the device, on the host, or on both.

    root === a b c === d e f ... g h       ===  on both    ---  on the device alone    ...  on the host alone
               |
               +------ x y                 the device has the nodes from the root on; host-only nodes follow these

1. A request that inserts a string *hits* each node of it that it has not inserted before. At ``threshold`` hits a node without a host copy
   is written, after its ancestors without one; a node that does not fit on the host ends this.
2. A written node takes host pages at once, and is locked with its ancestors until its copy has ended.
3. The device evicts unlocked nodes without children on the device, least recently touched first: one with a host copy stays in the tree,
   on the host alone; another one is gone.
4. The host evicts, when a node to be written does not fit, host-only nodes without children, in the same order. Copies of nodes that the
   device has stay.
5. A look-up ends at the last node that matches, on the device or on the host. What the host alone has of it is loaded into new device
   pages, and locked until the copy has ended.
6. A string that is inserted gives host-only nodes on its way its own pages, without a copy.

Sequences and copies lock alike, but are counted apart: what only copies lock is no sequence's.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/unified_tree_core.py``, ``components/full.py``, ``unified_radix_cache.py``
(``_execute_kv_backup``, ``load_back``), write policies ``write_through`` and ``write_through_selective``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...workload.content import Run
from .radix import Leaves, Place, RadixNode, RadixTree


class Copied(NamedTuple):
    """What is copied at once, and locked by its copy.

    Attributes:
        node: Where it ends.
        tokens: Tokens of the copy: of a load, those of its host-only ancestors, too.
        components: Units of components.
        bound: Of the lock, see ``ComponentTree``.
        written: Nodes of a write, where these have components.
    """

    node: RadixNode
    tokens: int
    components: int = 0
    bound: int = 0
    written: list[RadixNode] | None = None


class HostTree(RadixTree):
    """As ``RadixTree``; ``evict`` evicts from the device.

    Args:
        host_tokens: Tokens that the host holds.
        threshold: Hits at which a node is written.
        others: Of the tree that it extends.

    Attributes:
        host_free: Tokens for which the host has pages left.
        copying_tokens: Tokens on the device that only copies lock.
        host_evicted, refused_writes: Tokens that the host has evicted; nodes that found too few pages there.
        writes: Nodes that are to be written to the host.
    """

    def __init__(self, host_tokens: int, threshold: int = 1, *others: int) -> None:
        super().__init__(*others)
        self.host_free, self._threshold = host_tokens, threshold
        self.copying_tokens = self.host_evicted = self.refused_writes = self._restored = 0
        self.writes: list[Copied] = []
        self._host_leaves = Leaves(self._is_host_leaf)

    @property
    def unlocked_tokens(self) -> int:
        """See ``RadixTree``."""
        return self.evictable_tokens + self.copying_tokens

    def on_device(self, place: Place) -> tuple[RadixNode, int]:
        """The last node of a string from which a request can go on without a load, and the tokens up to there."""
        node, tokens = place.node, place.tokens
        while not node.on_device:
            tokens -= node.tokens
            node = self._parent_of(node)
        return node, tokens

    def between(self, node: RadixNode, above: RadixNode) -> tuple[int, int]:
        """Tokens of a string that ends at ``node``, behind ``above``: those with a copy on the host, and those that the device lacks."""
        copied = lacking = 0
        for each in self.path(node, above):
            copied += each.tokens * each.on_host
            lacking += each.tokens * (not each.on_device)
        return copied, lacking

    def insert(
        self, key: Sequence[Run], after: RadixNode | None = None, live: int = 0, inserted: int = 0
    ) -> tuple[RadixNode, int]:
        """See ``RadixTree``; tokens count as cached before where the device had them.

        Args:
            inserted: Tokens of the string that the request has inserted before, from the first one of ``key`` on; below 0 where it has not
                inserted all of the string before ``key``.
        """
        end, path = 0, []
        if after is not None and inserted < 0:
            for each in self.path(after):
                if end <= inserted:
                    break
                path.append(each)
                end -= each.tokens
        for each in reversed(path):
            self._hit(each)
        self._restored = 0
        node, tokens = super().insert(key, after, live, inserted)
        self._leaves.offer(node)
        return node, tokens - self._restored

    def _pass(self, place: Place, live: int, inserted: int) -> None:
        self._restored += self._restore(place.node)
        super()._pass(place, live, inserted)
        if place.tokens > inserted:
            self._hit(place.node)

    def _complete(self, node: RadixNode, new: int, live: int, inserted: int) -> None:
        super()._complete(node, new, live, inserted)
        if new > max(0, inserted):
            self._hit(node)

    def _hit(self, node: RadixNode) -> None:
        """A request has inserted a node that it had not inserted before."""
        node.hits += 1
        if not node.on_host and node.hits >= self._threshold:
            self._write(node)

    def load(self, node: RadixNode) -> Copied:
        """What a string that ends at a node lacks on the device takes pages there, which the caller has, and is locked by the copy."""
        tokens, end = 0, node
        while not end.on_device:
            tokens += self._restore(end)
            end = self._parent_of(end)
        return Copied(node, tokens, bound=self.pin(node))

    def pin(self, node: RadixNode) -> int:
        """A copy locks a node and its ancestors. Returns what ``unpin`` asks for."""
        while node is not self.root:
            self._count(node, -1)
            node.copies += 1
            self._count(node, 1)
            if node.copies > 1:
                break
            node = self._parent_of(node)
        return 0

    def unpin(self, copied: Copied) -> None:
        """A copy has ended."""
        node = copied.node
        while node is not self.root:
            self._count(node, -1)
            node.copies -= 1
            self._count(node, 1)
            if node.copies:
                break
            self._offer(node)
            node = self._parent_of(node)

    def _restore(self, node: RadixNode) -> int:
        """A node is on the device again, if it was not. Returns the tokens that it brings there."""
        if node.on_device:
            return 0
        node.on_device = True
        self._parent_of(node).device_children += 1
        self._count(node, 1)
        return node.tokens

    def _write(self, node: RadixNode) -> None:
        """Write a node to the host, after its ancestors that are not there."""
        chain: list[RadixNode] = []
        while node is not self.root and not (chain and node.on_host):
            chain.append(node)
            node = self._parent_of(node)
        for each in reversed(chain):
            if not self._copy_to_host(each):
                self.refused_writes += 1
                break

    def _copy_to_host(self, node: RadixNode) -> bool:
        """A node takes the pages that it lacks on the host, and is locked by the copy. Returns whether there were enough."""
        tokens = node.tokens * (not node.on_host)
        if not self._make_host_free(tokens):
            return False
        self.host_free -= tokens
        node.on_host = True
        self.writes.append(Copied(node, tokens, bound=self.pin(node)))
        return True

    def _make_host_free(self, tokens: int) -> bool:
        """Evict from the host until so many tokens fit, as far as there are leaves. Returns whether they do."""
        while self.host_free < tokens and (leaf := self._host_leaves.pop()) is not None:
            self._evict_from_host(leaf)
        return self.host_free >= tokens

    def _evict_from_host(self, leaf: RadixNode) -> None:
        self.host_free += leaf.tokens
        self.host_evicted += leaf.tokens
        self._host_leaves.offer(self._detach(leaf))

    def _remove(self, leaf: RadixNode) -> None:
        """See ``RadixTree``; a node with a host copy stays there."""
        self._parent_of(leaf).device_children -= 1
        if leaf.on_host:
            self._demote(leaf)
        else:
            super()._remove(leaf)

    def _demote(self, leaf: RadixNode) -> None:
        """A node is on the host alone."""
        parent = self._parent_of(leaf)
        self._count(leaf, -1)
        leaf.on_device = False
        self._inherit(parent, leaf)
        self._leaves.offer(parent)
        self._host_leaves.offer(leaf)

    def _offer(self, node: RadixNode) -> None:
        super()._offer(node)
        self._host_leaves.offer(node)

    def _is_leaf(self, node: RadixNode) -> bool:
        return node.parent is not None and node.on_device and not (node.locks or node.copies or node.device_children)

    def _is_host_leaf(self, node: RadixNode) -> bool:
        return node.parent is not None and not (node.on_device or node.children or node.locks)

    def _count(self, node: RadixNode, sign: int) -> None:
        if not node.on_device:
            return
        if node.copies and not node.locks:
            self.copying_tokens += sign * node.tokens
        else:
            super()._count(node, sign)

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        upper.on_device, upper.on_host, upper.hits = node.on_device, node.on_host, node.hits
        upper.copies, upper.device_children = int(node.copies > 0), int(node.on_device)
        return upper

    def _append(self, parent: RadixNode, runs: tuple[Run, ...]) -> RadixNode:
        parent.device_children += 1
        return super()._append(parent, runs)

    def _use(self, node: RadixNode) -> None:
        """See ``RadixTree``; the device's part of the path is as recent, and each host-only node of it."""
        path = [node]
        while not path[-1].on_device:
            path.append(self._parent_of(path[-1]))
        for each in reversed(path):
            self._touch(each)
