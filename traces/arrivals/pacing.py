"""Arrival times that replace those of the trace.

Gaps are drawn at unit rate and then mapped onto the rate: the i-th request arrives when the integral of the rate reaches
the sum of the first i gaps. One draw therefore serves every constant rate and every rate curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.types import ticks
from ...sim.types.errors import SettingError, TraceError
from ...sim.workload.content import NO_SESSION, turns_before
from ...sim.workload.users import Users
from ..parsing.checks import numbers_of
from ..parsing.csv_format import CsvParser, header
from ..parsing.files import TraceFile
from ..parsing.reading import MOST_INFLATED_BYTES
from ..parsing.table import shown
from ..parsing.times import LATEST_S, to_ticks
from ..types.trace import Trace
from .streams import stream

#: Columns of a rate curve and their contents.
_CURVE = {"start_s": "seconds, from 0 on", "request_rate": "requests/s"}
SECONDS_PER_HOUR = 3600
#: Fields that set a rate; one at most is given.
_RATES = ("request_rate", "rate_curve", "rate_scale", "requests_per_user_hour")
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Pacing:
    """Arrivals in place of the trace's own.

    Attributes:
        request_rate: Poisson arrivals at this rate, in requests/s; with inf all arrive at 0.
        burstiness: As in vLLM: shape of the gamma distribution of the gaps at a request rate. Their coefficient of
            variation is 1/sqrt(burstiness): 1 is a Poisson process, less is burstier.
        rate_curve: CSV with the columns start_s and request_rate (requests/s from start_s until the next row).
        rate_scale: Factor on the rate of the trace's own arrivals.
        max_concurrency: As in vLLM: maximum number of requests in flight, each sent by one of this many users. A
            request is sent when it has arrived and a user is free. Without arrivals in the trace and without a rate,
            all may be sent at once.
        think_time: Mean seconds between an answer and the user's next request, exponentially distributed. In a trace
            with sessions a user sends the turns of one session, each after the answer to the turn before; without
            max_concurrency each session has its own user and begins at the arrival of its first turn. By default the
            think times are the trace's delays, if it has any.
        users: Number of users: with requests_per_user_hour at a rate, whatever the answers; with
            think_time in a closed loop, as max_concurrency.
        requests_per_user_hour: Requests of each of the users in an hour; Poisson arrivals at the rate of all of them.
    """

    request_rate: float | None = None
    burstiness: Factor | None = None
    rate_curve: Path | None = None
    rate_scale: Factor | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=2**31)] | None = None
    think_time: Annotated[float, Field(ge=0, le=1e6)] | None = None
    users: Annotated[int, Field(ge=1, le=2**31)] | None = None
    requests_per_user_hour: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Pacing:
        for excluding in (_RATES, ("max_concurrency", "users"), ("think_time", "requests_per_user_hour")):
            named = [name for name in excluding if getattr(self, name) is not None]
            if len(named) > 1 and not (named == ["max_concurrency", "users"] and self.requests_per_user_hour):
                raise SettingError(named[1], getattr(self, named[1]), f"excludes {named[0]}; give one of them")
        if self.requests_per_user_hour is not None and self.users is None:
            remedy = "needs the number of users; give it"
            raise SettingError("requests_per_user_hour", self.requests_per_user_hour, remedy)
        if self.users is not None and self.requests_per_user_hour is None and self.think_time is None:
            remedy = "says nothing of how often they ask; give requests_per_user_hour (a rate), or think_time (a closed loop)"
            raise SettingError("users", self.users, remedy)
        if self.burstiness is not None and (self.rate is None and self.rate_curve is None):
            raise SettingError(
                "burstiness", self.burstiness, "applies only to drawn arrivals; give a request rate or a rate curve"
            )
        return self

    @property
    def rate(self) -> float | None:
        """Requests/s of drawn arrivals, given directly or by users; None without either."""
        if self.users is None or self.requests_per_user_hour is None:
            return self.request_rate
        return self.users * self.requests_per_user_hour / SECONDS_PER_HOUR

    @property
    def concurrency(self) -> int | None:
        """Maximum number of requests in flight; None without a closed loop."""
        return (
            self.users if self.max_concurrency is None and self.requests_per_user_hour is None else self.max_concurrency
        )

    @contextmanager
    def names_as_given(self) -> Iterator[None]:
        """Let errors name the flag that was given, where a rate or the requests in flight follow from users."""
        given: dict[str, tuple[str, object]] = {}
        if self.requests_per_user_hour is not None:
            given["request_rate"] = ("requests_per_user_hour", self.requests_per_user_hour)
        elif self.users is not None:
            given["max_concurrency"] = ("users", self.users)
        try:
            yield
        except SettingError as error:
            if type(error) is not SettingError or error.field not in given:
                raise
            raise SettingError(*given[error.field], error.remedy) from None

    @property
    def in_words(self) -> str:
        """The arrivals in words; empty if they are those of the trace."""
        shape = "Poisson" if self.burstiness is None else f"burstiness {self.burstiness:g}"
        parts = []
        if self.rate is not None:
            parts.append("all at once" if self.rate == inf else f"{self.rate:.4g} requests/s ({shape})")
        if self.requests_per_user_hour is not None:
            parts[0] += f": {self.users:,} users, {self.requests_per_user_hour:g} an hour each"
        if self.rate_curve is not None:
            parts.append(f"at the rates of {self.rate_curve.name}")
        if self.rate_scale is not None:
            parts.append(f"as traced, {self.rate_scale:g} times as fast")
        if self.concurrency is not None:
            think = "" if self.think_time is None else f", each {self.think_time:g} s after the answer"
            parts.append(f"at most {self.concurrency:,} in flight{think}")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A piecewise constant request rate.

    Attributes:
        start_s: Float64 [steps], start times in seconds, ascending from 0.
        request_rate: Float64 [steps], requests/s from each start time on, at least 0.
    """

    start_s: np.ndarray
    request_rate: np.ndarray

    def times_s(self, passed: np.ndarray) -> np.ndarray:
        """Times (float64 [n], seconds) at which the integral of the rate reaches ``passed`` (float64 [n], ascending).

        The time is inf where the integral never reaches the value.
        """
        reached = np.concatenate([[0], np.cumsum(self.request_rate[:-1] * np.diff(self.start_s))])
        # The first step with an integral above the value at its end: no request arrives at rate 0.
        step = np.searchsorted(reached, passed, side="left") - 1
        step = np.maximum(step, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.start_s[step] + (passed - reached[step]) / self.request_rate[step]


def paced(trace: Trace, pacing: Pacing, seed: int = 0) -> Trace:
    """The trace with the arrivals that ``pacing`` describes, or the unchanged trace if ``pacing`` sets none.

    Raises:
        SettingError: A rate is invalid, or a request arrives after more than 97 days.
    """
    if pacing.rate_scale is not None:
        return replace(trace, arrival_ticks=_scaled(trace, pacing.rate_scale))
    if pacing.rate_curve is not None:
        gaps = _gaps(trace, pacing, seed)
        return replace(trace, arrival_ticks=along(read_curve(pacing.rate_curve), gaps, pacing.rate_curve))
    if pacing.rate is not None:
        return replace(trace, arrival_ticks=at_rate(pacing.rate, _gaps(trace, pacing, seed)))
    if in_flight(pacing, trace) is not None and trace.arrival_ticks is None:
        return replace(trace, arrival_ticks=np.zeros(len(trace), dtype=np.int64))
    return trace


def _gaps(trace: Trace, pacing: Pacing, seed: int) -> np.ndarray:
    """Gaps between arrivals, float64 [n], with mean 1."""
    return unit_gaps(len(trace), pacing.burstiness or 1.0, stream(seed, "arrivals"))


def in_flight(pacing: Pacing, trace: Trace) -> int | None:
    """Maximum number of requests in flight: as given, or the trace's own if no other arrivals are given; None without one."""
    if pacing.concurrency is not None or pacing.rate is not None or pacing.rate_curve is not None:
        return pacing.concurrency
    return trace.max_concurrency


def users(pacing: Pacing, trace: Trace, seed: int = 0) -> Users | None:
    """The users of a closed loop; None if arrivals do not depend on the server's answers.

    With ``think_time``, or with delays in the trace, each turn of a session is sent after the answer to the turn before it.
    Otherwise turns arrive at the times of the trace, and ``max_concurrency`` limits the requests in flight.

    Raises:
        SettingError: A think time is set without users.
    """
    think_s, sessions = pacing.think_time, None
    if think_s is not None or trace.delay_ticks is not None:
        sessions = None if trace.content is None else trace.content.session_id
    limit = in_flight(pacing, trace)
    if limit is None and sessions is None:
        if think_s is not None:
            remedy = "applies only to users; give their number as max_concurrency, or a trace with sessions"
            raise SettingError("think_time", think_s, remedy)
        return None
    if think_s is None and sessions is not None and trace.delay_ticks is not None:
        think_ticks = _before_next_turn(trace.delay_ticks, sessions)
    else:
        drawn_s = stream(seed, "think times").exponential(size=len(trace)) * (think_s or 0)
        latest_s = _latest_s(drawn_s, limit, sessions)
        if latest_s >= LATEST_S / 2:
            raise SettingError(
                "think_time", think_s, f"makes {len(trace)} requests last up to {latest_s:.0f} s; lower it"
            )
        think_ticks = to_ticks(drawn_s, ticks.PER_SECOND)
    return Users(limit, think_ticks, sessions, None if sessions is None else trace.spawner)


def _latest_s(think_s: np.ndarray, users: int | None, sessions: np.ndarray | None) -> float:
    """Seconds after which no user thinks any more, without the time of the answers, at most.

    That is the longest session (or think time) behind an equal share of all others.
    """
    longest = think_s.max(initial=0)
    if sessions is not None and (turns := sessions != NO_SESSION).any():
        _, session = np.unique(sessions[turns], return_inverse=True)
        longest = max(longest, np.bincount(session, think_s[turns]).max())
    return float(longest + (0 if users is None else think_s.sum() / users))


def _before_next_turn(delay_ticks: np.ndarray, sessions: np.ndarray) -> np.ndarray:
    """Delay after each answer (int64 [n]), from the delay before each turn."""
    before = turns_before(sessions)
    think_ticks = np.zeros(len(delay_ticks), dtype=np.int64)
    think_ticks[before[before >= 0]] = delay_ticks[before >= 0]
    return think_ticks


def unit_gaps(n: int, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Gaps (float64 [n]) of mean 1, gamma distributed with the shape ``burstiness``, as in ``vllm bench serve``."""
    return rng.exponential(size=n) if burstiness == 1 else rng.gamma(burstiness, 1 / burstiness, size=n)


def at_rate(rate: float, gaps: np.ndarray) -> np.ndarray:
    """Arrival ticks (int64 [n]) at ``rate`` requests/s, in whole nanoseconds: cumulative gaps from 0.

    At an infinite rate all requests arrive at 0, which is the default of ``vllm bench serve``.

    Raises:
        SettingError: The rate is not positive, or is so low that the last request arrives after more than 97 days.
    """
    if not rate > 0:
        raise SettingError("request_rate", rate, "must be positive; inf lets all requests arrive at 0")
    arrivals_s = np.cumsum(gaps) / rate
    if len(gaps) and arrivals_s[-1] >= LATEST_S:
        raise SettingError("request_rate", rate, f"spreads {len(gaps)} requests over more than {LATEST_S} s; raise it")
    return to_ticks(arrivals_s, ticks.PER_SECOND)


def along(curve: RateCurve, gaps: np.ndarray, path: str | PathLike[str]) -> np.ndarray:
    """Arrival ticks (int64 [n]) along a rate curve.

    Raises:
        SettingError: The curve of ``path`` ends before all requests have arrived, or a request arrives after more than 97 days.
    """
    arrivals_s = curve.times_s(np.cumsum(gaps))
    if not (arrivals_s < LATEST_S).all():
        came = int((arrivals_s < LATEST_S).sum())
        remedy = f"lets {came} of {len(gaps)} requests come; end on a rate above 0, or ask for fewer"
        raise SettingError("rate_curve", str(path), remedy)
    return to_ticks(arrivals_s, ticks.PER_SECOND)


def _scaled(trace: Trace, scale: float) -> np.ndarray:
    if trace.arrival_ticks is None:
        raise SettingError("rate_scale", scale, f"{trace.name} has no arrivals; give a request rate")
    if int(trace.arrival_ticks[-1]) / scale >= LATEST_S * ticks.PER_SECOND:
        raise SettingError("rate_scale", scale, f"spreads the trace over more than {LATEST_S} s; raise it")
    # Whole nanoseconds below 2**53 are exact in float64, and no trace is longer.
    return np.rint(trace.arrival_ticks // 1000 / scale).astype(np.int64) * 1000


def read_curve(path: str | PathLike[str]) -> RateCurve:
    """Read a rate curve from a CSV with the columns ``start_s`` and ``request_rate``.

    Raises:
        TraceError: The file cannot be read, or has an invalid line; names the first one.
    """
    file = TraceFile(path, MOST_INFLATED_BYTES)
    file.form("rate_curve", file.head("a header and one rate a line"))
    lines = next(file.blocks())
    names = header(path, lines)
    missing = next((name for name in _CURVE if name not in names), None)
    if missing is not None:
        found, remedy = shown(",".join(names)), f"no column {missing}; name it so"
        raise TraceError(path, int(lines.lines[0]), "columns", found, remedy)
    if len(lines) < 2:
        raise TraceError(path, None, None, None, "has a header and no rows; give one rate a line")
    table = CsvParser(path, names, tuple(_CURVE))(lines.part(1))
    starts, rates = (numbers_of(table, name, meaning).astype(np.float64) for name, meaning in _CURVE.items())
    table.refuse(~(starts < LATEST_S), "start_s", starts, f"must be below {LATEST_S}; correct the row")
    table.refuse(np.diff(starts, prepend=-1) <= 0, "start_s", starts, "must be 0 or more, and above the row before")
    table.refuse(~np.isfinite(rates) | (rates < 0), "request_rate", rates, "must be finite and 0 or more")
    if starts[0]:
        raise table.error(0, "start_s", starts[0], "must be 0 in the first row; give the rate until then")
    return RateCurve(starts, rates)
