"""What a step did, in terms that a real scheduler and ours share, and where two logs of steps differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step, between its schedule and its end.

    Attributes:
        now: Ticks at which it starts.
        scheduled: (request, tokens that it computes), in the order in which they are computed.
        preempted: Requests that lost their blocks to others, ascending.
        free: Blocks in no table.
        cached: Ids of blocks that can be found by their contents, ascending.
        hits: (request, tokens found in the prefix cache) of each admission, in order.
        evicted: Blocks that lost their contents in the schedule of this step.
        tables: (request, block ids in the first KV group, in the second, ...) of those that hold blocks, ascending by
            request; ids from 1, and 0 where a group keeps nothing any more (vLLM's null block).
    """

    now: int
    scheduled: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    free: int
    cached: tuple[int, ...]
    hits: tuple[tuple[int, int], ...]
    evicted: int
    tables: tuple[tuple[Any, ...], ...]


class Served(NamedTuple):
    """A workload, served.

    Attributes:
        steps: Every step that computed something or preempted a request.
        finished: (ticks, request), in order.
        rejected: Requests that the API server rejected, ascending.
    """

    steps: list[Step]
    finished: list[tuple[int, int]]
    rejected: tuple[int, ...] = ()


class Difference(NamedTuple):
    """The first thing in which two logs differ: the step, the field of ``Step``, and both values."""

    step: int
    field: str
    real: object
    ours: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: real {self.real}, ours {self.ours}"


def first_difference(real: Served, ours: Served) -> Difference | None:
    """Where ``ours`` first differs from ``real``; None if nowhere."""
    for number, (theirs, mine) in enumerate(zip_longest(real.steps, ours.steps)):
        if theirs is None or mine is None:
            return Difference(number, "number of steps", len(real.steps), len(ours.steps))
        for field, value, known in zip(Step._fields, theirs, mine, strict=True):
            if value != known:
                return Difference(number, field, value, known)
    if real.rejected != ours.rejected:
        return Difference(len(real.steps), "rejected", real.rejected, ours.rejected)
    if real.finished != ours.finished:
        pairs = zip_longest(real.finished, ours.finished)
        number, (theirs, mine) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return Difference(number, "finished", theirs, mine)
    return None
