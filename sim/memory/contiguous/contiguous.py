"""Contiguous KV memory: a sequence reserves one piece for all tokens that it may ever have.

Reservations change only when a sequence is admitted or released, so sums over the sequences are enough:

    |<- live ->|<- reserved ->|<- over-estimate ->|<- round-up ->|
    0          c              F                   R              end of the chunk

c (computed tokens) grows by one per step for every unfinished sequence. F (final length), R (reserved length) and the
chunk are constant.

Each sequence of a group has its own piece, with its own copy of the prompt; paged memory would share these tokens. The admission of
the leader reserves the pieces of the whole group. In the next step the siblings copy the prompt; a beam that is replaced copies all
tokens of the beam that it continues. Memory that counts slots copies these tokens. Memory with chunks copies the whole chunk, as
the artifact of SOSP'23 does: its Orca pairs all blocks of both tables, empty ones included (``BuddyBlockSpaceManager.fork``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...types.errors import SimulationFault
from ...types.sequence import FORKED, Grant, Group, Sequence
from ...types.state import State
from ..accounting.ledger import METER, Meter
from ..accounting.moves import Moves
from ..interface.memory import Memory, Placement
from .arena import Arena, FirstFitArena


class ContiguousTransaction:
    """Tentative reservations of one step, each visible to the next. See ``Transaction``.

    Attributes:
        memory: The memory of the reservations.
        free_slots: Free slots less the reservations made so far.
    """

    __slots__ = ("blocked_blocks", "free_slots", "memory", "places")
    memory: ContiguousMemory

    def __init__(self, memory: ContiguousMemory) -> None:
        self.memory = memory
        self.free_slots = memory.capacity_slots - memory.used_slots
        #: Size of the chunk that the queue's head was refused for want of memory; 0 where it was not.
        self.blocked_blocks = 0
        #: Reservations made and not yet held: tokens asked for, slots taken, first block.
        self.places: deque[tuple[int, int, int | None]] = deque()

    def has_room(self, tokens: int, pieces: int = 1) -> bool:
        """Whether this many pieces for ``tokens`` can be allocated."""
        slots = self.memory.slots_of(tokens)
        if pieces * slots > self.free_slots:
            return False
        return self.memory.has_place(slots) if pieces == 1 else self._all_have_places(slots, pieces)

    def _all_have_places(self, slots: int, pieces: int) -> bool:
        """Whether this many pieces can be placed one after the other; tries and undoes it."""
        memory = self.memory
        starts: list[int | None] = []
        while len(starts) < pieces and memory.has_place(slots):
            starts.append(memory.take_place(slots))
        for start in reversed(starts):
            memory.give_place(Grant(slots, slots, 0, start))
        return len(starts) == pieces

    def fits(self, sequence: Sequence, tokens: int, pieces: int) -> bool:
        """Whether there is room for a sequence that needs this many pieces for ``tokens``."""
        return self.has_room(tokens, pieces)

    def place(self, sequence: Sequence, tokens: int, pieces: int) -> None:
        """Reserve pieces for which ``fits`` is true."""
        for _ in range(pieces):
            self.reserve(tokens)

    def refuse(self, tokens: int) -> None:
        """Note that no piece of ``tokens`` is free for the head of the queue."""
        self.blocked_blocks = self.memory.chunk_blocks(tokens)

    def reserve(self, tokens: int) -> None:
        """Reserve a piece for ``tokens`` of the sequence that is admitted next; it must be free."""
        slots = self.memory.slots_of(tokens)
        self.free_slots -= slots
        self.places.append((tokens, slots, self.memory.take_place(slots)))


class ContiguousMemory(Memory):
    """Reservations counted in slots, or in pieces of an arena. See ``Memory``, ``Placement``.

    Without an arena reservations have no addresses, and there is no external fragmentation.

    Args:
        arena: Optional part: places pieces of whole blocks in the pool.

    Attributes:
        used_slots: Slots of the reservations of admitted sequences.
        growing: Sequences that gain a token per step.
        searches: Whether beams run: each of their steps is a decision.
        addresses: In a recording, addresses for the pieces: each in the lowest run of slots that is long enough, if
            necessary beyond the pool, since counting ignores gaps.
        moves: Records copies of contents, in slots; None without a recording.
    """

    addresses: FirstFitArena | None = None
    moves: Moves | None = None
    #: What ``advance`` tells the ledger.
    meter = METER[:8]
    reserves = True
    searches = False

    def __init__(self, num_blocks: int, block_size: int, arena: Arena | None = None) -> None:
        self.num_blocks, self.block_size, self.arena = num_blocks, block_size, arena
        self._largest_run: int | None = None
        self.used_slots = 0
        self.growing = 0
        self._lag = self._target = self._asked = self._finished_hold = self._copied_slots = 0
        self._beams: dict[Group, None] = {}
        self._branched_step = -1
        self._transaction = ContiguousTransaction(self)

    @property
    def placement(self) -> Placement | None:
        """See ``Memory``: the memory itself."""
        return self

    @property
    def has_addresses(self) -> bool:
        """See ``Placement``."""
        return self.arena is not None

    def give_addresses(self, slots: int) -> None:
        """See ``Placement``."""
        self.addresses = FirstFitArena(slots)

    def slots_of(self, tokens: int) -> int:
        """Slots of a reservation of ``tokens``."""
        return tokens if self.arena is None else self.chunk_blocks(tokens) * self.block_size

    def chunk_blocks(self, tokens: int) -> int:
        """Blocks of the piece for ``tokens``: whole blocks, rounded up to a piece of the arena; 0 without one."""
        return 0 if self.arena is None else self.arena.piece_blocks(-(-tokens // self.block_size))

    def has_place(self, slots: int) -> bool:
        """Whether a piece of ``slots`` can be allocated; called only if that many slots are free."""
        return self.arena is None or self.arena.fits(slots // self.block_size)

    def take_place(self, slots: int) -> int | None:
        """First block of a new piece of ``slots``; if slots are only counted its first slot, or None."""
        if self.arena is None:
            return None if self.addresses is None else self.addresses.allocate(slots)
        self._largest_run = None
        return self.arena.allocate(slots // self.block_size)

    def give_place(self, grant: Grant) -> None:
        """Return the piece of a reservation."""
        if self.arena is not None:
            self._largest_run = None
            self.arena.free(grant.place, grant.slots // self.block_size)
        elif self.addresses is not None:
            self.addresses.free(grant.place, grant.slots)

    def first_slot(self, grant: Grant) -> int:
        """See ``Placement``."""
        return grant.place if self.arena is None else grant.place * self.block_size

    def kept_pieces(self) -> list[Grant]:
        """See ``Placement``."""
        return []

    def stranded_pieces(self) -> list[tuple[int, int]]:
        """See ``Placement``; where slots are only counted, room is room wherever it lies."""
        wanted = self._transaction.blocked_blocks
        if self.arena is None or not wanted:
            return []
        return [piece for piece in self.arena.free_pieces() if piece[1] < wanted]

    def record_copy(self, source: Grant, target: Grant, slots: int) -> None:
        """Record that the first ``slots`` of one piece are copied to another."""
        if self.moves is not None:
            self.moves.copies.append((self.first_slot(source), self.first_slot(target), slots))

    def stranded_slots(self, blocked_blocks: int) -> int:
        """Free slots in pieces too small for the ``blocked_blocks`` of the head of the queue."""
        if self.arena is None or not blocked_blocks:
            return 0
        return self.arena.free_blocks_below(blocked_blocks) * self.block_size

    def transaction(self, decode_step: int) -> ContiguousTransaction:
        """Open the reservations of ``decode_step`` and void the previous ones. Beams that died become copies of others
        here."""
        if self._beams and decode_step != self._branched_step:
            self._branch(decode_step)
        self._transaction = ContiguousTransaction(self)
        return self._transaction

    def _branch(self, decode_step: int) -> None:
        self._branched_step = decode_step
        for group in self._beams:
            if group.ancestry is None:
                raise SimulationFault("beams have no ancestry")
            slots = self._slots_to_copy(group.leader.grant, group.leader.held_tokens(decode_step))
            for dead, parent in group.ancestry.replaced(len(group.members)):
                self._copied_slots += slots
                self.record_copy(group.members[parent].grant, group.members[dead].grant, slots)

    def _slots_to_copy(self, grant: Grant, tokens: int) -> int:
        """Slots that a copy of a piece writes, given the number that hold tokens."""
        return tokens if self.arena is None else grant.slots

    def copied_slots(self, decodes: bool) -> int:
        slots, self._copied_slots = self._copied_slots, 0
        return slots

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Find cached tokens of a waiting sequence: none, so that its whole prompt is computed."""

    def may_grow(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether a later step may find more cached tokens for a waiting sequence; always False here."""
        return False

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Give the next reservations of the step to a sequence that starts in ``decode_step``, and to its siblings.

        The pieces of the siblings stay empty until they fork.
        """
        group = sequence.group
        if group is not None and sequence.kind == FORKED:
            self._fork(sequence, group, decode_step)
            return
        self._reserve(sequence, padded_tokens)
        self._grow(sequence, decode_step)
        if group is not None:
            for sibling in group.siblings:
                self._reserve(sibling, padded_tokens)

    def _fork(self, sibling: Sequence, group: Group, decode_step: int) -> None:
        """A sibling copies the prompt and decodes."""
        slots = self._slots_to_copy(sibling.grant, sibling.prompt_tokens)
        self._copied_slots += slots
        self.record_copy(group.leader.grant, sibling.grant, slots)
        self._grow(sibling, decode_step)
        if group.ancestry:
            self._beams[group] = None
            self.searches = True

    def _grow(self, sequence: Sequence, decode_step: int) -> None:
        self.growing += 1
        self._lag += sequence.start_tokens - decode_step

    def _reserve(self, sequence: Sequence, padded_tokens: int) -> None:
        """Give the step's next reservation to a sequence."""
        tokens, slots, start = self._transaction.places.popleft()
        padding = max(0, padded_tokens - sequence.prompt_tokens)
        sequence.grant = Grant(tokens, slots, padding, start)
        self.used_slots += slots
        self._target += self._final(sequence)
        self._asked += self._requested_slots(sequence)
        self._finished_hold += padding

    def room_after(self, state: State, steps: int) -> int:
        """Free slots after this many steps: unchanged, since sequences grow within their reservations."""
        return self.capacity_slots - self.used_slots

    def advance(self, state: State, steps: int) -> Meter:
        """The levels that the ledger integrates, see ``meter``."""
        # Where no sequence decodes all is as after the last step.
        live = self.growing * (state.decode_step if steps else state.decode_step - 1) + self._lag
        held, free = self.used_slots, self.largest_free_slots()
        stranded = self.stranded_slots(self._transaction.blocked_blocks)
        return live, held, self.growing, self._target, self._asked, self._finished_hold, stranded, free

    def largest_free_slots(self) -> int:
        """Slots of the longest run of free blocks; all free slots if reservations have no addresses."""
        if self.arena is None:
            return self.capacity_slots - self.used_slots
        if self._largest_run is None:
            self._largest_run = max((length for _, length in self.arena.free_runs()), default=0)
        return self._largest_run * self.block_size

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """Free the slots of sequences that generated their last token before ``decode_step``.

        Siblings with nothing to generate leave with the leader.
        """
        for sequence in finished:
            group, grant = sequence.group, sequence.grant
            if group is not None and sequence is group.leader:
                self._disband(group, decode_step)
            self._end(sequence)
            self.used_slots -= grant.slots
            self.give_place(grant)

    def _disband(self, group: Group, decode_step: int) -> None:
        self._beams.pop(group, None)
        self.searches = bool(self._beams)
        if not group.forked:
            for sibling in group.siblings:
                sibling.start_step = group.leader.start_step
                self._grow(sibling, sibling.start_step)
            self.release(group.siblings, decode_step)

    def _end(self, sequence: Sequence) -> None:
        self.growing -= 1
        self._lag -= sequence.start_tokens - sequence.start_step
        self._target -= self._final(sequence)
        self._asked -= self._requested_slots(sequence)

    def _final(self, sequence: Sequence) -> int:
        """F: the final number of tokens with slots (the last token needs none)."""
        return min(sequence.target_tokens, sequence.grant.slots)

    def _requested_slots(self, sequence: Sequence) -> int:
        """R: the requested tokens, without padding."""
        return max(sequence.grant.tokens - sequence.grant.padding, self._final(sequence))


class BatchMemory(ContiguousMemory):
    """Reservations of a static batch: a finished sequence holds its slots until the batch ends."""

    leaves_together = True

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        for sequence in finished:
            self._end(sequence)
            self._finished_hold += sequence.grant.tokens - sequence.grant.padding
        if not self.growing:
            self.used_slots = self._finished_hold = 0
            if self.addresses is not None:
                self.addresses = FirstFitArena(self.addresses.num_blocks)
