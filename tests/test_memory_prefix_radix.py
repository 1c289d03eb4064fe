"""The radix tree against a trie of single tokens that is searched from end to end."""

from __future__ import annotations

import pytest
from fragmeter.sim.errors import SimulationFault
from fragmeter.sim.memory.prefix import RadixTree
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

# Strings of few tokens, so that they often begin alike; cut into runs at random.
RUN = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 4))
KEY = st.lists(RUN, max_size=4).map(tuple)


def spelled(runs):
    """A string token by token."""
    return tuple((stream, start + i) for stream, start, length in runs for i in range(length))


def strings(tree: RadixTree) -> dict:
    """Every node but the root by its string: (tokens of its edge, locks, last access)."""
    found, todo = {}, [((), tree.root)]
    while todo:
        string, node = todo.pop()
        for token, child in node.children.items():
            edge = spelled(child.runs)
            assert child.parent is node and edge[0] == token and len(edge) == child.tokens
            todo.append((string + edge, child))
            found[string + edge] = (len(edge), child.locks, child.last_access)
    return found


class Trie:
    """Every cached string of tokens with its time of last access, and the ends at which edges are cut.

    A time is (the caller's, number of the call, 1 if the call made it): of two leaves that one call
    touched, the one that was there before is less recent.
    """

    def __init__(self):
        self.times: dict[tuple, tuple[int, int, int]] = {}
        self.locks: dict[tuple, int] = {}
        self.ends = {()}
        self.calls = 0

    def edge(self, end):
        """The strings on the edge that leads to ``end``, the shortest first."""
        above = max(len(other) for other in self.ends if len(other) < len(end) and end[: len(other)] == other)
        return [end[:length] for length in range(above + 1, len(end) + 1)]

    def end_below(self, string):
        """The end of the edge on which ``string`` lies."""
        return min((end for end in self.ends if end[: len(string)] == string), key=len)

    def shared(self, tokens, now):
        """How much of ``tokens`` is cached; touches the edges on the way and cuts the last one there."""
        self.calls += 1
        length = 0
        while length < len(tokens) and tokens[: length + 1] in self.times:
            length += 1
        end = ()
        while len(end) < length:
            end = self.end_below(tokens[: len(end) + 1])
            for string in self.edge(end):
                self.times[string] = (now, self.calls, 0)
        self.ends.add(tokens[:length])
        return length

    def insert(self, tokens, now):
        length = self.shared(tokens, now)
        for end in range(length + 1, len(tokens) + 1):
            self.times[tokens[:end]] = (now, self.calls, 1)
            self.locks[tokens[:end]] = 0
        self.ends.add(tokens)
        return length

    def lock(self, string, by):
        for end in range(1, len(string) + 1):
            self.locks[string[:end]] += by

    def evict(self, tokens):
        freed = 0
        while freed < tokens:
            inner = {end[:length] for end in self.ends for length in range(len(end))}
            leaves = [end for end in self.ends if end and end not in inner and not self.locks[end]]
            if not leaves:
                break
            oldest = min(leaves, key=self.times.get)
            edge = self.edge(oldest)
            for string in edge:
                del self.times[string], self.locks[string]
            self.ends.remove(oldest)
            freed += len(edge)
        return freed

    def strings(self):
        return {end: (len(self.edge(end)), self.locks[end], self.times[end][0]) for end in self.ends if end}


class TreeAgainstTrie(RuleBasedStateMachine):
    @initialize()
    def plant(self):
        self.tree, self.trie, self.now = RadixTree(), Trie(), 0
        self.locked: list = []

    @rule(key=KEY, later=st.integers(0, 1))
    def match(self, key, later):
        self.now += later
        node, tokens = self.tree.match(key, self.now)
        assert tokens == self.trie.shared(spelled(key), self.now)
        self.expect_at(node, spelled(key)[:tokens])

    @rule(key=KEY, later=st.integers(0, 1))
    def insert(self, key, later):
        self.now += later
        node, tokens = self.tree.insert(key, self.now)
        assert tokens == self.trie.insert(spelled(key), self.now)
        self.expect_at(node, spelled(key))

    @rule(key=KEY, insert=st.booleans())
    def lock(self, key, insert):
        """As requests do: they lock what they match, or what they have inserted."""
        node, tokens = self.tree.insert(key, self.now) if insert else self.tree.match(key, self.now)
        string = spelled(key)
        if insert:
            self.trie.insert(string, self.now)
        else:
            string = string[: self.trie.shared(string, self.now)]
        self.tree.lock(node)
        self.trie.lock(string, 1)
        self.locked.append((node, string))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        node, string = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)
        self.trie.lock(string, -1)

    @rule(tokens=st.integers(0, 12))
    def evict(self, tokens):
        assert self.tree.evict(tokens) == self.trie.evict(tokens)

    def expect_at(self, node, string):
        """``node`` is the end of ``string``."""
        edges = []
        while node is not self.tree.root:
            edges.insert(0, spelled(node.runs))
            node = node.parent
        assert sum(edges, ()) == string

    @invariant()
    def all_is_equal(self):
        assert strings(self.tree) == self.trie.strings()
        protected = sum(bool(count) for count in self.trie.locks.values())
        assert self.tree.protected_tokens == protected
        assert self.tree.evictable_tokens == len(self.trie.locks) - protected

    def teardown(self):
        """When all locks are taken off, all can be evicted."""
        for node, string in getattr(self, "locked", []):
            self.tree.unlock(node)
            self.trie.lock(string, -1)
        if hasattr(self, "tree"):
            held = self.tree.evictable_tokens
            assert self.tree.evict(10**9) == held == self.trie.evict(10**9)
            assert not self.tree.root.children and not self.tree.evictable_tokens


TreeAgainstTrie.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
TestTreeAgainstTrie = TreeAgainstTrie.TestCase


@pytest.mark.slow
def test_20_000_sequences_of_operations():
    run_state_machine_as_test(TreeAgainstTrie, settings=settings(max_examples=20_000, stateful_step_count=20))


def test_a_match_splits_and_a_shared_beginning_outlives_its_ends():
    tree = RadixTree()
    tree.insert([("block", 0, 512), ("answer", 0, 100)], now=1)
    node, tokens = tree.match([("block", 0, 512), ("other", 0, 7)], now=2)
    assert (tokens, node.tokens, len(node.children)) == (512, 512, 1)
    tree.insert([("block", 0, 512), ("other", 0, 7)], now=3)
    assert tree.evictable_tokens == 619
    assert tree.evict(1) == 100, "the least recently used leaf goes, whole"
    assert tree.evict(8) == 7 + 512, "a parent without children is a leaf"


def test_runs_are_a_way_of_writing():
    tree = RadixTree()
    tree.insert([("s", 0, 4), ("s", 4, 4)], now=0)
    assert tree.match([("s", 0, 3), ("s", 3, 4)], now=0)[1] == 7
    assert tree.match([("s", 0, 9)], now=0)[1] == 8
    assert tree.match([("s", 1, 3)], now=0)[1] == 0, "tokens are equal only where stream and position are"
    assert tree.match([], now=0) == (tree.root, 0)
    assert tree.insert([], now=0) == (tree.root, 0)


def test_locks_keep_a_path_and_only_that():
    tree = RadixTree()
    node, _ = tree.insert([("a", 0, 10)], now=0)
    tree.lock(node)
    tree.insert([("a", 0, 6), ("b", 0, 5)], now=1)
    assert (tree.protected_tokens, tree.evictable_tokens) == (10, 5)
    assert node.tokens == 4, "the node that was locked stays the end of its string"
    assert tree.evict(100) == 5
    tree.unlock(node)
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 10)
    assert tree.evict(100) == 10


def test_what_cannot_be_is_a_fault():
    tree = RadixTree()
    node, _ = tree.insert([("s", 0, 4)], now=3)
    with pytest.raises(SimulationFault, match="more often than locked"):
        tree.unlock(node)
    with pytest.raises(SimulationFault, match="used at 2 after 3"):
        tree.match([("s", 0, 4)], now=2)
    tree.evict(1)
    with pytest.raises(SimulationFault, match="after its eviction"):
        tree.lock(node)
