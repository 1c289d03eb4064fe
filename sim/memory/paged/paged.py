"""Paged KV memory: fixed-size blocks, handed out on demand.

A sequence with ``c`` tokens holds ``ceil(c / block_size)`` blocks. While it decodes it needs a new
block in the steps in which the tokens held before are a multiple of the block size. With
``c = decode_step + lag`` after ``decode_step``, that is when ``decode_step = 1 - lag (mod block_size)``: its
*phase*, fixed from admission to leaving. So the blocks needed in ``decode_step`` are the number of
running sequences of phase ``decode_step mod block_size``, and a histogram of phases tells the need of any
span of steps at a cost that does not grow with the number of sequences:

    phase      0  1  2  3          block size 4, seven sequences
    count      2  0  4  1          steps 4, 5, 6, ... need 2, 0, 4, 1, 2, 0, 4, ... blocks

The histogram is stored twice over, so that a span shorter than the block size is one slice.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from ...types.sequence import NOT_DECODING, Sequence
from ...types.state import State
from ..accounting.defaults import MemoryDefaults
from ..accounting.ledger import METER, Meter
from ..accounting.moves import Moves
from .block_pool import BlockPool


class PagedTransaction:
    """Tentative grants of one step: what is still free after those made so far. See ``Transaction``.

    Attributes:
        memory: The memory that the grants are of.
        block_size: Tokens a block.
        free: Blocks that are free; a policy lessens it by what it grants.
        need: Blocks that the running sequences take in the step, less those that they give back in it.
        decode_step: The step.
        groups: KV groups, each of which takes a block where a sequence needs one.
    """

    __slots__ = ("block_size", "decode_step", "free", "memory", "need")
    memory: PagedMemory
    block_size: int
    free: int
    need: int
    decode_step: int
    groups: int = 1

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.block_size = memory.block_size

    @property
    def takes(self) -> int:
        """Blocks that the running sequences take in the step, whatever they give back in it."""
        return self.need

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block_size)

    def chunk_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a prefill that goes on takes for its next ``tokens``."""
        blocks = self.blocks_of(sequence.computed_tokens + tokens)
        return max(0, blocks - self.memory.partial[sequence])

    def take_for_running(self) -> None:
        """The running sequences take their blocks for the step."""
        self.free -= self.need

    def look_up(self, sequence: Sequence) -> int:
        """Tokens of a sequence that waits that need not be computed: where nothing is cached, those that came with it."""
        return sequence.computed_tokens

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that must be free to admit the sequence that was looked up last: those of its known tokens.

        Args:
            tokens: How many it would compute now.
        """
        return self.blocks_of(sequence.start_tokens)

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        """Those of the blocks that ``lacking`` asks for that hold none of its first ``tokens``."""
        return self.blocks_of(sequence.start_tokens) - self.blocks_of(tokens)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """Grant the sequence that was looked up last the blocks to compute ``tokens``, after those that it found.

        Args:
            blocks: What it lacked.
        """
        self.free -= blocks

    def junction(self, sequence: Sequence) -> int:
        """Tokens of the longer prefix of a sequence that only some KV groups had when it was looked up; 0 for none."""
        return 0

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Grant a sequence in a chunked prefill the blocks for its first ``tokens``."""

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """Blocks that come free if a sequence gives way before ``decode_step``, after those already asked for."""
        partial = self.memory.partial.get(sequence)
        return self.blocks_of(sequence.held_tokens(decode_step)) if partial is None else partial

    def needs_block(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether the slot of ``decode_step`` opens a new block for a running sequence."""
        return not sequence.held_tokens(decode_step) % self.block_size

    def exchange(self, sequence: Sequence, decode_step: int) -> tuple[int, int]:
        """Blocks that a running sequence gives back in ``decode_step``, and those that it then takes."""
        return 0, int(self.needs_block(sequence, decode_step))

    # Where the running sequences go one by one. With block ids they take their blocks at once.

    def grow_tables(self, steps: int) -> None:
        """Bring block tables up to date.

        Args:
            steps: 0 before the running sequences go one by one; 1 after they have all taken their blocks of the step, before
                any other sequence takes blocks, or gives some up.
        """
        if self.memory.tables:
            self.memory.tables.grow_until(self.decode_step + steps)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a running sequence, or one in a chunked prefill, takes for its next ``tokens``, once it has given
        back what its windows have passed."""
        if sequence.start_step == NOT_DECODING:
            return self.chunk_blocks(sequence, tokens)
        return int(self.needs_block(sequence, self.decode_step))

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """It takes those ``blocks``."""
        self.free -= blocks
        if sequence.start_step == NOT_DECODING:
            self.extend(sequence, sequence.computed_tokens + tokens)
        elif blocks and self.memory.tables:
            self.memory.tables.append(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """A sequence in a chunked prefill computes nothing in this step."""

    def preempt(self, sequence: Sequence) -> None:
        """A sequence gives up its blocks, which others may take in the same step; the plan has to name it."""
        self.free += self.reclaimed(sequence, self.decode_step)
        if self.memory.tables:
            self.grow_tables(0)
            self.memory.tables.drop(sequence)

    def end_of_running(self) -> None:
        """All running sequences have taken their blocks, or given up those that they had."""
        self.need = 0
        if self.memory.tables:
            self.memory.tables.grown(self.decode_step)


class PagedMemory(MemoryDefaults):
    """Blocks held by running sequences, and by swapped ones in host memory. See ``Memory``.

    What only some kinds of paged memory do (chunks, KV groups, prefix caches, sequences that share, pages that stay
    mapped) is here too, as a policy may ask for it, and does nothing.

    Args:
        num_blocks: Blocks of the device pool.
        block_size: Tokens a block.
        host_blocks: Blocks of the swap space.
        ids: Whether to hand out physical block ids and keep block tables. Counts, and so every
            decision, are the same with and without.

    Attributes:
        free: Blocks that are free before the running sequences append their slots of the coming step; those that a
            cache keeps, and can give up, are free.
        host_free: Blocks of the swap space that are free.
        partial: Blocks held by each sequence in a chunked prefill, or that is stalled.
        tables: Block tables, where there are ids.
        searches: Whether beams run: each of their steps is a decision.
        prefix_blocks: Blocks of a prefix that every prompt begins with, pinned from the start.
        due_copies: Shared blocks that running sequences copy in their next step.
    """

    #: What ``advance`` tells the ledger.
    meter: tuple[str, ...] = METER[:2]
    #: The bucket of slots that are held past what was asked for: there are none.
    residue = "block_tail"
    searches = False
    prefix_blocks = due_copies = 0

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0, ids: bool = False) -> None:
        self.num_blocks, self.block_size, self.host_blocks = num_blocks, block_size, host_blocks
        self.free = num_blocks
        self.host_free = host_blocks
        self.tables: BlockTables | None = BlockTables(num_blocks, host_blocks, block_size) if ids else None
        self.partial: dict[Sequence, int] = {}
        self._phases = [0] * (2 * block_size)
        self._transaction = PagedTransaction(self)

    @property
    def capacity_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def cached_blocks(self) -> int:
        """Blocks that count as free and keep contents, or a mapping, for others."""
        return 0

    def transaction(self, decode_step: int) -> PagedTransaction:
        """The tentative grants of ``decode_step``; one at a time."""
        transaction = self._transaction
        transaction.decode_step, transaction.free = decode_step, self.free
        transaction.need = self._phases[decode_step % self.block_size]
        return transaction

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Victims give up their blocks before ``decode_step``."""
        for sequence in swapped_out:
            self.host_free -= -(-sequence.held_tokens(decode_step) // self.block_size)
            if self.tables:
                self.tables.grow_until(decode_step)
                self.tables.swap_out(sequence)
        self.release(preempted + swapped_out, decode_step)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Blocks for the tokens that a sequence has after ``decode_step``, in which it starts.

        That step is yet to come, and in it the last token takes its slot as that of any running
        sequence does; unless it is ``past``.
        """
        before, size, phases = sequence.start_tokens - 1, self.block_size, self._phases
        self.free += -(before + past) // size
        phase = (decode_step - before) % size
        phases[phase] += 1
        phases[phase + size] += 1
        if self.tables:
            self.tables.admit(sequence, decode_step, past, phase)

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """As ``admit``, for a sequence with blocks that come back from the host."""
        # All but that of the token that its next step computes.
        self.host_free += -(-(sequence.start_tokens - 1) // self.block_size)
        self.admit(sequence, decode_step)

    def swapped_blocks(self, sequences: tuple[Sequence, ...]) -> int:
        """Blocks that move when these are swapped out, or in: all but that of the token that comes next."""
        size = self.block_size
        return sum(-(-(sequence.start_tokens - 1) // size) for sequence in sequences)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Sequences that leave before ``decode_step`` give back the blocks that they held."""
        size, phases, tables = self.block_size, self._phases, self.tables
        if tables:
            tables.grow_until(decode_step)
        for sequence in leaving:
            ahead = 1 - sequence.lag
            phase = ahead % size
            phases[phase] -= 1
            phases[phase + size] -= 1
            self.free -= (ahead - decode_step) // size
            if tables:
                tables.leave(sequence, phase)

    def growth(self, decode_step: int, steps: int) -> int:
        """Blocks that the running sequences need in the ``steps`` steps from ``decode_step`` on."""
        size, phases = self.block_size, self._phases
        start = decode_step % size
        if steps < size:
            blocks = sum(phases[start : start + steps])
        else:
            cycles, rest = divmod(steps, size)
            blocks = cycles * sum(phases[:size]) + sum(phases[start : start + rest])
        return blocks

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Steps from the coming one on in which the running sequences need at most ``blocks`` new blocks
        together: exact up to ``limit``, beyond it perhaps fewer than the truth."""
        # Whatever their phases, they take no more than a block each in so many steps.
        safe = blocks // state.batch_size * self.block_size
        if safe >= limit:
            return safe
        return (
            limit if self.growth(state.decode_step, limit) <= blocks else self.steps_within(state.decode_step, blocks)
        )

    def steps_within(self, decode_step: int, blocks: int) -> int:
        """Steps from ``decode_step`` on that need at most ``blocks`` new blocks together.

        Only for a pool that some running sequence grows in; else the answer has no end.
        """
        size, phases = self.block_size, self._phases
        cycles, left = divmod(blocks, sum(phases[:size]))
        steps = cycles * size
        start = decode_step % size
        for need in phases[start : start + size]:
            if need > left:
                break
            left -= need
            steps += 1
        return steps

    def steps_before_admission(self, state: State, steps: int) -> int:
        """Of so many steps those before one in which the running do what lets the first that waits in."""
        return steps

    def steps_settled(self, decode_step: int, limit: int) -> int:
        """Steps from ``decode_step`` on, at most ``limit``, in which ``cached_blocks`` changes in the first one at the most."""
        return limit

    def step_that_frees(self, decode_step: int, blocks: int) -> int | None:
        """Number, from 1, of the first step from ``decode_step`` on after which ``blocks`` are free because running
        sequences gave some back; None where they give back none in time."""
        return None

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Set ``computed_tokens`` of a waiting sequence, where what is found for it may change while it waits."""

    def may_grow(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether what is found for a waiting sequence may be more in a later step."""
        return False

    def promise(self, sequence: Sequence) -> None:
        """The sequence is admitted in this step: what was looked up for it stays until then."""

    def reserve_decodes(self, need: int) -> None:
        """The running sequences take ``need`` blocks in the coming step: make them free, if a cache has them."""

    def held_blocks(self, leader: Sequence, decode_step: int) -> int:
        """Blocks that come free if a sequence, and all that share with it, give way before ``decode_step``."""
        return -(-leader.held_tokens(decode_step) // self.block_size)

    def needed_blocks(self, members: Iterable[Sequence], tokens: int = 0) -> int:
        """Blocks that sequences which come together take for all but their last ``tokens`` known tokens."""
        return sum(-(-(member.start_tokens - tokens) // self.block_size) for member in members)

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``."""
        if self.tables:
            self.tables.grow_until(state.decode_step + steps)

    def room_after(self, state: State, steps: int) -> int:
        """Slots of free blocks when the running sequences have grown through so many steps; nothing changes."""
        return (self.free - self.growth(state.decode_step, steps)) * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """Let the running sequences grow through the steps of a leap.

        Returns:
            What the ledger integrates: slots live and slots held in the first step. What is taken
            after it follows from the residencies.
        """
        if not steps:
            return self._stand_still(state)
        decode_step, size, phases, free = state.decode_step, self.block_size, self._phases, self.free
        start = decode_step % size
        self.free = free - (sum(phases[start : start + steps]) if steps <= size else self.growth(decode_step, steps))
        return state.batch_size * decode_step + state.lag_sum, (self.num_blocks - free + phases[start]) * size

    def _stand_still(self, state: State) -> Meter:
        """What ``advance`` returns where no sequence decodes: all is as after the last step."""
        return state.batch_size * (state.decode_step - 1) + state.lag_sum, (
            self.num_blocks - self.free
        ) * self.block_size


class BlockTables:
    """Physical ids behind the counts: a block table for every sequence on the device or the host.

    Tables grow when sequences come, go or are looked at: a look in ``decode_step`` first calls
    ``grow_until(decode_step + 1)``, which changes nothing but the tables.

    Attributes:
        moves: Where blocks with contents that change place are noted; None without a recording.
        rewrites: Whether blocks that a table names may become others; else tables only grow, at their ends.
        prefix: Blocks of a pinned prefix; see ``Tables``.
    """

    moves: Moves | None = None
    rewrites = False

    def __init__(self, num_blocks: int, host_blocks: int, block_size: int) -> None:
        self.prefix: list[int] = []
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(host_blocks)
        self.tables: dict[Sequence, list[int]] = {}
        self.host_tables: dict[Sequence, list[int]] = {}
        self._block_size = block_size
        # Running sequences by phase, in arrival order: which take a block in a step, in which order.
        self._members: list[list[Sequence]] = [[] for _ in range(block_size)]
        self._grown_until = 0

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Extend a table to ``tokens``."""
        table = self.tables.setdefault(sequence, [])
        table += self.pool.take_many(-(-tokens // self._block_size) - len(table))

    def drop(self, sequence: Sequence) -> None:
        """Give back the blocks of a table; nothing where that was done before."""
        self.pool.release(self.tables.pop(sequence, []))

    def append(self, sequence: Sequence) -> None:
        """A block for the token that a sequence computes in the coming step."""
        self.tables[sequence].append(self.pool.take())

    def grown(self, decode_step: int) -> None:
        """The tables have grown through ``decode_step``, one by one."""
        self._grown_until = decode_step + 1

    def admit(self, sequence: Sequence, decode_step: int, past: bool, phase: int) -> None:
        """A table that grows from ``decode_step`` on; one that comes from the host gets new device ids."""
        self.grow_until(decode_step + 1)
        swapped = self.host_tables.pop(sequence, [])
        self.host_pool.release(swapped)
        self.hold(sequence, sequence.start_tokens)
        if self.moves is not None:
            # The token of the coming step may open a block of its own.
            self.moves.swap_ins += zip(swapped, self.tables[sequence], strict=False)
        self.join(sequence, phase)

    def join(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows from now on, in its turn by arrival."""
        members = self._members[phase]
        if members and members[-1].order > sequence.order:
            insort(members, sequence, key=attrgetter("order"))
        else:
            members.append(sequence)

    def grow_until(self, decode_step: int) -> None:
        """Append a block to every table that is full before each of the steps before ``decode_step`` that it
        was not yet done for, in the order of (step, sequence)."""
        if decode_step <= self._grown_until:
            return
        members, tables, size = self._members, self.tables, self._block_size
        if size == 1:
            self._grow_all(members[0], decode_step - self._grown_until)
            self._grown_until = decode_step
            return
        full = [tables[sequence] for step in range(self._grown_until, decode_step) for sequence in members[step % size]]
        for table, block in zip(full, self.pool.take_many(len(full)), strict=True):
            table.append(block)
        self._grown_until = decode_step

    def _grow_all(self, growing: list[Sequence], steps: int) -> None:
        """In each of so many steps a block for each in turn: where a block holds a token."""
        blocks = self.pool.take_many(len(growing) * steps)
        for place, sequence in enumerate(growing):
            self.tables[sequence] += blocks[place :: len(growing)]

    def park(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more."""
        self._members[phase].remove(sequence)

    def leave(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more; unless it was swapped out, its blocks are given back."""
        self.park(sequence, phase)
        if sequence in self.tables:
            self.pool.release(self.tables.pop(sequence))

    def swap_out(self, sequence: Sequence) -> None:
        """Move the table to the host pool."""
        table = self.tables.pop(sequence)
        self.host_tables[sequence] = swapped = self.host_pool.take_many(len(table))
        self.pool.release(table)
        if self.moves is not None:
            self.moves.swap_outs += zip(table, swapped, strict=True)
