"""The radix tree with a host, and the memory over it, against a trie of single tokens: where each of them is, and what copies lock."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import HostRadixMemory
from fragmeter.sim.memory.paged.radix_host import LEAST_LOADED
from fragmeter.sim.memory.prefix import HostTree
from fragmeter.sim.memory.prefix.tiers import Offloaded
from fragmeter.sim.types.sequence import Sequence

from .draws import combined, picks
from .radix import KEY, Trie, spelled, strings
from .radix_memory import RadixMemoryMachine


class HostTrie(Trie):
    """As ``Trie``; every cached string of tokens is on the device, on the host, or on both."""

    def __init__(self, host_tokens: int, threshold: int) -> None:
        super().__init__()
        self.host_tokens, self.threshold = host_tokens, threshold
        self.device: set[tuple] = set()
        self.host: set[tuple] = set()
        self.hits: dict[tuple, int] = {}
        # Strings whose copies have not ended, and those to be written.
        self.copied: list[tuple] = []
        self.writes: list[tuple] = []

    def on_device(self, tokens: tuple) -> int:
        """How much of a cached string the device has, from its first token on."""
        return sum(tokens[: end + 1] in self.device for end in range(len(tokens)))

    def copying(self) -> set[tuple]:
        """Strings that copies lock."""
        return {copied[:end] for copied in self.copied for end in range(1, len(copied) + 1)}

    def insert(self, tokens: tuple) -> int:
        """Returns how many tokens the device had."""
        length = super().insert(tokens)
        known = self.on_device(tokens[:length])
        for end in range(1, len(tokens) + 1):
            self.device.add(tokens[:end])
            self.hits.setdefault(tokens[:end], 0)
        return known

    def hit(self, tokens: tuple, before: int) -> None:
        ends = sorted((end for end in self.ends if len(end) > before and end == tokens[: len(end)]), key=len)
        for end in ends:
            edge = self.edge(end)
            for string in edge:
                self.hits[string] += 1
            if end not in self.host and self.hits[end] >= self.threshold:
                self.write(end)

    def write(self, string: tuple) -> None:
        above = sorted((end for end in self.ends - self.host if end and end == string[: len(end)]), key=len)
        for end in above:
            edge = self.edge(end)
            while self.host_tokens - len(self.host) < len(edge) and self.evict_from_host():
                pass
            if self.host_tokens - len(self.host) < len(edge):
                break
            self.host.update(edge)
            self.copied.append(end)
            self.writes.append(end)

    def above(self, among: set[tuple]) -> set[tuple]:
        """Strings that go on to an end among these."""
        return {end[:length] for end in self.ends & among for length in range(len(end))}

    def evict_from_host(self) -> bool:
        leaves = [end for end in self.ends - self.device - self.above(self.ends) if end]
        if leaves:
            self.forget(min(leaves, key=self.times.get))
        return bool(leaves)

    def forget(self, end: tuple) -> None:
        for string in self.edge(end):
            self.device.discard(string)
            self.host.discard(string)
            del self.times[string], self.locks[string], self.hits[string]
        self.ends.remove(end)

    def evict(self, tokens: int) -> int:
        freed, kept = 0, self.copying()
        while freed < tokens:
            leaves = [
                e for e in self.ends & self.device - self.above(self.device) if not self.locks[e] and e not in kept
            ]
            if not leaves:
                break
            oldest = min(leaves, key=self.times.get)
            freed += len(self.edge(oldest))
            if oldest in self.host:
                self.device.difference_update(self.edge(oldest))
            else:
                self.forget(oldest)
        return freed

    def load(self, tokens: tuple) -> None:
        """All of a cached string is on the device."""
        self.device.update(tokens[:end] for end in range(1, len(tokens) + 1))
        self.copied.append(tokens)

    def sizes(self) -> tuple[int, int, int, int]:
        """Tokens on the device that are evictable, that sequences lock, that copies alone lock; free tokens of the host."""
        kept = self.copying()
        locked = {string for string in self.device if self.locks[string]}
        loose = self.device - locked
        return len(loose - kept), len(locked), len(loose & kept), self.host_tokens - len(self.host)


def sizes(tree: HostTree) -> tuple[int, int, int, int]:
    return tree.evictable_tokens, tree.protected_tokens, tree.copying_tokens, tree.host_free


def places(tree: HostTree) -> dict[tuple, tuple[bool, bool]]:
    """Whether each string is on the device, and on the host."""
    found, todo = {}, [((), tree.root)]
    while todo:
        string, node = todo.pop()
        for child in node.children.values():
            end = string + spelled(child.runs)
            found[end] = child.on_device, child.on_host
            todo.append((end, child))
    return found


class HostTreeMachine(RuleBasedStateMachine):
    @initialize(host_tokens=st.integers(1, 30), threshold=st.integers(1, 2))
    def plant(self, host_tokens, threshold):
        self.tree, self.trie = HostTree(host_tokens, threshold), HostTrie(host_tokens, threshold)
        self.locked: list = []
        self.copied: list = []

    def match(self, key):
        place = self.tree.follow(key, self.tree.start)
        string = spelled(key)[: self.trie.shared(spelled(key))]
        assert place.tokens == len(string)
        node, tokens = self.tree.on_device(place)
        assert tokens == self.trie.on_device(string)
        return place, node, string

    @rule(key=KEY)
    def follow(self, key):
        self.match(key)

    @rule(key=KEY, before=st.integers(0, 6))
    def insert(self, key, before):
        """A string of which its request has inserted the beginning."""
        string = spelled(key)
        _, known = self.tree.insert(key, inserted=before)
        assert known == self.trie.insert(string)
        self.trie.hit(string, before)
        self.copied += self.tree.writes
        assert [each.tokens for each in self.tree.writes] == [len(self.trie.edge(end)) for end in self.trie.writes]
        self.tree.writes, self.trie.writes = [], []

    @rule(key=KEY)
    def lock(self, key):
        """What the device has."""
        _, node, string = self.match(key)
        self.tree.lock(node)
        string = string[: self.trie.on_device(string)]
        self.trie.lock(string, 1)
        self.locked.append((node, string))

    @rule(key=KEY)
    def load(self, key):
        place, _, string = self.match(key)
        lacking = len(string) - self.trie.on_device(string)
        if lacking:
            copied = self.tree.load(place.node)
            assert copied.tokens == lacking
            self.copied.append(copied)
            self.trie.load(string)

    @precondition(lambda self: self.copied)
    @rule(number=st.integers(1, 5))
    def acknowledge(self, number):
        """The first copies have ended."""
        for copied in self.copied[:number]:
            self.tree.unpin(copied)
        del self.copied[:number], self.trie.copied[:number]

    @precondition(lambda self: self.locked)
    @rule(pick=picks)
    def unlock(self, pick):
        node, string = self.locked.pop(pick % len(self.locked))
        self.tree.unlock(node)
        self.trie.lock(string, -1)

    @rule(tokens=st.integers(0, 12))
    def evict(self, tokens):
        assert self.tree.evict(tokens) == self.trie.evict(tokens)

    @invariant()
    def all_is_equal(self):
        assert sizes(self.tree) == self.trie.sizes()
        assert strings(self.tree) == self.trie.strings()
        assert places(self.tree) == {
            end: (end in self.trie.device, end in self.trie.host) for end in self.trie.ends if end
        }


class HostRadixMemoryMachine(RadixMemoryMachine):
    """Copies end when they are acknowledged, at any time."""

    @initialize(num_slots=combined(range(8, 60, 3)), host=combined(range(1, 90, 4), range(1, 3)))
    def build(self, num_slots, host):
        self.host = host
        super().build(num_slots)

    def plant(self, num_slots):
        host_tokens, threshold = self.host
        memory = HostRadixMemory(num_slots, Offloaded(host_tokens, 1), threshold, self.contents)
        memory.transfers.connect(lambda: 0, lambda pages: 0, lambda pages: 0)
        self.serve(memory)
        self.trie, self.free = HostTrie(host_tokens, threshold), num_slots
        self.inserted: dict[Sequence, int] = {}

    def found(self, key):
        return self.trie.on_device(key[: self.trie.shared(key)])

    def load(self, transaction, key, found):
        length = 0
        while length < len(key) and key[: length + 1] in self.trie.times:
            length += 1
        lacking = length - found
        assert transaction.on_host == lacking
        if lacking < LEAST_LOADED:
            assert transaction.load() == 0
            return 0
        self.take(lacking)
        assert transaction.load() == lacking
        self.trie.load(key[:length])
        self.trie.lock(key[:found], -1)
        self.trie.lock(key[:length], 1)
        transaction.start_loading()
        return lacking

    def insert(self, sequence):
        string = self.string(sequence, self.tokens[sequence])
        known = self.trie.insert(string)
        self.trie.hit(string, self.inserted.get(sequence, 0))
        self.inserted[sequence] = len(string)
        if self.tokens[sequence] > sequence.prompt_tokens:
            self.trie.shared(self.string(sequence, sequence.prompt_tokens))
        locked = self.locked.pop(sequence)
        self.free += known - len(locked)
        self.trie.lock(locked, -1)

    @precondition(lambda self: self.tokens)
    @rule(pick=picks)
    def retract(self, pick):
        super().retract(pick)
        self.inserted = {sequence: tokens for sequence, tokens in self.inserted.items() if sequence in self.tokens}

    @rule()
    def acknowledge(self):
        """All copies have ended."""
        self.memory.transfers.complete(0)
        self.trie.copied.clear()

    def evictable(self):
        return self.trie.sizes()[0]

    def unlocked(self):
        return self.trie.sizes()[0] + self.trie.sizes()[2]

    def in_tree(self):
        return len(self.trie.device)

    @invariant()
    def host_holds(self):
        assert sizes(self.memory.tree) == self.trie.sizes()
