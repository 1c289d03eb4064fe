"""The smallest fleet that meets a goal at a given rate, decided by simulations of whole fleets behind their router.

    share     of a seed: ``n`` replicas serve its requests at the wanted rate; the share that meets the objectives
    rate      of a seed: the highest rate at which ``n`` replicas meet the goal with its requests
    decision   over the seeds of ``n``, of shares or of logarithms of rates, with mean m and deviation s, taken to be normal
        enough    m - k s >= the attainment, or the wanted rate: 90 % of other seeds meet the goal, with 95 % confidence
        too few   m - k' s < it: fewer than 90 % of other seeds meet it, with 95 % confidence
        open      neither
    size      the smallest ``n`` that is enough by its shares, and by its rates; ``fewest`` is the smallest not too few

k and k' are factors of one-sided tolerance limits, as in ``max_rate``. Shares take one run each, so they find the size. But
a share cannot exceed 1: where requests meet the objectives up to some rate and then all miss them, the shares of a few
seeds do not show how near that is. Rates do, so they confirm the size, or raise it.

The search begins with the given seeds, near the wanted rate over the highest rate of one replica. While ``fewest`` lies
further below the size than ``PRECISION``, the seeds are doubled, to at most ``MOST_SEEDS``. Rates that leave a size open are
followed by those of more seeds in the same way while the next larger size lies so far above ``fewest``. The budget is a number
of seeds and not a time, so that the answer does not depend on the machine. No fleet counts with replicas that would have to
serve more than their saturated rate (``slo_check``).

Too few requests to fill a replica have no saturated rate. At a high rate all of them arrive before the first has finished:
a burst, and not a load. ``known_rate`` is the rate up to which their runs are a load.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import ceil, exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from ...sim.cluster import Cluster, ClusterRun, cluster_summary, cluster_times, simulate_cluster
from ...sim.cluster.sent import part_of
from ...sim.engine.grouping import is_grouped
from ...sim.engine.run import Run, simulate
from ...sim.engine.settings import Settings
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.metrics.summary import summary
from ...sim.types import ticks
from ...sim.workload.workload import Workload
from ..runs.slo_check import Goal, SloCheck, check_times, compiled_cost
from .load import TURNOVERS, Load
from .max_rate import CONFIDENCE, CONTENT, MOST, highest, tolerance_factor

#: Most replicas of a fleet (``Cluster.num_replicas``), and relative to the first fleet that is tried.
_MOST, _TIMES_FIRST = 1024, 8
#: Most seeds of a fleet; and of its rates, which take some six runs a seed, where the next larger fleet is within ``PRECISION``.
MOST_SEEDS, _MOST_RATE_SEEDS = 48, 16
#: Seeds to begin with.
DEFAULT_FLEET_SEEDS = 4
#: Share of the size by which ``fewest`` may be smaller at the end of the search.
PRECISION = 0.025
#: Ratio of neighbouring rates, and the first strides of their search: from the wanted rate, and from another seed's rate.
FINE, _FINE_STRIDE, _NEAR_STRIDE = 1.005, 8, 2
#: Tolerance by which a quotient of rates may exceed a whole number of replicas, for the rounding of floats.
_ROUNDING = 1e-9


class Kind(StrEnum):
    """What a trial is to find."""

    SHARE = "share"
    RATE = "rate"


class Trial(NamedTuple):
    """The share or the rate of a fleet with a seed; ``near`` is where to seek the rate (``highest_rate``)."""

    kind: Kind
    replicas: int
    seed: int
    near: float | None = None


class Decision(StrEnum):
    """What the seeds say of a fleet."""

    ENOUGH = "enough"
    OPEN = "open"
    TOO_FEW = "too few"


@dataclass(frozen=True)
class Tried:
    """The seeds of one fleet.

    Attributes:
        replicas: Its size.
        shares: Share of the counted requests that meet the objectives, by seed.
        decision: What they say of the goal.
    """

    replicas: int
    shares: tuple[float, ...]
    decision: Decision


class Tested(NamedTuple):
    """Result of the test of one fleet.

    Attributes:
        decision: Whether it is enough.
        shares: Share of the counted requests that meet the objectives, by seed.
        rates: Highest rates by seed, requests/s.
        known_rates: As ``Answer`` has them.
    """

    decision: Decision
    shares: tuple[float, ...]
    rates: tuple[float, ...]
    known_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Fleet:
    """Result of the search.

    Attributes:
        replicas: The smallest fleet that is enough; None if none of the tried ones is.
        fewest: The smallest fleet that is not too few.
        tried: Fleets that were simulated, by size.
        rates: Highest rates of the recommended fleet by seed, requests/s.
    """

    replicas: int | None
    fewest: int
    tried: tuple[Tried, ...]
    rates: tuple[float, ...] = ()

    @property
    def seeds(self) -> int:
        """Number of seeds of the recommended fleet, or the most of any."""
        of_size = [len(each.shares) for each in self.tried if each.replicas == self.replicas]
        return max(of_size or [len(each.shares) for each in self.tried])

    @property
    def mean_rate(self) -> float:
        """Geometric mean of the rates."""
        return mean_rate(self.rates)

    @property
    def sure_rate(self) -> float:
        """``sure_rate`` of its rates."""
        return sure_rate(self.rates)


def sure_rate(rates: Sequence[float]) -> float:
    """The rate at which 90 % of other seeds meet the goal, with 95 % confidence; that of the seed if there is one.

    0 if a seed meets the goal at no rate, and infinity if every seed does at every rate.
    """
    if len(rates) == 1 or not 0 < min(rates) < inf:
        return min(rates)
    return exp(_tolerance_limit([log(each) for each in capped(rates)], CONFIDENCE, log(FINE)))


def capped(rates: Sequence[float]) -> list[float]:
    """The rates, with the highest finite one in place of infinite ones, if there is a finite one."""
    highest = max((each for each in rates if each < inf), default=inf)
    return [min(each, highest) for each in rates]


def mean_rate(rates: Sequence[float]) -> float:
    """Geometric mean; 0 counts as nothing met, an infinite rate as the highest finite one, and all of them are infinity."""
    if min(rates) <= 0:
        return 0.0
    return exp(fmean(map(log, capped(rates)))) if min(rates) < inf else inf


def first_fleet(wanted: float, of_one: float) -> int:
    """The number of replicas for a rate, from the rate of one, both in requests/s."""
    return min(max(1, ceil(wanted / of_one - _ROUNDING)), _MOST)


def decide(values: Sequence[float], wanted: float, known_to: float) -> Decision:
    """What the values of some seeds say of a wanted value; one seed decides alone.

    Args:
        known_to: Width of the interval to which a value is known.
    """
    if len(values) == 1:
        return Decision.ENOUGH if values[0] >= wanted else Decision.TOO_FEW
    if _tolerance_limit(values, CONFIDENCE, known_to) >= wanted:
        return Decision.ENOUGH
    if _tolerance_limit(values, 1 - CONFIDENCE, known_to) < wanted:
        return Decision.TOO_FEW
    return Decision.OPEN


def _tolerance_limit(values: Sequence[float], confidence: float, known_to: float) -> float:
    """The value that 90 % of all values exceed, with a confidence."""
    deviation = max(stdev(values), known_to / sqrt(12))
    return fmean(values) - tolerance_factor(len(values), CONTENT, confidence) * deviation


def decide_by_rates(rates: Sequence[float], wanted: float) -> Decision:
    """What the highest rates of some seeds say of a wanted rate. An infinite rate counts as the highest finite one."""
    if min(rates) <= 0:
        return Decision.TOO_FEW
    if min(rates) == inf:
        return Decision.ENOUGH
    return decide([log(each / wanted) for each in capped(rates)], 0.0, log(FINE))


Results = Mapping[Trial, float]
Steps = Generator[list[Trial], Results, Fleet]


class FleetSearch:
    """The search for the smallest fleet.

    Args:
        wanted: The wanted rate, requests/s.
        near: Size to begin with.
        least: Sizes below are known to be too few.
        attainment: Share of the requests that must meet the objectives.
        counted: Number of requests that a share is of.
        seeds: Seeds to begin with; more follow the last.
        engines: Sizes are multiples of this number of replicas, which share experts.
    """

    # The steps count in multiples of ``engines``; trials and results in replicas.

    def __init__(
        self,
        wanted: float,
        near: int,
        least: int,
        attainment: float,
        counted: int,
        seeds: Sequence[int],
        engines: int = 1,
    ) -> None:
        self._wanted, self._attainment, self._counted, self._engines = wanted, attainment, counted, engines
        self._least = max(1, ceil(least / engines))
        self._near = max(ceil(near / engines), self._least)
        self._most = max(1, min(_MOST // engines, _TIMES_FIRST * self._near))
        self._first, self._count = seeds[0], len(seeds)
        self._found: dict[tuple[Kind, int], list[float]] = {}

    def steps(self) -> Steps:
        """Yield the trials that are needed next, be sent their results, and return the fleet.

        Results are shares of requests, and rates in requests/s.
        """
        size, fewest = yield from self._by_shares()
        while size is not None:
            larger = size + max(1, size // 50)
            near = larger - fewest <= PRECISION * larger
            found = yield from self._of_rates(size, _MOST_RATE_SEEDS if near else MOST_SEEDS)
            if found is Decision.ENOUGH:
                if (Kind.SHARE, size) not in self._found:
                    yield from self._complete(Kind.SHARE, size)
                return self._fleet(size, fewest)
            if found is Decision.TOO_FEW:
                fewest = max(fewest, size + 1)
            size = larger if larger <= self._most else None
            fewest = min(fewest, self._most)
        return self._fleet(None, fewest)

    def of_size(self, size: int) -> Generator[list[Trial], Results, Tested]:
        """As ``steps``, of one fleet only, of ``size`` replicas: whether it is enough."""
        begun, size = self._count, size // self._engines
        while True:
            yield from self._complete(Kind.SHARE, size)
            found = self._tried(size)
            if found.decision is not Decision.OPEN or self._count in (1, MOST_SEEDS):
                break
            self._count = min(2 * self._count, MOST_SEEDS)
        self._count = begun
        by_rates = yield from self._of_rates(size, MOST_SEEDS)
        decision = by_rates if found.decision is Decision.ENOUGH else found.decision
        return Tested(decision, found.shares, tuple(self._found[Kind.RATE, size]))

    def _fleet(self, size: int | None, fewest: int) -> Fleet:
        sizes = sorted(size for kind, size in self._found if kind is Kind.SHARE)
        rates = () if size is None else tuple(self._found[Kind.RATE, size])
        return Fleet(size and size * self._engines, fewest * self._engines, tuple(map(self._tried, sizes)), rates)

    def _tried(self, size: int) -> Tried:
        shares = self._found[Kind.SHARE, size]
        return Tried(size * self._engines, tuple(shares), decide(shares, self._attainment, 1 / self._counted))

    def _by_shares(self) -> Generator[list[Trial], Results, tuple[int | None, int]]:
        """The smallest fleet that is enough by its shares, if any is, and the smallest that is not too few."""
        begun, near = self._count, self._near
        while True:
            enough = yield from self._smallest(near, lambda found: found is Decision.ENOUGH)
            highest = self._most if enough is None else enough
            fewest = yield from self._smallest(highest, lambda found: found is not Decision.TOO_FEW)
            fewest = highest if fewest is None else fewest
            settled = highest - fewest <= PRECISION * highest and enough is not None
            hopeless = enough is None and fewest == self._most
            if settled or hopeless or self._count in (1, MOST_SEEDS):
                self._count = begun
                return enough, fewest
            self._count, near = min(2 * self._count, MOST_SEEDS), highest

    def _smallest(self, near: int, passes: Callable[[Decision], bool]) -> Generator[list[Trial], Results, int | None]:
        """The smallest size that passes; sizes that pass are taken to have no smaller one above them that does not."""
        low, high, probe, stride = self._least - 1, None, near, max(1, near // 50)
        while high is None or high - low > 1:
            yield from self._complete(Kind.SHARE, probe)
            if passes(self._tried(probe).decision):
                high = probe
            else:
                low = probe
            if high is None:
                if low >= self._most:
                    return None
                probe = min(low + stride, self._most)
            elif low < self._least:
                probe = max(high - stride, self._least)
            else:
                probe = (low + high) // 2
            stride *= 2
        return high

    def _of_rates(self, size: int, most: int) -> Generator[list[Trial], Results, Decision]:
        """What the rates of a fleet say, with as many seeds as that takes, of at most so many."""
        while True:
            yield from self._complete(Kind.RATE, size)
            found = decide_by_rates(self._found[Kind.RATE, size], self._wanted)
            if found is not Decision.OPEN or self._count >= most:
                return found
            self._count = min(2 * self._count, most)

    def _complete(self, kind: Kind, size: int) -> Generator[list[Trial], Results, None]:
        """Ask for the trials of a fleet that are missing. The first seed's rate is where those of the others are sought."""
        known = self._found.setdefault((kind, size), [])
        while len(known) < self._count:
            first, near, many = len(known), None, self._count
            if kind is Kind.RATE:
                near, many = (near_rate(known[0]), many) if known else (None, 1)
            missing = [Trial(kind, size * self._engines, self._first + place, near) for place in range(first, many)]
            results = yield missing
            known += [results[trial] for trial in missing]


class Served(NamedTuple):
    """A finished run of a fleet.

    Attributes:
        times: Of all requests.
        run: Where sequences share blocks, that of the first replica.
    """

    times: RequestTimes
    run: Run | ClusterRun

    def summary(self) -> dict[str, Any]:
        """The summary of the run."""
        return cluster_summary(self.run) if isinstance(self.run, ClusterRun) else summary(self.run)


def serve(settings: Settings, work: Workload, cluster: Cluster) -> Served:
    """Serve a workload on a fleet.

    Raises:
        UserError, SimulationFault: As ``simulate`` and ``simulate_cluster``.
    """
    cost = compiled_cost(settings)
    if cluster.size == 1:
        run = simulate(settings, work, cost)
        return Served(request_times(run), run)
    in_turn = work.shares and work.content is None and cluster == Cluster(num_replicas=cluster.num_replicas)
    if in_turn and is_grouped(settings, work):
        return _in_turn(settings, work, cluster.num_replicas)
    fleet = simulate_cluster(settings, work, cluster, cost)
    return Served(cluster_times(fleet), fleet)


def _in_turn(settings: Settings, work: Workload, replicas: int) -> Served:
    """Requests of sequences that share blocks, which a cluster does not take, dealt in turn to replicas that run one by one."""
    parts = [np.arange(first, len(work), replicas) for first in range(min(replicas, len(work)))]
    runs = [simulate(settings, part_of(work, rows), compiled_cost(settings)) for rows in parts]
    each = [
        replace(times, index=rows[times.index]) for rows, times in zip(parts, map(request_times, runs), strict=True)
    ]
    columns = {field.name: np.concatenate([getattr(times, field.name) for times in each]) for field in fields(each[0])}
    return Served(RequestTimes(**columns), runs[0])


def check_fleet(settings: Settings, work: Workload, cluster: Cluster, goal: Goal) -> SloCheck:
    """The share of a workload's requests that meet the objectives on a fleet.

    Raises:
        UserError, SimulationFault: As ``serve``.
    """
    return check_times(work, serve(settings, work, cluster).times, goal)


def near_rate(found: float) -> float | None:
    """Where to seek the rates of other seeds (``highest_rate``), from that of one."""
    return found if 0 < found < inf else None


def highest_rate(
    settings: Settings,
    load: Load,
    goal: Goal,
    seed: int,
    cluster: Cluster,
    wanted: float,
    most: float | None,
    near: float | None = None,
) -> float:
    """The highest rate at which a fleet meets the goal with a seed, requests/s, rounded down by at most 0.5 %.

    It is sought from about a sixth of the wanted rate to 33 times it.

    Args:
        wanted: The rates that are tried are this one times powers of ``FINE``, requests/s.
        most: The saturated rate of the fleet, requests/s; None if it has none. Of replicas that only prefill or only
            decode it is found here.
        near: The highest rate of another seed, to begin with; None begins with the wanted rate.

    Returns:
        0 if no rate meets the goal, and infinity if every rate does.
    """
    drawn = load.draw(seed, cluster.size)
    if cluster.disaggregated:
        most = saturated_split_rate(settings, drawn.at(inf), cluster)

    def meets(power: int) -> bool:
        tried = wanted * FINE**power
        return (most is None or tried <= most) and check_fleet(settings, drawn.at(tried), cluster, goal).meets

    start, stride = (0, _FINE_STRIDE) if near is None else (round(log(near / wanted) / log(FINE)), _NEAR_STRIDE)
    found = highest(meets, start, stride)
    if found == MOST:
        return inf
    return 0.0 if found is None else wanted * FINE**found


def known_rate(
    settings: Settings, load: Load, seed: int, cluster: Cluster, wanted: float, highest_found: float
) -> float:
    """The highest rate at which a seed's run is a load, requests/s: requests arrive for ``TURNOVERS`` times their mean time in
    the system.

    Args:
        wanted: Rate to begin with, requests/s.
        highest_found: ``highest_rate`` of the seed; no higher rate is tried.

    Returns:
        ``highest_found`` if its run is a load or the fleet has a saturated rate. It is below the wanted rate if the run at the
        wanted rate is a burst, and 0 if no rate down to a sixth of it is known.
    """
    drawn = load.draw(seed, cluster.size)
    if cluster.disaggregated and saturated_split_rate(settings, drawn.at(inf), cluster) is not None:
        return highest_found

    def is_load(rate: float) -> bool:
        work = drawn.at(rate)
        times = serve(settings, work, cluster).times
        span = int(work.arrival_ticks[-1] - work.arrival_ticks[0])
        return span >= TURNOVERS * float((times.finish_ticks - times.arrival_ticks).mean())

    def known(power: int) -> bool:
        return wanted * FINE**power <= highest_found and is_load(wanted * FINE**power)

    if not highest_found or (highest_found < inf and is_load(highest_found)):
        return highest_found
    found = highest(known, 0, _FINE_STRIDE)
    return 0.0 if found is None else wanted * FINE**found


def saturated_split_rate(settings: Settings, at_once: Workload, cluster: Cluster) -> float | None:
    """Requests/s of a fleet, divided into prefill and decode, that always has requests waiting.

    All requests arrive at once, and the later half of those that begin to decode sets the rate, as in ``slo_check``.

    Args:
        at_once: Requests that arrive together.

    Returns:
        None if fewer than half of those that decode finish before the last one begins to: so few do
        not fill the fleet.
    """
    run = simulate_cluster(settings, at_once, cluster, compiled_cost(settings))
    decoded = [request_times(part) for part in run.runs[run.num_arriving :]]
    begun = np.sort(np.concatenate([times.first_scheduled_ticks for times in decoded]))
    finish = np.concatenate([times.finish_ticks for times in decoded])
    if not len(begun) or 2 * (finish <= begun[-1]).sum() < len(begun):
        return None
    middle = len(begun) // 2
    served = (len(begun) - 1 - middle) * len(at_once) / len(begun)
    return served * ticks.PER_SECOND / int(begun[-1] - begun[middle])
