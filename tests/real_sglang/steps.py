"""What a step of SGLang did, in terms that its scheduler and ours share, and where two logs of steps differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from fragmeter.sim import Workload

#: Token ids of one stream, apart from those of any other; 0 is the end of text.
_STREAM_TOKENS = 1 << 24


class Step(NamedTuple):
    """One step, between its schedule and its end.

    Attributes:
        now: Ticks at which it starts.
        prefills: Whether it prefills; else it decodes.
        scheduled: (request, tokens that it computes), ascending in a prefill, else in the order of the batch.
        retracted: Requests that were retracted in its schedule, ascending.
        free: Slots that are neither in the tree nor a request's own.
        evictable: Slots of the tree without locks.
        beside_free, beside_evictable: The same in the pool of windows, or of states; 0 without one.
        host_free, beside_host_free: Free slots of HiCache's host pool, and of that of windows or states; 0 without one.
    """

    now: int
    prefills: bool
    scheduled: tuple[tuple[int, int], ...]
    retracted: tuple[int, ...]
    free: int
    evictable: int
    beside_free: int = 0
    beside_evictable: int = 0
    host_free: int = 0
    beside_host_free: int = 0


class Served(NamedTuple):
    """A workload, served: every step, and (ticks, request) of each finish, ascending.

    Attributes:
        is_stuck: Whether requests wait at the end that are never admitted: a pool without a tree may be too small for one.
    """

    steps: list[Step]
    finished: list[tuple[int, int]]
    is_stuck: bool = False


class Difference(NamedTuple):
    """The first step that differs, the field of ``Step``, and both values."""

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
    for field in ("finished", "is_stuck"):
        value, known = getattr(real, field), getattr(ours, field)
        if value != known:
            return Difference(len(real.steps), field, value, known)
    return None


def tokens_of(workload: Workload) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs as token ids: equal where the contents are, and never the end of text."""
    runs, streams = workload.token_runs(), {}

    def ids(pieces: tuple[tuple[int, int, int], ...]) -> list[int]:
        found: list[int] = []
        for stream, start, length in pieces:
            base = streams.setdefault(stream, len(streams)) * _STREAM_TOKENS + 1
            found += range(base + start, base + start + length)
        return found

    rows = range(len(workload))
    return [ids(runs.runs(row)) for row in rows], [ids(runs.output_runs(row)) for row in rows]
