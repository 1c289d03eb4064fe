"""Waiting and running sequences and the current decode step: what policies look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from .errors import SimulationFault
from .sequence import NOT_DECODING, RECOMPUTED, SWAPPED_IN, Sequence

if TYPE_CHECKING:
    from ..workload.groups import Group


class State:
    """The scheduler's queues over the decode step.

    ``decode_step`` counts steps. A running sequence gains one token a step, so the tokens computed by
    all of them in ``decode_step`` are ``batch_size * decode_step + lag_sum``, and the step after which each
    finishes is known when it is admitted: finishes wait in a calendar, a heap by finish step.

    Args:
        preempted_first: Whether a preempted sequence goes to the front of the queue, and not to its
            place by arrival.

    Attributes:
        decode_step: Steps begun and ended so far; the step being decided has this number.
        waiting: Arrived and not admitted, in arrival order, preempted ones at the front.
        prefilling: Sequences in a prefill over several steps, in the order in which they began.
        running: Those that decode, in the order in which their prefills ended.
        stalled: Those that stand still and keep their blocks.
        swapped: Out in host memory, first to come back first.
        batch_size: Sequences that a step computes. In static batching ended ones count until the batch is over.
        lag_sum: Sum of the lags of those, in a static batch with every prompt padded.
        forking: Groups with siblings that begin in the next step that decodes; where sequences are alone, none.
    """

    __slots__ = (
        "_preempted_first", "calendar", "decode_step", "lag_sum", "prefilling", "running", "stalled", "swapped",
        "waiting", "batch_size",
    )  # fmt: skip
    forking: Iterable[Group] = ()
    #: Whether sequences may have siblings.
    shares = False

    def __init__(self, preempted_first: bool = False) -> None:
        self._preempted_first = preempted_first
        self.decode_step = self.batch_size = self.lag_sum = 0
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.prefilling: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.stalled: dict[Sequence, None] = {}
        self.calendar: list[tuple[int, int, Sequence]] = []

    def prefill(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of a prefill that goes on; a new one leaves the head of the waiting queue."""
        if sequence not in self.prefilling:
            self.waiting.popleft()
            self.prefilling[sequence] = None
        sequence.computed_tokens += tokens

    def start(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0) -> None:
        """A sequence has all its tokens computed once ``decode_step`` is over, and decodes from then on."""
        sequence.start_step = decode_step
        sequence.lag = lag = (padded_tokens or sequence.start_tokens) - decode_step
        sequence.finish_step = finish = decode_step + sequence.output_tokens - sequence.generated_tokens
        self.batch_size += 1
        self.lag_sum += lag
        self.running[sequence] = None
        heappush(self.calendar, (finish, sequence.order, sequence))

    def fork(self, sibling: Sequence, decode_step: int) -> None:
        """A sibling decodes from ``decode_step`` on.

        Raises:
            SimulationFault: Sequences are alone here; see ``GroupState``.
        """
        raise SimulationFault(f"sequence {sibling.index} is to fork where sequences have no siblings")

    def preempt(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...]) -> None:
        """Sequences go back to waiting, or to the host."""
        for sequence in preempted + swapped_out:
            if sequence in self.running:
                self._stop(sequence)
            else:
                self._drop(sequence)
                sequence.lost_tokens = max(sequence.lost_tokens, sequence.computed_tokens)
        heapify(self.calendar)
        for sequence in preempted:
            sequence.computed_tokens = 0
            if self._preempted_first:
                self.waiting.appendleft(sequence)
            else:
                _insert(self.waiting, sequence)
        for sequence in swapped_out:
            sequence.kind = SWAPPED_IN
            sequence.computed_tokens = sequence.start_tokens - 1
            _insert(self.swapped, sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.prefilling:
            del self.prefilling[sequence]
        else:
            del self.stalled[sequence]
            sequence.kind = RECOMPUTED

    def stall(self, sequence: Sequence) -> None:
        """A running sequence stands still; when it goes on it decodes, as one that comes back from the host."""
        lost = sequence.lost_tokens
        self._stop(sequence)
        heapify(self.calendar)
        sequence.kind, sequence.lost_tokens = SWAPPED_IN, lost
        sequence.computed_tokens = sequence.start_tokens - 1
        self.stalled[sequence] = None

    def _stop(self, sequence: Sequence) -> None:
        self.batch_size -= 1
        self.lag_sum -= sequence.lag
        del self.running[sequence]
        self.calendar.remove((sequence.finish_step, sequence.order, sequence))
        sequence.kind = RECOMPUTED
        sequence.lost_tokens = sequence.held_tokens(self.decode_step)
        sequence.generated_tokens += self.decode_step - sequence.start_step
        sequence.start_tokens = sequence.prompt_tokens + sequence.generated_tokens
        sequence.start_step = NOT_DECODING

    def take_finished(self) -> list[Sequence]:
        """The sequences with no token left to generate leave, in order of arrival."""
        finished: list[Sequence] = []
        calendar, decode_step, running = self.calendar, self.decode_step, self.running
        while calendar and calendar[0][0] == decode_step:
            _, _, sequence = heappop(calendar)
            del running[sequence]
            self.lag_sum -= sequence.lag
            finished.append(sequence)
        self.batch_size -= len(finished)
        return finished

    def take_ended(self) -> list[Sequence]:
        """As ``take_finished`` for a static batch: its sequences leave when the last one is done.

        Those that end early stay in ``running`` and in the batch size: their rows are still computed.
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
    """Put ``sequence`` back among those that arrived before and after it: nearly always the front."""
    place = 0
    while place < len(queue) and queue[place].order < sequence.order:
        place += 1
    queue.insert(place, sequence)
