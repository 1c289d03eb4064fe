"""The API server in front of the engine: what a request and its output tokens wait for its event loops.

``--api-server-count`` processes have an event loop each, which does one thing at a time. Request i is on loop ``i % loops``:

    before the engine   request + prompt_token x prompt       parsing, chat template, tokenizer; in two turns
    after a step        step + token x n + chunk x n          detokenizer and streaming, for the n sequences that the step computes

The first turn of a request is ``FIRST_TURN`` of ``request``: connection, parsing, checks. Then it waits for the thread of the tokenizer, and takes its second
turn behind all requests that came before its first one was over. So nothing of a burst reaches the engine before all of it is parsed: of
1,000 chat requests of 217 tokens that vLLM's API server got at once, the first left it when half of its work for all of them was done.

A loop that is still at work when steps end takes all of them at once when it is free, and sends one chunk to each sequence, with the
tokens of all these steps, as vLLM does. Several loops share tokens and chunks of a step equally. Requests go first: the outputs have
a loop's time between them. So no request waits for outputs, and what reaches the engine, and when, follows from the arrivals alone: the
engine is simulated as without an API server. vLLM's loop takes turns instead; the sum of the work is the same.

Source: vLLM 0.33, ``AsyncLLM._run_output_handler`` and ``RequestOutputCollector``; times by ``benchmarks/api_server_time.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ..policy.api_times import PARTS
from ..types import ticks
from .run_log import RunLog

#: Share of ``request`` before the tokenizer, by the CPU time of the process until the engine had the first request of a burst:
#: ``bursts`` of ``api_server.json``.
FIRST_TURN = 0.7
#: One number, or one of each step.
Number = TypeVar("Number", int, np.ndarray)


class Steps(NamedTuple):
    """Steps that compute output tokens, in order of time; int64 [steps].

    Attributes:
        end_ticks: When each is over.
        sequences: Sequences with a token in it.
        begun: Those of them with none in the step before.
    """

    end_ticks: np.ndarray
    sequences: np.ndarray
    begun: np.ndarray

    @classmethod
    def of(cls, log: RunLog) -> Steps:
        """The steps of a run, those within leaps too."""
        rows = {name: log.rows[name] for name in ("start_ticks", "steps", "first_ticks", "next_ticks", "slope_ticks")}
        steps = rows["steps"]
        start, first, later, slope = (
            np.repeat(rows[name], steps) for name in ("start_ticks", "first_ticks", "next_ticks", "slope_ticks")
        )
        place = np.arange(len(start)) - np.repeat(np.cumsum(steps) - steps, steps)
        ends = start + first + later * place + slope * (place * (place - 1) // 2)
        begun = np.zeros_like(ends)
        some = np.flatnonzero(steps)
        begun[(np.cumsum(steps) - steps)[some]] = (log.rows["batch_size"] - log.rows["decodes"])[some]
        return cls(ends, np.repeat(log.rows["batch_size"], steps), begun)


@dataclass(frozen=True)
class ApiServer:
    """Event loops and the time of their work, in ticks.

    Attributes:
        loops: Processes of the API server.
        request, prompt_token: Of a request before it reaches the engine.
        step, token, chunk: Of the outputs of a step.
    """

    loops: int
    request: int
    prompt_token: int
    step: int
    token: int
    chunk: int

    @classmethod
    def of_us(cls, loops: int, us: Mapping[str, float]) -> ApiServer:
        """From microseconds, by the names of ``PARTS``."""
        return cls(loops, **{name: round(us[name] * ticks.PER_US) for name in PARTS})

    def delivered(self, arrival_ticks: np.ndarray, prompt_tokens: np.ndarray) -> np.ndarray:
        """When the engine gets each request, int64 [n]: never before an earlier one, whichever loops they are on."""
        found = np.empty_like(arrival_ticks)
        first = round(FIRST_TURN * self.request)
        for loop in range(self.loops):
            own = slice(loop, None, self.loops)
            second = self.request - first + self.prompt_token * prompt_tokens[own]
            found[own] = second_turns(arrival_ticks[own], first, second)
        return np.maximum.accumulate(found)

    def answered(
        self, steps: Steps, arrival_ticks: np.ndarray, prompt_tokens: np.ndarray, rows: np.ndarray, at: np.ndarray
    ) -> np.ndarray:
        """When clients get tokens, int64 [tokens].

        Args:
            steps: All steps of the engine.
            arrival_ticks, prompt_tokens: Of all requests, int64 [n].
            rows, at: Request of each token, and the end of the step that computed it.
        """
        found, step = at.copy(), np.searchsorted(steps.end_ticks, at)
        for loop in range(self.loops):
            mine = np.flatnonzero((rows % self.loops == loop) & (step < len(steps.end_ticks)))
            own = slice(loop, None, self.loops)
            work = self.request + self.prompt_token * prompt_tokens[own]
            between = Between(arrival_ticks[own], work)
            ends = self._sent(steps._replace(end_ticks=between.clock(steps.end_ticks)))
            found[mine] = np.maximum(at[mine], between.time(ends[step[mine]]))
        return found

    def _sent(self, steps: Steps) -> np.ndarray:
        """When a loop has sent the outputs of each step: alone, or all at once that it finds over."""
        sent = steps.end_ticks + self.step + self._shared(steps.sequences, steps.sequences)
        late = np.flatnonzero(sent[:-1] > steps.end_ticks[1:])
        if not len(late):
            return sent
        end, tokens, begun = (column.tolist() for column in steps)
        behind = 0
        for first in late.tolist():
            if first < behind:
                continue
            place, free = first, end[first]
            while place < len(end) and end[place] <= free:
                begin = place
                while place < len(end) and end[place] <= free:
                    place += 1
                # Sequences with a token in any of these steps.
                chunks = tokens[begin] + sum(begun[begin + 1 : place])
                free += self.step * (place - begin) + self._shared(sum(tokens[begin:place]), chunks)
                sent[begin:place] = free
            behind = place
        return sent

    def _shared(self, tokens: Number, chunks: Number) -> Number:
        """A loop's share of the work of sending that many, rounded up."""
        return -(-(self.token * tokens + self.chunk * chunks) // self.loops)


class Between:
    """The time of a loop that requests leave to outputs.

    Args:
        arrival_ticks, work: Requests of the loop and the time that each takes, int64 [n].
    """

    def __init__(self, arrival_ticks: np.ndarray, work: np.ndarray) -> None:
        #: End of each request's work, its begin, and the work before it.
        self._ends = served(arrival_ticks, work)
        self._begins = self._ends - work
        self._sums = np.concatenate([[0], np.cumsum(work)])

    def clock(self, at: np.ndarray) -> np.ndarray:
        """Time up to ``at`` that no request took."""
        begun = np.searchsorted(self._begins, at, side="right")
        if not len(self._ends):
            return at
        left = np.where(begun > 0, np.maximum(self._ends[np.maximum(begun - 1, 0)] - at, 0), 0)
        return at - self._sums[begun] + left

    def time(self, clock: np.ndarray) -> np.ndarray:
        """When that much time was left to outputs; the inverse of ``clock``, the earliest."""
        return clock + self._sums[np.searchsorted(self._begins - self._sums[:-1], clock, side="left")]


def served(arrival_ticks: np.ndarray, work: np.ndarray) -> np.ndarray:
    """When each job is done by a server that does one after the other, int64 [n]; arrivals ascend."""
    done = np.cumsum(work)
    if not len(done):
        return done
    return done + np.maximum.accumulate(arrival_ticks - (done - work))


def second_turns(arrival_ticks: np.ndarray, first: int, second: np.ndarray) -> np.ndarray:
    """When each job is done by a server that takes jobs twice, in the order in which they came for that turn; int64 [n].

    Args:
        arrival_ticks: Ascending; of equal times an arrival goes before a second turn.
        first, second: Time of the first turn, and of each job's second one.
    """
    arrivals, seconds, now = arrival_ticks.tolist(), second.tolist(), 0
    ready: list[int] = []
    done: list[int] = []
    while len(done) < len(arrivals):
        job = len(done)
        if len(ready) < len(arrivals) and (job == len(ready) or arrivals[len(ready)] <= ready[job]):
            now = max(now, arrivals[len(ready)]) + first
            ready.append(now)
        else:
            now += seconds[job]
            done.append(now)
    return np.array(done, dtype=np.int64)
