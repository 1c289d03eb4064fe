"""The radix tree against a trie of single tokens that is searched from end to end."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import RadixTree

from .draws import combined, picks

# Strings of few tokens, so that they often begin alike; cut into runs at random.
RUN = combined(range(2), range(3), range(1, 5))
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


class RadixMachine(RuleBasedStateMachine):
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
    @rule(pick=picks)
    def unlock(self, pick):
        node, string = self.locked.pop(pick % len(self.locked))
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
