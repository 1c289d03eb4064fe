"""The radix tree on logs worked out by hand."""

from __future__ import annotations

import pytest

from fragmeter.sim.memory.prefix import RadixTree
from fragmeter.sim.types.errors import SimulationFault


def test_a_match_splits_and_a_shared_beginning_outlives_its_ends():
    tree = RadixTree()
    tree.insert([("block", 0, 512), ("answer", 0, 100)])
    node, tokens = tree.match([("block", 0, 512), ("other", 0, 7)])
    assert (tokens, node.tokens, len(node.children)) == (512, 512, 1)
    tree.insert([("block", 0, 512), ("other", 0, 7)])
    assert tree.evictable_tokens == 619
    assert tree.evict(1) == 100, "the least recently used leaf goes, whole"
    assert tree.evict(8) == 7 + 512, "a parent without children is a leaf"


def test_runs_are_a_way_of_writing():
    tree = RadixTree()
    tree.insert([("s", 0, 4), ("s", 4, 4)])
    assert tree.match([("s", 0, 3), ("s", 3, 4)])[1] == 7
    assert tree.match([("s", 0, 9)])[1] == 8
    assert tree.match([("s", 1, 3)])[1] == 0, "tokens are equal only where stream and position are"
    assert tree.match([]) == (tree.root, 0)
    assert tree.insert([]) == (tree.root, 0)


def test_locks_keep_a_path_and_only_that():
    tree = RadixTree()
    node, _ = tree.insert([("a", 0, 10)])
    tree.lock(node)
    tree.insert([("a", 0, 6), ("b", 0, 5)])
    assert (tree.protected_tokens, tree.evictable_tokens) == (10, 5)
    assert node.tokens == 4, "the node that was locked remains the end of its string"
    assert tree.evict(100) == 5
    tree.unlock(node)
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 10)
    assert tree.evict(100) == 10


def test_what_cannot_be_is_a_fault():
    tree = RadixTree()
    node, _ = tree.insert([("s", 0, 4)])
    with pytest.raises(SimulationFault, match="more often than locked"):
        tree.unlock(node)
    tree.evict(1)
    with pytest.raises(SimulationFault, match="after its eviction"):
        tree.lock(node)
