"""The coordinator of vLLM's data parallelism: what the engines report, and when its clients hear of it.

    engine 0    report(2 waiting, 5 running)       report(0, 7)
    engine 1                 report(0, 4)
    clients                       | published                  | published       100 ms apart while counts change,
                                                                                 else every 5 s

1. Each engine reports its waiting and running requests, and the use of its KV cache, when the two numbers change: at the end of a step.
2. The coordinator publishes them 100 ms after it last did, at once if that is longer ago, and every 5 s if nothing changes.
3. It counts whole milliseconds and waits anew after every report, so that a publication comes up to a millisecond later.
4. Where engines share experts their steps are one, and it publishes the counts of whole steps: once the reports of a step begin, the
   counts before them are kept, and are published first. It then waits for 50 ms at least.

Messages take no time. Those of one tick come before a publication of that tick, and requests before both.

Source: vllm-project/vllm, ``vllm/v1/engine/coordinator.py``, ``DPCoordinatorProc.process_input_socket`` (0.33.0).
"""

from __future__ import annotations

from typing import NamedTuple

from ..types import ticks

MILLISECOND = ticks.from_ms(1)
#: Milliseconds between two publications while counts change, while they do not, and at least after a step of engines in lock step.
CHANGED_MS, UNCHANGED_MS, STEP_MS = 100, 5000, 50


class Counts(NamedTuple):
    """What an engine reports: its waiting and running requests, and the share of its blocks in use."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0


class Coordinator:
    """See the module. It has published zeros at tick 0.

    Args:
        engines: Their number.
        lock_step: Whether their steps are one.
    """

    def __init__(self, engines: int, lock_step: bool) -> None:
        self._counts, self._lock_step = [Counts()] * engines, lock_step
        self._whole: list[Counts] | None = None
        self._changed, self._published_ms, self._step = False, 0, -1
        self._news: list[Counts] | None = None
        self._wait(0)

    def report(self, engine: int, now: int, counts: Counts) -> None:
        """An engine is between two steps; reports come in the order of their ticks."""
        if counts[:2] == self._counts[engine][:2]:
            return
        self._publish_before(now)
        if self._lock_step and now > self._step:
            if self._changed:
                self._whole = [*self._counts]
            self._step = now
        self._counts[engine], self._changed = counts, True
        self._wait(now)

    def news(self, now: int) -> list[Counts] | None:
        """The counts last published before a tick; None if nothing was since the last call."""
        self._publish_before(now)
        found, self._news = self._news, None
        return found

    def _wait(self, now: int) -> None:
        """Publish next when nothing is reported until then."""
        most = CHANGED_MS if self._changed else UNCHANGED_MS
        least = STEP_MS if self._lock_step and self._whole is None else 0
        self._due = now + MILLISECOND * max(least, most - (now // MILLISECOND - self._published_ms))

    def _publish_before(self, now: int) -> None:
        while self._due < now:
            if not self._changed:
                # All that follow until then are the same.
                self._due += (now - 1 - self._due) // (UNCHANGED_MS * MILLISECOND) * UNCHANGED_MS * MILLISECOND
            self._published_ms = self._due // MILLISECOND
            if self._whole is None:
                self._news, self._changed = [*self._counts], False
            else:
                self._news, self._whole = self._whole, None
            self._wait(self._due)
