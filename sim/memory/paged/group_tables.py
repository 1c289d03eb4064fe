"""Block tables for KV groups: one table per group, with null entries before a window.

A step handles the sequences in order of arrival. For each sequence, as in ``KVCacheManager.allocate_slots`` of vLLM 0.33:

    skip       group by group, release the blocks before the window of the first token to compute
    take       group by group, take blocks for the tokens of the step
    publish    group by group, give full blocks a hash if there is a prefix cache (``group_cache``)
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import RING, SLIDING, STATE, PageGroups, skipped_blocks
from ..accounting.moments import after_step, at_row
from ..prefix import BlockPool
from .group_cache import NULL_BLOCK, GroupCache, Table
from .skipped import known_tokens


class GroupTables:
    """Block ids behind the counts. As in ``BlockTables``, tables are updated when sequences join, leave or are read.

    Args:
        pool: Blocks of the device.
        host_blocks: Blocks of the swap space.
        cache: The prefix cache, if any, of the same pool.

    Attributes:
        tables: For each sequence, one table per group, in the order of the groups.
    """

    def __init__(
        self,
        pool: BlockPool,
        host_blocks: int,
        block_size: int,
        groups: PageGroups,
        cache: GroupCache | None,
    ) -> None:
        size = groups.hash_block_size(block_size)
        self.pool = pool
        self.host_pool = BlockPool(host_blocks)
        self.host_tables: dict[Sequence, tuple[Table, ...]] = {}
        self.tables: dict[Sequence, tuple[Table, ...]] = {}
        self._size, self._groups, self._cache, self._ahead = size, groups, cache, groups.ahead
        classes = groups.classes(block_size)
        #: Tokens of a block of each group.
        self._sizes = groups.block_sizes(block_size)
        #: Most blocks that an admission asks for in each sliding group.
        self._most = {
            place: each.most_prompt_blocks for each in classes if each.kind == SLIDING for place in each.places
        }
        # Classes that release blocks while their sequences run: window and block size; and their groups, in order.
        windowed = [each for each in classes if each.window_tokens]
        self._windows = [(each.window_tokens, each.block_size) for each in windowed]
        self._releasing = sorted((place, number) for number, each in enumerate(windowed) for place in each.places)
        #: Groups with a window of one token.
        self._alone = {
            place for each in windowed if each.kind == SLIDING and each.window_tokens == 1 for place in each.places
        }
        self._none_skipped = [0] * len(windowed)
        # Sequences that may take or release blocks in a step, by the step modulo the smallest size of blocks.
        self._takers: list[set[Sequence]] = [set() for _ in range(size)]
        self._givers: list[set[Sequence]] = [set() for _ in range(size)]
        # Sequences before their first decode, which releases the blocks that only their prompt needed; and before their
        # second decode, if only that one does.
        self._prompts: set[Sequence] = set()
        self._second: set[Sequence] = set()
        # Place up to which each sequence has released blocks, by class of groups.
        self._skipped: dict[Sequence, list[int]] = {}
        # Sequences that have a block for each draft at the end of their tables of states.
        self._drafting: set[Sequence] = set()
        self._grown_until = 0
        # The step whose growth is made up for, or None while a row is decided.
        self._growing_in: int | None = None

    def reach(self, sequence: Sequence, known: int, tokens: int, published: int) -> None:
        """Release and take the blocks of a sequence for a step; see ``skip`` and ``take``."""
        self.skip(sequence, known)
        self.take(sequence, tokens, published)

    def skip(self, sequence: Sequence, known: int) -> None:
        """Release the blocks of each group that it does not need for the token after the first ``known`` tokens."""
        if not self._windows:
            return
        before = self._skipped.get(sequence, self._none_skipped)
        until = [skipped_blocks(known, window, size) for window, size in self._windows]
        if until == before:
            return
        tables = self._tables_of(sequence)
        for group, number in self._releasing:
            table, places = tables[group], slice(before[number], until[number])
            passed = [block for block in table[places] if block is not NULL_BLOCK]
            if passed:
                self.give_back(passed, group)
                table[places] = [NULL_BLOCK] * len(table[places])
        self._skipped[sequence] = until

    def take(
        self,
        sequence: Sequence,
        tokens: int,
        published: int,
        slots: int = 0,
        loads: bool = False,
        hashed: int | None = None,
    ) -> None:
        """Extend the tables of a sequence to ``tokens``, the tokens computed after the step.

        Args:
            published: How many of them look-ups can find from now on.
            slots: Tokens that groups of attention have blocks for, where those are more: a drafter looks ahead.
            hashed: See ``GroupCache.publish``.
            loads: Whether a load fills the blocks, none of which are for states of drafts.
        """
        tables, drafts = self._tables_of(sequence), self._groups.drafts
        for place, (kind, size, table) in enumerate(zip(self._groups.kinds, self._sizes, tables, strict=True)):
            if kind == STATE:
                self._take_states(sequence, table, tokens, 0 if loads else drafts)
                continue
            if loads and place in self._alone:
                # A token attends to no other: nothing that is loaded is of use.
                continue
            missing = (1 if kind == RING else -(-max(tokens, slots) // size)) - len(table)
            if missing > 0:
                table += self._new_blocks(missing)
        if drafts and not loads:
            self._drafting.add(sequence)
        if self._cache:
            self._cache.publish(sequence, tables, published, hashed)

    def take_after_load(self, sequence: Sequence, tokens: int) -> None:
        """A sequence that loads ``tokens`` and computes nothing yet takes the blocks that no load fills, after those of all groups: for
        states of drafts, and of a window of one token that ends within a block."""
        drafts = self._groups.drafts
        for place, (kind, table) in enumerate(zip(self._groups.kinds, self._tables_of(sequence), strict=True)):
            if kind == STATE:
                table += self._new_blocks(drafts)
            elif place in self._alone:
                table += self._new_blocks(max(0, -(-tokens // self._sizes[place]) - len(table)))
        if drafts:
            self._drafting.add(sequence)

    def _take_states(self, sequence: Sequence, table: Table, tokens: int, drafts: int) -> None:
        """Only the state at the end of the step is kept, and one that a prefill exports; the blocks before it within the step get
        null entries. States of drafts come last: where the step enters another block they move behind it."""
        groups, before, ends = self._groups, len(table), -(-tokens // self._size)
        missing = (ends if groups.states_by_block else 1) + drafts - before
        if missing <= 0:
            return
        if groups.states_by_block:
            scratch = self._scratch(sequence)
            kept_from = ends - 1 - self._exports(sequence, before - scratch, tokens)
            table += [NULL_BLOCK] * (kept_from - before)
            for place in range(before - scratch, min(before, kept_from)):
                table.append(table[place])
                table[place] = NULL_BLOCK
            missing = ends + drafts - len(table)
        table += self._new_blocks(missing)

    def _new_blocks(self, count: int) -> list[int]:
        if self._cache is None:
            return self.pool.get_new_blocks(count)
        moment = at_row(self._cache.log.row) if self._growing_in is None else after_step(self._growing_in)
        return self.pool.get_new_blocks(count, [moment] * count)

    def _scratch(self, sequence: Sequence) -> int:
        """Blocks for states of drafts at the end of a table of states."""
        return self._groups.drafts if sequence in self._drafting else 0

    def _exports(self, sequence: Sequence, blocks: int, tokens: int) -> bool:
        """Whether a step from a table of ``blocks`` up to ``tokens`` exports a state from within (``PageGroups.exports``)."""
        groups = self._groups
        last = tokens >= sequence.prefill_end or groups.retention_tokens > 0
        return groups.exports_states and last and groups.last_end(tokens, self._size) > blocks

    def lacked(
        self,
        sequence: Sequence,
        tables: tuple[Table, ...],
        tokens: int,
        slots: int,
        computed: int,
        admits: bool = False,
    ) -> int:
        """Blocks that ``take`` would take beside those in ``tables``.

        Args:
            tokens, slots: See ``take``.
            computed: Tokens that it has before, those that it loads included: a prefill that goes on within a block exports no
                state.
            admits: Whether a sliding group asks for no more than an admission does.
        """
        groups, lacked = self._groups, 0
        for place, (kind, size, table) in enumerate(zip(groups.kinds, self._sizes, tables, strict=True)):
            blocks = -(-slots // size)
            if kind == RING:
                blocks = 1
            elif kind == SLIDING and admits:
                blocks = min(blocks, self._most[place] or blocks)
            elif kind == STATE:
                ends, scratch = -(-tokens // self._size) if groups.states_by_block else 1, self._scratch(sequence)
                exports = groups.exports(computed, tokens, sequence.prefill_end, self._size)
                # The state is exported into the last block but one, also where look-ups find it a block earlier.
                own = len(table) - scratch
                new = 1 + groups.drafts - scratch + (exports and ends - 1 > own)
                blocks = min(ends + groups.drafts, len(table) + new)
            lacked += max(0, blocks - len(table))
        return lacked

    def passed(self, found: tuple[Table, ...], tokens: int) -> tuple[Table, ...]:
        """Tables that a sequence has found, without what it does not need for the token after ``tokens``."""
        tables = [*found]
        until = [skipped_blocks(tokens, window, size) for window, size in self._windows]
        for group, number in self._releasing:
            nulls: Table = [NULL_BLOCK] * until[number]
            tables[group] = nulls + found[group][until[number] :]
        return tuple(tables)

    def enter(self, sequence: Sequence, found: tuple[Table, ...]) -> None:
        """Set the tables of a waiting sequence to the blocks that it found."""
        self.tables[sequence] = found

    def receive(self, sequence: Sequence, tokens: int) -> None:
        """A waiting sequence takes the blocks of its first ``tokens``, which it comes with, of all groups, before those of the step."""
        if tokens:
            self.tables[sequence] = self.passed(tuple([] for _ in self._groups.kinds), tokens)
            self.take(sequence, tokens, 0, loads=True)

    def _tables_of(self, sequence: Sequence) -> tuple[Table, ...]:
        tables = self.tables.get(sequence)
        if tables is None:
            tables = self.tables[sequence] = tuple([] for _ in range(self._groups.number))
        return tables

    def give_back(self, blocks: list[int], group: int) -> None:
        """Release blocks of one table; the last of them is taken again first."""
        if self._cache:
            self._cache.leave(blocks, group)
        self.pool.free_blocks(blocks)

    def give_back_all(self, tables: tuple[Table, ...]) -> None:
        """Release the blocks of all tables of a sequence at once: those of the last group, and of it the last one, are taken first."""
        blocks: list[int] = []
        for group, table in enumerate(tables):
            own = [block for block in table if block is not NULL_BLOCK]
            if self._cache:
                self._cache.leave(own, group)
            blocks += own
        self.pool.free_blocks(blocks)

    def join(self, sequence: Sequence, decode_step: int, known: int) -> None:
        """End a prefill in ``decode_step``, or return from the host; from the next step on its tables grow and its windows
        move.

        Args:
            known: See ``skip``.
        """
        start, size = sequence.start_tokens, self._size
        if sequence in self.host_tables:
            self.tables[sequence] = _moved(self.host_tables.pop(sequence), self.host_pool, self.pool)
        self.reach(sequence, known, start, start)
        # Before step s it holds start + s - decode_step - 1 tokens.
        self._takers[(decode_step + 1 - start) % size].add(sequence)
        for window, _ in self._windows:
            self._givers[(decode_step + window - start + self._ahead) % size].add(sequence)
        self._prompts.add(sequence)

    def grow_until(self, decode_step: int) -> None:
        """Update all tables for the steps before ``decode_step`` that are not yet done."""
        for step in range(self._grown_until, decode_step):
            self._growing_in, place = step, step % self._size
            moving = self._takers[place] | self._givers[place] | self._prompts | self._second
            if self._cache:
                # Also sequences that fill a block in the step.
                moving |= self._takers[(step + 1) % self._size]
                self._cache.moment = after_step(step)
            self._pass_prompts()
            for sequence in sorted(moving, key=attrgetter("order")):
                held = sequence.held_tokens(step)
                self.reach(sequence, known_tokens(sequence, step, self._ahead), held + 1, held + 1 - self._ahead)
            if self._cache:
                self._cache.settle()
        self._growing_in, self._grown_until = None, max(decode_step, self._grown_until)
        if self._cache:
            self._cache.moment = at_row(self._cache.log.row)

    def grown(self, decode_step: int, idle: AbstractSet[Sequence]) -> None:
        """Note that the tables of the running sequences were updated one by one for ``decode_step``."""
        self._pass_prompts()
        self._grown_until = decode_step + 1

    def _pass_prompts(self) -> None:
        """The sequences in ``_prompts`` decode for the first time."""
        self._second = self._prompts if self._ahead else set()
        self._prompts = set()

    def drop(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence; does nothing if they were already released."""
        if sequence in self.tables:
            for group, table in enumerate(self.detach(sequence)):
                self.give_back([block for block in table if block is not NULL_BLOCK], group)

    def detach(self, sequence: Sequence) -> tuple[Table, ...]:
        """Remove the tables of a sequence, the blocks of which stay taken until they are given back."""
        self._skipped.pop(sequence, None)
        self._drafting.discard(sequence)
        if self._cache:
            self._cache.forget(sequence)
        self.park(sequence)
        return self.tables.pop(sequence)

    def swap_out(self, sequence: Sequence, computed: int) -> None:
        """Move the blocks that the token after ``computed`` tokens needs to the host, and release the others."""
        self.skip(sequence, computed)
        self._skipped.pop(sequence, None)
        self.host_tables[sequence] = _moved(self.tables.pop(sequence), self.pool, self.host_pool)
        self.park(sequence)

    def park(self, sequence: Sequence) -> None:
        """Stop updating the tables of a sequence."""
        for members in (*self._takers, *self._givers):
            members.discard(sequence)
        self._prompts.discard(sequence)
        self._second.discard(sequence)


def _moved(tables: tuple[Table, ...], source: BlockPool, target: BlockPool) -> tuple[Table, ...]:
    """The same tables with blocks of another pool; those of ``source`` are released."""
    moved = []
    for table in tables:
        blocks = [block for block in table if block is not NULL_BLOCK]
        ids = iter(target.get_new_blocks(len(blocks)))
        moved.append([NULL_BLOCK if block is NULL_BLOCK else next(ids) for block in table])
        source.free_blocks(blocks)
    return tuple(moved)
