"""Contiguous and reserved memories against a census of every slot of every reservation."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fragmeter.sim.memory import BatchMemory, ContiguousMemory, ReservedMemory
from fragmeter.sim.memory.contiguous.contiguous import ContiguousTransaction
from fragmeter.sim.types.sequence import Grant, Sequence
from oracle.slots import FINISHED_HOLD, FREE, STRANDED, census, classify_slot

from .arenas import ARENAS, Blocks
from .draws import EITHER, combined
from .served import Served
from .tables import Tables, walk


class Counted(Served):
    """Reservations by count."""

    #: Whether running sequences pause for an admission.
    pauses = False

    def __init__(self, memory: Any) -> None:
        self.serve(memory)
        self.slots = self.free_slots = memory.num_blocks * memory.block_size
        #: What every sequence on the device was given.
        self.held: dict[Sequence, Grant] = {}
        #: Blocks of the piece that the head of the queue was refused.
        self.blocked = 0

    def slots_for(self, tokens: int) -> int:
        return tokens

    def blocked_by(self, tokens: int) -> int:
        """Blocks of the piece that is refused to a request for so many tokens; 0 where there are no pieces."""
        return 0

    def has_place(self, slots: int) -> bool:
        return slots <= self.free_slots

    def take(self, grant: Grant) -> None:
        """Slots are reserved."""
        assert grant.start is None
        self.free_slots -= grant.slots

    def hold(self, sequence: Sequence, grant: Grant) -> None:
        """What was reserved is what a sequence is given."""
        assert sequence.grant == grant
        self.held[sequence] = grant

    def drop(self, sequence: Sequence) -> None:
        self.free_slots += self.held.pop(sequence).slots

    def reserve(self, transaction: ContiguousTransaction, tokens: int, padding: int = 0) -> Grant:
        transaction.reserve(tokens)
        grant = Grant(tokens, self.slots_for(tokens), padding, transaction.places[-1][2])
        self.take(grant)
        assert transaction.free_slots == self.free_slots
        return grant

    def admit(self, prompt: int, output: int, extra: int, two: bool) -> None:
        """The second one sees what the first one took. The last token of an output needs no slot."""
        transaction, self.blocked = self.memory.transaction(self.state.decode_step), 0
        admitted: list[tuple[Sequence, Grant]] = []
        for sequence in [self.arrive(prompt, output), self.arrive(output, prompt)][: 1 + two]:
            tokens = sequence.target_tokens - 1 + extra + len(admitted)
            room = self.has_place(self.slots_for(tokens))
            assert transaction.has_room(tokens) == room
            if not room:
                transaction.refuse(tokens)
                self.blocked = self.blocked_by(tokens)
                break
            admitted.append((sequence, self.reserve(transaction, tokens)))
        for sequence, grant in admitted:
            self.start(sequence, self.pauses)
            self.hold(sequence, grant)
        if self.pauses:
            self.advance(0)

    def leap(self, steps: int) -> None:
        """Stopping where a sequence finishes."""
        while steps and self.tokens:
            reach = min(steps, self.steps_to_finish())
            self.advance(reach)
            steps -= reach

    def advance(self, steps: int) -> None:
        """Steps pass, and finished sequences leave."""
        if steps:
            self.begin()
        self.check_meter(self.memory.advance(self.state, steps))
        self.step_on(steps)
        self.leave()

    def leave(self) -> None:
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        for sequence in finished:
            del self.tokens[sequence]
            self.drop(sequence)

    def check_meter(self, meter: tuple[int, ...]) -> None:
        """Invariant 1: the buckets are those of a census of all slots, which every slot is in once."""
        live, held, growing, target, asked, finished_hold, stranded, largest_free = meter
        expected = dict.fromkeys(census([]), 0) | {
            "live": live,
            "reserved": target - live,
            "over_estimate": asked - target,
            "round_up" if self.memory.placement else "block_tail": held - asked - finished_hold,
            "finished_hold": finished_hold,
            "stranded": stranded,
            "free": self.slots - held - stranded,
        }
        counted = census(bucket for buckets in (self.census(), self.free_census()) for bucket in buckets)
        assert expected == counted and sum(counted.values()) == self.slots
        assert growing == len(self.tokens)
        assert largest_free == self.largest_free()

    def census(self) -> list[str]:
        """The bucket of every slot that is held."""
        return [
            classify_slot(i, self.tokens[s], s.target_tokens, grant.tokens, self.block_end(grant.tokens))
            for s, grant in self.held.items()
            for i in range(grant.slots)
        ]

    def block_end(self, tokens: int) -> int:
        """Where the block ends in which the tokens asked for end; arenas have no block tails."""
        return tokens

    def free_census(self) -> list[str]:
        return [FREE] * self.free_slots

    def largest_free(self) -> int:
        return self.free_slots

    def check(self) -> None:
        assert self.memory.used_slots == self.slots - self.free_slots >= 0
        assert self.memory.growing == len(self.tokens)


class InBlocks(Counted):
    """Whole blocks anywhere, with tables; running sequences pause for a prefill."""

    pauses = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(ReservedMemory(num_blocks, block_size, ids=True))
        self.model = Tables(num_blocks)

    def slots_for(self, tokens: int) -> int:
        return self.blocks(tokens) * self.memory.block_size

    block_end = slots_for

    def hold(self, sequence: Sequence, grant: Grant) -> None:
        super().hold(sequence, grant)
        self.model.hold(sequence, self.blocks(grant.tokens))

    def drop(self, sequence: Sequence) -> None:
        super().drop(sequence)
        self.model.drop(sequence)

    def check(self) -> None:
        """Invariants 2 and 3."""
        super().check()
        kept = self.memory.tables
        walk(kept.pool, kept.tables)
        assert kept.tables == self.model.tables and [*reversed(kept.pool.free_ids)] == self.model.free


class InChunks(Counted):
    """Chunks of an arena, with places that are looked up in a bitmap."""

    def __init__(self, memory: ContiguousMemory, arena: str) -> None:
        super().__init__(memory)
        self.places = Blocks(arena, memory.num_blocks)

    def blocked_by(self, tokens: int) -> int:
        return self.places.piece_blocks(self.blocks(tokens))

    def slots_for(self, tokens: int) -> int:
        return self.blocked_by(tokens) * self.memory.block_size

    def has_place(self, slots: int) -> bool:
        return any(size * self.memory.block_size >= slots for _, size in self.places.pieces())

    def take(self, grant: Grant) -> None:
        """Invariant 7: a chunk is aligned, and its blocks were free."""
        self.places.take(grant.start, grant.slots // self.memory.block_size)
        self.free_slots -= grant.slots

    def drop(self, sequence: Sequence) -> None:
        grant = self.held[sequence]
        self.places.give(grant.start, grant.slots // self.memory.block_size)
        super().drop(sequence)

    def free_census(self) -> list[str]:
        size = self.memory.block_size
        return [
            STRANDED if blocks < self.blocked else FREE
            for _, blocks in self.places.pieces()
            for _ in range(blocks * size)
        ]

    def largest_free(self) -> int:
        return max((blocks for _, blocks in self.places.runs()), default=0) * self.memory.block_size

    def check(self) -> None:
        super().check()
        assert self.memory.arena.free_runs() == self.places.runs()


class InBatches(Counted):
    """Static batches: padded alike, and all leave when the last one is done."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(BatchMemory(num_blocks, block_size))
        #: Members of the batch that have all their tokens.
        self.ended: list[Sequence] = []

    def admit(self, prompt: int, output: int, extra: int, two: bool) -> None:
        """One, or up to four, the first of them with the longest output and the last with the longest prompt."""
        prompts = [prompt + place for place in range(2 + extra % 3 if two else 1)]
        outputs = [max(1, output - 2 * place) for place in range(len(prompts))]
        padded, tokens = prompts[-1], prompts[-1] + output + extra
        if self.held or tokens * len(prompts) > self.slots:
            return
        transaction = self.memory.transaction(self.state.decode_step)
        grants = [self.reserve(transaction, tokens, padded - prompt) for prompt in prompts]
        for sequence, grant in zip(map(self.arrive, prompts, outputs), grants, strict=True):
            self.start(sequence, False, padded)
            self.hold(sequence, grant)

    def leave(self) -> None:
        ended = self.finished()
        assert self.state.take_ended() == ended
        self.memory.release(ended, self.state.decode_step)
        self.ended += ended
        for sequence in ended:
            del self.tokens[sequence]
        if not self.tokens:
            self.held, self.ended, self.free_slots = {}, [], self.slots

    def census(self) -> list[str]:
        """Padding, and all that ended sequences still hold, is wasted."""
        buckets: list[str] = []
        for s, grant in self.held.items():
            own = 0 if s in self.ended else grant.tokens - grant.padding
            buckets += [classify_slot(i, self.tokens[s], s.target_tokens, own, own) for i in range(own)]
            buckets += [FINISHED_HOLD] * (grant.slots - own)
        return buckets


class ReservationMachine(RuleBasedStateMachine):
    """The same requests, one or two a step, and the same leaps in four memories."""

    @initialize(pool=combined(range(4, 33), range(1, 5), ARENAS))
    def build(self, pool):
        *pool, arena = pool
        chunks = InChunks(ContiguousMemory(*pool, ARENAS[arena](pool[0])), arena)
        self.memories = [Counted(ContiguousMemory(*pool)), InBlocks(*pool), chunks, InBatches(*pool)]

    @rule(request=combined(range(1, 8), range(1, 13), range(7), EITHER))
    def admit(self, request):
        for served in self.memories:
            served.admit(*request)

    @rule(steps=st.integers(1, 8))
    def leap(self, steps):
        for served in self.memories:
            served.leap(steps)

    @invariant()
    def holds(self):
        for served in self.memories:
            served.check()
