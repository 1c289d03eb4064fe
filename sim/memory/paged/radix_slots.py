"""A radix tree's slots by their ids: which slot holds which token of which sequence.

A node knows the slots of its edge. What a sequence computes lies in slots of its own, until it joins the tree: then
the new leaf takes them over, and slots of tokens that the tree holds already are free; the sequence goes on with the
tree's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np

from ...types.sequence import Sequence
from ...types.state import State
from ...workload.content import Tokens
from ..accounting.ledger import Meter
from ..accounting.moments import in_step
from ..prefix import RadixNode, RadixTree
from ..prefix.block_tables import BlockTables
from .radix_memory import RadixMemory


class SlotTree(RadixTree):
    """As ``RadixTree``; a split divides the slots of an edge too.

    Attributes:
        slots: Of each edge, by the node at its end; never changed in place.
        evicted: Slots of the leaves that were evicted, until they are taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[RadixNode, list[int]] = {}
        self.evicted: list[int] = []

    def along(self, node: RadixNode, above: RadixNode | None = None) -> list[int]:
        """Slots of the string that ends at a node; those of the tokens after ``above``, if that is given."""
        return [slot for step in reversed(self.path(node, above)) for slot in self.slots[step]]

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper, slots = super()._split(node, tokens), self.slots[node]
        self.slots[upper], self.slots[node] = slots[:tokens], slots[tokens:]
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        super()._remove(leaf)
        self.evicted += self.slots.pop(leaf)


class SlotRadixMemory(RadixMemory):
    """As ``RadixMemory``, with slot ids.

    Attributes:
        tables: Slot ids of each sequence's tokens.
    """

    def __init__(self, num_slots: int, runs: Tokens | None = None, keeps: bool = True) -> None:
        super().__init__(num_slots, runs, keeps)
        self.tree: SlotTree = SlotTree()
        self.tables: BlockTables = BlockTables(num_slots, 0, 1)
        # Of the leap that is about to run, once it has been looked at: slots held in its first step, and the steps
        # that hand out their slots.
        self._held: int | None = None
        self._settled = 0
        # Slots that were taken step by step and are in no table yet.
        self._taken: list[int] = []

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``RadixMemory``."""
        super().admit(sequence, decode_step, padded_tokens, past)
        self._begin(sequence)

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """See ``RadixMemory``."""
        super().prefill(sequence, decode_step)
        self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """A table begins with what the tree has of it."""
        if sequence not in self.tables.tables:
            self.tables.tables[sequence] = self.tree.along(self.holdings[sequence].node)

    def settle(self, state: State, steps: int) -> None:
        """Assign slot ids for ``steps`` steps of the leap that is about to run; 0 for a step that only prefills.

        The ids stay when the leap is over. ``steps`` is at most that of the leap.
        """
        if self._held is None:
            self._held, self._settled = self._begin_row(state, steps), min(steps, 1)
        if steps > self._settled:
            self._grow(state.batch_size, state.decode_step + self._settled, state.decode_step + steps)
            self._settled = steps
        if self._taken:
            self._hand_out(state.running)

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: all slots of the tree, of which some are locked."""
        return np.fromiter(chain.from_iterable(self.tree.slots.values()), dtype=np.int64)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``RadixMemory``."""
        self.settle(state, steps)
        held, self._held = self._held or 0, None
        if not steps:
            self._end_prefills(state.decode_step)
        return held, held

    def _begin_row(self, state: State, steps: int) -> int:
        """See ``RadixMemory``."""
        held, pool = super()._begin_row(state, steps), self.tables.pool
        if steps:
            self._taken += pool.get_new_blocks(state.batch_size)
            return held
        for sequence, tokens in self._batch:
            self.tables.tables[sequence] += pool.get_new_blocks(tokens - self.holdings[sequence].tokens)
        return held

    def _grow(self, batch_size: int, decode_step: int, end: int) -> None:
        """See ``RadixMemory``."""
        while decode_step < end:
            # None is evicted before the free ones run out: so many steps at once.
            steps = max(1, min(self.free // batch_size, end - decode_step))
            self._take(batch_size * steps)
            self.log.settle(self.tree.evictable_tokens, in_step(decode_step))
            self._taken += self.tables.pool.get_new_blocks(batch_size * steps)
            decode_step += steps

    def _hand_out(self, running: Collection[Sequence]) -> None:
        """The slots taken, in each step to one of those that run after the other."""
        for place, sequence in enumerate(running):
            self.tables.tables[sequence] += self._taken[place :: len(running)]
        self._taken.clear()

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``RadixMemory``."""
        for sequence in preempted:
            own = self.tables.tables.pop(sequence)[self.holdings[sequence].tokens :]
            self.tables.pool.free_blocks(own)
        super().evict(preempted, swapped_out, decode_step)

    def _make_free(self, slots: int) -> None:
        super()._make_free(slots)
        self._reclaim()

    def _settle(self) -> None:
        super()._settle()
        self._reclaim()

    def _reclaim(self) -> None:
        """What was evicted is free."""
        if self.tree.evicted:
            self.tables.pool.free_blocks(self.tree.evicted)
            self.tree.evicted = []

    def _keep(self, sequence: Sequence, tokens: int, decode_step: int) -> None:
        super()._keep(sequence, tokens, decode_step)
        if sequence not in self.holdings:
            del self.tables.tables[sequence]

    def _insert(self, sequence: Sequence, tokens: int) -> RadixNode:
        """See ``RadixMemory``; the sequence goes on with the tree's slots."""
        holding, table = self.holdings[sequence], self.tables.tables[sequence]
        node, first = super()._insert(sequence, tokens), holding.tokens
        # A new leaf is there, the end of the string.
        self.tree.slots.setdefault(node, table[tokens - node.tokens : tokens])
        # Up to the node that it has locked the table has the tree's slots.
        slots = self.tree.along(node, holding.node)
        own = table[first:tokens]
        if own != slots:
            self.tables.pool.free_blocks([mine for mine, kept in zip(own, slots, strict=True) if mine != kept])
            self.tables.tables[sequence] = [*table[:first], *slots, *table[tokens:]]
        return node

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``RadixMemory``."""
        leaving = tuple(leaving)
        super().release(leaving, decode_step)
        for sequence in leaving:
            self.tables.tables.pop(sequence, None)
