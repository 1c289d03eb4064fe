"""The radix trees of windows and of states with a host: where a look-up ends, on either side and on the device alone, by a walk over all nodes;
sums, places, locks and the order of uses by another one."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import HostComponents, HostStateTree, HostWindowTree, RadixNode
from fragmeter.sim.memory.prefix.component_tree import Recency

from .draws import picks
from .radix import KEY, spelled

_HOST_TOKENS = st.integers(4, 40)


class HostComponentsMachine(RuleBasedStateMachine):
    """Strings are named by their tokens; ``window`` is 0 for states."""

    tree: HostComponents
    window = 0

    @initialize(host=_HOST_TOKENS, places=st.integers(1, 30), threshold=st.integers(1, 2), window=st.integers(1, 5))
    def plant(self, host, places, threshold, window):
        self.host, self.places = host, places
        if self.window:
            self.window = window
            self.tree = HostWindowTree(host, threshold, places, window)
        else:
            self.tree = HostStateTree(host, threshold, places)
        # Locks of requests, with their strings; and copies in flight.
        self.locked: list = []
        self.copied: list = []

    def nodes(self) -> dict[tuple, RadixNode]:
        found, todo = {}, [((), self.tree.root)]
        while todo:
            string, node = todo.pop()
            for child in node.children.values():
                found[string + spelled(child.runs)] = child
                todo.append((string + spelled(child.runs), child))
        return found

    def units(self, node: RadixNode) -> int:
        return node.tokens if self.window else 1

    def end(self, tokens: tuple, nodes: dict, on_host: bool) -> tuple:
        """Where a string ends from which a request can go on, by its nodes in turn."""
        best, covered = (), 10**6
        for string in sorted((each for each in nodes if each == tokens[: len(each)]), key=len):
            node = nodes[string]
            there = node.component or (on_host and node.component_on_host)
            covered = covered + node.tokens if there else 0
            if there and covered >= self.window:
                best = string
        return best

    def look_up(self, key):
        place = self.tree.follow(key, self.tree.start)
        nodes, tokens = self.nodes(), spelled(key)
        found = self.end(tokens, nodes, True)
        assert place.node is nodes.get(found, self.tree.root) and place.tokens == len(found)
        node, length = self.tree.on_device(place)
        assert node is nodes.get(self.end(found, nodes, False), self.tree.root)
        assert length == len(self.end(found, nodes, False))
        return place, node, tokens[:length]

    @rule(key=KEY)
    def follow(self, key):
        self.look_up(key)

    @rule(key=KEY, inserted=st.integers(0, 6), live=st.integers(0, 4))
    def insert(self, key, inserted, live):
        tokens = spelled(key)
        live = min(live, max(0, len(tokens) - 1)) if self.window else 0
        before = sum(each.tokens for each in self.nodes().values() if each.on_device)
        _, known = self.tree.insert(key, None, live, inserted)
        nodes = self.nodes()
        assert sum(each.tokens for each in nodes.values() if each.on_device) == before + len(tokens) - known
        assert all(nodes[each].on_device for each in nodes if each == tokens[: len(each)])
        assert not tokens or self.window or nodes[tokens].component
        self.copied += self.tree.writes
        self.tree.writes = []

    @rule(key=KEY)
    def lock(self, key):
        _, node, string = self.look_up(key)
        self.locked.append((node, self.tree.lock(node), string))

    @rule(key=KEY)
    def load(self, key):
        place, node, _ = self.look_up(key)
        if place.node is node:
            return
        lacking = sum(each.tokens for each in self.tree.path(place.node) if not each.on_device)
        units = self.tree.units(self.tree.to_load(place.node))
        copied = self.tree.load(place.node)
        assert (copied.tokens, copied.components) == (lacking, units)
        assert self.tree.on_device(place)[0] is place.node
        self.copied.append(copied)

    @precondition(lambda self: self.copied)
    @rule(number=st.integers(1, 5))
    def acknowledge(self, number):
        """The first copies have ended."""
        for copied in self.copied[:number]:
            self.tree.unpin(copied)
        del self.copied[:number]

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick):
        node, bound, _ = self.locked.pop(pick % len(self.locked))
        self.tree.unlock(node, bound)

    @rule(tokens=st.integers(0, 12), components=st.integers(0, 5))
    def evict(self, tokens, components):
        tree = self.tree
        before, possible = tree.components, (tree.evictable_tokens, tree.component_evictable)
        freed = tree.evict(tokens, components)
        assert freed >= min(tokens, possible[0])
        assert before - tree.components >= min(components, possible[1])

    @invariant()
    def all_is_equal(self):
        tree, nodes = self.tree, self.nodes()
        every = nodes.values()
        held = {string[:end] for *_, string in self.locked for end in range(1, len(string) + 1)}
        assert tree.protected_tokens == len(held)
        assert tree.evictable_tokens + tree.copying_tokens == sum(e.tokens for e in every if e.on_device) - len(held)
        assert tree.host_free == self.host - sum(e.tokens for e in every if e.on_host) >= 0
        on_host = sum(self.units(e) for e in every if e.component_on_host)
        assert tree.components_free == self.places - on_host >= 0
        sums = [0, 0, 0]
        for each in every:
            assert each.on_device or each.on_host
            assert each.on_device or not (each.component or each.locks or each.copies)
            assert each.on_host or not each.component_on_host
            assert each.parent is tree.root or each.parent.on_device >= each.on_device
            assert each.parent is tree.root or each.parent.on_host >= each.on_host
            assert each.device_children == sum(child.on_device for child in each.children.values())
            assert each.locks >= bool(each.component_locks) and each.copies >= bool(each.component_copies)
            if each.component:
                sums[1 if each.component_locks else 2 if each.component_copies else 0] += self.units(each)
        assert [tree.component_evictable, tree.component_protected, tree.component_copying] == sums
        assert self.listed(tree.recency) == {e for e in every if e.component}
        assert self.listed(tree.host_recency) == {e for e in every if e.component_on_host and not e.component}

    @staticmethod
    def listed(recency: Recency) -> set[RadixNode]:
        found, node = set(), recency.newer()
        while node is not None:
            assert node not in found
            found.add(node)
            node = recency.newer(node)
        return found


class HostStateMachine(HostComponentsMachine):
    """Of states."""


class HostWindowMachine(HostComponentsMachine):
    """Of windows."""

    window = 1
