"""The radix tree with states: the strings that have one, least recently used first, by a list; sums, locks and the order by a walk over all
nodes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import Rest, StateTree

from .draws import picks
from .radix import KEY, spelled, strings


class StateMachine(RuleBasedStateMachine):
    """A string is named by its tokens."""

    @initialize()
    def plant(self):
        self.tree = StateTree()
        # Strings with a state, the least recently used first.
        self.recent: list[tuple] = []
        # Nodes that are locked, and their strings.
        self.locked: list = []
        # Strings that were inserted: most of them are still cached, or begin like one that is.
        self.keys: list = [()]

    def use(self, string):
        if string in self.recent:
            self.recent.remove(string)
            self.recent.append(string)

    def look_up(self, key):
        tokens = spelled(key)
        known = [end[:n] for end in strings(self.tree) for n in range(len(end) + 1) if end[:n] == tokens[:n]]
        place = self.tree.follow(key, self.tree.start)
        assert self.tree.hit == max(map(len, known), default=0)
        found = max((end for end in self.recent if end == tokens[: len(end)]), key=len, default=())
        self.use(found)
        assert self.string_of(place.node) == found and place.tokens == len(found)
        return place.node, found

    @rule(key=KEY, pick=picks)
    def follow(self, key, pick):
        self.look_up(key or self.keys[pick % len(self.keys)])

    @rule(key=KEY, pick=picks, cut=st.integers(0, 4))
    def insert(self, key, pick, cut):
        """A string that may go on from within another one."""
        other = self.keys[pick % len(self.keys)]
        key = (*Rest(other).take(min(cut, len(spelled(other)))), *key)
        self.keys.append(key)
        tokens = spelled(key)
        node, _ = self.tree.insert(key)
        if tokens and tokens not in self.recent:
            self.recent.append(tokens)
        self.use(tokens)
        assert self.string_of(node) == tokens

    @rule(pick=picks)
    def lock(self, pick):
        node, string = self.look_up(self.keys[pick % len(self.keys)])
        self.tree.lock(node)
        self.locked.append((node, string))

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick):
        self.tree.unlock(self.locked.pop(pick % len(self.locked))[0])

    @rule(tokens=st.integers(0, 8))
    def evict(self, tokens):
        tree, before = self.tree, strings(self.tree)
        full = tree.evictable_tokens
        freed, after = tree.evict(tokens), strings(tree)
        assert freed == sum(edge for edge, _ in before.values()) - sum(edge for edge, _ in after.values())
        assert freed >= min(tokens, full)
        self.recent = [end for end in self.recent if end in after]

    @rule(states=st.integers(0, 4))
    def evict_states(self, states):
        """The least recently used without a lock; with a leaf its tokens go, too."""
        leaves = {
            end for end in strings(self.tree) if not any(o != end and o[: len(end)] == end for o in strings(self.tree))
        }
        locked = {string for _, string in self.locked}
        gone = [end for end in self.recent if end not in locked][:states]
        before = strings(self.tree)
        freed = self.tree.evict(0, states)
        self.recent = [end for end in self.recent if end not in gone]
        # A node becomes a leaf when the ones behind it have gone.
        assert freed >= sum(before[end][0] for end in gone if end in leaves)
        assert strings(self.tree).keys() >= before.keys() - set(gone)

    @invariant()
    def all_is_equal(self):
        tree, nodes = self.tree, dict(self.nodes())
        assert sorted(nodes[each] for each in nodes if each.component) == sorted(self.recent)
        ordered, node = [], tree.recency.newer()
        while node is not None:
            ordered.append(nodes[node])
            node = tree.recency.newer(node)
        assert ordered == self.recent
        locked = {string for _, string in self.locked} - {()}
        assert {nodes[each] for each in nodes if each.component_locks} == locked <= set(self.recent)
        assert tree.component_protected == len(locked)
        assert tree.component_evictable == len(self.recent) - len(locked)
        held = {string[:end] for _, string in self.locked for end in range(1, len(string) + 1)}
        assert tree.protected_tokens == len(held)

    def teardown(self):
        """When all locks are taken off, all can be evicted."""
        for node, _ in getattr(self, "locked", []):
            self.tree.unlock(node)
        if hasattr(self, "tree"):
            assert not self.tree.component_protected and not self.tree.protected_tokens
            self.tree.evict(self.tree.evictable_tokens)
            assert not self.tree.root.children and not self.tree.component_evictable

    def nodes(self):
        """Every node but the root, with its string."""
        found = [((), self.tree.root)]
        for string, node in found:
            found.extend((string + spelled(child.runs), child) for child in node.children.values())
        return [(node, string) for string, node in found[1:]]

    def string_of(self, node):
        return next((string for each, string in self.nodes() if each is node), ())
