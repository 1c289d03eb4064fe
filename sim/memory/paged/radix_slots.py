"""A radix tree's pages by their ids: which page holds which tokens of which sequence. A page of one token is a slot.

A node knows the pages of its edge. What a sequence computes lies in pages of its own, until these are full and join the tree: then
the new leaf takes them over, and pages that the tree holds already are free; the sequence goes on with the tree's.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from ...types.sequence import Sequence
from ...types.state import State
from ...workload.content import Tokens
from ..accounting.ledger import Meter
from ..prefix import RadixNode, RadixTree, StateTree, WindowTree
from ..prefix.block_tables import BlockTables
from .radix_holdings import States, Windows
from .radix_memory import RadixMemory


class SlotTree(RadixTree):
    """As ``RadixTree``; a split divides the slots of an edge too.

    Attributes:
        slots: Of each edge, by the node at its end; never changed in place.
        evicted: Slots of the leaves that were evicted, until they are taken.
    """

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.slots: dict[RadixNode, list[int]] = {}
        self.evicted: list[int] = []

    def along(self, node: RadixNode, above: RadixNode | None = None) -> list[int]:
        """Slots of the string that ends at a node; those of the tokens after ``above``, if that is given."""
        return [slot for step in reversed(self.path(node, above)) for slot in self.slots[step]]

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        # A new leaf has none yet.
        if slots := self.slots.get(node):
            self.slots[upper], self.slots[node] = slots[:tokens], slots[tokens:]
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        super()._remove(leaf)
        self.evicted += self.slots.pop(leaf)


class SlotWindowTree(SlotTree, WindowTree):
    """A ``SlotTree`` with windows, whose slots have no ids."""


class SlotStateTree(SlotTree, StateTree):
    """A ``SlotTree`` with states, whose slots have no ids."""


class SlotRadixMemory(RadixMemory):
    """As ``RadixMemory``, with slot ids.

    Attributes:
        tables: Page ids of each sequence's tokens.
    """

    trees = (SlotTree, SlotWindowTree, SlotStateTree)
    tree: SlotTree

    def __init__(
        self,
        num_blocks: int,
        runs: Tokens | None = None,
        keeps: bool = True,
        block_size: int = 1,
        ahead: bool = False,
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        super().__init__(num_blocks, runs, keeps, block_size, ahead, windows, states)
        self.tables: BlockTables = BlockTables(self.num_blocks, 0, block_size)
        # Of the leap that is about to run, once it has been looked at: what its row says, and the steps that hand out
        # their pages.
        self._row: Meter | None = None
        self._settled = 0
        # Pages that were taken step by step and are in no table yet.
        self._taken: list[int] = []

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        super().admit(sequence, decode_step, padded_tokens, past)
        self._begin(sequence)

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
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
        if self._row is None:
            self._row, self._settled = self._begin_row(state, steps), min(steps, 1)
        if steps > self._settled:
            span = range(state.decode_step + self._settled, state.decode_step + steps)
            self._grow(state.batch_size, span.start, span.stop)
            self._hand_out(span)
            self._settled = steps

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: all slots of the tree, of which some are locked."""
        return np.fromiter(chain.from_iterable(self.tree.slots.values()), dtype=np.int64)

    def advance(self, state: State, steps: int) -> Meter:
        self.settle(state, steps)
        row, self._row = self._row, None
        assert row is not None
        if not steps:
            self._end_prefills(state.decode_step)
        return row

    def _take_for_prefills(self) -> None:
        super()._take_for_prefills()
        for sequence, tokens in self._batch:
            self.tables.hold(sequence, tokens)

    def _take_for_decode(self, decode_step: int) -> None:
        super()._take_for_decode(decode_step)
        self._hand_out(range(decode_step, decode_step + 1))

    def _take(self, pages: int, asked: int) -> None:
        """See ``RadixMemory``; pages of a step that decodes are handed out later."""
        super()._take(pages, asked)
        if not self._batch:
            self._taken += self.tables.pool.get_new_blocks(pages)

    def _hand_out(self, steps: range) -> None:
        """The pages taken, in each step to those of the running sequences that begin one, one after the other."""
        if not self._taken:
            return
        size, tables = self.block_size, self.tables.tables
        members: list[list[list[int]]] = [[] for _ in range(size)]
        for sequence in self.decoding:
            members[self._phase(sequence)].append(tables[sequence])
        taken = iter(self._taken)
        for step in steps:
            for table in members[step % size]:
                table.append(next(taken))
        self._taken.clear()

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        self.tables.pool.free_blocks(self.tables.tables.pop(sequence)[self.holdings[sequence].pages :])
        super().drop(sequence, decode_step)

    def make_free(self, pages: int, states: int = 0) -> None:
        super().make_free(pages, states)
        self._reclaim()

    def _settle(self, moment: int) -> None:
        super()._settle(moment)
        self._reclaim()

    def _reclaim(self) -> None:
        """What was evicted is free."""
        if self.tree.evicted:
            self.tables.pool.free_blocks(self.tree.evicted)
            self.tree.evicted = []

    def _leave(self, sequence: Sequence, tokens: int, known: int) -> None:
        """See ``RadixMemory``; of the table the tree has the first pages."""
        holding = self.holdings[sequence]
        super()._leave(sequence, tokens, known)
        self.tables.pool.free_blocks(self.tables.tables.pop(sequence)[holding.pages :])

    def _insert(self, sequence: Sequence, tokens: int) -> RadixNode:
        """See ``RadixMemory``; the sequence goes on with the tree's pages."""
        holding, table = self.holdings[sequence], self.tables.tables[sequence]
        node, first, end = super()._insert(sequence, tokens), holding.pages, tokens // self.block_size
        # A new leaf is there, the end of the string; windows may have divided it.
        last = end
        for step in self.tree.path(node, holding.node):
            self.tree.slots.setdefault(step, table[last - step.tokens : last])
            last -= step.tokens
        # Up to the node that it has locked the table has the tree's pages.
        pages = self.tree.along(node, holding.node)
        own = table[first:end]
        if own != pages:
            self.tables.pool.free_blocks([mine for mine, kept in zip(own, pages, strict=True) if mine != kept])
            self.tables.tables[sequence] = [*table[:first], *pages, *table[end:]]
        return node
