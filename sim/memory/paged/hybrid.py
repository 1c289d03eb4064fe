"""Paged memory for layers in KV groups over one pool of pages: some keep every token, some a window, some a state.

A block of a sequence is a page in each group: as in vLLM's hybrid KV cache manager all groups grow at
the same time, by a page each, and the groups with a window give back what it lets go of (``skipped``). A group that keeps
the state at the end of a block gives back that of the block before. So a few counts tell all, the blocks that a
group holds which keeps every token, and those of them that one group of each other kind has given back:

    free = pages - groups * blocks + sum over kinds of groups * skipped

Past its window a sequence takes a page every ``block_size`` steps in a sliding group, and gives one back
every ``block_size`` steps. **Giving back comes first, sequence by sequence**: each, in the order in which
they run, gives back what its window needs no more, and then takes what its next token needs. So pages
that come back from a sequence serve it and those behind it, not those before it.

Where prefixes are not cached a state takes one page, from the first chunk of a prefill to the end: it is not among the
groups above, but ``fixed`` pages a sequence.

With a prefix cache (``group_cache``) a page may be in several tables: ``shared`` are the entries beyond the first.

    free = pages - groups * blocks + sum over kinds of groups * skipped + shared

Then tables always have ids, and grants of a step are made at once, as the next look-up sees what they took.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import NamedTuple

import numpy as np

from ...types.sequence import NOT_DECODING, Sequence
from ...types.state import State
from ..accounting.kv_groups import SLIDING, STATE, PageGroups
from ..accounting.ledger import METER, Meter
from ..accounting.moments import after_step
from ..prefix import Chains
from .group_cache import Found, GroupCache
from .hybrid_tables import HybridTables
from .paged import PagedMemory, PagedTransaction
from .skipped import SkippedBlocks, SkippedStates


class Partial(NamedTuple):
    """What a sequence holds in a chunked prefill, or while it stands still.

    Attributes:
        blocks: In a full group.
        skipped: Of those, the ones that a group of each other kind has given back.
        computed_tokens: With those of its last chunk.
    """

    blocks: int
    skipped: tuple[int, ...]
    computed_tokens: int


class Kind:
    """Groups of one kind that give blocks back: they all give back the same.

    Attributes:
        number: How many there are.
        given_back: Blocks of all sequences that one of them has given back.
    """

    __slots__ = ("given_back", "number", "skipped")

    def __init__(self, number: int, skipped: SkippedBlocks) -> None:
        self.number, self.skipped, self.given_back = number, skipped, 0


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
        self.groups = memory.growing

    def blocks_of(self, tokens: int) -> int:
        """Pages that an admission of a prompt of ``tokens`` asks for."""
        return self.memory.groups.wanted_blocks(-(-tokens // self.block_size))

    def look_up(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        cache, tables = self.memory.cache, self.memory.group_tables
        if cache is None or tables is None:
            return 0
        tables.grow_until(self.decode_step + 1)
        self.found = cache.look_up(sequence)
        return self.found.blocks * self.block_size

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``: those of all tokens that it knows, and of those that it would compute now."""
        memory, start, size = self.memory, sequence.start_tokens, self.block_size
        if memory.cache is None:
            return self.blocks_of(start)
        found, groups, blocks = self.found.blocks, memory.groups, -(-start // size)
        if memory.cache.computes_now(self.found):
            # The state that it would begin with is not there before the end of this step.
            return memory.num_blocks + 1
        now = -(-(found * size + tokens) // size)
        windows = max(0, min(blocks, groups.most_prompt_blocks) - found)
        states = groups.states * min(blocks - found, 1)
        most = groups.full * (blocks - found) + groups.sliding * windows + states
        at_once = (groups.full + groups.sliding) * (now - found) + states
        return max(most, at_once) + memory.cache.to_take(self.found)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        cache, tables = self.memory.cache, self.memory.group_tables
        if cache is None or tables is None:
            self.free -= blocks
            return
        sequence.computed_tokens = known = self.found.blocks * self.block_size
        cache.enter(sequence, self.found)
        tables.enter(sequence, self.found.tables)
        self.memory.begin(sequence, known)
        tables.reach(sequence, known, known + tokens)
        self.free = cache.pool.num_free

    def junction(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        cache = self.memory.cache
        return cache.junction(sequence) * self.block_size if cache else 0

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
            return (memory.groups.full + memory.groups.sliding) * more + memory.groups.states * min(more, 1)
        return memory.pages(more, memory.skipped_in_prefill(computed, computed + tokens, holding.skipped))

    def grow_tables(self, steps: int) -> None:
        """See ``PagedTransaction``."""
        if self.memory.group_tables:
            self.memory.group_tables.grow_until(self.decode_step + steps)

    def take_for_running(self) -> None:
        """See ``PagedTransaction``."""
        super().take_for_running()
        if self.memory.cache:
            self.free = self.memory.cache.pool.num_free

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        if sequence.start_step == NOT_DECODING:
            return self.chunk_blocks(sequence, tokens)
        back, taken = self.exchange(sequence, self.decode_step)
        tables = self.memory.group_tables
        if tables:
            tables.skip(sequence, sequence.held_tokens(self.decode_step))
        self._freed(back)
        return taken

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        tables = self.memory.group_tables
        if tables:
            computed = sequence.computed_tokens
            if sequence.start_step != NOT_DECODING:
                computed = sequence.held_tokens(self.decode_step)
            tables.take(sequence, computed + tokens)
        self._freed(-blocks)

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
        back = sum(
            kind.number * (kind.skipped.of(held) - kind.skipped.so_far(sequence, decode_step)) for kind in memory.giving
        )
        return back, self.groups * (held % self.block_size == 0)

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """Pages that come free if a sequence gives way before ``decode_step``: those that it holds."""
        memory = self.memory
        if sequence in memory.prefills:
            return memory.pages(*memory.prefills[sequence][:2]) + memory.fixed
        blocks = -(-sequence.held_tokens(decode_step) // self.block_size)
        return memory.pages(blocks, memory.skipped_by(sequence, decode_step)) + memory.fixed


class HybridMemory(PagedMemory):
    """Pages held by running sequences and by chunked prefills; there is no swap space.

    Args:
        num_blocks: Pages of the pool.
        block_size: Tokens a page, of the layers of one group.
        groups: The groups that share it.
        ids: Whether to keep block tables, one a sequence and group.
        chains: Names of the blocks of every request, where prefixes are to be cached.

    Attributes:
        cache: The prefix cache, or None.
        giving: The kinds of groups that give blocks back while their sequences run.
        growing: Groups that take a page with every block.
        fixed: Pages that every sequence has besides.
        prefills: What each sequence in a chunked prefill, or that stands still, holds; in place of ``partial``.
        group_tables: The block tables, one a sequence and group, where there are ids; in place of ``tables``.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: PageGroups, ids: bool = False, chains: Chains | None = None
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.groups = groups
        self.fixed = 0 if groups.states_by_block else groups.states
        self.growing = groups.number - self.fixed
        self.giving: list[Kind] = []
        self.meter = (*METER[:2], "prefill_tail")
        if groups.sliding:
            self.giving.append(Kind(groups.sliding, SkippedBlocks(groups.window_tokens, block_size)))
            self.meter += ("skipped",)
        if groups.states_by_block:
            self.giving.append(Kind(groups.states, SkippedStates(block_size)))
            self.meter += ("skipped_states",)
        elif groups.states:
            self.meter += ("states",)
        self.cache: GroupCache | None = None
        if chains is not None:
            self.cache = GroupCache(num_blocks, block_size, groups, chains)
            self.cache_log = self.cached_level = self.cache.log
            self.meter += ("shared", "shared_in_windows", "shared_states")
        # Table entries beyond the first of a block, as ``free`` counts them.
        self._shared = 0
        self.prefills: dict[Sequence, Partial] = {}
        keeps_tables = ids or self.cache is not None
        self.group_tables = HybridTables(num_blocks, block_size, groups, self.cache) if keeps_tables else None
        # Of all sequences, in a full group.
        self._blocks = 0
        self._transaction: HybridTransaction = HybridTransaction(self)
        self._nothing = Partial(0, (0,) * len(self.giving), 0)

    @property
    def evicted_blocks(self) -> int:
        """See ``Memory``."""
        return self.cache.pool.evicted_blocks if self.cache else 0

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        if self.cache is None:
            return super().cached_block_ids()
        return np.flatnonzero(np.frombuffer(self.cache.pool.is_named, np.uint8))

    def pages(self, blocks: int, skipped: Values[int]) -> int:
        """Pages of all growing groups where a full one has ``blocks``, and one of each other kind has given back so many
        of them."""
        pages = self.growing * blocks
        for kind, back in zip(self.giving, skipped, strict=True):
            pages -= kind.number * back
        return pages

    def skipped_in_prefill(self, computed: int, tokens: int, before: Values[int]) -> list[int]:
        """Blocks that each kind gives back in a step that computes a prompt from ``computed`` tokens up to ``tokens``,
        where it has given back ``before`` of them."""
        kinds = zip(self.giving, before, strict=True)
        return [kind.skipped.in_prefill(computed, tokens) - back for kind, back in kinds]

    def skipped_by(self, sequence: Sequence, decode_step: int) -> list[int]:
        """Blocks that a decoding sequence has given back before ``decode_step``, of each kind."""
        return [kind.skipped.so_far(sequence, decode_step) for kind in self.giving]

    def transaction(self, decode_step: int) -> HybridTransaction:
        """The tentative grants of ``decode_step``; one at a time."""
        transaction = self._transaction
        if self.cache and self.group_tables:
            self.group_tables.grow_until(decode_step)
            self._count_shared()
            self.cache.begin_step()
        transaction.decode_step, transaction.free = decode_step, self.free
        need = transaction.takes = self.growing * self._phases[decode_step % self.block_size]
        for kind in self.giving:
            need -= kind.number * kind.skipped.in_step(decode_step)
        transaction.need = need
        return transaction

    def begin(self, sequence: Sequence, known_tokens: int) -> None:
        """A sequence that waited holds the pages of ``known_tokens``, which it found."""
        if known_tokens:
            blocks = known_tokens // self.block_size
            skipped = self.skipped_in_prefill(known_tokens, known_tokens, self._nothing.skipped)
            self._hold(blocks, skipped)
            self.prefills[sequence] = Partial(blocks, tuple(skipped), known_tokens)

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Pages for the tokens of a prefill that goes on, those of the chunk in ``decode_step`` included."""
        before, computed = self.prefills.get(sequence, self._nothing), sequence.computed_tokens
        start = before.computed_tokens
        if sequence not in self.prefills:
            self.free -= self.fixed
        blocks = -(-computed // self.block_size)
        more = self.skipped_in_prefill(start, computed, before.skipped)
        self._hold(blocks - before.blocks, more)
        skipped = tuple(back + again for back, again in zip(before.skipped, more, strict=True))
        self.prefills[sequence] = Partial(blocks, skipped, computed)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.reach(sequence, start, computed)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; what the prefill held becomes part of it."""
        before, size, phases = sequence.start_tokens - 1, self.block_size, self._phases
        if sequence not in self.prefills:
            self.free -= self.fixed
        held = self.prefills.pop(sequence, self._nothing)
        more = self.skipped_in_prefill(sequence.computed_tokens, before + 1, held.skipped)
        self._hold(-(-(before + past) // size) - held.blocks, more)
        phase = (decode_step - before) % size
        phases[phase] += 1
        phases[phase + size] += 1
        for kind, back, again in zip(self.giving, held.skipped, more, strict=True):
            kind.skipped.join(sequence, before + 1 - decode_step, back + again)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.join(sequence, decode_step)

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``; of ``group_tables``."""
        if self.group_tables:
            self.group_tables.grow_until(state.decode_step + steps)

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """A running sequence grows no more and keeps its pages."""
        ahead, size = 1 - sequence.lag, self.block_size
        held = sequence.held_tokens(decode_step)
        self._end_growth(ahead % size)
        skipped = tuple(kind.skipped.leave(sequence, decode_step) for kind in self.giving)
        self.prefills[sequence] = Partial(-(-held // size), skipped, held)
        if self.group_tables:
            self.group_tables.grow_until(decode_step)
            self.group_tables.park(sequence)

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``."""
        held = self.prefills.pop(sequence)
        self._hold(-held.blocks, [-back for back in held.skipped])
        self.free += self.fixed
        if self.group_tables:
            self.group_tables.grow_until(decode_step)
            self.group_tables.drop(sequence)
        if self.cache:
            self.cache.settle()

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; a prefill that goes on gives up its pages too."""
        for sequence in preempted:
            if sequence in self.prefills:
                self.drop(sequence, decode_step)
        super().evict(tuple(s for s in preempted if s.start_step != NOT_DECODING), swapped_out, decode_step)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``."""
        size = self.block_size
        if self.group_tables:
            self.group_tables.grow_until(decode_step)
        for sequence in leaving:
            ahead = 1 - sequence.lag
            self._end_growth(ahead % size)
            self._hold(
                (ahead - decode_step) // size, [-kind.skipped.leave(sequence, decode_step) for kind in self.giving]
            )
            self.free += self.fixed
            if self.group_tables:
                self.group_tables.drop(sequence)
        if self.cache:
            self._count_shared()
            self.cache.moment = after_step(decode_step)
            self.cache.settle()

    def _end_growth(self, phase: int) -> None:
        self._phases[phase] -= 1
        self._phases[phase + self.block_size] -= 1

    def _count_shared(self) -> None:
        """``free`` counts a block once, however many tables name it."""
        if self.cache:
            shared = sum(self.cache.shared.values())
            self.free += shared - self._shared
            self._shared = shared

    def _hold(self, blocks: int, skipped: Values[int]) -> None:
        """So many blocks more are held in a full group, and more of them given back in a group of each other kind."""
        self._blocks += blocks
        for kind, back in zip(self.giving, skipped, strict=True):
            kind.given_back += back
        self.free -= self.pages(blocks, skipped)

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Steps from the coming one on in which every sequence finds its pages in any order of taking, with
        ``blocks`` free before them; perhaps fewer than the truth."""
        if self.cache and (self.cache.shared[SLIDING] or self.cache.shared[STATE]):
            # Where windows pass blocks that others have, too, fewer pages come back.
            return 1
        alike = min((kind.skipped.steps_alike(state.decode_step) for kind in self.giving), default=limit)
        # No sequence takes more than a page a group in so many steps, even if nothing comes back.
        safe = blocks // (self.growing * state.batch_size) * self.block_size if self.growing else limit
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
        start = decode_step % self.block_size
        takes = self._phases[start : start + self.block_size]
        backs = [0] * self.block_size
        for kind in self.giving:
            backs = [
                back + kind.number * more for back, more in zip(backs, kind.skipped.cycle(decode_step), strict=True)
            ]
        return [(self.growing * take, back) for take, back in zip(takes, backs, strict=True)]

    def room_after(self, state: State, steps: int) -> int:
        """See ``PagedMemory``; within a leap every cycle of a block is as the first."""
        cycles, rest = divmod(steps, self.block_size)
        exchanges = [take - back for take, back in self._cycle(state.decode_step)]
        taken = cycles * sum(exchanges) + sum(exchanges[:rest])
        return (self.free - taken) * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``: live and held are those of a group that keeps every token, and so is the block_tail of
        prefills that go on; skipped are the slots of those that a group of another kind has given back."""
        size, decode_step = self.block_size, state.decode_step
        others: tuple[int, ...] = (size * (state.batch_size + len(self.prefills)),) if self.fixed else ()
        if self.cache and self.group_tables:
            if steps and (self.cache.shared[SLIDING] or self.cache.shared[STATE]):
                self.group_tables.grow_until(decode_step + 1)
            self._count_shared()
            self.cache.settle()
            self.cache.log.row += 1
            others += tuple(entries * size for entries in self.cache.shared.values())
        partial = sum(held.computed_tokens for held in self.prefills.values())
        tail = sum(max(0, held.blocks * size - s.target_tokens) for s, held in self.prefills.items())
        if not steps:
            live = state.batch_size * (decode_step - 1) + state.lag_sum + partial
            return live, self._blocks * size, tail, *(kind.given_back * size for kind in self.giving), *others
        taken, held = self.growth(decode_step, steps), self._blocks + self._phases[decode_step % size]
        before = [kind.given_back for kind in self.giving]
        changes = [kind.skipped.advance(decode_step, steps) for kind in self.giving]
        self._hold(taken, [given_back for _, given_back in changes])
        skipped = ((back + first) * size for back, (first, _) in zip(before, changes, strict=True))
        live = state.batch_size * decode_step + state.lag_sum + partial
        return live, held * size, tail, *skipped, *others
