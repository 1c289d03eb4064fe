"""The radix tree against a trie of single tokens that is searched from end to end."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import RadixTree, Rest

from .draws import combined, picks

# Strings of few tokens, so that they often begin alike; cut into runs at random.
RUN = combined(range(2), range(3), range(1, 5))
KEY = st.lists(RUN, max_size=4).map(tuple)


def spelled(runs):
    """A string token by token."""
    return tuple((stream, start + i) for stream, start, length in runs for i in range(length))


def strings(tree: RadixTree) -> dict:
    """Every node but the root by its string: (tokens of its edge, locks of strings that go through it)."""
    found, todo, ends = {}, [((), tree.root)], {}
    while todo:
        string, node = todo.pop()
        for token, child in node.children.items():
            edge = spelled(child.runs)
            assert child.parent is node and edge[0] == token and len(edge) == child.tokens
            todo.append((string + edge, child))
            found[string + edge] = len(edge)
            ends[string + edge] = child.locks - sum(below.locks > 0 for below in child.children.values())
    assert all(count >= 0 for count in ends.values())
    return {
        string: (edge, sum(count for end, count in ends.items() if end[: len(string)] == string))
        for string, edge in found.items()
    }


class Trie:
    """Every cached string of tokens with its time of last access, and the ends at which edges are cut.

    A time is (number of the call, 1 if the call made it): of two leaves that one call touched, the one that was there
    before is less recent.
    """

    def __init__(self):
        self.times: dict[tuple, tuple[int, int]] = {}
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

    def shared(self, tokens):
        """How much of ``tokens`` is cached; touches the edges on the way and cuts the last one there."""
        self.calls += 1
        length = 0
        while length < len(tokens) and tokens[: length + 1] in self.times:
            length += 1
        end = ()
        while len(end) < length:
            end = self.end_below(tokens[: len(end) + 1])
            for string in self.edge(end):
                self.times[string] = (self.calls, 0)
        self.ends.add(tokens[:length])
        return length

    def insert(self, tokens):
        length = self.shared(tokens)
        for end in range(length + 1, len(tokens) + 1):
            self.times[tokens[:end]] = (self.calls, 1)
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
        return {end: (len(self.edge(end)), self.locks[end]) for end in self.ends if end}


class RadixMachine(RuleBasedStateMachine):
    @initialize()
    def plant(self):
        self.tree, self.trie = RadixTree(), Trie()
        self.locked: list = []
        # Strings that were followed, each with the place that it was followed to.
        self.followed: list = []

    @rule(key=KEY)
    def match(self, key):
        node, tokens = self.tree.match(key)
        assert tokens == self.trie.shared(spelled(key))
        self.expect_at(node, spelled(key)[:tokens])

    @rule(key=KEY, pick=picks, again=st.booleans())
    def follow(self, key, pick, again):
        """A string that waits is followed again and again, from where it ended on."""
        place = self.tree.start
        if again and self.followed:
            key, place = self.followed.pop(pick % len(self.followed))
        place = self.tree.follow(key, place)
        assert place.tokens == self.trie.shared(spelled(key))
        self.expect_at(place.node, spelled(key)[: place.tokens])
        self.followed.append((key, place))

    @rule(key=KEY)
    def insert(self, key):
        node, tokens = self.tree.insert(key)
        assert tokens == self.trie.insert(spelled(key))
        self.expect_at(node, spelled(key))

    @precondition(lambda self: self.locked)
    @rule(pick=picks, key=KEY, sizes=st.lists(st.integers(0, 4), max_size=3))
    def insert_in_pieces(self, pick, key, sizes):
        """A string that goes on after one that is locked, as a prefill in chunks does; its lock moves along."""
        node, string = self.locked.pop(pick % len(self.locked))
        rest = Rest(key)
        for size in sizes:
            piece = rest.take(min(size, len(spelled(key))))
            key = key if not piece else self.without(key, len(spelled(piece)))
            end, tokens = self.tree.insert(piece, node)
            longer = string + spelled(piece)
            assert tokens == self.trie.insert(longer) - len(string)
            self.expect_at(end, longer)
            self.tree.unlock(node)
            self.tree.lock(end)
            self.trie.lock(string, -1)
            self.trie.lock(longer, 1)
            node, string = end, longer
        self.locked.append((node, string))

    def without(self, key, tokens):
        """A string without its first tokens."""
        rest = Rest(key)
        rest.take(tokens)
        return tuple(rest.take(len(spelled(key)) - tokens))

    @rule(key=KEY, insert=st.booleans())
    def lock(self, key, insert):
        """As requests do: they lock what they match, or what they have inserted."""
        node, tokens = self.tree.insert(key) if insert else self.tree.match(key)
        string = spelled(key)
        if insert:
            self.trie.insert(string)
        else:
            string = string[: self.trie.shared(string)]
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
            # One after the other.
            while held := self.tree.evictable_tokens:
                assert self.tree.evict(1) == self.trie.evict(1) > 0
                assert strings(self.tree) == self.trie.strings()
                assert self.tree.evictable_tokens < held
            assert not self.tree.root.children and not self.tree.evictable_tokens
