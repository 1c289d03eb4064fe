"""Blocks of finished sequences that come free after the batches in flight.

A KV connector may fill a free block at once, while a batch in flight still writes it for the sequence that had it. The blocks of a
finished sequence that a batch in flight computes therefore wait at a *fence*, the number of batches that are scheduled by then:

    batch          1             2             3             4
    is decided     at first      then          1 is over     2 is over
    computes       A, B          A, B          B             B
    A's blocks     held          deferred      free          free

A ended in batch 1, which the decision of batch 2 did not know. Its blocks come free when batch 2 is over, so that batch 4 may take them; batch 3
was decided before. For the same reason no sequence of a batch in flight is preempted. If the blocks for a running
sequence are not free it stalls, and so do those behind it; the last running sequence may be preempted once no batch in flight computes it.

Source: vLLM 0.33, vllm/v1/core/sched/scheduler.py (``defer_block_free``, ``_drain_deferred_frees``, ``_request_blocks_can_be_freed``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...types.sequence import Sequence
from .group_cache import Table


class Deferred(NamedTuple):
    """Blocks of a finished sequence that a batch in flight computes in vain.

    Attributes:
        fence: Batches that must be over before they come free.
        tables: Its block tables, one a KV group; empty where blocks are only counted.
    """

    fence: int
    tables: tuple[Table, ...]


class Fences:
    """The batches of a memory, and the blocks that wait for them.

    Attributes:
        scheduled, processed: Batches that compute anything that were scheduled, and that are over (``sched_step_seq``,
            ``processed_step_seq``). Not counted where sequences grow in lockstep: only the last one is in flight.
        deferred: Finished sequences whose blocks wait, in the order in which these come free.
    """

    def __init__(self) -> None:
        self.scheduled = self.processed = 0
        self.deferred: dict[Sequence, Deferred] = {}

    def defer(self, sequence: Sequence, tables: tuple[Table, ...]) -> None:
        """The blocks of a sequence wait until the batches that are scheduled by now are over."""
        self.deferred[sequence] = Deferred(self.scheduled, tables)

    def process(self, batches: int) -> Iterator[tuple[Sequence, tuple[Table, ...]]]:
        """So many batches are over. Yields the sequences whose blocks come free."""
        self.processed = batches
        while self.deferred and (first := next(iter(self.deferred.items())))[1].fence <= batches:
            sequence, (_, tables) = first
            del self.deferred[sequence]
            yield sequence, tables
