"""Slots of single tokens, of which a radix tree keeps what was computed.

A sequence locks the path to what it has in the tree; what it computes beyond that is its own:

    root === a b c === d e     S1: prompt a b c d e, locked to there; x y, which it generated, are its own
               |
               +===== f g      S2: prompt a b c f g; what it shares with S1 is there once
             --- h i j         unlocked: evictable

    slots = free + own + locked + evictable         live: own and locked; cached: evictable

Only look-ups, prefills that end and sequences that leave change the tree, and evictions: decodes take free slots, and
where too few are left, leaves are evicted first, also in the middle of a leap. The log has the step of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...types.errors import Overdrawn
from ...types.sequence import Sequence
from ...types.state import State
from ...workload.content import Run, Tokens
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import METER, Meter
from ..accounting.moments import after_row, at_row, in_step
from ..interface.memory import Memory
from ..prefix import Place, RadixNode, RadixTree, Rest, all_but_last, first_tokens

#: ``SGLANG_RETRACT_DECODE_STEPS``: slots made free, and reserved, for each sequence left after a retraction.
RETRACT_STEPS = 20


@dataclass(slots=True)
class Holding:
    """What a sequence has in the tree.

    Attributes:
        node: The node that it locks.
        tokens: Tokens up to there.
        rest: What follows them in its prompt and output, once any of it has joined the tree.
    """

    node: RadixNode
    tokens: int
    rest: Rest | None = None


@dataclass(slots=True)
class Known:
    """The known tokens of a sequence that waits, prefills or runs: they are looked up again and again.

    Attributes:
        tokens: How many they are.
        string: All of them.
        before_last: All but the last one, which has to be computed.
        place, found: How far the tree had ``string`` and ``before_last`` when they were looked up last.
    """

    tokens: int
    string: tuple[Run, ...]
    before_last: tuple[Run, ...]
    place: Place
    found: Place


class RadixTransaction:
    """The calls of a scheduler to a radix tree within one step.

    A look-up updates the order of eviction, and a lock takes effect at once, because both decide what the next
    sequence finds. Retractions are tentative.

    Attributes:
        room: Slots that are free or evictable.
        longest_tokens: Longest prompt + output in tokens, as SGLang limits it.
    """

    __slots__ = ("_found", "_given_up", "longest_tokens", "memory", "room")
    room: int
    _found: Holding
    _given_up: dict[RadixNode, int]

    def __init__(self, memory: RadixMemory) -> None:
        self.memory = memory
        self.longest_tokens = memory.num_blocks - 2

    def open(self) -> None:
        """Void earlier grants and read the current free and evictable slots."""
        self._given_up = {}
        self.room = self.memory.room

    def max_output_tokens(self, sequence: Sequence) -> int:
        """The declared longest output, capped by what the pool can hold."""
        return min(sequence.max_tokens, self.longest_tokens - sequence.prompt_tokens)

    @property
    def departures(self) -> int:
        """Sequences that finished so far."""
        return self.memory.departures

    @property
    def keeps(self) -> bool:
        """Whether the tree keeps nodes that no sequence locks."""
        return self.memory.keeps

    def batch(self) -> list[Sequence]:
        """Sequences that hold slots, in the order of SGLang's batch."""
        return [*self.memory.holdings]

    def reorder(self, batch: Iterable[Sequence]) -> None:
        """Set the order of the batch, for the sequences that a retraction left."""
        for sequence in batch:
            self.memory.holdings[sequence] = self.memory.holdings.pop(sequence)

    def known(self, sequence: Sequence) -> tuple[Run, ...]:
        """A sequence's known tokens."""
        return self.memory.known(sequence)

    def match(self, sequence: Sequence) -> int:
        """Number of a sequence's known tokens that are in the tree."""
        known = self.memory.known_of(sequence)
        known.place = self.memory.tree.follow(known.string, known.place)
        return known.place.tokens

    def look_up(self, sequence: Sequence) -> int:
        """Number of a sequence's known tokens that need not be computed; the last token always is."""
        known = self.memory.known_of(sequence)
        known.found = found = self.memory.tree.follow(known.before_last, known.found)
        self._found = Holding(found.node, found.tokens)
        return found.tokens

    def lock(self, sequence: Sequence) -> None:
        """Lock the prefix that was looked up last for a sequence."""
        self.memory.holdings[sequence] = self._found
        self.memory.tree.lock(self._found.node)
        self.room = self.memory.room

    def enter(self, sequence: Sequence) -> None:
        """Set ``computed_tokens`` of a sequence to its locked prefix."""
        sequence.computed_tokens = found = self._found.tokens
        self.memory.log.look_ups.append((sequence.index, sequence.start_tokens, found))

    def unlock(self, sequence: Sequence) -> None:
        """Undo ``lock``."""
        self.memory.tree.unlock(self.memory.holdings.pop(sequence).node)
        self.room = self.memory.room

    def retract(self, sequence: Sequence, decode_step: int) -> None:
        """Tentatively free a running sequence's own slots and its locks before ``decode_step``."""
        holding = self.memory.holdings[sequence]
        self.room += sequence.held_tokens(decode_step) - holding.tokens
        for node in self.memory.tree.path(holding.node):
            self._given_up[node] = self._given_up.get(node, 0) + 1
            if self._given_up[node] < node.locks:
                break
            self.room += node.tokens


class RadixMemory(Memory):
    """A pool of single slots with a radix tree over it, as SGLang's.

    Args:
        num_slots: Slots of the pool.
        runs: Tokens of every request; None if no two requests share any.
        keeps: Whether the tree keeps nodes that no sequence locks.

    Attributes:
        tree: Computed tokens, locked or evictable.
        holdings: For each sequence that runs or prefills, its part of the tree; in order of admission.
        free: Slots that are neither in the tree nor held by one sequence.
        departures: Finished sequences so far.
        keeps: Whether the tree keeps nodes that no sequence locks.
        log: Look-ups, and changes of the cached slots.
        cache_log: ``log`` if ``keeps``, else None.
        evicted_blocks: Evicted slots.
    """

    meter = METER[:2]
    block_size = 1
    evicted_blocks = 0

    def __init__(self, num_slots: int, runs: Tokens | None = None, keeps: bool = True) -> None:
        self._runs, self.keeps = runs, keeps
        self.log = CacheLog(unit_slots=1)
        self.cache_log = self.cached_level = self.log if keeps else None
        self.num_blocks = self.free = num_slots
        self.tree = RadixTree()
        self.holdings: dict[Sequence, Holding] = {}
        self.departures = 0
        # Sequences that prefill in this step, in order, and the tokens that are computed of each when it is over.
        self._batch: list[tuple[Sequence, int]] = []
        self._known: dict[Sequence, Known] = {}
        self._transaction = RadixTransaction(self)

    @property
    def room(self) -> int:
        """Slots that are free or can be evicted."""
        return self.free + self.tree.evictable_tokens

    def known(self, sequence: Sequence) -> tuple[Run, ...]:
        """The tokens that a sequence's next (or last) prefill covers: its prompt and the tokens it has generated."""
        return self.known_of(sequence).string

    def known_of(self, sequence: Sequence) -> Known:
        """As ``known``, with the place in the tree where they were found."""
        known, tokens = self._known.get(sequence), sequence.start_tokens
        if known is None or known.tokens != tokens:
            string, start = first_tokens(self._runs_of(sequence), tokens), self.tree.start
            known = self._known[sequence] = Known(tokens, string, all_but_last(string), start, start)
        return known

    def _runs_of(self, sequence: Sequence) -> tuple[Run, ...]:
        """A sequence's prompt and output."""
        index, runs = sequence.index, self._runs
        if runs is None:
            return ((index, 0, sequence.target_tokens),)
        return (*runs.runs(index), *runs.output_runs(index))

    def transaction(self, decode_step: int) -> RadixTransaction:
        """Open the grants of ``decode_step`` and void the previous ones."""
        self._transaction.open()
        return self._transaction

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Compute the tokens of a sequence beyond the prefix that it has locked."""
        self._batch.append((sequence, sequence.start_tokens))

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """As ``admit``, up to the end of a chunk."""
        self._batch.append((sequence, sequence.computed_tokens))

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Free the own slots and the locks of victims before ``decode_step``; the tree keeps the rest."""
        self._make_free(len(self.holdings))
        for sequence in preempted:
            holding = self.holdings.pop(sequence)
            self.free += sequence.held_tokens(decode_step) - holding.tokens
            self.tree.unlock(holding.node)
            self._drop_unkept()
            self._make_free(RETRACT_STEPS * len(self.holdings))

    def _make_free(self, slots: int) -> None:
        """Evict so many that these are free, as far as there are leaves."""
        if self.free < slots:
            freed = self.tree.evict(slots - self.free)
            self.free += freed
            self.evicted_blocks += freed

    def room_after(self, state: State, steps: int) -> int:
        """Slots that are free or evictable after the running sequences have grown by ``steps`` tokens each."""
        return self.room - state.batch_size * steps

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``; of blocks of one slot. SGLang's steps prefill or decode, so that all tables decode where some do."""
        return sum(holding.tokens for holding in self.holdings.values()) - self.tree.protected_tokens

    def advance(self, state: State, steps: int) -> Meter:
        """Grow the running sequences through the steps of a leap, or end a step that only prefills.

        Returns:
            Live and held slots in the first step.
        """
        held = self._begin_row(state, steps)
        if steps:
            self._grow(state.batch_size, state.decode_step + 1, state.decode_step + steps)
        else:
            self._end_prefills(state.decode_step)
        return held, held

    def _begin_row(self, state: State, steps: int) -> int:
        """Take the slots of the first step, or of one that only prefills; how many are held in it."""
        row = self.log.row
        self.log.row += 1
        taken = state.batch_size
        if not steps:
            taken = sum(tokens - self.holdings[sequence].tokens for sequence, tokens in self._batch)
        self._take(taken)
        cached = self.tree.evictable_tokens
        self.log.settle(cached, at_row(row))
        return self.capacity_slots - self.free - cached

    def _take(self, slots: int) -> None:
        self._make_free(slots)
        self.free -= slots
        if self.free < 0:
            raise Overdrawn(f"{-self.free} more slots are taken than there are")

    def _grow(self, batch_size: int, decode_step: int, end: int) -> None:
        """So many slots in each step from ``decode_step`` to before ``end``, at once up to the next that must evict."""
        while decode_step < end:
            steps = min(self.free // batch_size, end - decode_step)
            self.free -= batch_size * steps
            decode_step += steps
            if decode_step < end:
                self._take(batch_size)
                self.log.settle(self.tree.evictable_tokens, in_step(decode_step))
                decode_step += 1

    def _end_prefills(self, decode_step: int) -> None:
        for sequence, tokens in self._batch:
            self._keep(sequence, tokens, decode_step)
        self._batch.clear()
        self._settle()

    def _settle(self) -> None:
        """The row is over: what is no longer locked is cached, or gone."""
        self._drop_unkept()
        self.log.settle(self.tree.evictable_tokens, after_row(self.log.row - 1))

    def _drop_unkept(self) -> None:
        """What is not locked is free, where the tree keeps nothing."""
        if not self.keeps:
            self.free += self.tree.evict(self.tree.evictable_tokens)

    def _keep(self, sequence: Sequence, tokens: int, decode_step: int) -> None:
        """What a prefill computed joins the tree, and unless the sequence is done its lock moves there."""
        node = self._insert(sequence, tokens)
        self._part(sequence, tokens)
        holding = self.holdings[sequence]
        before = holding.node
        if tokens == sequence.start_tokens and sequence.finish_step <= decode_step:
            del self.holdings[sequence], self._known[sequence]
            self.departures += 1
        else:
            # Before the other is unlocked, so that the path to both stays locked.
            self.tree.lock(node)
            holding.node, holding.tokens = node, tokens
        self.tree.unlock(before)

    def _insert(self, sequence: Sequence, tokens: int) -> RadixNode:
        """Its first tokens join the tree; those of its own that are there already are free."""
        holding = self.holdings[sequence]
        if holding.rest is None:
            holding.rest = Rest(self._runs_of(sequence))
            holding.rest.take(holding.tokens)
        node, known = self.tree.insert(holding.rest.take(tokens - holding.tokens), holding.node)
        self.free += known
        return node

    def _part(self, sequence: Sequence, tokens: int) -> None:
        """An edge ends with the prompt, so that an output can be evicted without it."""
        if tokens > sequence.prompt_tokens:
            self.tree.match(first_tokens(self._runs_of(sequence), sequence.prompt_tokens))

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Sequences leave before ``decode_step``; the tree keeps their computed tokens.

        The tokens of a sequence that left at the end of its prefill are in the tree already.
        """
        decoded = [sequence for sequence in leaving if sequence in self.holdings]
        self.departures += len(decoded)
        if len(decoded) > 1:
            places = {sequence: place for place, sequence in enumerate(self.holdings)}
            decoded.sort(key=places.__getitem__)
        for sequence in decoded:
            tokens = sequence.held_tokens(decode_step)
            self._insert(sequence, tokens)
            self._part(sequence, tokens)
            self.tree.unlock(self.holdings.pop(sequence).node)
            del self._known[sequence]
        self._settle()
