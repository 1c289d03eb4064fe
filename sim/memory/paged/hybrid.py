"""Paged memory for layers in KV groups, some with a window, over one pool of pages.

A block of a sequence is a page in each group: as in vLLM's hybrid KV cache manager all groups grow at
the same time, by a page each, and the groups with a window give back what it lets go of (``skipped``).
So two counts tell all, the blocks that a group holds which keeps every token, and those of them that a
sliding group has given back:

    free = pages - groups * blocks + sliding groups * skipped

Past its window a sequence takes a page every ``block_size`` steps in a sliding group, and gives one back
every ``block_size`` steps. **Giving back comes first, sequence by sequence**: each, in the order in which
they run, gives back what its window needs no more, and then takes what its next token needs. So pages
that come back from a sequence serve it and those behind it, not those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...types.sequence import NOT_DECODING, Sequence
from ...types.state import State
from ..accounting.kv_groups import PageGroups
from ..accounting.ledger import METER, Meter
from .hybrid_tables import HybridTables
from .paged import PagedMemory, PagedTransaction
from .skipped import SkippedBlocks


class Partial(NamedTuple):
    """What a prefill that goes on holds.

    Attributes:
        blocks: In a full group.
        skipped: Of those, the ones that a sliding group has given back.
        computed_tokens: With those of its last chunk.
    """

    blocks: int = 0
    skipped: int = 0
    computed_tokens: int = 0


_NOTHING = Partial()


class HybridTransaction(PagedTransaction):
    """Tentative grants of one step, in pages of all groups together.

    Attributes:
        free: What is free before any sequence gives back or takes.
        takes: What those that decode take in the step.
        need: That less what they give back.
    """

    __slots__ = ("groups", "takes")
    memory: HybridMemory
    takes: int

    def __init__(self, memory: HybridMemory) -> None:
        super().__init__(memory)
        self.groups = memory.groups.number

    def blocks_of(self, tokens: int) -> int:
        """Pages that an admission of a prompt of ``tokens`` asks for."""
        return self.memory.groups.wanted_blocks(-(-tokens // self.block_size))

    def chunk_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a prefill takes for its next ``tokens``, less those that it gives back for them."""
        memory, computed = self.memory, sequence.computed_tokens
        holding = memory.prefills[sequence]
        more = -(-(computed + tokens) // self.block_size) - holding.blocks
        return memory.pages(more, memory.skipped.of(computed) - holding.skipped)

    def exchange(self, sequence: Sequence, decode_step: int) -> tuple[int, int]:
        """Pages that a decoding sequence gives back in ``decode_step``, and then takes."""
        memory, held = self.memory, sequence.held_tokens(decode_step)
        back = memory.skipped.of(held) - memory.skipped.so_far(sequence, decode_step)
        return memory.groups.sliding * back, self.groups * (held % self.block_size == 0)

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """Pages that come free if a sequence gives way before ``decode_step``: those that it holds."""
        memory = self.memory
        if sequence in memory.prefills:
            return memory.pages(*memory.prefills[sequence][:2])
        blocks = -(-sequence.held_tokens(decode_step) // self.block_size)
        return memory.pages(blocks, memory.skipped.so_far(sequence, decode_step))


class HybridMemory(PagedMemory):
    """Pages held by running sequences and by chunked prefills; there is no swap space.

    Args:
        num_blocks: Pages of the pool.
        block_size: Tokens a page, of the layers of one group.
        groups: The groups that share it.
        ids: Whether to keep block tables, one a sequence and group.

    Attributes:
        prefills: What each sequence in a chunked prefill holds; in place of ``partial``.
        group_tables: The block tables, one a sequence and group, where there are ids; in place of ``tables``.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail", "skipped")

    def __init__(self, num_blocks: int, block_size: int, groups: PageGroups, ids: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.groups = groups
        self.skipped = SkippedBlocks(groups, block_size)
        self.prefills: dict[Sequence, Partial] = {}
        self.group_tables: HybridTables | None = HybridTables(num_blocks, block_size, groups) if ids else None
        # Of all sequences, in a full group and in a sliding one.
        self._blocks = self._given_back = 0
        self._transaction: HybridTransaction = HybridTransaction(self)

    def pages(self, blocks: int, skipped: int) -> int:
        """Pages of all groups where a full one has ``blocks`` and a sliding one has given back ``skipped`` of them."""
        return self.groups.number * blocks - self.groups.sliding * skipped

    def transaction(self, decode_step: int) -> HybridTransaction:
        """The tentative grants of ``decode_step``; one at a time."""
        transaction = self._transaction
        transaction.free = self.free
        transaction.takes = self.groups.number * self._phases[decode_step % self.block_size]
        transaction.need = transaction.takes - self.groups.sliding * self.skipped.in_step(decode_step)
        return transaction

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Pages for the tokens of a prefill that goes on, those of the chunk in ``decode_step`` included."""
        before, computed = self.prefills.get(sequence, _NOTHING), sequence.computed_tokens
        start = before.computed_tokens
        after = Partial(-(-computed // self.block_size), self.skipped.of(start), computed)
        self._hold(after.blocks - before.blocks, after.skipped - before.skipped)
        self.prefills[sequence] = after
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.reach(sequence, start, computed)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; what the prefill held becomes part of it."""
        before, size, phases = sequence.start_tokens - 1, self.block_size, self._phases
        held, skipped = self.prefills.pop(sequence, _NOTHING), self.skipped.of(sequence.computed_tokens)
        self._hold(-(-(before + past) // size) - held.blocks, skipped - held.skipped)
        phase = (decode_step - before) % size
        phases[phase] += 1
        phases[phase + size] += 1
        self.skipped.join(sequence, before + 1 - decode_step, skipped)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.join(sequence, decode_step)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; a prefill that goes on gives up its pages too."""
        for sequence in preempted:
            if sequence in self.prefills:
                held = self.prefills.pop(sequence)
                self._hold(-held.blocks, -held.skipped)
                if self.group_tables:
                    self.group_tables.grow_until(decode_step)
                    self.group_tables.drop(sequence)
        super().evict(tuple(s for s in preempted if s.start_step != NOT_DECODING), swapped_out, decode_step)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``."""
        size, phases = self.block_size, self._phases
        if self.group_tables:
            self.group_tables.grow_until(decode_step)
        for sequence in leaving:
            ahead = 1 - sequence.lag
            phase = ahead % size
            phases[phase] -= 1
            phases[phase + size] -= 1
            self._hold((ahead - decode_step) // size, -self.skipped.leave(sequence, decode_step))
            if self.group_tables:
                self.group_tables.drop(sequence)

    def _hold(self, blocks: int, skipped: int) -> None:
        """So many blocks more are held in a full group, and more of them given back in a sliding one."""
        self._blocks += blocks
        self._given_back += skipped
        self.free -= self.pages(blocks, skipped)

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Steps from the coming one on in which every sequence finds its pages in any order of taking, with
        ``blocks`` free before them; perhaps fewer than the truth."""
        alike = self.skipped.steps_alike(state.decode_step)
        # No sequence takes more than a page a group in so many steps, even if nothing comes back.
        safe = blocks // (self.groups.number * state.batch_size) * self.block_size
        return min(alike, safe if safe >= limit else self._steps_within(state.decode_step, blocks, limit))

    def _steps_within(self, decode_step: int, blocks: int, limit: int) -> int:
        """As ``steps_with``, while cycles of a block are alike."""
        exchanges = self._cycle(decode_step)
        level = peak = 0
        for take, back in exchanges:
            peak = max(peak, level + take)
            level += take - back
        # By so many pages more is held after each cycle: those of the full groups, and of windows yet to fill.
        drift = level
        if peak <= blocks and not drift:
            return limit
        cycles = (blocks - peak) // drift + 1 if peak <= blocks else 0
        steps, level = cycles * self.block_size, cycles * drift
        for take, back in exchanges:
            if level + take > blocks:
                break
            level += take - back
            steps += 1
        return steps

    def step_that_frees(self, decode_step: int, blocks: int) -> int | None:
        """Number, from 1, of the first step from ``decode_step`` on after which ``blocks`` pages are free; None where
        there is none while cycles are alike: from one to the next no more come back than are taken."""
        free = self.free
        for number, (take, back) in enumerate(self._cycle(decode_step), 1):
            free += back - take
            if free >= blocks:
                return number
        return None

    def _cycle(self, decode_step: int) -> list[tuple[int, int]]:
        """Pages taken and given back in each of the ``block_size`` steps from ``decode_step`` on."""
        groups, start = self.groups, decode_step % self.block_size
        takes = self._phases[start : start + self.block_size]
        backs = self.skipped.cycle(decode_step)
        return [(groups.number * take, groups.sliding * back) for take, back in zip(takes, backs, strict=True)]

    def room_after(self, state: State, steps: int) -> int:
        """See ``PagedMemory``; within a leap every cycle of a block is as the first."""
        cycles, rest = divmod(steps, self.block_size)
        exchanges = [take - back for take, back in self._cycle(state.decode_step)]
        taken = cycles * sum(exchanges) + sum(exchanges[:rest])
        return (self.free - taken) * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``: live and held are those of a group that keeps every token, and so is the block_tail of
        prefills that go on; skipped are the slots of those that a sliding group has given back."""
        size, decode_step = self.block_size, state.decode_step
        partial = sum(sequence.computed_tokens for sequence in self.prefills)
        tail = sum(max(0, held.blocks * size - s.target_tokens) for s, held in self.prefills.items())
        if not steps:
            live = state.batch_size * (decode_step - 1) + state.lag_sum + partial
            return live, self._blocks * size, tail, self._given_back * size
        taken = self.growth(decode_step, steps)
        held, skipped = self._blocks + self._phases[decode_step % size], self._given_back
        first, given_back = self.skipped.advance(decode_step, steps)
        self._hold(taken, given_back)
        return state.batch_size * decode_step + state.lag_sum + partial, held * size, tail, (skipped + first) * size
