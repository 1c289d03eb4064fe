"""A load that can be served at any rate and drawn anew for every seed.

    from a trace        requests drawn from it with replacement; or, as traced, blocks of 64 consecutive requests with their
                        gaps (a moving-block bootstrap, Kuensch 1989), which keeps bursts within some ten seconds
    from a fitted load  drawn by the rules of ``traces synth``
    from a data set     drawn from its length summary

A trace with shared prefixes is served from its first request on, in order, because drawing single requests breaks the
sharing. A seed then draws only the gaps. Gaps have mean 1 and are divided by the rate: one seed serves the same
requests at every rate (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, sqrt

import numpy as np

from ...sim.types import ticks
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...sim.workload.workload import Workload
from ...traces import Pacing, Trace, holds_load, stream, workload
from ...traces.arrivals.pacing import RateCurve, at_rate, unit_gaps
from ...traces.parsing.times import to_ticks
from ..runs.inputs import Inputs, source_text

#: Requests per run, and at least so many for each replica of a fleet: with 300 a replica, the share that meets the
#: objectives is up to a point above that of long runs, with 1,000 a quarter of a point.
DEFAULT_PROMPTS, PROMPTS_A_REPLICA = 5000, 1000
#: Least time in which the requests of a load arrive, relative to their mean time in the system. A fleet is empty at first. If
#: times in the system are exponential, it has 95 % of its steady number of requests in the mean over the counted ones.
TURNOVERS = 10
#: Lower limit of the requests per run: with fewer, one request is more than a percent of the counted ones.
FEWEST_PROMPTS = 100
_BLOCK = 64
#: Arrivals that have no rate to look for, with the reason and the remedy.
_NO_RATE = {
    "rate_curve": "has several rates, and fleets are found for one; give the highest as request_rate",
    "max_concurrency": "makes arrivals wait for responses (a closed loop), so that there is no rate to look for; give"
    " --request-rate in place of it",
}


@dataclass(frozen=True, eq=False)
class Drawn:
    """Requests of one seed, the gaps between them at rate 1 (float64 [n]), and ``Workload.load``."""

    trace: Trace
    gaps: np.ndarray
    max_tokens: str | int | None = None
    n: int | None = None
    load: np.ndarray | None = None

    def at(self, rate: float) -> Workload:
        """The workload with its gaps scaled to ``rate``, in requests/s."""
        paced = replace(self.trace, arrival_ticks=at_rate(rate, self.gaps))
        return replace(workload(paced, max_tokens=self.max_tokens, n=self.n), load=self.load)

    def first(self, requests: int) -> Drawn:
        """The first requests only."""
        load = None if self.load is None else self.load[:requests]
        return replace(self, trace=self.trace.first(requests), gaps=self.gaps[:requests], load=load)


class Load:
    """The load of a capacity plan.

    Args:
        inputs: As for ``simulate``. ``request_rate`` and ``burstiness`` draw gaps; ``rate_scale`` keeps the gaps of the
            trace.
        in_flight: Requests in flight that a replica has at its highest rate, 0 if unknown: the requests of a run arrive by
            default for ``TURNOVERS`` times their time in the system, so they are ``TURNOVERS`` times as many (Little's law).

    Raises:
        UserError: A trace that cannot be read, or arrivals without a rate.
    """

    def __init__(self, inputs: Inputs, in_flight: float = 0.0) -> None:
        self._a_replica = _prompts_a_replica(in_flight)
        self.pacing = inputs.pacing
        for name, remedy in _NO_RATE.items():
            if getattr(self.pacing, name) is not None:
                raise SettingError(name, str(getattr(self.pacing, name)), remedy)
        if self.pacing.think_time is not None:
            remedy = "makes a closed loop, and the requests of a plan arrive at a rate; give requests_per_user_hour, or a rate"
            raise SettingError("think_time", self.pacing.think_time, remedy)
        wanted = self.pacing.rate
        if wanted is not None and not 0 < wanted < inf:
            raise SettingError("request_rate", wanted, "must be above 0 and finite: it is the rate to be served")
        requests = inputs.requests
        if requests.num_prompts is not None and requests.num_prompts < FEWEST_PROMPTS:
            remedy = f"must be {FEWEST_PROMPTS} or more, for percentages of requests"
            raise SettingError("num_prompts", requests.num_prompts, remedy)
        self._inputs = replace(inputs, pacing=Pacing())
        self.is_drawn = requests.trace is None or holds_load(requests.trace)
        if self.pacing.rate_scale is not None and self._found.arrival_ticks is None:
            raise SettingError(
                "rate_scale", self.pacing.rate_scale, f"{self._found.name} has no arrivals; give a request rate"
            )

    @cached_property
    def _found(self) -> Trace:
        """The whole trace; for drawn requests, those of the first seed."""
        count = self._asked() if self.is_drawn else None
        return replace(self._inputs, requests=replace(self._inputs.requests, num_prompts=count)).lengths()

    def _asked(self, replicas: int = 1) -> int:
        """Requests per run, if the trace has as many."""
        given = self._inputs.requests.num_prompts
        return self._default(replicas) if given is None else given

    def _default(self, replicas: int) -> int:
        return max(DEFAULT_PROMPTS, self._a_replica * replicas)

    def filling(self, in_flight: float) -> Load:
        """The same load with another ``in_flight``."""
        filled = copy(self)
        filled._a_replica = _prompts_a_replica(in_flight)
        if self.is_drawn:
            filled.__dict__.pop("_found", None)
        return filled

    @property
    def name(self) -> str:
        return self._found.name

    @property
    def shares_prefixes(self) -> bool:
        """Whether the contents of prompts are known."""
        return self._found.content is not None or self._found.dialogue is not None

    @property
    def keeps_order(self) -> bool:
        """Whether requests share prefixes and are served in the order of the trace."""
        return not self.is_drawn and self.shares_prefixes

    def num_prompts(self, replicas: int = 1) -> int:
        """Requests per run of a fleet."""
        count = self._asked(replicas)
        return min(count, len(self._found)) if self.keeps_order else count

    def is_short(self, replicas: int) -> bool:
        """Whether the runs of a fleet have fewer requests than by default."""
        return self.num_prompts(replicas) < self._default(replicas)

    @property
    def trace_rate(self) -> float | None:
        """Request rate of the trace's own arrivals, requests/s; None without arrivals."""
        arrivals = self._found.arrival_ticks
        if arrivals is None or arrivals[-1] == arrivals[0]:
            return None
        return (len(arrivals) - 1) * ticks.PER_SECOND / int(arrivals[-1] - arrivals[0])

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean prompt and output tokens of a request; the output counts all parallel samples."""
        found, requests = self._found, self._inputs.requests
        samples = requests.n or (1 if found.n is None else found.n)
        return float(found.prompt_tokens.mean()), float((found.output_tokens * samples).mean())

    @property
    def longest_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return int((self._found.prompt_tokens + self._found.output_tokens).max())

    def description(self) -> str:
        """Description of the load, for titles."""
        pacing = self.pacing
        if pacing.rate_scale is not None:
            return f"{self.name}, its gaps as traced"
        shape = f"gamma gaps of burstiness {pacing.burstiness:g}" if pacing.burstiness else "Poisson arrivals"
        users = (
            ""
            if pacing.users is None
            else f", {pacing.users:,} users with {pacing.requests_per_user_hour:g} requests an hour"
        )
        return f"{self.name}, {shape}{users}"

    def source(self) -> str:
        """Name and source of the requests."""
        return source_text(self._inputs.requests, self._inputs.reading)

    def draw(self, seed: int, replicas: int = 1) -> Drawn:
        """The requests of a seed, as many as a fleet of so many replicas serves.

        Raises:
            UserError: As ``Inputs.lengths``.
        """
        return self.drawn(seed, self.num_prompts(replicas))

    def drawn(self, seed: int, n: int) -> Drawn:
        """The first ``n`` requests of a seed."""
        requests, rng = self._inputs.requests, stream(seed, "plan requests")
        if self.is_drawn:
            drawn, chosen = replace(requests, num_prompts=n), replace(self._inputs.settings, seed=seed)
            trace, rows = replace(self._inputs, settings=chosen, requests=drawn).lengths(), np.arange(n)
        elif self.keeps_order:
            trace, rows = self._found.first(n), np.arange(n)
        else:
            rows = drawn_rows(len(self._found), n, self.pacing.rate_scale is not None, rng)
            trace = taken(self._found, rows)
        return Drawn(trace, self._gaps(rows, seed), requests.declared_max_tokens, requests.n)

    def day(self, seed: int, start_s: Sequence[float], rates: Sequence[float], end_s: float) -> Workload:
        """The requests of a seed along steps of constant rate, until the end; their number is drawn, too.

        Raises:
            SettingError: The requests keep the order of a trace that has fewer.
        """
        curve = RateCurve(np.array(start_s), np.array(rates))
        expected = float((np.diff([*start_s, end_s]) * curve.request_rate).sum())
        most, rng = (
            ceil(expected + 6 * sqrt(expected / (self.pacing.burstiness or 1.0)) + 6),
            stream(seed, "plan requests"),
        )
        gaps = unit_gaps(most, self.pacing.burstiness or 1.0, stream(seed, "arrivals"))
        arrivals_s = curve.times_s(np.cumsum(gaps))
        arrivals_s = arrivals_s[arrivals_s < end_s]
        n, requests = len(arrivals_s), self._inputs.requests
        if self.is_drawn:
            drawn, chosen = replace(requests, num_prompts=n), replace(self._inputs.settings, seed=seed)
            trace = replace(self._inputs, settings=chosen, requests=drawn).lengths()
        elif not self.keeps_order:
            trace = taken(self._found, drawn_rows(len(self._found), n, False, rng))
        elif n > len(self._found):
            remedy = f"are a day of requests, and {self.name}, which keeps its order for shared prefixes, has {len(self._found):,}"
            raise SettingError("rate_curve", n, f"{remedy}; give lower rates, or shorter steps")
        else:
            trace = self._found.first(n)
        paced = replace(trace, arrival_ticks=to_ticks(arrivals_s, ticks.PER_SECOND))
        return workload(paced, max_tokens=requests.declared_max_tokens, n=requests.n)

    def _gaps(self, rows: np.ndarray, seed: int) -> np.ndarray:
        if self.pacing.rate_scale is None:
            return unit_gaps(len(rows), self.pacing.burstiness or 1.0, stream(seed, "arrivals"))
        own_s = traced_gaps_s(self._found)
        return (own_s / own_s[0])[rows]


def _prompts_a_replica(in_flight: float) -> int:
    return max(PROMPTS_A_REPLICA, ceil(TURNOVERS * in_flight))


def drawn_rows(count: int, n: int, traced: bool, rng: np.random.Generator) -> np.ndarray:
    """``n`` rows of ``count``, drawn with replacement, int64 [n]; ``traced`` draws blocks of consecutive rows."""
    if not traced:
        return rng.integers(count, size=n)
    starts = rng.integers(count, size=-(-n // _BLOCK))
    return ((starts[:, None] + np.arange(_BLOCK)) % count).ravel()[:n]


def traced_gaps_s(trace: Trace) -> np.ndarray:
    """Seconds before each request of a trace with arrivals, float64 [n]; the first has none and gets the mean gap."""
    own = np.diff(not_none(trace.arrival_ticks)) / ticks.PER_SECOND
    return np.insert(own, 0, own.mean() if len(own) else 0.0)


def taken(trace: Trace, rows: np.ndarray) -> Trace:
    """Rows of a trace without shared prompts; a row may occur several times."""
    named = ("max_tokens", "n", "priority", "ignore_eos")
    columns = {name: column[rows] for name in named if (column := getattr(trace, name)) is not None}
    return Trace(trace.name, trace.prompt_tokens[rows], trace.output_tokens[rows], **columns)
