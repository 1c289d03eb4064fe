"""Disaggregated prefill: some replicas prefill, others decode, and the prompt's KV cache moves over a link.

    prefill replica    |--prefill--|first token   its blocks are kept   |
    link                           |--other transfers--|--its transfer--|
    decode replica                                                      |queue|--second token--|--third--| ...

A request is prefilled as if its output had one token. If the output has more, the decode router chooses a replica at
once and the KV of the prompt is sent there. Each prefill replica has one link, which transfers one prompt after the
other at its bandwidth, plus the latency. The prefill replica keeps the blocks, with their contents, until the transfer
ends. They are freed at its next step boundary, or at once if the replica is idle.

On the decode replica the request waits in the queue, with its prompt computed and one token generated. Its blocks are
allocated at admission; until then its KV is outside of the pool. Its first step computes the KV of the first token
and yields the second token. If it is preempted there, it is recomputed there, prompt included, as in vLLM.

The transferred bytes are therefore those of the prompts of all requests with more than one output token, once each. A
transfer takes at least one tick. At one tick, transfers end before step boundaries, in the order in which they were
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from heapq import heappop, heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import URGENT

from ..engine.engine import Alarm
from ..memory.accounting.ledger import Leap, Table
from ..types import ticks
from ..types.sequence import NOT_DECODING, Sequence
from ..workload.source import NEVER
from .routed import Mailbox, RoutedEngine
from .routing import Router
from .sent import Lengths, Sent

#: Columns of the transfers: which request, from where to where, when its prompt was done, when the transfer began and
#: when it was over, and how much it was.
TRANSFER = ("row", "prefill_replica", "replica", "ready_ticks", "start_ticks", "end_ticks", "bytes")
#: Bytes of a gigabyte, of which links carry so many a second.
GIGABYTE = 10**9


class Link:
    """A link that carries one transfer after the other.

    Args:
        bandwidth: GB/s.
        latency_ms: Milliseconds added to each transfer; the next one may begin in the meantime.
    """

    def __init__(self, bandwidth: float, latency_ms: float) -> None:
        self._ticks_a_byte = Fraction(ticks.PER_SECOND, GIGABYTE) / Fraction(bandwidth)
        self._latency_ticks = ticks.from_ms(latency_ms)
        self._free_ticks = 0

    def carry(self, now: int, size_bytes: int) -> tuple[int, int]:
        """Start and end of a transfer that is ready now."""
        start = max(now, self._free_ticks)
        self._free_ticks = start - (-size_bytes * self._ticks_a_byte // 1)
        return start, self._free_ticks + self._latency_ticks


class PrefillMailbox(Mailbox):
    """A ``Mailbox`` that also reports the end of transfers, when the prefill replica frees the blocks.

    Args:
        drop: Called with the sequence that holds the blocks.

    Attributes:
        held: Heap of sequences that hold blocks, by the end of their transfer.
    """

    hears_of_finishes = True

    def __init__(self, drop: Callable[[Sequence], None]) -> None:
        self.held: list[tuple[int, int, Sequence]] = []
        self._drop = drop
        super().__init__()

    def hold(self, until: int, sequence: Sequence) -> None:
        """Keep the blocks of a sequence until the end of its transfer."""
        heappush(self.held, (until, sequence.index, sequence))
        self._look()

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        while self.held and self.held[0][0] <= now:
            self._drop(heappop(self.held)[2])
        super().deliver(now, waiting)

    def _look(self) -> None:
        super()._look()
        if self.held:
            self.next_ticks = min(self.next_ticks, self.held[0][0])


class PrefillEngine(RoutedEngine):
    """A replica that only prefills.

    Args:
        transfer: Called with a prefilled sequence and the time; returns the end of its transfer, or None if the
            sequence has finished.
        others: As for ``RoutedEngine``.
    """

    _mailbox: PrefillMailbox

    def __init__(
        self, env: simpy.Environment, number: int, transfer: Callable[[int, Sequence, int], int | None], *others: Any
    ) -> None:
        super().__init__(env, number, PrefillMailbox(self._drop), *others)
        self._transfer = transfer

    def _drop(self, sequence: Sequence) -> None:
        self.memory.release((sequence,), self.state.decode_step)

    def _release_and_notify(self, leaving: list[Sequence], decode_step: int, lost: Iterable[Sequence] = ()) -> None:
        """See ``Engine``; a sequence that is sent elsewhere keeps its blocks until the transfer ends, unless it was preempted."""
        for sequence in lost:
            self._transfer(self.number, sequence, int(self.env.now))
        for sequence in leaving:
            until = self._transfer(self.number, sequence, int(self.env.now))
            if until is None:
                release = self.memory.release_finished if self._ahead else self.memory.release
                release((sequence,), decode_step)
                continue
            self.memory.stall(sequence, decode_step)
            self.memory.pass_windows(sequence)
            sequence.start_step, sequence.computed_tokens = NOT_DECODING, sequence.start_tokens
            self._mailbox.hold(until, sequence)

    def _rest(self, now: int) -> tuple[int, Leap | None] | None:
        """See ``Engine``. Blocks may be held meanwhile, so the ledger has a row; waiting sequences may need them."""
        until = self.source.next_ticks
        if until >= NEVER or (self.state.waiting and not self._mailbox.held and self._transfers is None):
            return None
        rest = until - now, (now, 0, until - now, 0, 0, 0, 0, 0, len(self.state.waiting))
        self._begin(now, 0, *rest, rests=True)
        return rest


class KVTransfers:
    """Sends the KV of prompts from prefill replicas to decode replicas.

    Args:
        lengths: Lengths of the workload's requests.
        sent: Requests sent to each replica, prefill replicas first.
        decoders: Engines of the decode replicas.
        router: Chooses the decode replica.
        links: Links of the prefill replicas.
        bytes_of: Bytes of the KV of a prompt of so many tokens.
        remaining: Number of requests of more than one token that will be served.

    Attributes:
        transfers: A record of ``TRANSFER`` each.
    """

    def __init__(
        self,
        lengths: Lengths,
        sent: list[Sent],
        decoders: Iterable[RoutedEngine],
        router: Router,
        links: list[Link],
        bytes_of: Callable[[int], int],
        remaining: int,
    ) -> None:
        self._lengths, self._sent, self.decoders, self._router = lengths, sent, [*decoders], router
        self._links, self._bytes_of, self._remaining = links, bytes_of, remaining
        self.transfers = Table(TRANSFER)
        router.watch(self.decoders)
        if not remaining:
            self._close(0)

    def __call__(self, number: int, sequence: Sequence, now: int) -> int | None:
        """See ``PrefillEngine``."""
        row = self._sent[number].rows[sequence.index]
        if self._lengths.outputs[row] == 1:
            return None
        decoder = self.decoders[self._router.choose(row, now)]
        size_bytes = self._bytes_of(sequence.prompt_tokens)
        start, end = self._links[number].carry(now, size_bytes)
        self.transfers.append((row, number, decoder.number, now, start, end, size_bytes))
        coming = self._lengths.sequence(row)
        # Its prompt is computed, and its first token is there.
        coming.computed_tokens, coming.generated_tokens = coming.prompt_tokens, 1
        coming.start_tokens += 1
        decoder.expect(coming)
        self._at(decoder, end - now, row, coming)
        return end

    def _at(self, decoder: RoutedEngine, delay: int, row: int, sequence: Sequence) -> None:
        """Schedule an arrival after a delay, before all other events of its tick."""
        alarm = Alarm(decoder.env)
        alarm.callbacks = [lambda _: self._arrive(decoder, row, sequence)]
        decoder.env.schedule(alarm, URGENT, delay)

    def _arrive(self, decoder: RoutedEngine, row: int, sequence: Sequence) -> None:
        now = int(decoder.env.now)
        decoder.send(now, self._sent[decoder.number].number(row, sequence))
        self._remaining -= 1
        if not self._remaining:
            self._close(now)

    def _close(self, now: int) -> None:
        for decoder in self.decoders:
            decoder.close(now)

    def columns(self) -> dict[str, np.ndarray]:
        """The transfers as int64 columns, in the order in which prefills ended."""
        return self.transfers.columns()
