"""SGLang's prefill steps, while they are put together: what is admitted, and the share of outputs that is reserved (``PrefillAdder``,
``NewTokenRatioTracker``)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from ..memory.paged.radix_transaction import RETRACT_STEPS, RadixTransaction
from ..types.sequence import Sequence
from .server import Limits

#: ``--max-prefill-tokens`` of SGLang.
MAX_PREFILL_TOKENS = 16_384
#: Slots that remain for each sequence when one of them ends.
IGNORE_EOS_RESERVE = 1
#: An output counts no longer than this when room is asked for it.
CLIP_MAX_NEW_TOKENS = 4096


class PrefillBatch:
    """A step that prefills, while it is put together: SGLang's ``PrefillAdder``.

    Attributes:
        reserved: Slots kept for the outputs of each running sequence: a share of them, which is a float as in SGLang.
        preempted: Running sequences that were preempted for it.
        running: Sequences that run beside it.
        parked: Prefills in progress that find no windows: they compute nothing in it, and keep their seats.
        lacked: Tokens that the sequence which was looked at last has to compute.
        admitted: Sequences that end their prefill in it.
        chunks: Sequences that continue their prefill after it, with the tokens that they compute in it.
        tokens: Tokens that it computes.
        is_full: Whether ``max_num_seqs`` is reached or the room ran out.
    """

    def __init__(
        self, transaction: RadixTransaction, limits: Limits, generated: Mapping[Sequence, int], ratio: float
    ) -> None:
        self._generated, self._ratio, self._transaction = generated, ratio, transaction
        self.reserved = {each: self._to_reserve(each) for each in generated}
        self.preempted: list[Sequence] = []
        self.running, self.parked, self.lacked = len(generated), 0, 0
        self._ends: list[tuple[float, int]] | None = None
        self.admitted: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.tokens = 0
        self.is_full = False
        self._page, self._chunk_left = transaction.memory.block_size, limits.max_num_batched_tokens
        self._input_left = MAX_PREFILL_TOKENS
        # Sequences of the step, in the order in which they joined it.
        self._order: list[Sequence] = []
        # Slots that are spoken for, in whole pages and one more of each sequence; and without the outputs to come.
        self._taken = sum(self.reserved.values())
        self._taken_now = self._windows_taken = 0
        self._windows = transaction.windows
        # In one buffer with states: slots that have the bytes of one, and states that may be taken.
        self._state_slots, self._states_left = 0, 1
        if transaction.buffer is not None and not transaction.windows:
            self._state_slots, self._states_left = transaction.buffer.unit_slots, transaction.state_room

    def __len__(self) -> int:
        return len(self.admitted) + len(self.chunks)

    @property
    def seats(self) -> int:
        """Seats that are taken: SGLang's rows of ``req_to_token``."""
        return self.running + len(self) + self.parked

    def _to_reserve(self, sequence: Sequence) -> float:
        left = self._transaction.max_output_tokens(sequence) - self._generated[sequence]
        return min(left, CLIP_MAX_NEW_TOKENS) * (1.0 if sequence.ignores_eos else self._ratio)

    def room_for_output(self, sequence: Sequence) -> float:
        """Slots that the whole output of a sequence takes beyond the room."""
        return min(self._transaction.max_output_tokens(sequence), CLIP_MAX_NEW_TOKENS) - self._room

    def preempt(self, sequence: Sequence) -> None:
        """Free what a running sequence has, and what is kept for it."""
        self._taken -= self.reserved.pop(sequence)
        self.running -= 1
        self._transaction.retract(sequence, self.running)

    def continue_prefill(self, sequence: Sequence) -> None:
        """The next chunk of a prefill: as much as the room has, or a whole one if there is none."""
        own = sequence.start_tokens - sequence.computed_tokens
        left = min(self._chunk_left, int(self._room))
        if self._shares:
            left = self._chunk_in_both(sequence, own)
        elif self._windows is not None:
            left = min(left, self._window_room - self._page)
        if self._windows is not None and left <= 0:
            self.parked += 1
            return
        self._compute(sequence, own, min(own, left if left > 0 else self._chunk_left))

    def add(self, sequence: Sequence) -> bool:
        """Admit a sequence if it fits, and whether another one may follow."""
        transaction = self._transaction
        self.lacked = own = sequence.start_tokens - transaction.look_up(sequence)
        to_come = min(max(0, transaction.max_output_tokens(sequence) - sequence.generated_tokens), CLIP_MAX_NEW_TOKENS)
        beside = 0 if transaction.has_copy else self._state_slots
        if sequence.ignores_eos and not transaction.keeps:
            paged = self._paged(own) + self._page + beside
            if not self._fits_to_its_end(sequence, paged, self._in_windows(own, to_come)):
                self.is_full = True
                return False
            transaction.lock(sequence)
            return self._admit(sequence, own, min(own, self._chunk_left), beside)
        transaction.lock(sequence)
        # What it locks can be evicted no more.
        promised = transaction.on_host
        tokens = self._fitting(sequence, own - promised, own, to_come, beside, transaction.windows_on_host)
        if tokens and (loaded := transaction.load()):
            own -= loaded
            tokens = min(tokens, own)
        elif tokens and promised:
            tokens = self._fitting(sequence, own, own, to_come, beside, 0)
        if not tokens:
            transaction.unlock(sequence)
            return False
        return self._admit(sequence, own, tokens, beside)

    def _fitting(self, sequence: Sequence, lacking: int, own: int, to_come: int, beside: int, on_host: int) -> int:
        """Tokens that a sequence would compute in the step, of those that it is ``lacking`` after a load; 0 if it is not admitted.

        Args:
            own: Tokens that it lacks on the device.
            beside: Slots that have the bytes of the state that it lacks, in one buffer.
            on_host: Slots of windows for the load.
        """
        if self._shares:
            chunk = self._first_chunk_in_both(sequence.start_tokens, own, to_come)
            lacks_room = chunk <= 0 < self._chunk_left
        else:
            chunk = self._chunk_in_windows(self._paged(lacking), to_come, on_host)
            lacks_room = own + to_come + self._page + beside >= self._room or chunk <= 0 < self._chunk_left
            lacks_room = lacks_room or (beside > 0 and self._states_left < 1)
        self.is_full = self.is_full or lacks_room
        return 0 if lacks_room else self._within(lacking, chunk)

    def _within(self, own: int, chunk: int) -> int:
        """Tokens of a prefill of ``own`` that it computes in the rest of the chunk: all, or whole pages."""
        return own if self._paged(own) <= chunk else chunk // self._page * self._page

    def _in_windows(self, tokens: int, to_come: int) -> int:
        """See ``Windows.needed``."""
        return 0 if self._windows is None else self._windows.needed(tokens, to_come, self._page, self._chunk_left)

    @property
    def _shares(self) -> bool:
        """Whether slots and windows share a buffer, so that one sum of bytes is asked for both (``SharedSWAPrefillBudget``)."""
        return self._windows is not None and self._transaction.buffer is not None

    def _fits_both(self, tokens: int, to_come: int, slots: int) -> bool:
        """Whether there is room for a prefill's windows and so many slots, beside what is spoken for."""
        windows = self._in_windows(tokens, to_come) + self._windows_taken
        return self._transaction.can_reserve(slots + self._taken, windows)

    def _most_in_both(self, tokens: int) -> int:
        """Tokens in whole pages, at most so many, that there is room for without an output."""
        page = self._page

        def lacks(pages: int) -> bool:
            return not self._fits_both(pages * page, 0, pages * page + page)

        return page * bisect_left(range(1, max(0, tokens) // page + 1), True, key=lacks)

    def _chunk_in_both(self, sequence: Sequence, own: int) -> int:
        """Tokens of the next chunk of a prefill of ``own``; 0 without room."""
        if self._chunk_left <= 0:
            return 0
        left = self._transaction.max_output_tokens(sequence) - sequence.generated_tokens
        tokens = min(own, self._chunk_left)
        to_come = min(max(left, 0), CLIP_MAX_NEW_TOKENS) if tokens == own else 0
        if self._fits_both(tokens, to_come, tokens + to_come + self._page):
            return self._chunk_left
        return self._most_in_both(tokens - 1 if tokens == own else tokens)

    def _first_chunk_in_both(self, known: int, own: int, to_come: int) -> int:
        """Tokens of the rest of the chunk for which a request of ``known`` tokens finds room: all or none, fewer only where all of it never does."""
        page = self._page
        assert self._transaction.buffer is not None
        if self._fits_both(own, to_come, own + to_come + page):
            return self._chunk_left
        if self._transaction.buffer.holds(known + to_come + page, self._in_windows(known, to_come), page):
            return 0
        return self._most_in_both(min(self._chunk_left, own - 1))

    def _chunk_in_windows(self, tokens: int, to_come: int, on_host: int) -> int:
        """Tokens of the rest of the chunk for which there are windows beside so many slots: all or none, fewer only where the pool could
        never hold all."""
        if self._windows is None:
            return self._chunk_left
        needed = self._in_windows(tokens, to_come) + on_host
        if needed < self._window_room:
            return self._chunk_left
        if needed < self._windows.pages * self._page:
            return 0
        left = (self._window_room - self._in_windows(0, to_come) - on_host) // self._page * self._page
        return min(self._chunk_left, left)

    @property
    def _window_room(self) -> int:
        return self._transaction.window_room - self._windows_taken

    def _paged(self, tokens: int) -> int:
        """Slots of the pages that so many tokens take."""
        return -(-tokens // self._page) * self._page

    def _admit(self, sequence: Sequence, own: int, tokens: int, beside: int) -> bool:
        self._transaction.enter(sequence)
        self._compute(sequence, own, tokens)
        if beside:
            # Neither its copies nor that of a state which joins the tree are counted.
            self._states_left -= 1
            self._taken_now += beside
            self._taken += beside
        self.is_full = self.is_full or not self._has_room
        return self._has_room and not self.is_spent

    def _fits_to_its_end(self, sequence: Sequence, own: int, of_windows: int) -> bool:
        """Without a tree: whether slots are left at the end of each sequence, the ends in the order of tokens to come; with windows in a
        pool of their own, whether they are now.

        Those that run and that were admitted before are collected when the first sequence asks, as SGLang does.
        """
        left_now = self._transaction.room - self._taken_now
        if own > min(left_now, self._room):
            return False
        if self._windows is not None:
            return of_windows <= self._window_room
        mine = self._end(sequence, sequence.generated_tokens)
        if self._ends is None:
            counted = [(each, self._generated[each]) for each in self.reserved]
            counted += [(each, each.generated_tokens) for each in self._order]
            ends = [mine, *(self._end(each, generated) for each, generated in counted)]
            self._ends = sorted((end for end in ends if end[0] > 0), key=lambda end: end[0])
        elif mine[0] > 0:
            # Its place in SGLang: before the last one where it ends after all.
            later = (place for place, end in enumerate(self._ends) if mine[0] <= end[0])
            self._ends.insert(next(later, max(0, len(self._ends) - 1)), mine)
        freed, remaining = 0, left_now - own
        for place, (left, occupied) in enumerate(self._ends):
            running = len(self._ends) - place
            if remaining + freed - left * running <= IGNORE_EOS_RESERVE * running:
                return False
            freed += occupied
        return True

    def _end(self, sequence: Sequence, generated: int) -> tuple[float, int]:
        """Tokens that a sequence is expected to generate yet, and those that it has."""
        ratio = 1.0 if sequence.ignores_eos else self._ratio
        left = self._transaction.max_output_tokens(sequence) * ratio - generated
        return left, sequence.prompt_tokens + generated

    @property
    def is_spent(self) -> bool:
        """Whether chunk or input are used up while there is room."""
        return self._has_room and (self._chunk_left <= 0 or self._input_left <= 0)

    @property
    def _has_room(self) -> bool:
        if self._shares:
            return self._transaction.can_reserve(self._taken, self._windows_taken)
        if (self._windows is not None and self._window_room <= 0) or self._states_left <= 0:
            return False
        return self._room > 0 and self._transaction.room > self._taken_now

    @property
    def _room(self) -> float:
        return self._transaction.room - self._taken

    def _compute(self, sequence: Sequence, own: int, tokens: int) -> None:
        """So many of the tokens that it lacks; with all of them, its output to come is spoken for."""
        self._order.append(sequence)
        self.tokens += tokens
        paged = self._paged(tokens)
        output = 0 if tokens < own else min(self._transaction.max_output_tokens(sequence), CLIP_MAX_NEW_TOKENS)
        self._windows_taken += self._in_windows(paged, output)
        self._chunk_left -= paged
        self._input_left -= paged
        self._taken_now += paged + self._page
        self._taken += paged + self._page
        if tokens < own:
            self.chunks.append((sequence, tokens))
        else:
            self.admitted.append(sequence)
            self._taken += output


class NewTokenRatio:
    """The share of the outputs to come that is reserved: a float, which every decode lowers until it is reset or estimated
    anew."""

    FIRST = 0.7
    LEAST = FIRST * 0.14
    #: From the first to the least in 600 steps.
    DECAY = (FIRST - LEAST) / 600

    def __init__(self) -> None:
        self._ratio, self._since = self.FIRST, 0

    def at(self, decode_step: int) -> float:
        """The ratio before ``decode_step``; subtracted step by step, as floats round."""
        while self._since < decode_step and self._ratio != self.LEAST:
            self._ratio = max(self._ratio - self.DECAY, self.LEAST)
            self._since += 1
        self._since = max(self._since, decode_step)
        return self._ratio

    def reset(self, decode_step: int) -> None:
        """Begin anew."""
        self._ratio, self._since = self.FIRST, decode_step

    def estimate(self, generated: int, running: int, declared: int, decode_step: int) -> None:
        """Set the estimate by what the sequences left by a retraction in ``decode_step`` need."""
        estimate = (generated + RETRACT_STEPS * running) / (declared + 1)
        self._ratio, self._since = min(1.0, estimate), decode_step + 1
