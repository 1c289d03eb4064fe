"""The state of a scheduler that policies read: its queues and the current decode step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

from .errors import SimulationFault
from .sequence import NOT_DECODING, RECOMPUTED, SWAPPED_IN, Group, Sequence


class State:
    """The queues of a scheduler, and its decode step.

    Every running sequence gains one token per step. After ``decode_step`` the running sequences therefore have
    ``batch_size * decode_step + lag_sum`` computed tokens in total. The finish step of a sequence is known when it is
    admitted, and kept in ``calendar``.

    Args:
        preempted_first: Whether a preempted sequence goes to the front of the queue; False puts it back by arrival.

    Attributes:
        decode_step: Number of completed steps, which is the index of the step that is being decided.
        waiting: Sequences to admit, in order of arrival; preempted ones first if ``preempted_first``.
        prefilling: Sequences in a chunked prefill, in the order of their first chunks.
        running: Decoding sequences, in the order in which their prefills ended.
        stalled: Sequences that do not decode and keep their blocks.
        calendar: Heap of (finish step, order, sequence) of the running sequences.
        finished: Asynchronous scheduling: sequences that finished in the previous step. They hold their blocks and
            batch places for one more decision, which was taken while that step ran.
        overrunning: Asynchronous scheduling: finished sequences in ``running`` that compute one more token, which is
            discarded, because their EOS was not known at the decision.
        swapped: Sequences in host memory, in the order of their return.
        batch_size: Sequences that a step computes. In static batching, finished sequences count until the batch ends.
        lag_sum: Sum of their lags; in a static batch, with padded prompts.
        idle_spans: Number of idle spans so far.
        speculates: Whether steps verify drafts, so that a decision does not know the number of tokens of the step
            before it.
        forking: Groups whose siblings start in the next decoding step; empty without groups.
    """

    __slots__ = (
        "_preempted_first", "batch_size", "calendar", "decode_step", "finished", "overrunning", "lag_sum", "prefilling",
        "idle_spans", "running", "speculates", "stalled", "swapped", "waiting",
    )  # fmt: skip
    forking: Iterable[Group] = ()
    #: Whether requests may have several sequences.
    shares = False

    def __init__(self, preempted_first: bool = False) -> None:
        self._preempted_first = preempted_first
        self.decode_step = self.batch_size = self.lag_sum = 0
        self.idle_spans = 0
        self.speculates = False
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.prefilling: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.stalled: dict[Sequence, None] = {}
        self.finished: dict[Sequence, None] = {}
        self.overrunning: dict[Sequence, None] = {}
        self.calendar: list[tuple[int, int, Sequence]] = []

    def prefill(self, sequence: Sequence, tokens: int) -> None:
        """Count ``tokens`` more of a prompt as computed. The first chunk takes the sequence from the head of the waiting queue."""
        if sequence not in self.prefilling:
            self.waiting.popleft()
            self.prefilling[sequence] = None
        sequence.computed_tokens += tokens

    def start(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0) -> None:
        """End the prefill of a sequence in ``decode_step``; it decodes from the next step on."""
        sequence.start_step = decode_step
        sequence.lag = lag = (padded_tokens or sequence.start_tokens) - decode_step
        sequence.finish_step = finish = decode_step + sequence.output_tokens - sequence.generated_tokens
        self.batch_size += 1
        self.lag_sum += lag
        self.running[sequence] = None
        heappush(self.calendar, (finish, sequence.order, sequence))

    def accept(self, drafts: Mapping[Sequence, int]) -> None:
        """Add accepted drafts to running sequences, in addition to the one token of each step.

        Args:
            drafts: Accepted draft tokens by sequence.
        """
        if not drafts:
            return
        for sequence, tokens in drafts.items():
            sequence.lag += tokens
            sequence.finish_step -= tokens
            self.lag_sum += tokens
        self.calendar[:] = [(sequence.finish_step, sequence.order, sequence) for _, _, sequence in self.calendar]
        heapify(self.calendar)

    def fork(self, sibling: Sequence, decode_step: int) -> None:
        """Start a sibling that decodes from ``decode_step`` on.

        Raises:
            SimulationFault: This state has no groups; see ``GroupState``.
        """
        raise SimulationFault(f"sequence {sibling.index} is to fork where sequences have no siblings")

    def preempt(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...]) -> None:
        """Move sequences back to the waiting queue, or to the swapped queue."""
        for sequence in preempted + swapped_out:
            if sequence in self.running:
                self._stop(sequence)
            elif sequence in self.prefilling or sequence in self.stalled:
                self._drop(sequence)
                sequence.lost_tokens = max(sequence.lost_tokens, sequence.computed_tokens)
        heapify(self.calendar)
        for sequence in preempted:
            sequence.computed_tokens = 0
            self.put_back(self.waiting, sequence)
        for sequence in swapped_out:
            sequence.kind = SWAPPED_IN
            sequence.computed_tokens = sequence.start_tokens - 1
            _insert(self.swapped, sequence)

    def put_back(self, waiting: deque[Sequence], sequence: Sequence) -> None:
        """Return a preempted sequence to ``waiting``: to the front if the policy says so (``preempted_first``), else in order of arrival."""
        if self._preempted_first:
            waiting.appendleft(sequence)
        else:
            _insert(waiting, sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.prefilling:
            del self.prefilling[sequence]
        else:
            del self.stalled[sequence]
            sequence.kind = RECOMPUTED

    def stall(self, sequence: Sequence) -> None:
        """Stall a running sequence. When it resumes, it decodes, like a swapped-in sequence."""
        lost = sequence.lost_tokens
        self._stop(sequence)
        heapify(self.calendar)
        self._hold(sequence)
        sequence.lost_tokens = lost
        self.stalled[sequence] = None

    def _hold(self, sequence: Sequence) -> None:
        """It does not decode, and keeps what it has computed."""
        self._count_generated(sequence)
        sequence.kind, sequence.computed_tokens = SWAPPED_IN, sequence.start_tokens - 1

    def _stop(self, sequence: Sequence) -> None:
        self._end(sequence)
        self.calendar.remove((sequence.finish_step, sequence.order, sequence))
        sequence.kind = RECOMPUTED
        sequence.lost_tokens = sequence.held_tokens(self.decode_step)
        self._count_generated(sequence)

    def _count_generated(self, sequence: Sequence) -> None:
        """Count what a sequence generated since it started; nothing where that was done."""
        if sequence.start_step != NOT_DECODING:
            sequence.generated_tokens += self.decode_step + sequence.lag - sequence.start_tokens
            sequence.start_tokens = sequence.prompt_tokens + sequence.generated_tokens
            sequence.start_step = NOT_DECODING

    def take_finished(self) -> list[Sequence]:
        """Remove and return the finished sequences, in order of arrival."""
        finished: list[Sequence] = []
        calendar, decode_step, running = self.calendar, self.decode_step, self.running
        while calendar and calendar[0][0] == decode_step:
            _, _, sequence = heappop(calendar)
            del running[sequence]
            self.lag_sum -= sequence.lag
            finished.append(sequence)
        self.batch_size -= len(finished)
        return finished

    def note_finished(self, expects_end: Callable[[Sequence], bool] | None) -> list[Sequence]:
        """As ``take_finished`` under asynchronous scheduling: the sequences become ``finished`` or ``overrunning``.

        A decision that does not know the last token expects a finish at ``max_tokens`` and at the model's length, but
        not at an EOS. With drafts it expects no finish at all.

        Args:
            expects_end: Whether a decision that does not know a sequence's last token expects its end; None where it knows all tokens.
        """
        ended: list[Sequence] = []
        calendar, decode_step = self.calendar, self.decode_step
        while calendar and calendar[0][0] == decode_step:
            sequence = heappop(calendar)[2]
            ended.append(sequence)
            if expects_end is not None and (self.speculates or not expects_end(sequence)):
                self.overrunning[sequence] = None
            else:
                self._end(sequence)
                self.finished[sequence] = None
        return ended

    def _end(self, sequence: Sequence) -> None:
        """Remove a sequence without an entry in the calendar from the batch."""
        del self.running[sequence]
        self.batch_size -= 1
        self.lag_sum -= sequence.lag

    def wait_in_vain(self, sequence: Sequence) -> None:
        """An ``overrunning`` sequence stands still until its turn, as the batch of its last token is in flight."""
        self._end(sequence)
        self._hold(sequence)
        self.stalled[sequence] = None

    def overrun(self, sequence: Sequence, decode_step: int) -> None:
        """The turn of an ``overrunning`` sequence that stood still: it computes a token in vain."""
        sequence.start_step, sequence.lag = decode_step, sequence.start_tokens - decode_step
        self.batch_size += 1
        self.lag_sum += sequence.lag
        self.running[sequence] = None

    def forget(self, sequence: Sequence) -> bool:
        """Remove a sequence that is ``finished`` or ``overrunning``; returns False if it is neither."""
        if sequence in self.overrunning:
            del self.overrunning[sequence]
            if sequence in self.running:
                self._end(sequence)
            else:
                del self.stalled[sequence]
            return True
        return self.finished.pop(sequence, True) is None

    def take_back(self, sequence: Sequence) -> None:
        """Take back the last token, and what was computed in vain after it: a sequence that is about to be preempted generates it anew."""
        entry = sequence.finish_step, sequence.order, sequence
        if sequence in self.finished:
            del self.finished[sequence]
            self.running[sequence] = None
            self.batch_size += 1
            self.lag_sum += sequence.lag
        elif sequence in self.overrunning:
            del self.overrunning[sequence]
            if sequence in self.stalled:
                del self.stalled[sequence]
                self.overrun(sequence, self.decode_step)
            generated = sequence.generated_tokens + self.decode_step + sequence.lag - sequence.start_tokens
            in_vain = generated - sequence.output_tokens
            sequence.lag -= in_vain
            self.lag_sum -= in_vain
        else:
            self.calendar.remove(entry)
        sequence.lag -= 1
        self.lag_sum -= 1
        sequence.finish_step += 1
        self.calendar.append((sequence.finish_step, sequence.order, sequence))

    def forget_finished(self) -> None:
        """Remove all sequences that are ``finished`` or ``overrunning``."""
        for sequence in self.overrunning:
            del self.running[sequence]
            self.lag_sum -= sequence.lag
        self.batch_size -= len(self.overrunning)
        self.overrunning.clear()
        self.finished.clear()

    def take_ended(self) -> list[Sequence]:
        """As ``take_finished`` for a static batch, whose sequences all leave when the last one finishes.

        Sequences that finish earlier stay in ``running`` and count in ``batch_size``: their rows are still computed.
        """
        ended: list[Sequence] = []
        calendar = self.calendar
        while calendar and calendar[0][0] == self.decode_step:
            ended.append(heappop(calendar)[2])
        if not calendar:
            self.running.clear()
            self.batch_size = self.lag_sum = 0
        return ended


def _insert(queue: deque[Sequence], sequence: Sequence) -> None:
    """Put ``sequence`` back into a queue in order of arrival: nearly always at the front."""
    place = 0
    while place < len(queue) and queue[place].order < sequence.order:
        place += 1
    queue.insert(place, sequence)
