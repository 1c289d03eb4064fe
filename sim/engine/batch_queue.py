"""Batches in flight over pipeline stages, as vLLM's ``EngineCore.step_with_batch_queue`` keeps them.

The scheduler is called while the queue has room. Then it waits for the oldest batch, learns what that sampled, and is called
again. A call that schedules nothing is a batch, too, which is over at once. Two stages, which an even batch passes in one unit:

    time           0       1       2       3       4
    stage 0        | A     | B     | A'    | B'    |
    stage 1                | A     | B     | A'    | B'
    calls          A B     -       A'      B'               a queue of two: ``A'`` waits for what ``A`` sampled
    rows           | A     | B     | A'    | B'    |        a row of the ledger lasts until the next batch enters the first stage

The queue holds one batch a stage, and one more where steps are scheduled ahead: its decision then knows all but the last
``stages`` batches. Batches do not overtake each other, and a stage takes the same share of the time of its batch as every other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ..types.sequence import Sequence


@dataclass(eq=False)
class Batch:
    """What one call of the scheduler decided.

    Attributes:
        over_ticks: When it has passed the last stage.
        computes: Whether it computes anything.
        scheduled: The sequences that it computes, as their memory notes it.
        ended: Those whose last token it computes.
    """

    over_ticks: int
    computes: bool
    scheduled: Mapping[Sequence, object] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)


class BatchQueue:
    """The batches in flight, the oldest first.

    Args:
        stages: Pipeline stages.
        size: Batches that the queue holds.
    """

    def __init__(self, stages: int, size: int) -> None:
        self._size = size
        self._batches: deque[Batch] = deque()
        # When each stage is free.
        self._free_at = [0] * stages

    @property
    def free_at(self) -> int:
        """When the first stage is free."""
        return self._free_at[0]

    @property
    def computes(self) -> bool:
        """Whether any batch in flight computes anything."""
        return any(batch.computes for batch in self._batches)

    def push(self, now: int, ticks: int = 0, decodes: tuple[Sequence, ...] = (), wait: int = 0) -> Batch:
        """Add a batch that may enter the first stage ``now``.

        Args:
            ticks: Its time in all stages together; 0 for one that computes nothing.
            decodes: Sequences that decode a token that may still be in flight. It then waits for that.
            wait: Ticks that it keeps the first stage before, while blocks are copied to the host.
        """
        if wait:
            now += wait
            self._free_at[0] = max(now, self._free_at[0])
        if ticks:
            oldest = self._batches[0] if len(self._batches) == len(self._free_at) else None
            if oldest is not None and not oldest.scheduled.keys().isdisjoint(decodes):
                now = max(now, oldest.over_ticks)
            stages, left = len(self._free_at), 0
            for stage in range(stages):
                left, before = ticks * (stage + 1) // stages, left
                now = self._free_at[stage] = max(now, self._free_at[stage]) + left - before
        batch = Batch(now, ticks > 0)
        self._batches.append(batch)
        return batch

    def take_back(self, sequences: Container[Sequence]) -> None:
        """The tokens that these sequences have in flight are dropped."""
        for batch in self._batches:
            batch.ended = [each for each in batch.ended if each not in sequences]

    def pop(self) -> Batch | None:
        """The oldest batch, where the queue is full."""
        return self._batches.popleft() if len(self._batches) == self._size else None

    def pop_oldest(self) -> Batch | None:
        """The oldest batch, if there is any."""
        return self._batches.popleft() if self._batches else None
