"""Memory over a radix tree against a count of its slots and a trie of single tokens."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import RadixMemory, SlotRadixMemory
from fragmeter.sim.memory.paged.radix_transaction import RadixTransaction
from fragmeter.sim.types.sequence import Sequence

from .draws import EITHER, combined, picks
from .paged import spans
from .radix import Trie, spelled, strings
from .served import Served, chosen

#: Slots that are made free for each sequence left after a retraction, as SGLang does.
RETRACTED = 20


class Contents:
    """Prompts of two kinds, which begin alike as far as both reach, and outputs of one's own."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int, int]] = {}

    def runs(self, row: int) -> tuple:
        kind, prompt, _ = self.rows[row]
        return ((kind, 0, prompt),)

    def output_runs(self, row: int) -> tuple:
        return ((2 + row, 0, self.rows[row][2]),)


class RadixMemoryMachine(Served, RuleBasedStateMachine):
    """Prefills in steps of their own, leaps of any length, retraction."""

    kind = RadixMemory

    @initialize(num_slots=combined(range(8, 60, 3)))
    def build(self, num_slots):
        self.contents = Contents()
        self.plant(*num_slots)
        # What each running sequence has in the tree, in order of admission.
        self.locked: dict[Sequence, tuple] = {}

    def plant(self, num_slots: int) -> None:
        """The memory and its model."""
        self.serve(self.kind(num_slots, self.contents))
        self.trie, self.free = Trie(), num_slots

    def string(self, sequence: Sequence, tokens: int) -> tuple:
        row = sequence.index
        return spelled((*self.contents.runs(row), *self.contents.output_runs(row)))[:tokens]

    def evictable(self) -> int:
        return sum(not locks for locks in self.trie.locks.values())

    def unlocked(self) -> int:
        """Tokens in the tree that no sequence locks."""
        return self.evictable()

    def in_tree(self) -> int:
        """Tokens in the tree."""
        return len(self.trie.locks)

    def make_free(self, slots: int) -> None:
        """Where fewer are free, what lacks is evicted."""
        if self.free < slots:
            self.free += self.trie.evict(slots - self.free)

    def take(self, slots: int) -> None:
        self.make_free(slots)
        self.free -= slots

    @rule(request=combined(range(2), range(1, 9), range(1, 9), EITHER))
    def admit(self, request):
        """A new request, or one that was retracted: it locks what it finds, and unlocks it if there is no room."""
        kind, prompt, output, again = request
        again = again and bool(self.state.waiting)
        sequence = self.state.waiting[0] if again else self.arrive(prompt, output)
        self.contents.rows.setdefault(sequence.index, (kind, prompt, output))
        transaction = self.memory.transaction(self.state.decode_step)
        key = self.string(sequence, sequence.start_tokens - 1)
        found = self.found(key)
        assert transaction.look_up(sequence) == found
        self.trie.lock(key[:found], 1)
        transaction.lock(sequence)
        assert transaction.room == self.free + self.evictable()
        if transaction.room < sequence.start_tokens - found:
            transaction.unlock(sequence)
            self.trie.lock(key[:found], -1)
            return
        found += self.load(transaction, key, found)
        transaction.enter(sequence)
        if again:
            self.state.waiting.popleft()
        self.locked[sequence] = key[:found]
        self.memory.admit(sequence, self.state.decode_step - 1, 0, True)
        self.state.start(sequence, self.state.decode_step - 1)
        self.take(sequence.start_tokens - found)
        self.check_meter(0)
        self.tokens[sequence] = sequence.start_tokens
        self.insert(sequence)
        if self.tokens[sequence] < sequence.target_tokens - 1:
            self.locked[sequence] = self.string(sequence, sequence.start_tokens)
            self.trie.lock(self.locked[sequence], 1)
        self.leave()

    def found(self, key: tuple) -> int:
        """Tokens of a string that need not be computed."""
        return self.trie.shared(key)

    def load(self, transaction: RadixTransaction, key: tuple, found: int) -> int:
        """Tokens after these that are loaded, and locked."""
        return transaction.load()

    def insert(self, sequence: Sequence) -> None:
        """What it computed joins the tree, which frees what is there already, and its lock is taken off."""
        known = self.trie.insert(self.string(sequence, self.tokens[sequence]))
        if self.tokens[sequence] > sequence.prompt_tokens:
            self.trie.shared(self.string(sequence, sequence.prompt_tokens))
        locked = self.locked.pop(sequence)
        self.free += known - len(locked)
        self.trie.lock(locked, -1)

    @precondition(lambda self: self.tokens)
    @rule(steps=spans)
    def leap(self, steps):
        """As far as slots reach, stopping where a sequence finishes."""
        room = self.free + self.evictable()
        steps = min(steps, self.steps_to_finish(), room // len(self.tokens))
        if not steps:
            return
        self.take(len(self.tokens))
        self.check_meter(steps)
        for _ in range(steps - 1):
            self.take(len(self.tokens))
        self.tokens = {sequence: tokens + steps for sequence, tokens in self.tokens.items()}
        self.state.decode_step += steps
        self.leave()

    def check_meter(self, steps: int) -> None:
        """Invariant 1: what is neither free nor evictable is held, and live."""
        held = self.memory.num_blocks - self.free - self.unlocked()
        assert self.memory.advance(self.state, steps) == (held, held, 0)

    def leave(self) -> None:
        """Finished sequences leave what they computed in the tree, in order of admission."""
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        for sequence in [sequence for sequence in self.locked if sequence in finished]:
            self.insert(sequence)
        for sequence in finished:
            del self.tokens[sequence]

    @precondition(lambda self: self.tokens)
    @rule(pick=picks)
    def retract(self, pick):
        """One or two give up their own slots and their locks."""
        victims, transaction = chosen([*self.tokens], pick), self.memory.transaction(self.state.decode_step)
        self.make_free(len(self.tokens))
        transaction.make_free(transaction.begun())
        for sequence in victims:
            locked = self.locked.pop(sequence)
            self.free += self.tokens.pop(sequence) - len(locked)
            self.trie.lock(locked, -1)
            self.make_free(RETRACTED * len(self.tokens))
            transaction.retract(sequence, len(self.tokens))
        self.memory.evict(tuple(victims), (), self.state.decode_step)
        self.state.preempt(tuple(victims), ())

    @invariant()
    def holds(self):
        """Invariant 1: slots are free, one sequence's own, or in the tree, which is the trie."""
        own = sum(self.tokens[sequence] - len(locked) for sequence, locked in self.locked.items())
        assert self.free + own + self.in_tree() == self.memory.num_blocks
        assert self.memory.free == self.free
        assert self.memory.tree.evictable_tokens == self.evictable()
        assert strings(self.memory.tree) == self.trie.strings()
        assert {s: holding.pages for s, holding in self.memory.holdings.items()} == {
            s: len(locked) for s, locked in self.locked.items()
        }


class SlotRadixMachine(RadixMemoryMachine):
    """The same with slots by their ids; which tokens they hold is what recorded plans are held to."""

    kind = SlotRadixMemory

    @invariant()
    def every_slot_has_one_place(self):
        """A slot is free, or of one edge, or one sequence's own; a table is the locked path, and then the own slots."""
        tables, tree = self.memory.tables, self.memory.tree
        assert tables.tables.keys() == self.tokens.keys()
        taken = [slot for slots in tree.slots.values() for slot in slots]
        for sequence, table in tables.tables.items():
            holding = self.memory.holdings[sequence]
            assert len(table) == self.tokens[sequence]
            assert table[: holding.pages] == tree.along(holding.node)
            taken += table[holding.pages :]
        assert sorted([*taken, *tables.pool.free_ids]) == list(range(self.memory.num_blocks))
        assert sorted(self.memory.cached_block_ids()) == sorted(slot for slots in tree.slots.values() for slot in slots)
        assert all(len(slots) == node.tokens for node, slots in tree.slots.items())
