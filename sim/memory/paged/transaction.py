"""Tentative grants of one step of a paged memory."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ...types.sequence import NOT_DECODING, Sequence
from ..accounting.kv_groups import FULL, SLIDING
from .counts import BlockCounts
from .group_cache import Found
from .phases import more_blocks
from .skipped import known_tokens


class PagedTransaction:
    """Blocks that are still free after the grants made so far, over all KV groups. See ``Transaction``.

    With a prefix cache of KV groups, grants take effect at once because the next look-up depends on them.

    Attributes:
        memory: The memory of this transaction.
        block_size: Tokens per block.
        free: Free blocks before any running sequence frees or takes blocks. A policy subtracts the blocks that it
            grants.
        takes: Blocks that the running sequences take in the step.
        need: ``takes`` less the blocks that the running sequences free in the step.
        decode_step: The step that is decided.
        groups: KV groups that take a block whenever a sequence needs one.
        group_found: Result of the last look-up in a prefix cache of KV groups.
        known: With drafts: computed tokens of the sequence that was looked up last.
    """

    __slots__ = (
        "block_size",
        "decode_step",
        "free",
        "gave",
        "group_found",
        "groups",
        "known",
        "memory",
        "need",
        "takes",
    )
    memory: BlockCounts
    block_size: int
    free: int
    takes: int
    need: int
    decode_step: int
    groups: int
    group_found: Found
    known: int
    #: The running sequence that gave blocks back last in a pass over all of them, and how many.
    gave: tuple[Sequence | None, int]

    def __init__(self, memory: BlockCounts) -> None:
        self.memory = memory
        self.block_size, self.groups = memory.block_size, memory.growing
        self.gave = None, 0

    def blocks_of(self, tokens: int) -> int:
        """Blocks that must be free for the admission of a prompt of ``tokens``."""
        return self.memory.wanted_blocks(tokens)

    def chunk_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that the next ``tokens`` of a chunked prefill take, less the blocks that its windows free."""
        memory, computed = self.memory, sequence.computed_tokens
        held = memory.partial[sequence]
        more = max(0, -(-(computed + tokens) // memory.unit_tokens) - held.blocks)
        if memory.is_plain:
            return more
        if memory.group_tables:
            # Released even if the chunk then finds too few blocks.
            memory.group_tables.skip(sequence, held.known_tokens)
        if memory.cache:
            # Released blocks may still be in tables of other sequences.
            self.free = memory.cache.pool.num_free
            states = self._new_states(sequence, computed, computed + tokens)
            return self._new_blocks(more, held.blocks) + min(more * memory.groups.states, states)
        return memory.pages(more, memory.skipped_in_prefill(sequence, held, computed, computed + tokens), held.blocks)

    def take_for_running(self) -> None:
        """Grant the running sequences their blocks of the step."""
        self._freed(-self.need)

    def look_up(self, sequence: Sequence) -> int | None:
        """Tokens of a waiting sequence that are computed already: cached ones, or those sent from a prefill replica.

        None if the sequence waits for a copy from the host; sequences behind it may then be admitted.
        """
        cache = self.memory.cache
        if cache is None:
            return sequence.computed_tokens
        self.group_found = cache.look_up(sequence)
        return self.group_found.blocks * self.block_size

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that must be free to admit the sequence that was looked up last.

        The larger of the blocks for all its tokens, and of the blocks for the tokens that it computes in this step.

        Args:
            tokens: Tokens that it would compute in this step.
        """
        memory, start = self.memory, sequence.start_tokens
        if memory.cache is None:
            return self.blocks_of(start) if memory.is_plain else memory.blocks_beside(sequence.computed_tokens, start)
        known = self.group_found.blocks * self.block_size
        if memory.cache.computes_now(self.group_found):
            # The state at the end of the prefix is only available after this step.
            return memory.num_blocks + 1
        most = self._new_states(sequence, known, start) + memory.groups.rings
        for each in memory.classes:
            if each.kind in (FULL, SLIDING):
                most += each.number * max(0, each.wanted_blocks(start) - known // each.block_size)
        return max(most, self._blocks_now(sequence, known + tokens)) + memory.cache.to_take(self.group_found)

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        """The part of ``lacking`` that its first ``tokens`` do not use: blocks that a later step may take."""
        memory = self.memory
        if memory.cache is None:
            return self.blocks_of(sequence.start_tokens) - memory.pages_of(tokens) - memory.fixed
        if memory.cache.computes_now(self.group_found):
            return 0
        at_once = self._blocks_now(sequence, tokens) + memory.cache.to_take(self.group_found)
        return self.lacking(sequence, tokens - self.group_found.blocks * self.block_size) - at_once

    def _blocks_now(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence takes to compute its first ``tokens``, after those that it found."""
        known = self.group_found.blocks * self.block_size
        states = self._new_states(sequence, known, tokens)
        found = known // self.memory.unit_tokens
        more = -(-tokens // self.memory.unit_tokens) - found
        return self._new_blocks(more, found) + states + self.memory.groups.rings

    def _new_blocks(self, units: int, before: int) -> int:
        """Blocks that all groups with tokens allocate to grow a sequence from ``before`` units by ``units``; a unit is ``unit_tokens`` tokens."""
        memory, blocks = self.memory, 0
        for each in memory.classes:
            if each.kind in (FULL, SLIDING):
                blocks += each.number * more_blocks(units, before, each.block_size // memory.unit_tokens)
        return blocks

    def _new_states(self, sequence: Sequence, computed: int, tokens: int) -> int:
        """Blocks that a chunk from ``computed`` up to ``tokens`` tokens, with a new block at its end, takes for states."""
        groups = self.memory.groups
        return groups.states * (1 + groups.exports(computed, tokens, sequence.prefill_end, self.block_size))

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """Grant the sequence that was looked up last its cached blocks, and new blocks for the next ``tokens``.

        Args:
            blocks: The result of ``lacking``.
        """
        cache, tables = self.memory.cache, self.memory.group_tables
        if cache is None or tables is None:
            self.free -= blocks
            known = sequence.computed_tokens
            if not self.memory.is_plain:
                self.memory.begin(sequence, known)
            if tables:
                # In the order of admissions; the executor knows those that end their prefill first.
                tables.receive(sequence, known)
                tables.take(sequence, known + tokens, known + tokens)
            return
        sequence.computed_tokens = known = self.group_found.blocks * self.block_size
        cache.enter(sequence, self.group_found)
        tables.enter(sequence, self.group_found.tables)
        self.memory.begin(sequence, known)
        tables.reach(sequence, known, known + tokens, known + tokens)
        self.free = cache.pool.num_free

    def junction(self, sequence: Sequence) -> int:
        """Tokens of the longer prefix that only some KV groups had cached at the look-up; 0 for none."""
        cache = self.memory.cache
        return cache.junction(sequence) * self.block_size if cache else 0

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Grant a sequence in a chunked prefill the blocks for its first ``tokens``."""
        tables = self.memory.group_tables
        if tables:
            tables.grow_until(self.decode_step + 1)
            tables.reach(sequence, self.memory.partial[sequence].known_tokens, tokens, tokens)

    def needs_block(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether a running sequence needs a new block for the token that it computes in ``decode_step``."""
        return not sequence.held_tokens(decode_step) % self.memory.unit_tokens

    def exchange(self, sequence: Sequence, decode_step: int) -> tuple[int, int]:
        """Blocks that a running sequence frees in ``decode_step``, and blocks that it then takes."""
        held = sequence.held_tokens(decode_step)
        back = sum(
            kind.number * (kind.in_decode(sequence, decode_step) - kind.so_far(sequence, decode_step))
            for kind in self.memory.giving
        )
        if self.memory.is_plain:
            return back, self.groups * (held % self.block_size == 0)
        return back, sum(groups.number for groups in self.memory.sizes if held % groups.size == 0)

    # Where the running sequences go one by one. With block ids they take their blocks at once.

    def grow_tables(self, steps: int) -> None:
        """Bring block tables up to date.

        Args:
            steps: 0 before the running sequences are granted blocks one by one. 1 after all of them were, and before
                any other sequence takes or frees blocks.
        """
        tables = self.memory.tables or self.memory.group_tables
        if tables:
            tables.grow_until(self.decode_step + steps)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a running or prefilling sequence takes for its next ``tokens``. Blocks before its windows are
        freed
        first."""
        if sequence.start_step == NOT_DECODING:
            return self.chunk_blocks(sequence, tokens)
        back, taken = self.exchange(sequence, self.decode_step)
        if self.memory.group_tables:
            known = known_tokens(sequence, self.decode_step, self.memory.groups.ahead)
            self.memory.group_tables.skip(sequence, known)
        self.gave = sequence, back
        self._freed(back)
        return taken

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """Grant a running or prefilling sequence the ``blocks`` that ``needed`` returned."""
        memory, prefills = self.memory, sequence.start_step == NOT_DECODING
        if memory.group_tables:
            until = tokens + (sequence.computed_tokens if prefills else sequence.held_tokens(self.decode_step))
            memory.group_tables.take(sequence, until, until - (memory.groups.ahead and not prefills))
        elif prefills:
            self.extend(sequence, sequence.computed_tokens + tokens)
            if memory.tables:
                memory.tables.hold(sequence, sequence.computed_tokens + tokens)
        elif blocks and memory.tables:
            memory.tables.append(sequence)
        self._freed(-blocks)

    def pass_in_vain(self, sequence: Sequence, tokens: int) -> None:
        """Note that a running or prefilling sequence does not find the blocks for its next ``tokens``, and keeps those that it has; what
        its windows have passed is free all the same."""
        self.memory.pass_in_vain(sequence, tokens)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether the step now running computes a chunk of this prefill; asynchronous scheduling only."""
        held = self.memory.partial[sequence]
        return held.known_tokens < held.computed_tokens

    def pass_over(self, sequence: Sequence) -> None:
        """Note that a chunked prefill computes nothing in this step."""
        held = self.memory.partial[sequence]
        # In the next decision none of its tokens is in flight.
        self.memory.partial[sequence] = held._replace(known_tokens=held.computed_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a victim for other sequences of the same step; the plan must list it in ``preempted``."""
        tables = self.memory.tables or self.memory.group_tables
        self.free += self._left_of(sequence)
        if tables:
            tables.grow_until(self.decode_step)
            tables.drop(sequence)
        self._freed(0)

    def swap_out(self, sequence: Sequence) -> None:
        """As ``preempt``, for a sequence that moves to the host; the plan must list it in ``swapped_out``."""
        self.free += self._left_of(sequence)
        if self.memory.group_tables:
            self.memory.group_tables.swap_out(sequence, sequence.held_tokens(self.decode_step))

    def _left_of(self, sequence: Sequence) -> int:
        """Blocks that a sequence still has, after those that it gave back in this step."""
        giver, blocks = self.gave
        return self.memory.held_blocks(sequence, self.decode_step) - (blocks if giver is sequence else 0)

    def end_of_running(self, any_left: bool, idle: AbstractSet[Sequence] = frozenset()) -> None:
        """Note that each running sequence has been granted its blocks or preempted.

        Args:
            any_left: Whether any was granted blocks. Otherwise block tables are not advanced to this step.
            idle: Running sequences that compute nothing in the step.
        """
        self.need, self.gave = 0, (None, 0)
        tables = self.memory.tables or self.memory.group_tables
        if tables and any_left:
            tables.grown(self.decode_step, idle)

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """End the decision; with KV offloading, copies between GPU and host begin.

        Args:
            computed: Sequences that compute a token in the step; a step without any takes no time.

        Returns:
            Ticks that the step waits for copies.
        """
        return 0

    def _freed(self, blocks: int) -> None:
        """So many more blocks are free; a prefix cache of KV groups counts itself."""
        cache = self.memory.cache
        self.free = self.free + blocks if cache is None else cache.pool.num_free
