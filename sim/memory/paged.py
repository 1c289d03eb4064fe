"""Paged KV memory: fixed-size blocks, handed out on demand.

A sequence with ``c`` tokens holds ``ceil(c / block_size)`` blocks. While it decodes it needs a new
block in the steps in which the tokens held before are a multiple of the block size. With
``c = clock + lag`` after step ``clock``, that is when ``clock = 1 - lag (mod block_size)``: its
*phase*, fixed from admission to leaving. So the blocks needed in step ``clock`` are the number of
running sequences of phase ``clock mod block_size``, and a histogram of phases tells the need of any
span of steps at a cost that does not grow with the number of sequences:

    phase      0  1  2  3          block size 4, seven sequences
    count      2  0  4  1          steps 4, 5, 6, ... need 2, 0, 4, 1, 2, 0, 4, ... blocks

The histogram is stored twice over, so that a span shorter than the block size is one slice.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from ..sequence import Plan, Sequence
from ..state import State
from .block_pool import BlockPool
from .ledger import Meter


class PagedTransaction:
    """Tentative grants of one step: what is still free after those made so far."""

    __slots__ = ("block_size", "free", "memory", "need")

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.block_size = memory.block_size

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block_size)

    def needs_block(self, sequence: Sequence, clock: int) -> bool:
        """Whether the slot of step ``clock`` opens a new block for a running sequence."""
        return not sequence.held_tokens(clock) % self.block_size


class PagedMemory:
    """Blocks held by running sequences, and by swapped ones in host memory.

    Args:
        num_blocks: Blocks of the device pool.
        block_size: Tokens a block.
        host_blocks: Blocks of the swap space.
        ids: Whether to hand out physical block ids and keep block tables. Counts, and so every
            decision, are the same with and without.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0, ids: bool = False) -> None:
        self.num_blocks, self.block_size, self.host_blocks = num_blocks, block_size, host_blocks
        self.free = num_blocks
        self.host_free = host_blocks
        self.tables: BlockTables | None = BlockTables(num_blocks, host_blocks, block_size) if ids else None
        self._phases = [0] * (2 * block_size)
        self._transaction = PagedTransaction(self)
        # How many steps ``growth`` was asked for last since the commit, and its answer: a policy asks
        # how far it can look ahead, and just that span then passes.
        self._span_steps = self._span_growth = 0

    @property
    def capacity_slots(self) -> int:
        return self.num_blocks * self.block_size

    def transaction(self, clock: int) -> PagedTransaction:
        """The tentative grants of step ``clock``; one at a time."""
        transaction = self._transaction
        transaction.free = self.free
        transaction.need = self._phases[clock % self.block_size]
        return transaction

    def commit(self, plan: Plan, clock: int) -> None:
        """Blocks change hands for the step: victims give, running sequences grow, then others come in.

        Called before the state begins the plan, so lags are those of the step before.
        """
        admitted, _, preempted, swapped_out, swapped_in, _, _, _, _ = plan
        if preempted or swapped_out:
            self._evict(preempted, swapped_out, clock)
        size, phases = self.block_size, self._phases
        self.free -= phases[clock % size]
        self._span_steps = 0
        if self.tables:
            self.tables.grow(clock)
        for sequence in swapped_in:
            self.host_free += self._blocks_to_move(sequence)
        for sequence in swapped_in + admitted:
            tokens = sequence.start_tokens
            self.free -= -(-tokens // size)
            phase = (1 - tokens + clock) % size
            phases[phase] += 1
            phases[phase + size] += 1
            if self.tables:
                self.tables.admit(sequence, tokens, phase)

    def _blocks_to_move(self, sequence: Sequence) -> int:
        """Blocks of a swapped sequence: all its tokens but the one that its next step computes."""
        return -(-(sequence.start_tokens - 1) // self.block_size)

    def _evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], clock: int) -> None:
        for sequence in swapped_out:
            self.host_free -= -(-sequence.held_tokens(clock) // self.block_size)
            if self.tables:
                self.tables.swap_out(sequence)
        self.release(preempted + swapped_out, clock)

    def release(self, leaving: Iterable[Sequence], clock: int) -> None:
        """Sequences that leave before step ``clock`` give back the blocks that they held."""
        size, phases = self.block_size, self._phases
        for sequence in leaving:
            lag = sequence.lag
            phase = (1 - lag) % size
            phases[phase] -= 1
            phases[phase + size] -= 1
            self.free += -(-(clock - 1 + lag) // size)
            if self.tables:
                self.tables.leave(sequence, phase)

    def growth(self, clock: int, steps: int) -> int:
        """Blocks that the running sequences need in the ``steps`` steps from ``clock`` on."""
        size, phases = self.block_size, self._phases
        start = clock % size
        if steps < size:
            blocks = sum(phases[start : start + steps])
        else:
            cycles, rest = divmod(steps, size)
            blocks = cycles * sum(phases[:size]) + sum(phases[start : start + rest])
        self._span_steps, self._span_growth = steps, blocks
        return blocks

    def steps_within(self, clock: int, blocks: int) -> int:
        """Steps from ``clock`` on that need at most ``blocks`` new blocks together.

        Only for a pool that some running sequence grows in; else the answer has no end.
        """
        size, phases = self.block_size, self._phases
        cycles, left = divmod(blocks, sum(phases[:size]))
        steps = cycles * size
        start = clock % size
        for need in phases[start : start + size]:
            if need > left:
                break
            left -= need
            steps += 1
        return steps

    def pass_steps(self, state: State, steps: int) -> Meter:
        """Let the running sequences grow through the steps after the first of a leap.

        Returns:
            What the ledger integrates: sequences that grow, slots live and slots held, in the first
            step. What is taken after it follows from the stays.
        """
        held = (self.num_blocks - self.free) * self.block_size
        clock, width = state.clock, state.width
        if steps > 1:
            known = self._span_steps == steps - 1
            self.free -= self._span_growth if known else self.growth(clock + 1, steps - 1)
            if self.tables:
                self.tables.grow(clock + 1, steps - 1)
        return width, width * clock + state.lag_sum, held, 0, 0, 0, 0, 0


class BlockTables:
    """Physical ids behind the counts: a block table for every sequence on the device or the host."""

    def __init__(self, num_blocks: int, host_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(host_blocks)
        self.tables: dict[Sequence, list[int]] = {}
        self.host_tables: dict[Sequence, list[int]] = {}
        self._block_size = block_size
        # Running sequences by phase, in arrival order: who takes a block in a step, in which order.
        self._members: list[list[Sequence]] = [[] for _ in range(block_size)]

    def admit(self, sequence: Sequence, tokens: int, phase: int) -> None:
        """Give a table for ``tokens``; one that comes from the host gets new device ids."""
        if sequence in self.host_tables:
            self.host_pool.release(self.host_tables.pop(sequence))
        self.tables[sequence] = self.pool.take_many(-(-tokens // self._block_size))
        members = self._members[phase]
        if members and members[-1].index > sequence.index:
            insort(members, sequence, key=attrgetter("index"))
        else:
            members.append(sequence)

    def grow(self, clock: int, steps: int = 1) -> None:
        """Append a block to every table that is full before each of ``steps`` steps from ``clock`` on,
        in the order of (step, sequence)."""
        take, tables, size = self.pool.take, self.tables, self._block_size
        for step in range(clock, clock + steps):
            for sequence in self._members[step % size]:
                tables[sequence].append(take())

    def leave(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more; unless it was swapped out, its blocks are given back."""
        self._members[phase].remove(sequence)
        if sequence in self.tables:
            self.pool.release(self.tables.pop(sequence))

    def swap_out(self, sequence: Sequence) -> None:
        """Move the table to the host pool."""
        table = self.tables.pop(sequence)
        self.host_tables[sequence] = self.host_pool.take_many(len(table))
        self.pool.release(table)
