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
    """A node that is copied, and locked by its copy.

    Attributes:
        tokens: Tokens of the copy: of a load, those of its host-only ancestors, too.
    """

    node: RadixNode
    tokens: int


class HostTree(RadixTree):
    """As ``RadixTree``; ``evict`` evicts from the device.

    Args:
        host_tokens: Tokens that the host holds.
        threshold: Hits at which a node is written.

    Attributes:
        host_free: Tokens for which the host has pages left.
        copying_tokens: Tokens on the device that only copies lock.
        host_evicted, refused_writes: Tokens that the host has evicted; nodes that found too few pages there.
        writes: Nodes that are to be written to the host.
    """

    def __init__(self, host_tokens: int, threshold: int = 1) -> None:
        super().__init__()
        self.host_free, self._threshold = host_tokens, threshold
        self.copying_tokens = self.host_evicted = self.refused_writes = 0
        self.writes: list[Copied] = []
        self._host_leaves = Leaves(self._is_host_leaf)

    @property
    def unlocked_tokens(self) -> int:
        """See ``RadixTree``."""
        return self.evictable_tokens + self.copying_tokens

    def on_device(self, place: Place) -> tuple[RadixNode, int]:
        """The last node on the device of a string, and the tokens up to there."""
        node, tokens = place.node, place.tokens
        while not node.on_device:
            tokens -= node.tokens
            node = self._parent_of(node)
        return node, tokens

    def insert(self, key: Sequence[Run], after: RadixNode | None = None, live: int = 0) -> tuple[RadixNode, int]:
        """See ``RadixTree``; tokens count as cached before where the device had them."""
        last = first = Place(after or self.root, 0, 0, 0)
        restored = 0
        for last in self._walk(key, first):
            restored += self._restore(last.node)
        self._touch(last.node)
        node, tokens, run, into = last
        if run < len(key):
            stream, start, length = key[run]
            node = self._append(node, ((stream, start + into, length - into), *key[run + 1 :]))
        self._leaves.offer(node)
        return node, tokens - restored

    def hit(self, node: RadixNode, tokens: int, before: int) -> None:
        """A request has inserted the string of ``tokens`` that ends at a node, and so many of them ``before``."""
        path = []
        while tokens > before:
            path.append(node)
            tokens -= node.tokens
            node = self._parent_of(node)
        for each in reversed(path):
            each.hits += 1
            if not each.on_host and each.hits >= self._threshold:
                self._write(each)

    def load(self, node: RadixNode) -> Copied:
        """What the host alone has of a string that ends at a node takes device pages, which the caller has, and is locked by the copy."""
        end, tokens = node, 0
        while not node.on_device:
            tokens += self._restore(node)
            node = self._parent_of(node)
        self.pin(end)
        return Copied(end, tokens)

    def pin(self, node: RadixNode) -> None:
        """A copy locks a node and its ancestors."""
        while node is not self.root:
            node.copies += 1
            if node.copies > 1:
                break
            if not node.locks:
                self.evictable_tokens -= node.tokens
                self.copying_tokens += node.tokens
            node = self._parent_of(node)

    def unpin(self, node: RadixNode) -> None:
        """The copy has ended."""
        while node is not self.root:
            node.copies -= 1
            if node.copies:
                break
            if not node.locks:
                self.evictable_tokens += node.tokens
                self.copying_tokens -= node.tokens
            self._leaves.offer(node)
            node = self._parent_of(node)

    def _restore(self, node: RadixNode) -> int:
        """A node is on the device again, if it was not. Returns the tokens that it brings there."""
        if node.on_device:
            return 0
        node.on_device = True
        self._parent_of(node).device_children += 1
        self._count_unlocked(node, 1)
        return node.tokens

    def _write(self, node: RadixNode) -> None:
        """Write a node to the host, after its ancestors that are not there."""
        chain = []
        while node is not self.root and not node.on_host:
            chain.append(node)
            node = self._parent_of(node)
        for each in reversed(chain):
            if not self._make_host_free(each.tokens):
                self.refused_writes += 1
                break
            self.host_free -= each.tokens
            each.on_host = True
            self.pin(each)
            self.writes.append(Copied(each, each.tokens))

    def _make_host_free(self, tokens: int) -> bool:
        """Evict from the host until so many tokens fit, as far as there are leaves. Returns whether they do."""
        while self.host_free < tokens and (leaf := self._host_leaves.pop()) is not None:
            self.host_free += leaf.tokens
            self.host_evicted += leaf.tokens
            self._host_leaves.offer(self._detach(leaf))
        return self.host_free >= tokens

    def _remove(self, leaf: RadixNode) -> None:
        """See ``RadixTree``; a node with a host copy stays there."""
        parent = self._parent_of(leaf)
        parent.device_children -= 1
        if not leaf.on_host:
            super()._remove(leaf)
            return
        leaf.on_device = False
        self._count_unlocked(leaf, -1)
        self._inherit(parent, leaf)
        self._leaves.offer(parent)
        self._host_leaves.offer(leaf)

    def _is_leaf(self, node: RadixNode) -> bool:
        return node.parent is not None and node.on_device and not (node.locks or node.copies or node.device_children)

    @staticmethod
    def _is_host_leaf(node: RadixNode) -> bool:
        return node.parent is not None and not (node.on_device or node.children)

    def _count_unlocked(self, node: RadixNode, sign: int) -> None:
        if node.copies:
            self.copying_tokens += sign * node.tokens
        else:
            super()._count_unlocked(node, sign)

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        upper.on_device, upper.on_host, upper.hits = node.on_device, node.on_host, node.hits
        upper.copies, upper.device_children = int(node.copies > 0), int(node.on_device)
        return upper

    def _append(self, parent: RadixNode, runs: tuple[Run, ...]) -> RadixNode:
        parent.device_children += 1
        return super()._append(parent, runs)

    def _touch(self, node: RadixNode) -> None:
        """See ``RadixTree``; the device's part of the path is as recent, and each host-only node of it."""
        path = [node]
        while not path[-1].on_device:
            path.append(self._parent_of(path[-1]))
        for each in reversed(path):
            super()._touch(each)
