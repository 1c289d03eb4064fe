"""Intervals of a simulated latency or throughput that hold the measured one of 9 of 10 servers of its class.

Their source is the errors of measured runs (docs/results/servers.md) that nothing was fitted to; of a metric:

1. The error of a run is e = log(measured / simulated). A server has one vote, which its runs share.
2. The class of a run is card, attention backend, kind of model and load; without the load where fewer than ``LEAST_RUNS`` runs,
   or one server, have it. A class that is as small without the load has no interval: its runs are shown.
3. Wider classes are the family of models (dense, MoE, ...) on all cards, and all runs.
4. The centre c of a class is the median of its n servers' errors, drawn towards that of the wider class, which counts as
   ``PRIOR_SERVERS`` servers; the widest has the centre 0.
5. Its spread s is the root mean square of e - c, drawn towards that of the wider class in the same way.
6. The interval is simulated x exp(c +/- q s t), t the quantile of Student's t of n degrees: few servers say little of s.
7. q is calibrated: a server is left out, c, s and t of its class are found from the others, and its score is abs(e - c) / (s t).
8. q is the smallest score that ``SHARE`` of n + 1 servers reach, with the new server counted as one that does not.
9. So no error narrows an interval that is judged on it: coverage of a server is that of intervals found without its errors,
   in 7 as in ``tools.servers.coverage``, where the calibration, too, is repeated for each server.
10. TTFT of a run in which requests wait, and throughput in overload, are of classes of their own: queueing multiplies the errors of
    step times. Below overload throughput is the rate at which requests arrive, and has no interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log1p
from typing import Any, NamedTuple

import numpy as np

from ..runs.student_t import student_t

#: Metrics that have intervals.
METRICS = ("tpot", "ttft", "throughput")
#: Share of the servers of a class that an interval holds.
SHARE = 0.9
#: Runs of a class from which it has an interval.
LEAST_RUNS = 5
#: Servers as which a wider class counts.
PRIOR_SERVERS = 3
#: Places of the wider classes in ``Levels``.
_WIDER = (2, 3)
#: Spread of a class of which every error is the same.
_LEAST_SPREAD = 1e-3

#: A class with its load and without it, and the wider classes: the family of models, all runs.
Levels = tuple[tuple[str, ...], ...]


class Interval(NamedTuple):
    """The lowest and highest measured value over the simulated one."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in it."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class RunError:
    """The error of a run in one metric.

    Attributes:
        run, server: Their names; runs of a server share its vote.
        error: log(measured / simulated).
        levels: Its class, and wider ones.
    """

    run: str
    server: str
    error: float
    levels: Levels


def levels_of(row: Mapping[str, Any], metric: str) -> Levels | None:
    """The class of a run, and wider ones; None where the metric says nothing of step times.

    Args:
        row: ``gpu``, ``backend``, ``kind``, ``load`` (of the client; None if not known), ``busy`` and ``overload``, as ``BoardRow`` has
            them.
    """
    queued = row["overload"] if metric == "throughput" else metric == "ttft" and row["busy"]
    if metric == "throughput" and not queued:
        return None
    about = {"throughput": "overload", "ttft": "requests wait" if queued else "none waits", "tpot": ""}[metric]
    family = row["kind"].split()[0]
    card = (row["gpu"], row["backend"], row["kind"], about)
    return (*card, "" if queued else row["load"] or ""), card, (family, about), (about,)


def run_errors(rows: Iterable[Mapping[str, Any]], metric: str) -> list[RunError]:
    """The errors of the runs that nothing was fitted to.

    Args:
        rows: Runs as ``BoardRow.as_dict`` has them.
    """
    return [
        RunError(row["run"], row["server"], -log1p(row["errors"][metric]), levels)
        for row in rows
        if row["standing"] != "fitted" and metric in row["errors"] and (levels := levels_of(row, metric)) is not None
    ]


def class_text(levels: Levels, depth: int) -> str:
    """A class in words.

    Args:
        depth: 0 with its load, 1 without.
    """
    gpu, backend, kind, about = levels[1]
    load = (levels[0][-1] if depth == 0 else "") or about
    return f"{gpu} {backend} {kind}{f', {load}' if load else ''}"


class Calibrated:
    """Intervals from the errors of runs.

    Args:
        errors: Of one metric.
        without: A server with errors that do not count. Its runs count in the size of a class, so that the class does not change.
    """

    def __init__(self, errors: Sequence[RunError], without: str | None = None) -> None:
        self._every = errors
        self._used = [each for each in errors if each.server != without]

    def depth(self, levels: Levels) -> int | None:
        """The level of a class that has enough runs, 0 or 1; None if neither has."""
        for depth in (0, 1):
            found = self.members(levels, depth)
            if len(found) >= LEAST_RUNS and len({each.server for each in found}) > 1:
                return depth
        return None

    def members(self, levels: Levels, depth: int) -> list[RunError]:
        """The runs of a class."""
        return [each for each in self._every if each.levels[depth] == levels[depth]]

    def interval(self, levels: Levels) -> Interval | None:
        """The interval of a class; None if it has too few runs, or the metric too few servers."""
        depth = self.depth(levels)
        if depth is None or self.quantile == inf:
            return None
        centre, spread = _fit(self._used, levels, depth)
        return Interval(exp(centre - self.quantile * spread), exp(centre + self.quantile * spread))

    def widest(self) -> Interval:
        """That of all servers, for one of a class without runs; only of a metric with one class of all runs, as TPOT has."""
        about = next(iter({each.levels[-1] for each in self._used}))
        centre, spread = _fit(self._used, ((), (), (), about), 0)
        return Interval(exp(centre - self.quantile * spread), exp(centre + self.quantile * spread))

    @cached_property
    def quantile(self) -> float:
        """The factor on all spreads; infinite with too few servers."""
        scores: list[float] = []
        votes: list[float] = []
        servers = {each.server for each in self._used if self.depth(each.levels) is not None}
        for server in sorted(servers):
            own = [each for each in self._used if each.server == server]
            others = [each for each in self._used if each.server != server]
            judged = [(each, depth) for each in own if (depth := self.depth(each.levels)) is not None]
            for each, depth in judged:
                centre, spread = _fit(others, each.levels, depth)
                scores.append(abs(each.error - centre) / spread)
                votes.append(1 / len(judged))
        return _reached(scores, votes, SHARE * (len(servers) + 1))


def _fit(errors: Sequence[RunError], levels: Levels, depth: int) -> tuple[float, float]:
    """Centre and spread of a class, the spread times Student's t for the number of its servers."""
    centre, spread, servers = 0.0, 0.0, 0
    # The class with its load is no part of this for one without: the same runs would count twice.
    for place in (*reversed(_WIDER), depth):
        found = [each for each in errors if each.levels[place] == levels[place]]
        runs = Counter(each.server for each in found)
        servers = len(runs)
        if not servers:
            continue
        values = np.array([each.error for each in found])
        votes = np.array([1 / runs[each.server] for each in found])
        is_widest = place == _WIDER[-1]
        if not is_widest:
            centre = _drawn(_reached(values, votes, servers / 2), centre, servers)
        own = float(np.sqrt(np.average((values - centre) ** 2, weights=votes)))
        spread = own if is_widest else _drawn(own, spread, servers)
    return centre, max(spread, _LEAST_SPREAD) * student_t(SHARE, max(1, servers))


def _drawn(own: float, wider: float, servers: int) -> float:
    """A value of a class, drawn towards that of the wider class."""
    return (servers * own + PRIOR_SERVERS * wider) / (servers + PRIOR_SERVERS)


def _reached(values: Sequence[float] | np.ndarray, votes: Sequence[float] | np.ndarray, most: float) -> float:
    """The smallest value that so many votes do not exceed; infinite if there are fewer."""
    order = np.argsort(values, kind="stable")
    # Thirds and sevenths of a vote add up to a whole one but for rounding.
    place = int(np.searchsorted(np.cumsum(np.asarray(votes)[order]), most - 1e-9))
    return float(np.asarray(values)[order][place]) if place < len(order) else inf
