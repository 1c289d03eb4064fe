"""Paged memory for KV groups with one pool of pages: groups keep every token, the tokens of a window, or a state.

A block of a sequence has one page in each group. As in vLLM's hybrid KV cache manager, all groups grow at the same time, by
one page each. Groups with a window release the pages before the window (``skipped``). A group that keeps the state at the
end of a block releases the state of the previous block. Two counts are sufficient: the blocks held in a group that keeps
every token, and for each other kind the number of them that one group has released:

    free = pages - groups * blocks + sum over kinds of groups * skipped

Past its window a sequence takes a page every ``block_size`` steps in a sliding group, and releases one every
``block_size`` steps. **Each sequence releases before it takes**: in running order, a sequence releases the pages before its
window, and then takes the pages for its next token. Released pages are available to this sequence and the ones after it in
the order, not to the ones before it.

Without prefix caching a state takes one page, from the first chunk of the prefill to the end of the sequence. It is not
counted among the groups above, but as ``fixed`` pages of each sequence.

With a prefix cache (``group_cache``) a page may be in several tables; ``shared`` counts the entries beyond the first:

    free = pages - groups * blocks + sum over kinds of groups * skipped + shared

Tables then always have ids, and grants of a step take effect at once, because the next look-up depends on them.
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
from .skipped import SkippedBlocks, SkippedStates, known_tokens


class Partial(NamedTuple):
    """Pages of a sequence in a chunked prefill, or of a stalled sequence.

    Attributes:
        blocks: Number of blocks in a full group.
        skipped: Number of these blocks that one group of each other kind has released.
        computed_tokens: Computed tokens, including the last chunk.
        known_tokens: Those of them that are known to be computed when the next step is decided.
    """

    blocks: int
    skipped: tuple[int, ...]
    computed_tokens: int
    known_tokens: int


class Kind:
    """Groups of one kind that release blocks of running sequences; all of them release the same blocks.

    Attributes:
        number: Number of groups.
        released: Number of blocks that one of the groups has released, over all sequences.
    """

    __slots__ = ("number", "released", "skipped")

    def __init__(self, number: int, skipped: SkippedBlocks) -> None:
        self.number, self.skipped, self.released = number, skipped, 0


class HybridTransaction(PagedTransaction):
    """Tentative grants of one step, in pages of all groups; with a prefix cache they take effect at once.

    Attributes:
        free: Free pages before any sequence releases or takes pages.
        takes: Pages that the decoding sequences take in the step.
        need: ``takes`` minus the pages that they release.
    """

    __slots__ = ("found", "groups", "takes")
    memory: HybridMemory
    takes: int
    #: Result of the last look-up.
    found: Found

    def __init__(self, memory: HybridMemory) -> None:
        super().__init__(memory)
        self.groups = memory.growing

    def blocks_of(self, tokens: int) -> int:
        """Pages that must be free for the admission of a prompt of ``tokens``."""
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
        """See ``PagedTransaction``: the maximum of the pages for all its tokens and for the tokens to compute now."""
        memory, start, size = self.memory, sequence.start_tokens, self.block_size
        if memory.cache is None:
            return self.blocks_of(start)
        found, groups, blocks = self.found.blocks, memory.groups, -(-start // size)
        if memory.cache.computes_now(self.found):
            # The state at the end of the prefix is only available after this step.
            return memory.num_blocks + 1
        now = -(-(found * size + tokens) // size)
        windows = max(0, min(blocks, groups.most_prompt_blocks) - found)
        states = groups.states * min(blocks - found, 1)
        most = groups.full * (blocks - found) + groups.sliding * windows + states
        at_once = (groups.full + groups.sliding) * (now - found) + states
        return max(most, at_once) + memory.cache.to_take(self.found)

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        memory, groups, now = self.memory, self.memory.groups, -(-tokens // self.block_size)
        if memory.cache is None:
            return self.blocks_of(sequence.start_tokens) - memory.growing * now - memory.fixed
        if memory.cache.computes_now(self.found):
            return 0
        found = self.found.blocks
        at_once = (groups.full + groups.sliding) * (now - found) + groups.states + memory.cache.to_take(self.found)
        return self.lacking(sequence, tokens - found * self.block_size) - at_once

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        cache, tables = self.memory.cache, self.memory.group_tables
        if cache is None or tables is None:
            self.free -= blocks
            if tables:
                # In the order of admissions; the executor knows those that end their prefill first.
                tables.take(sequence, tokens, tokens)
            return
        sequence.computed_tokens = known = self.found.blocks * self.block_size
        cache.enter(sequence, self.found)
        tables.enter(sequence, self.found.tables)
        self.memory.begin(sequence, known)
        tables.reach(sequence, known, known + tokens, known + tokens)
        self.free = cache.pool.num_free

    def junction(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        cache = self.memory.cache
        return cache.junction(sequence) * self.block_size if cache else 0

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``."""
        tables = self.memory.group_tables
        if tables:
            tables.grow_until(self.decode_step + 1)
            tables.reach(sequence, self.memory.prefills[sequence].known_tokens, tokens, tokens)

    def chunk_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a prefill takes for its next ``tokens``, minus the pages that it releases for them."""
        memory, computed = self.memory, sequence.computed_tokens
        holding = memory.prefills[sequence]
        more = -(-(computed + tokens) // self.block_size) - holding.blocks
        if memory.group_tables:
            # Released even if the chunk then finds too few pages.
            memory.group_tables.skip(sequence, holding.known_tokens)
        if memory.cache:
            # Released pages may still be in tables of other sequences.
            self.free = memory.cache.pool.num_free
            return (memory.groups.full + memory.groups.sliding) * more + memory.groups.states * min(more, 1)
        return memory.pages(more, memory.skipped_in_prefill(holding, computed, computed + tokens))

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
            tables.skip(sequence, known_tokens(sequence, self.decode_step, self.memory.groups.ahead))
        self._freed(back)
        return taken

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        tables = self.memory.group_tables
        if tables and sequence.start_step == NOT_DECODING:
            until = sequence.computed_tokens + tokens
            tables.take(sequence, until, until)
        elif tables:
            held = sequence.held_tokens(self.decode_step)
            tables.take(sequence, held + 1, held + 1 - self.memory.groups.ahead)
        self._freed(-blocks)

    def pass_over(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        holding = self.memory.prefills[sequence]
        # In the next decision none of its tokens is in flight.
        self.memory.prefills[sequence] = holding._replace(known_tokens=holding.computed_tokens)

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
        """Pages that a decoding sequence releases in ``decode_step``, and pages that it then takes."""
        memory, held = self.memory, sequence.held_tokens(decode_step)
        back = sum(
            kind.number * (kind.skipped.in_decode(sequence, decode_step) - kind.skipped.so_far(sequence, decode_step))
            for kind in memory.giving
        )
        return back, self.groups * (held % self.block_size == 0)

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """Pages that a sequence would release if it is preempted before ``decode_step``."""
        memory = self.memory
        if sequence in memory.prefills:
            return memory.pages(*memory.prefills[sequence][:2]) + memory.fixed
        blocks = -(-sequence.held_tokens(decode_step) // self.block_size)
        return memory.pages(blocks, memory.skipped_by(sequence, decode_step)) + memory.fixed


class HybridMemory(PagedMemory):
    """Pages of running sequences and of chunked prefills, without swap space.

    Args:
        num_blocks: Pages of the pool.
        block_size: Tokens per page, for the layers of one group.
        groups: The groups that share the pool.
        ids: Whether to keep block tables, one per sequence and group.
        chains: Names of the blocks of every request, for prefix caching; None disables it.

    Attributes:
        cache: The prefix cache, or None.
        giving: The kinds of groups that release blocks while their sequences run.
        growing: Number of groups that take a page with every block.
        fixed: Additional pages of every sequence.
        prefills: Pages of sequences in a chunked prefill and of stalled sequences; used instead of ``partial``.
        group_tables: The block tables, one per sequence and group; None without ids. Used instead of ``tables``.
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
            self.giving.append(Kind(groups.sliding, SkippedBlocks(groups.window_tokens, block_size, groups.ahead)))
            self.meter += ("skipped",)
        if groups.states_by_block:
            self.giving.append(Kind(groups.states, SkippedStates(block_size, groups.ahead)))
            self.meter += ("skipped_states",)
        elif groups.states:
            self.meter += ("states",)
        self.cache: GroupCache | None = None
        if chains is not None:
            self.cache = GroupCache(num_blocks, block_size, groups, chains)
            self.cache_log = self.cached_level = self.cache.log
            self.meter += ("shared", "shared_in_windows", "shared_states")
        # Table entries beyond the first of a block, as included in ``free``.
        self._shared = 0
        self.prefills: dict[Sequence, Partial] = {}
        keeps_tables = ids or self.cache is not None
        self.group_tables = HybridTables(num_blocks, block_size, groups, self.cache) if keeps_tables else None
        # Blocks of all sequences, in a full group.
        self._blocks = 0
        self._transaction: HybridTransaction = HybridTransaction(self)
        self._nothing = Partial(0, (0,) * len(self.giving), 0, 0)

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
        """Pages of all growing groups if a full group has ``blocks`` and one group of each other kind has released
        ``skipped`` of them."""
        pages = self.growing * blocks
        for kind, back in zip(self.giving, skipped, strict=True):
            pages -= kind.number * back
        return pages

    def skipped_in_prefill(self, holding: Partial, computed: int, tokens: int) -> list[int]:
        """Blocks that each kind releases in a step that computes a prompt from ``computed`` up to ``tokens`` tokens.

        Args:
            holding: What the sequence held before the step.
        """
        kinds = zip(self.giving, holding.skipped, strict=True)
        return [kind.skipped.in_chunk(holding.known_tokens, computed, tokens) - back for kind, back in kinds]

    def skipped_by(self, sequence: Sequence, decode_step: int) -> list[int]:
        """Blocks that a decoding sequence has released before ``decode_step``, for each kind."""
        return [kind.skipped.so_far(sequence, decode_step) for kind in self.giving]

    def transaction(self, decode_step: int) -> HybridTransaction:
        """The transaction of ``decode_step``; only one exists at a time."""
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
        """Count the pages of ``known_tokens``, which a waiting sequence has found."""
        if known_tokens:
            blocks = known_tokens // self.block_size
            nothing = self._nothing._replace(known_tokens=known_tokens)
            skipped = self.skipped_in_prefill(nothing, known_tokens, known_tokens)
            self._hold(blocks, skipped)
            self.prefills[sequence] = Partial(blocks, tuple(skipped), known_tokens, known_tokens)

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Count the pages of a prefill that continues, including the chunk of ``decode_step``."""
        before, computed = self.prefills.get(sequence, self._nothing), sequence.computed_tokens
        start = before.computed_tokens
        if sequence not in self.prefills:
            self.free -= self.fixed
        blocks = -(-computed // self.block_size)
        more = self.skipped_in_prefill(before, start, computed)
        self._hold(blocks - before.blocks, more)
        skipped = tuple(back + again for back, again in zip(before.skipped, more, strict=True))
        self.prefills[sequence] = Partial(blocks, skipped, computed, start if self.groups.ahead else computed)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.reach(sequence, before.known_tokens, computed, computed)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; the pages of the prefill become pages of the running sequence."""
        before, size, phases = sequence.start_tokens - 1, self.block_size, self._phases
        if sequence not in self.prefills:
            self.free -= self.fixed
        held = self.prefills.pop(sequence, self._nothing)
        more = self.skipped_in_prefill(held, sequence.computed_tokens, before + 1)
        self._hold(-(-(before + past) // size) - held.blocks, more)
        phase = (decode_step - before) % size
        phases[phase] += 1
        phases[phase + size] += 1
        for kind, back, again in zip(self.giving, held.skipped, more, strict=True):
            kind.skipped.join(sequence, before + 1 - decode_step, back + again)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.join(sequence, decode_step, held.known_tokens)

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``; applies to ``group_tables``."""
        if self.group_tables:
            self.group_tables.grow_until(state.decode_step + steps)

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """Stall a running sequence: it stops growing and keeps its pages."""
        ahead, size = 1 - sequence.lag, self.block_size
        held = sequence.held_tokens(decode_step)
        self._end_growth(ahead % size)
        skipped = tuple(kind.skipped.leave(sequence, decode_step) for kind in self.giving)
        self.prefills[sequence] = Partial(-(-held // size), skipped, held, held)
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
            # Asynchronous steps ask for a horizon after this, before the next transaction.
            self._count_shared()
            self.cache.settle()

    def hold_finished(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        for sequence in finished:
            self.stall(sequence, decode_step)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
        for sequence in leaving:
            if self.cache and self.group_tables:
                self.cache.publish(sequence, self.group_tables.tables[sequence], sequence.held_tokens(decode_step))
            if sequence in self.prefills:
                self.drop(sequence, decode_step)
            else:
                self.release((sequence,), decode_step)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; a chunked prefill also releases its pages."""
        growing = tuple(sequence for sequence in preempted if sequence not in self.prefills)
        for sequence in preempted:
            if sequence in self.prefills:
                self.drop(sequence, decode_step)
        super().evict(growing, swapped_out, decode_step)

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
        """Update ``free`` for shared blocks: a block in several tables counts once."""
        if self.cache:
            shared = sum(self.cache.shared.values())
            self.free += shared - self._shared
            self._shared = shared

    def _hold(self, blocks: int, skipped: Values[int]) -> None:
        """Hold ``blocks`` more in a full group; a group of each other kind releases ``skipped`` more."""
        self._blocks += blocks
        for kind, back in zip(self.giving, skipped, strict=True):
            kind.released += back
        self.free -= self.pages(blocks, skipped)

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """Lower bound of the number of steps, from the next one on, in which every sequence finds its pages in any order
        of taking, with ``blocks`` free before them."""
        if self.cache and (self.cache.shared[SLIDING] or self.cache.shared[STATE]):
            # A window that passes a shared block does not free its page.
            return 1
        alike = min((kind.skipped.steps_alike(state.decode_step) for kind in self.giving), default=limit)
        # In ``safe`` steps the sequences take at most ``blocks`` pages, even if none is released.
        safe = blocks // (self.growing * state.batch_size) * self.block_size if self.growing else limit
        return min(alike, safe if safe >= limit else self._steps_within(state.decode_step, blocks, limit))

    def _steps_within(self, decode_step: int, blocks: int, limit: int) -> int:
        """As ``steps_with``, while all cycles of ``block_size`` steps are equal."""
        exchanges = self._cycle(decode_step)
        level = peak = 0
        for take, back in exchanges:
            peak = max(peak, level + take)
            level += take - back
        # Increase of held pages per cycle: pages of full groups, and of windows that are not yet full.
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
        """Number, from 1, of the first step from ``decode_step`` on after which ``blocks`` pages are free.

        None if the first cycle has no such step. Later equal cycles have none either, as a cycle never releases more
        pages than it takes.
        """
        free = self.free
        for number, (take, back) in enumerate(self._cycle(decode_step), 1):
            free += back - take
            if free >= blocks:
                return number
        return None

    def _cycle(self, decode_step: int) -> list[tuple[int, int]]:
        """Pages taken and released in each of the ``block_size`` steps from ``decode_step`` on."""
        start = decode_step % self.block_size
        takes = self._phases[start : start + self.block_size]
        backs = [0] * self.block_size
        for kind in self.giving:
            backs = [
                back + kind.number * more for back, more in zip(backs, kind.skipped.cycle(decode_step), strict=True)
            ]
        return [(self.growing * take, back) for take, back in zip(takes, backs, strict=True)]

    def room_after(self, state: State, steps: int) -> int:
        """See ``PagedMemory``; within a leap all cycles of ``block_size`` steps are equal."""
        cycles, rest = divmod(steps, self.block_size)
        exchanges = [take - back for take, back in self._cycle(state.decode_step)]
        taken = cycles * sum(exchanges) + sum(exchanges[:rest])
        return (self.free - taken) * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``: live, held and the block_tail of chunked prefills are counts of a group that keeps every
        token; skipped are the slots that a group of another kind has released."""
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
            return live, self._blocks * size, tail, *(kind.released * size for kind in self.giving), *others
        taken, held = self.growth(decode_step, steps), self._blocks + self._phases[decode_step % size]
        before = [kind.released for kind in self.giving]
        changes = [kind.skipped.advance(decode_step, steps) for kind in self.giving]
        self._hold(taken, [released for _, released in changes])
        skipped = ((back + first) * size for back, (first, _) in zip(before, changes, strict=True))
        live = state.batch_size * decode_step + state.lag_sum + partial
        return live, held * size, tail, *skipped, *others
