"""Paged KV memory: fixed-size blocks, handed out on demand.

One memory serves every paged policy. It is composed of

    a block pool      a count of free blocks (``counts``), or ids with reference counts (``block_tables``, ``group_tables``)
    KV groups         a manager (``skipped``) for each kind that gives blocks back while its sequences run: sliding windows,
                      states at ends of blocks; other groups keep every block, or one state or ring a sequence
    optional parts    chunked prefills and a host pool here; a prefix cache (``group_cache`` for KV groups, ``cached`` for one
                      group); shared blocks with copies on write (``sharing``); tables kept for requests that go on from
                      others (``dialogue``); pages that stay mapped (``deferred``); blocks that batches in flight keep (``fences``)

While its prefill goes on a sequence is no part of the histogram: it holds the blocks of the tokens computed so far, or of its
whole prompt (``partial``), and nothing of it grows but by chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from operator import sub

from ...types.errors import Overdrawn
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.kv_groups import SLIDING
from ..accounting.ledger import Meter
from ..accounting.moments import after_step
from .counts import BlockCounts, Partial
from .group_cache import Table
from .transaction import PagedTransaction


class PagedMemory(BlockCounts):
    """Blocks of the running sequences, and of swapped sequences on the host. See ``Memory``.

    ``BlockCounts`` has the arguments.
    """

    _transaction: PagedTransaction | None = None

    def transaction(self, decode_step: int) -> PagedTransaction:
        """Open the grants of ``decode_step`` and void the previous ones."""
        # A kind of memory with a kind of transaction has made it.
        transaction = self._transaction
        if transaction is None:
            transaction = self._transaction = PagedTransaction(self)
        if self.is_plain:
            takes = need = self.phases.counts[decode_step % self.block_size]
        else:
            takes = self._taken_in(decode_step)
            need = takes - self._open_groups(decode_step)
        transaction.decode_step, transaction.free, transaction.takes, transaction.need = (
            decode_step,
            self.free,
            takes,
            need,
        )
        return transaction

    def _taken_in(self, decode_step: int) -> int:
        """Blocks that all running sequences allocate in ``decode_step``, in all groups; none is released by then."""
        takes = 0
        for groups in self.sizes:
            takes += groups.number * groups.phases.counts[decode_step % groups.size]
        return takes

    def _change_phase(self, ahead: int, number: int) -> None:
        """Count ``number`` sequences more (or fewer, below 0) among those with a block of each size due in step ``ahead``."""
        for groups in self.sizes:
            groups.phases.add(ahead % groups.size, number)

    def _open_groups(self, decode_step: int) -> int:
        """Bring counts up to date before ``decode_step``. Returns the blocks that the running sequences give back in it."""
        if self.cache and self.group_tables:
            self.group_tables.grow_until(decode_step)
            self._count_shared()
            self.cache.begin_step()
        return sum(kind.number * kind.in_step(decode_step) for kind in self.giving)

    # --- Sequences come, prefill in chunks and go ---

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Count the blocks of a prefill that continues, including the chunk of ``decode_step``."""
        before, computed = self.partial.get(sequence, self._nothing), sequence.computed_tokens
        start, tokens = before.computed_tokens, sequence.start_tokens if self._whole_prompts else computed
        if before is self._nothing:
            self.free -= self.fixed
        blocks = -(-tokens // self.unit_tokens)
        more = self.skipped_in_prefill(sequence, before, start, computed)
        self._hold(blocks - before.blocks, more, before.blocks)
        skipped = tuple(back + again for back, again in zip(before.skipped, more, strict=True))
        self.partial[sequence] = Partial(blocks, skipped, computed, start if self.groups.ahead else computed)
        if self.tables:
            self.tables.grow_until(decode_step + 1)
            self.tables.hold(sequence, tokens)
        elif self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.reach(sequence, before.known_tokens, computed, computed)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Allocate blocks for the tokens of a sequence after ``decode_step``, in which it starts to decode.

        Blocks that a chunked prefill holds are kept. The last token gets its slot in ``decode_step``, as for a running
        sequence, unless ``past`` is set.
        """
        before, size = sequence.start_tokens - 1, self.block_size
        if not self.is_plain:
            self._change_phase(decode_step - before, 1)
            self._admit_to_groups(sequence, decode_step, -(-(before + past) // self.unit_tokens))
            return
        phase, counts = (decode_step - before) % size, self.phases.counts
        # ``Phases.add``, spelt out: every sequence comes and goes.
        counts[phase] += 1
        counts[phase + size] += 1
        self.free += -(before + past) // size
        if self.partial and sequence in self.partial:
            self.free += self.partial.pop(sequence).blocks
        if self.tables:
            self.tables.admit(sequence, decode_step, past, phase)

    def _admit_to_groups(self, sequence: Sequence, decode_step: int, blocks: int) -> None:
        if sequence not in self.partial:
            self.free -= self.fixed
        held, tokens = self.partial.pop(sequence, self._nothing), sequence.start_tokens
        more = self.skipped_in_prefill(sequence, held, held.computed_tokens, tokens)
        self._hold(blocks - held.blocks, more, held.blocks)
        for kind, back, again in zip(self.giving, held.skipped, more, strict=True):
            kind.join(sequence, tokens - decode_step, back + again)
        if self.group_tables:
            self.group_tables.grow_until(decode_step + 1)
            self.group_tables.join(sequence, decode_step, held.known_tokens)

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; nothing changes of a sequence that is stalled already."""
        if sequence in self.partial:
            return
        phase, held = (1 - sequence.lag) % self.block_size, sequence.held_tokens(decode_step)
        if self.is_plain:
            self.phases.add(phase, -1)
        else:
            self._change_phase(1 - sequence.lag, -1)
        passed = [kind.in_decode(sequence, decode_step) for kind in self.giving if sequence is self._passing_in_vain]
        skipped = tuple(kind.leave(sequence, decode_step) for kind in self.giving)
        if passed:
            self._passing_in_vain = None
            self._hold(0, [*map(sub, passed, skipped)])
            skipped = tuple(passed)
        self.partial[sequence] = Partial(-(-held // self.unit_tokens), skipped, held, held)
        if self.tables:
            self.tables.grow_until(decode_step)
            self.tables.park(sequence, phase)
        elif self.group_tables:
            self.group_tables.grow_until(decode_step)
            self.group_tables.park(sequence)

    def pass_windows(self, sequence: Sequence) -> None:
        if self.is_plain:
            return
        held = self.partial[sequence]
        skipped = tuple(kind.of(held.computed_tokens) for kind in self.giving)
        self._hold(0, [now - before for now, before in zip(skipped, held.skipped, strict=True)])
        self.partial[sequence] = held._replace(skipped=skipped)
        if self.group_tables:
            self.group_tables.skip(sequence, held.computed_tokens)
            self._settle_cache()

    def _drop(self, sequence: Sequence, decode_step: int) -> None:
        """A stalled sequence, or one in a chunked prefill, gives up its blocks."""
        self._release_partial(sequence, decode_step)
        # Asynchronous steps ask for a horizon after this, before the next transaction.
        self._settle_cache()

    def _drop_partial(self, leaving: Iterable[Sequence], decode_step: int) -> list[Sequence]:
        """Those of some sequences that decode; the others give up their blocks."""
        decoding = []
        for sequence in leaving:
            if sequence in self.partial:
                self._drop(sequence, decode_step)
            else:
                decoding.append(sequence)
        return decoding

    def _pass_at_end(self, sequence: Sequence) -> None:
        """Beside a KV connector a finished sequence gives back what its windows have passed, before its other blocks; nothing happens to
        one without tables, as those that the decision has preempted."""
        tables = self.group_tables
        if self.groups.connects and tables and sequence in tables.tables:
            tables.skip(sequence, sequence.target_tokens - 1)

    def _release_partial(self, sequence: Sequence, decode_step: int) -> None:
        tables = self.tables or self.group_tables
        self._count_out(sequence)
        if tables:
            tables.grow_until(decode_step)
            self._pass_at_end(sequence)
            tables.drop(sequence)

    def _count_out(self, sequence: Sequence) -> None:
        held = self.partial.pop(sequence)
        self._hold(-held.blocks, [-back for back in held.skipped], held.blocks)
        self.free += self.fixed

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        tables = self.tables or self.group_tables
        if tables:
            tables.grow_until(decode_step + 1)
        for sequence in leaving:
            if self.cache and self.group_tables:
                held = self.partial.get(sequence)
                tokens = sequence.held_tokens(decode_step) if held is None else held.computed_tokens
                self.cache.publish(sequence, self.group_tables.tables[sequence], tokens)
            if sequence in self.partial:
                self._release_partial(sequence, decode_step)
            elif self.groups.defers:
                self._finish_in_vain(sequence, decode_step)
            else:
                self.release((sequence,), decode_step)
        # Nothing may be scheduled for long after this.
        self._settle_cache(after_step(decode_step))

    def _finish_in_vain(self, sequence: Sequence, decode_step: int) -> None:
        """A finished sequence keeps its blocks while the coming step computes it in vain."""
        self.stall(sequence, decode_step, finished=True)
        self.pass_windows(sequence)
        held = self.partial[sequence]
        tokens = held.computed_tokens + 1
        blocks = -(-tokens // self.unit_tokens)
        self._hold(blocks - held.blocks, self._nothing.skipped, held.blocks)
        self.partial[sequence] = held._replace(blocks=blocks, computed_tokens=tokens, known_tokens=tokens)
        self._defer(sequence)

    def _defer(self, sequence: Sequence) -> None:
        """A finished sequence keeps its blocks until the batches that are scheduled by now are over."""
        tables = self.tables or self.group_tables
        self.fences.defer(sequence, tables.detach(sequence) if tables else ())

    def _process(self, batches: int) -> bool:
        """So many batches are over: blocks that waited for them come free. Returns whether any did."""
        tables, freed = self.tables or self.group_tables, False
        for sequence, own in self.fences.process(batches):
            self._count_out(sequence)
            if tables:
                tables.give_back_all(own)
            freed = True
        return freed

    def free_deferred(self, decode_step: int) -> None:
        if tables := self.tables or self.group_tables:
            # The coming step was decided without them.
            tables.grow_until(decode_step + 1)
        self._process(self.fences.scheduled)
        self._settle_cache()

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Free the blocks of preempted sequences before ``decode_step``; some of these may still compute their prompt in chunks."""
        for sequence in swapped_out:
            held = sequence.held_tokens(decode_step)
            self.host_free -= self.pages_for(held)
            if self.tables:
                self.tables.grow_until(decode_step)
                self.tables.swap_out(sequence)
            elif self.group_tables and sequence in self.group_tables.tables:
                self.group_tables.grow_until(decode_step)
                self.group_tables.swap_out(sequence, held)
        self.release(preempted + swapped_out, decode_step)

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """As ``admit``, for a sequence whose blocks are copied back from the host."""
        # All but that of the token that its next step computes.
        tokens = sequence.start_tokens - 1
        self.host_free += self.pages_for(tokens)
        if not self.is_plain:
            skipped = tuple(kind.of(tokens) for kind in self.giving)
            held = Partial(-(-tokens // self.unit_tokens), skipped, tokens, tokens)
            self._hold(*held[:2])
            self.partial[sequence] = held
        self.admit(sequence, decode_step)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Free the blocks of sequences that leave before ``decode_step``."""
        if self.partial:
            leaving = self._drop_partial(leaving, decode_step)
        if not self.is_plain:
            self._release_in_groups(leaving, decode_step)
            return
        size, counts, tables = self.block_size, self.phases.counts, self.tables
        if tables:
            tables.grow_until(decode_step)
        for sequence in leaving:
            ahead = 1 - sequence.lag
            phase = ahead % size
            counts[phase] -= 1
            counts[phase + size] -= 1
            self.free -= (ahead - decode_step) // size
            if tables:
                tables.leave(sequence, phase)

    def _release_in_groups(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        if self.group_tables:
            self.group_tables.grow_until(decode_step)
        for sequence in leaving:
            ahead = 1 - sequence.lag
            self._change_phase(ahead, -1)
            skipped = [-kind.leave(sequence, decode_step) for kind in self.giving]
            taken = (ahead - decode_step) // self.unit_tokens
            self._hold(taken, skipped, -taken)
            self.free += self.fixed
            if self.group_tables:
                self._pass_at_end(sequence)
                self.group_tables.drop(sequence)
        self._settle_cache(after_step(decode_step))

    def settle(self, state: State, steps: int) -> None:
        tables = self.tables or self.group_tables
        if tables:
            tables.grow_until(state.decode_step + steps)

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        return self.cache.repeated_slots(self._idle_tables(admitted)) if self.cache else 0

    def _idle_tables(self, admitted: Iterable[Sequence]) -> list[tuple[Table, ...]]:
        """Tables of KV groups that no decode reads in the coming step."""
        tables = self.group_tables.tables if self.group_tables else {}
        return [tables[sequence] for sequence in (*self.partial, *admitted) if sequence in tables]

    def advance(self, state: State, steps: int) -> Meter:
        """Grow the running sequences through the steps of a leap.

        Returns:
            Live and held slots in the first step, and ``block_tail`` of the prefills in progress. With several KV
                groups: the counts of a group that keeps every token, and the slots that each group with a window has
                freed. The ledger derives later blocks from the residencies.
        """
        # Where no sequence decodes all is as after the last step.
        live, tail = state.batch_size * (state.decode_step - (not steps)) + state.lag_sum, 0
        size, partial = self.block_size, self.partial
        if partial:
            live += sum(held.computed_tokens for held in partial.values())
            tail = sum(max(0, held.blocks * size - s.target_tokens) for s, held in partial.items())
        if not self.is_plain:
            return live, *self._advance_groups(state, steps, tail)
        free = self.free
        if not steps:
            return live, (self.num_blocks - free) * size, tail
        self.free -= self.phases.total(state.decode_step, steps)
        if self.free < 0:
            raise self.overdrawn()
        return live, (self.num_blocks - free + self.phases.counts[state.decode_step % size]) * size, tail

    def overdrawn(self) -> Overdrawn:
        """The error of a policy that granted more blocks than are free."""
        return Overdrawn(f"{-self.free} blocks more than are free are taken")

    def _advance_groups(self, state: State, steps: int, tail: int) -> Meter:
        """``advance``, without the slots that are live."""
        decode_step = state.decode_step
        if self.cache and self.group_tables:
            if steps and self.cache.shares_in_windows():
                self.group_tables.grow_until(decode_step + 1)
            self._count_shared()
            self.cache.settle()
            self.cache.log.row += 1
        held = [groups.blocks for groups in self.sizes]
        skipped = [kind.released for kind in self.giving]
        if steps:
            for place, groups in enumerate(self.sizes):
                held[place] += groups.phases.counts[decode_step % groups.size]
                taken = groups.phases.total(decode_step, steps)
                groups.blocks += taken
                self.free -= groups.number * taken
            for place, kind in enumerate(self.giving):
                first, released = kind.advance(decode_step, steps)
                skipped[place] += first
                kind.released += released
                self.free += kind.number * released
            if self.free < 0:
                raise self.overdrawn()
        if self.groups.sizes:
            return self._by_class(held, skipped)
        size = self.block_size
        others: tuple[int, ...] = (size * (state.batch_size + len(self.partial)),) if self.fixed else ()
        if self.cache:
            others += tuple(entries * size for entries in self.cache.shared_by_kind())
        return held[0] * size, tail, *(blocks * size for blocks in skipped), *others

    def _by_class(self, held: Values[int], skipped: Values[int]) -> Meter:
        """What ``advance`` says of each class of groups, in slots of its own blocks."""
        blocks = {groups.size: number for groups, number in zip(self.sizes, held, strict=True)}
        released, found = iter(skipped), []
        for place, each in enumerate(self.classes):
            size = each.block_size
            tail = sum(max(0, -(-p.computed_tokens // size) * size - s.target_tokens) for s, p in self.partial.items())
            found += [blocks[size] * size, tail]
            if each.kind == SLIDING:
                found.append(next(released) * size)
            if self.cache:
                found.append(self.cache.shared[place] * size)
        return tuple(found)
