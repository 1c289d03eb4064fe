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

With a prefix cache (``group_cache``) a page may be in several tables: ``shared`` are the entries beyond the first.

    free = pages - groups * blocks + sliding groups * skipped + shared

Then tables always have ids, and grants of a step are made at once, as the next look-up sees what they took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...types.sequence import NOT_DECODING, Sequence
from ...types.state import State
from ..accounting.kv_groups import PageGroups
from ..accounting.ledger import METER, Meter
from ..accounting.moments import after_step
from ..prefix import BlockNames
from .group_cache import Found, GroupCache
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
    """Tentative grants of one step, in pages of all groups together; made at once where there is a prefix cache.

    Attributes:
        free: What is free before any sequence gives back or takes.
        takes: What those that decode take in the step.
        need: That less what they give back.
    """

    __slots__ = ("found", "groups", "takes")
    memory: HybridMemory
    takes: int
    #: What the sequence that looked up last found.
    found: Found

    def __init__(self, memory: HybridMemory) -> None:
        super().__init__(memory)
        self.groups = memory.groups.number

    def blocks_of(self, tokens: int) -> int:
        """Pages that an admission of a prompt of ``tokens`` asks for."""
        return self.memory.groups.wanted_blocks(-(-tokens // self.block_size))

    def lacking(self, sequence: Sequence, budget: int) -> int:
        """See ``PagedTransaction``: those of all tokens that it knows, and of those that it would compute now."""
        memory, start = self.memory, sequence.start_tokens
        cache, tables = memory.cache, memory.group_tables
        if cache is None or tables is None:
            return self.blocks_of(start)
        tables.grow_until(self.decode_step + 1)
        self.found = cache.look_up(sequence)
        found, groups = self.found.blocks, memory.groups
        blocks = -(-start // self.block_size)
        most = groups.full * (blocks - found) + groups.sliding * max(0, min(blocks, groups.most_prompt_blocks) - found)
        now = -(-min(start, found * self.block_size + budget) // self.block_size)
        return max(most, groups.number * (now - found)) + cache.to_take(self.found)

    def enter(self, sequence: Sequence, budget: int) -> int:
        """See ``PagedTransaction``: what was found need not be computed."""
        cache, tables = self.memory.cache, self.memory.group_tables
        if cache is None or tables is None:
            return sequence.computed_tokens
        sequence.computed_tokens = known = self.found.blocks * self.block_size
        cache.enter(sequence, self.found)
        tables.tables[sequence] = self.found.tables
        self.memory.begin(sequence, known)
        self.extend(sequence, min(sequence.start_tokens, known + budget))
        return known

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``."""
        tables = self.memory.group_tables
        if self.memory.cache and tables:
            tables.grow_until(self.decode_step + 1)
            tables.reach(sequence, sequence.computed_tokens, tokens)

    def chunk_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a prefill takes for its next ``tokens``, less those that it gives back for them."""
        memory, computed = self.memory, sequence.computed_tokens
        holding = memory.prefills[sequence]
        more = -(-(computed + tokens) // self.block_size) - holding.blocks
        if memory.group_tables:
            # Given back even if the chunk then finds no room.
            memory.group_tables.skip(sequence, computed)
        if memory.cache:
            # What it gave back others may still have.
            self.free = memory.cache.pool.num_free
            return self.groups * more
        return memory.pages(more, memory.skipped.of(computed) - holding.skipped)

    def take_for_running(self) -> None:
        """See ``PagedTransaction``."""
        super().take_for_running()
        if self.memory.group_tables:
            # Before a prefill that goes on gives way.
            self.memory.group_tables.grow_until(self.decode_step + 1)
        if self.memory.cache:
            self.free = self.memory.cache.pool.num_free

    def give_back(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        back, taken = self.exchange(sequence, self.decode_step)
        tables = self.memory.group_tables
        if tables:
            tables.skip(sequence, sequence.held_tokens(self.decode_step))
        self._freed(back)
        return taken

    def take(self, sequence: Sequence, pages: int) -> None:
        """See ``PagedTransaction``."""
        if self.memory.group_tables:
            self.memory.group_tables.take(sequence, sequence.held_tokens(self.decode_step) + 1)
        self._freed(-pages)

    def preempt(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        pages = self.reclaimed(sequence, self.decode_step)
        if self.memory.group_tables:
            self.memory.group_tables.drop(sequence)
        self._freed(pages)

    def end_of_running(self) -> None:
        """See ``PagedTransaction``."""
        super().end_of_running()
        if self.memory.group_tables:
            self.memory.group_tables.grown(self.decode_step)

    def _freed(self, pages: int) -> None:
        cache = self.memory.cache
        self.free = self.free + pages if cache is None else cache.pool.num_free

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
        names: Of the blocks of every request, where prefixes are to be cached.

    Attributes:
        cache: The prefix cache, or None.
        prefills: What each sequence in a chunked prefill holds; in place of ``partial``.
        group_tables: The block tables, one a sequence and group, where there are ids; in place of ``tables``.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail", "skipped")

    def __init__(
        self, num_blocks: int, block_size: int, groups: PageGroups, ids: bool = False, names: BlockNames | None = None
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.groups = groups
        self.cache: GroupCache | None = None
        if names is not None:
            self.cache = GroupCache(num_blocks, block_size, groups, names)
            self.cache_log = self.cached_level = self.cache.log
            self.meter = (*self.meter, "shared", "shared_in_windows")
        # Table entries beyond the first of a block, as ``free`` counts them.
        self._shared = 0
        self.skipped = SkippedBlocks(groups, block_size)
        self.prefills: dict[Sequence, Partial] = {}
        keeps_tables = ids or self.cache is not None
        self.group_tables = HybridTables(num_blocks, block_size, groups, self.cache) if keeps_tables else None
        # Of all sequences, in a full group and in a sliding one.
        self._blocks = self._given_back = 0
        self._transaction: HybridTransaction = HybridTransaction(self)

    @property
    def evicted_blocks(self) -> int:
        """See ``Memory``."""
        return self.cache.pool.evicted_blocks if self.cache else 0

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        return (
            np.flatnonzero(np.frombuffer(self.cache.pool.is_named, np.uint8))
            if self.cache
            else super().cached_block_ids()
        )

    def pages(self, blocks: int, skipped: int) -> int:
        """Pages of all groups where a full one has ``blocks`` and a sliding one has given back ``skipped`` of them."""
        return self.groups.number * blocks - self.groups.sliding * skipped

    def transaction(self, decode_step: int) -> HybridTransaction:
        """The tentative grants of ``decode_step``; one at a time."""
        transaction = self._transaction
        if self.cache and self.group_tables:
            self.group_tables.grow_until(decode_step)
            self._count_shared()
        transaction.decode_step, transaction.free = decode_step, self.free
        transaction.takes = self.groups.number * self._phases[decode_step % self.block_size]
        transaction.need = transaction.takes - self.groups.sliding * self.skipped.in_step(decode_step)
        return transaction

    def begin(self, sequence: Sequence, known_tokens: int) -> None:
        """A sequence that waited holds the pages of ``known_tokens``, which it found."""
        self.prefills[sequence] = found = Partial(
            known_tokens // self.block_size, self.skipped.of(known_tokens), known_tokens
        )
        self._hold(found.blocks, found.skipped)

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
        if self.cache:
            self.cache.settle()
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
        if self.cache:
            self._count_shared()
            self.cache.moment = after_step(decode_step)
            self.cache.settle()

    def _count_shared(self) -> None:
        """``free`` counts a block once, however many tables name it."""
        if self.cache:
            shared = sum(self.cache.shared)
            self.free += shared - self._shared
            self._shared = shared

    def _hold(self, blocks: int, skipped: int) -> None:
        """So many blocks more are held in a full group, and more of them given back in a sliding one."""
        self._blocks += blocks
        self._given_back += skipped
        self.free -= self.pages(blocks, skipped)

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Steps from the coming one on in which every sequence finds its pages in any order of taking, with
        ``blocks`` free before them; perhaps fewer than the truth."""
        # Where windows pass blocks that others have, too, fewer pages come back.
        alike = 1 if self.cache and self.cache.shared[True] else self.skipped.steps_alike(state.decode_step)
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
        shared: Meter = ()
        if self.cache and self.group_tables:
            if steps and self.cache.shared[True]:
                self.group_tables.grow_until(decode_step + 1)
            self._count_shared()
            self.cache.settle()
            self.cache.log.row += 1
            shared = tuple(entries * size for entries in self.cache.shared)
        partial = sum(sequence.computed_tokens for sequence in self.prefills)
        tail = sum(max(0, held.blocks * size - s.target_tokens) for s, held in self.prefills.items())
        if not steps:
            live = state.batch_size * (decode_step - 1) + state.lag_sum + partial
            return live, self._blocks * size, tail, self._given_back * size, *shared
        taken = self.growth(decode_step, steps)
        held, skipped = self._blocks + self._phases[decode_step % size], self._given_back
        first, given_back = self.skipped.advance(decode_step, steps)
        self._hold(taken, given_back)
        live = state.batch_size * decode_step + state.lag_sum + partial
        return live, held * size, tail, (skipped + first) * size, *shared
