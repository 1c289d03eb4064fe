"""The radix tree with windows: which tokens have their windows, by a set of strings; sums, locks and the order by a walk over all nodes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import Rest, WindowTree

from .draws import picks
from .radix import KEY, spelled, strings


class WindowMachine(RuleBasedStateMachine):
    """A string is named by its tokens; it is ``windowed`` where its last token has its KV of the layers with a window."""

    @initialize(window=st.integers(1, 5))
    def plant(self, window):
        self.window, self.tree = window, WindowTree(window)
        self.windowed: set[tuple] = set()
        # Node, its string, the name of the segment, and the strings whose windows the lock keeps.
        self.locked: list = []
        # Strings that were inserted: most of them are still cached, or begin like one that is.
        self.keys: list = [()]

    @rule(key=KEY, pick=picks)
    def follow(self, key, pick):
        key = key or self.keys[pick % len(self.keys)]
        known, tokens = strings(self.tree), spelled(key)
        place = self.tree.follow(key, self.tree.start)
        walked = max(
            (n for n in range(len(tokens) + 1) if any(end[:n] == tokens[:n] for end in (*known, ()))), default=0
        )
        assert self.tree.hit == walked
        # Its walk may have cut the last node in two.
        ends = [end for end in strings(self.tree) if end == tokens[: len(end)]]
        usable = [len(end) for end in ends if self.is_whole(end)]
        assert place.tokens == max(usable, default=0)
        assert self.string_of(place.node) == tokens[: place.tokens]

    @rule(key=KEY, live=st.integers(0, 8), pick=picks, cut=st.integers(0, 4))
    def insert(self, key, live, pick, cut):
        """A string that may go on from within another one."""
        other = self.keys[pick % len(self.keys)]
        key = (*Rest(other).take(min(cut, len(spelled(other)))), *key)
        self.keys.append(key)
        tokens = spelled(key)
        node, _ = self.tree.insert(key, live=live)
        self.windowed.update(tokens[:end] for end in range(live + 1, len(tokens) + 1))
        assert self.string_of(node) == tokens

    @rule(pick=picks)
    def lock(self, pick):
        key = self.keys[pick % len(self.keys)]
        place = self.tree.follow(key, self.tree.start)
        string = spelled(key)[: place.tokens]
        name, kept = self.tree.lock(place.node), set()
        for end in range(len(string), 0, -1):
            kept.add(string[:end])
            if len(kept) >= self.window and string[: end - 1] in {(), *strings(self.tree)}:
                break
        self.locked.append((place.node, string, name, kept & self.windowed))

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick):
        node, _, name, _ = self.locked.pop(pick % len(self.locked))
        self.tree.unlock(node, name)

    @rule(tokens=st.integers(0, 8), windows=st.integers(0, 8))
    def evict(self, tokens, windows):
        tree, before = self.tree, strings(self.tree)
        could, full = tree.component_evictable, tree.evictable_tokens
        freed, after = tree.evict(tokens, windows), strings(tree)
        assert freed == sum(edge for edge, _ in before.values()) - sum(edge for edge, _ in after.values())
        assert freed >= min(tokens, full) and could - tree.component_evictable >= min(windows, could)
        left = self.walked()
        assert left <= self.windowed
        self.windowed = left

    @invariant()
    def all_is_equal(self):
        tree = self.tree
        assert self.walked() == self.windowed
        assert tree.component_evictable + tree.component_protected == len(self.windowed)
        ordered, node = [], tree.recency.newer()
        while node is not None:
            ordered.append(id(node))
            node = tree.recency.newer(node)
        assert sorted(ordered) == sorted(id(each) for each, _ in self.nodes() if each.component)
        with_locks = [each for each, _ in self.nodes() if each.component_locks]
        assert all(each.component_locks > 0 for each in with_locks)
        assert tree.component_protected == sum(each.tokens for each in with_locks if each.component)
        kept = {string for _, _, _, each in self.locked for string in each}
        assert kept <= self.windowed and tree.component_protected >= len(kept)
        held = {string[:end] for _, string, _, _ in self.locked for end in range(1, len(string) + 1)}
        assert tree.protected_tokens == len(held)

    def teardown(self):
        """When all locks are taken off, all can be evicted."""
        for node, _, name, _ in getattr(self, "locked", []):
            self.tree.unlock(node, name)
        if hasattr(self, "tree"):
            assert not self.tree.component_protected and not self.tree.protected_tokens
            self.tree.evict(self.tree.evictable_tokens)
            assert not self.tree.root.children and not self.tree.component_evictable

    def is_whole(self, end):
        """Whether a whole window is there before an end, or all of its tokens."""
        return all(end[:last] in self.windowed for last in range(max(1, len(end) - self.window + 1), len(end) + 1))

    def nodes(self):
        """Every node but the root, with its string."""
        found = [((), self.tree.root)]
        for string, node in found:
            found.extend((string + spelled(child.runs), child) for child in node.children.values())
        return [(node, string) for string, node in found[1:]]

    def walked(self):
        """Strings with windows, by the nodes."""
        return {
            string[:end]
            for node, string in self.nodes()
            if node.component
            for end in range(len(string) - node.tokens + 1, len(string) + 1)
        }

    def string_of(self, node):
        return next((string for each, string in self.nodes() if each is node), ())
