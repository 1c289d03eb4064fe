"""A radix tree's slots by their ids: which slot holds which token of which sequence.

A node knows the slots of its edge. What a sequence computes lies in slots of its own, until it joins the tree: then
the new leaf takes them over, and slots of tokens that the tree holds already are free; the sequence goes on with the
tree's.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np

from ...types.errors import Overdrawn, SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ...workload.content import Tokens
from ..accounting.ledger import Meter
from ..accounting.moments import in_step
from ..accounting.moves import Moves
from ..prefix import RadixNode, RadixTree
from .radix_memory import RadixMemory


class SlotTree(RadixTree):
    """As ``RadixTree``; a split divides the slots of an edge too.

    Attributes:
        slots: Of each edge, by the node at its end; never changed in place.
        evicted: Slots of the leaves that were evicted, until they are taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[RadixNode, array[int]] = {}
        self.evicted = array("i")

    def along(self, node: RadixNode, above: RadixNode | None = None) -> array[int]:
        """Slots of the string that ends at a node; those of the tokens after ``above``, if that is given."""
        slots = array("i")
        for step in reversed(self.path(node, above)):
            slots += self.slots[step]
        return slots

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper, slots = super()._split(node, tokens), self.slots[node]
        self.slots[upper], self.slots[node] = slots[:tokens], slots[tokens:]
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        super()._remove(leaf)
        self.evicted += self.slots.pop(leaf)


class SlotPool:
    """As ``BlockPool``, of slots that come and go by the hundred and are named once: ids in arrays."""

    def __init__(self, num_slots: int) -> None:
        self.num_blocks = num_slots
        # Ids that came back, the last one on top; those from ``_fresh`` on were never taken.
        self._stack = np.zeros(0, dtype=np.int32)
        self._height = self._fresh = 0

    def shuffle(self, random: np.random.Generator) -> None:
        """Hand out those that are free now in a random order."""
        free = list(self.free_ids)
        random.shuffle(free)
        self._stack, self._height, self._fresh = np.array(free, dtype=np.int32), len(free), self.num_blocks

    @property
    def num_free(self) -> int:
        return self._height + self.num_blocks - self._fresh

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Free ids, the next one to be taken last."""
        return (*range(self.num_blocks - 1, self._fresh - 1, -1), *self._stack[: self._height].tolist())

    def get_new_blocks(self, count: int) -> np.ndarray:
        """``count`` ids, int32, the last one freed first.

        Raises:
            Overdrawn: Fewer are free; the policy must have seen to that.
        """
        if count > self.num_free:
            raise Overdrawn(f"{count} slots are taken and {self.num_free} are free")
        returned = min(count, self._height)
        slots = np.empty(count, dtype=np.int32)
        slots[:returned] = self._stack[self._height - returned : self._height][::-1]
        slots[returned:] = np.arange(self._fresh, self._fresh + count - returned)
        self._height -= returned
        self._fresh += count - returned
        return slots

    def free_blocks(self, slots: np.ndarray) -> None:
        """The ids are free again.

        Raises:
            SimulationFault: More are free than were ever taken.
        """
        height = self._height + len(slots)
        if height > self._fresh:
            raise SimulationFault(f"{len(slots)} slots are released and {self._fresh - self._height} are taken")
        if height > len(self._stack):
            self._stack = np.concatenate([self._stack[: self._height], np.zeros(height, dtype=np.int32)])
        self._stack[self._height : height] = slots
        self._height = height


class SlotTables:
    """The slots of every sequence that prefills or runs, by position.

    Attributes:
        moves, host_tables: See ``Tables``; nothing ever moves.
        rewrites: See ``Tables``: what joins the tree goes on with the tree's slots.
        prefix: See ``Tables``; nothing is pinned.
    """

    moves: Moves | None = None
    rewrites = True

    def __init__(self, num_slots: int) -> None:
        self.prefix: list[int] = []
        self.pool, self.host_pool = SlotPool(num_slots), SlotPool(0)
        self.tables: dict[Sequence, array[int]] = {}
        self.host_tables: dict[Sequence, list[int]] = {}


class SlotRadixMemory(RadixMemory):
    """As ``RadixMemory``, with slots handed out by their ids.

    Attributes:
        tables: Which slots each sequence's tokens are in.
    """

    def __init__(self, num_slots: int, runs: Tokens | None = None, keeps: bool = True) -> None:
        super().__init__(num_slots, runs, keeps)
        self.tree: SlotTree = SlotTree()
        self.tables: SlotTables = SlotTables(num_slots)
        # Of the leap that is about to run, once it has been looked at: slots held in its first step, and the steps
        # that hand out their slots.
        self._held: int | None = None
        self._settled = 0
        # Slots that were taken step by step and are in no table yet.
        self._taken: list[np.ndarray] = []

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
        """Hand out the slots of so many steps of the leap that is about to run, or of a step that only prefills (0).

        They are not handed out again when it is over. No more steps may be asked for than the leap has.
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
            self._taken.append(pool.get_new_blocks(state.batch_size))
            return held
        for sequence, tokens in self._batch:
            slots = pool.get_new_blocks(tokens - self.holdings[sequence].tokens)
            self.tables.tables[sequence].frombytes(slots.tobytes())
        return held

    def _grow(self, batch_size: int, decode_step: int, end: int) -> None:
        """See ``RadixMemory``."""
        while decode_step < end:
            # None is evicted before the free ones run out: so many steps at once.
            steps = max(1, min(self.free // batch_size, end - decode_step))
            self._take(batch_size * steps)
            self.log.settle(self.tree.evictable_tokens, in_step(decode_step))
            self._taken.append(self.tables.pool.get_new_blocks(batch_size * steps))
            decode_step += steps

    def _hand_out(self, running: Collection[Sequence]) -> None:
        """The slots taken, in each step to one of those that run after the other."""
        slots, tables = np.concatenate(self._taken).reshape(-1, len(running)), self.tables.tables
        self._taken.clear()
        ids, size = slots.T.tobytes(), len(slots) * slots.itemsize
        for start, sequence in zip(range(0, len(ids), size), running, strict=True):
            tables[sequence].frombytes(ids[start : start + size])

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``RadixMemory``."""
        for sequence in preempted:
            own = self.tables.tables.pop(sequence)[self.holdings[sequence].tokens :]
            self.tables.pool.free_blocks(np.array(own, dtype=np.int32))
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
            self.tables.pool.free_blocks(np.array(self.tree.evicted))
            self.tree.evicted = array("i")

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
        if table[first:tokens] != slots:
            own = np.array(table[first:tokens])
            self.tables.pool.free_blocks(own[own != np.array(slots)])
            table[first:tokens] = slots
        return node

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``RadixMemory``."""
        leaving = tuple(leaving)
        super().release(leaving, decode_step)
        for sequence in leaving:
            self.tables.tables.pop(sequence, None)
