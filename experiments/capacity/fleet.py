"""The smallest fleet that meets a goal at a given rate, decided by simulations of whole fleets behind their router.

    share     of a seed: ``n`` replicas serve its requests at the wanted rate; the share that meets the objectives
    rate      of a seed: the highest rate at which ``n`` replicas meet the goal with its requests
    guide     the smallest ``n`` that is enough by the shares of a few seeds (``confidence.decide``)
    confirm   the rate that 90 % of other seeds take with that ``n``, from 48 seeds (``confidence.lower_limit``); if it is below
              the wanted rate, the next ``n`` follows
    fewest    the smallest ``n`` that the seeds do not call too few

Shares take one run each, so they find the size. But a share cannot exceed 1, and a few seeds do not show how others are
distributed: where rare long requests decide, most seeds are alike and some are far lower. So 48 seeds confirm the size,
or raise it.

The search begins with the given seeds, near the wanted rate over the highest rate of one replica. While ``fewest`` lies
further below the size than ``PRECISION``, the seeds are doubled, to at most 48 or those to begin with. The budget is a number of seeds and not a
time, so that the answer does not depend on the machine. No fleet counts with replicas that would have to serve more than their
saturated rate (``slo_check``).

Too few requests to fill a replica have no saturated rate. At a high rate all of them arrive before the first has finished:
a burst, and not a load. ``known_rate`` is the rate up to which their runs are a load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import ceil, inf, log
from typing import Any, NamedTuple

import numpy as np

from ...sim import Run, Settings, Workload, simulate, summary
from ...sim.cluster import Cluster, ClusterRun, Pair, cluster_summary, cluster_times, simulate_cluster
from ...sim.cluster.sent import part_of
from ...sim.cluster.worth import cluster_cache_summary
from ...sim.engine.grouping import is_grouped
from ...sim.metrics.cache_bounds import cache_summary
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types import ticks
from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ..runs.slo_check import Goal, SloCheck, check_times, compiled_cost
from .chance import Chance
from .confidence import NUM_SEEDS, Decision, Limit, decide, lower_limit, mean_rate
from .load import TURNOVERS, Load
from .max_rate import ALONE, MOST, STEP, Ahead, SeedRate, highest
from .max_rate import rate as rate_of_power
from .steady import scaled
from .tasks import Search, Task, results, smallest
from .trials import MOST_REPLICAS, Case, Trials

#: Most replicas of a fleet, relative to the first that is tried.
_TIMES_FIRST = 8
#: Seeds to begin with.
DEFAULT_FLEET_SEEDS = 4
#: Share of the size by which ``fewest`` may be smaller at the end of the search.
PRECISION = 0.025
#: Ratio of neighbouring rates, and the first strides of their search: from the wanted rate, and from another seed's rate.
FINE, _FINE_STRIDE, _NEAR_STRIDE = 1.005, 8, 2
#: Tolerance by which a quotient of rates may exceed a whole number of replicas, for the rounding of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Tried:
    """The seeds of one fleet.

    Attributes:
        replicas: Its size.
        shares: Share of the counted requests that meet the objectives, by seed.
        decision: What they say of the goal; of a size that was to be confirmed by more seeds, what these say.
    """

    replicas: int
    shares: tuple[float, ...]
    decision: Decision


@dataclass(frozen=True)
class Fleet:
    """Result of the search.

    Attributes:
        replicas: The smallest fleet that is enough; None if none of the tried ones is.
        fewest: The smallest fleet that is not too few.
        tried: Fleets that were simulated, by size.
        rates: Highest rates of the recommended fleet with the seeds to begin with, requests/s.
        sure_rate: The rate that other seeds take with it (``lower_limit``), requests/s; that of the seed if there is one.
        seeds: Seeds that confirm the recommended fleet; without one, the most of any.
        misses: Seeds of these that miss the goal at the wanted rate.
        chances: The probability that it is enough, of each size of which it was found (``chance``), by size; empty where it was not.
        is_unsure: Whether no size that was tried is enough with the confidence that is asked for.
    """

    replicas: int | None
    fewest: int
    tried: tuple[Tried, ...]
    rates: tuple[float, ...] = ()
    sure_rate: float = 0.0
    seeds: int = field(kw_only=True)
    misses: int = 0
    chances: tuple[Chance, ...] = ()
    is_unsure: bool = False

    @property
    def chance(self) -> Chance | None:
        """That of the recommended size; None where it was not found."""
        return next((each for each in self.chances if each.replicas == self.replicas), None)

    @property
    def mean_rate(self) -> float:
        """Geometric mean of the rates."""
        return mean_rate(self.rates)


def first_fleet(wanted: float, of_one: float) -> int:
    """The number of replicas for a rate, from the rate of one, both in requests/s."""
    return max(1, ceil(wanted / of_one - _ROUNDING))


class RateSearch:
    """The search for the rates of fleets.

    Args:
        trials: Their runs.
        seeds: Seeds to begin with; more follow the last.
        engines: Sizes are multiples of this number of replicas, which share experts.
    """

    # Sizes count multiples of ``engines``; trials and results replicas.

    def __init__(self, trials: Trials, seeds: Sequence[int], engines: int = 1) -> None:
        self._trials, self._first, self._count, self._engines = trials, seeds[0], len(seeds), engines
        self._rates: dict[int, list[float]] = {}

    def rates(
        self, size: int, known: Sequence[float] = (), near: float | None = None
    ) -> Search[tuple[tuple[float, ...], float]]:
        """The highest rates of one fleet with the seeds to begin with, and the rate that other seeds take, requests/s.

        Args:
            known: Rates of the first seeds that are known.
            near: Where to seek that of the first seed.
        """
        self._rates[size] = [*known]
        # To the end, whatever is wanted: the number of misses is not used.
        limit = yield from self._limit(size, inf, near, to_end=True)
        return tuple(self._rates[size]), limit.rate

    def _limit(self, size: int, wanted: float, near: float | None = None, *, to_end: bool) -> Search[Limit]:
        """The rate that other seeds take with a fleet, from the rates of the seeds to begin with."""
        replicas, first, known = size * self._engines, self._first, self._rates.setdefault(size, [])

        def takes(place: int, rate: float) -> Task[bool]:
            return self._trials.takes(replicas, first + place, rate)

        def highest(place: int, near: float | None) -> Task[float]:
            return self._trials.rate(replicas, first + place, near if near is None else near_rate(near))

        if not known:
            known += yield from results([highest(0, near)])
        # The first seed's rate is where those of the others are sought.
        known += yield from results(highest(place, known[0]) for place in range(len(known), self._count))
        return (yield from lower_limit(known, wanted, takes, highest, to_end=to_end))


class FleetSearch(RateSearch):
    """The search for the smallest fleet.

    Args:
        wanted: The wanted rate, requests/s.
        near: Size to begin with.
        least: Sizes below are known to be too few; 1 or more.
        attainment: Share of the requests that must meet the objectives.
        counted: Number of requests that a share is of.
        trials, seeds, engines: As of ``RateSearch``.
    """

    def __init__(
        self,
        trials: Trials,
        wanted: float,
        near: int,
        least: int,
        attainment: float,
        counted: int,
        seeds: Sequence[int],
        engines: int = 1,
    ) -> None:
        super().__init__(trials, seeds, engines)
        self._wanted, self._attainment, self._counted = wanted, attainment, counted
        self._least, largest = ceil(least / engines), max(1, MOST_REPLICAS // engines)
        self._near = min(max(ceil(near / engines), self._least), largest)
        self._most = min(largest, _TIMES_FIRST * self._near)
        self._most_seeds = max(NUM_SEEDS, self._count)
        self._shares: dict[int, list[float]] = {}
        #: Of sizes that 48 seeds confirmed, or did not.
        self._confirmed: dict[int, Decision] = {}

    def steps(self) -> Search[Fleet]:
        """The smallest fleet."""
        size, fewest = yield from self._by_shares()
        while size is not None:
            limit = yield from self._limit(size, self._wanted, to_end=False)
            found = self._confirmed[size] = limit.decision
            if found is Decision.ENOUGH:
                if size not in self._shares:
                    yield from self._complete(size)
                return self._fleet(size, fewest, limit)
            if found is Decision.TOO_FEW:
                fewest = max(fewest, size + 1)
            larger = size + max(1, size // 50)
            size = larger if larger <= self._most else None
            fewest = min(fewest, self._most)
        return self._fleet(None, fewest)

    def too_few(self, size: int) -> Search[bool]:
        """Whether the seeds to begin with call a fleet of ``size`` replicas too few."""
        yield from self._complete(size // self._engines)
        return self._tried(size // self._engines).decision is Decision.TOO_FEW

    def _fleet(self, size: int | None, fewest: int, limit: Limit | None = None) -> Fleet:
        tried, fewest = tuple(map(self._tried, sorted(self._shares))), fewest * self._engines
        if size is None or limit is None:
            return Fleet(None, fewest, tried, seeds=max(len(each.shares) for each in tried))
        rates = tuple(self._rates[size])
        return Fleet(size * self._engines, fewest, tried, rates, limit.rate, limit.misses, seeds=limit.num_seeds)

    def _complete(self, size: int) -> Search[None]:
        """Find the shares of a fleet that are missing."""
        known, replicas = self._shares.setdefault(size, []), size * self._engines
        places = range(len(known), self._count)
        known += yield from results(self._trials.share(replicas, self._first + place) for place in places)

    def _tried(self, size: int) -> Tried:
        shares = self._shares[size]
        by_shares = decide(shares, self._attainment, 1 / self._counted)
        return Tried(size * self._engines, tuple(shares), self._confirmed.get(size, by_shares))

    def _by_shares(self) -> Search[tuple[int | None, int]]:
        """The smallest fleet that is enough by its shares, if any is, and the smallest that is not too few."""
        begun, near = self._count, self._near
        while True:
            enough = yield from self._smallest(near, lambda found: found is Decision.ENOUGH)
            largest = self._most if enough is None else enough
            fewest = yield from self._smallest(largest, lambda found: found is not Decision.TOO_FEW)
            settled = fewest is None or enough is not None and enough - fewest <= PRECISION * enough
            if settled or self._count in (1, self._most_seeds):
                self._count = begun
                return enough, largest if fewest is None else fewest
            self._count, near = min(2 * self._count, self._most_seeds), largest

    def _smallest(self, near: int, passes: Callable[[Decision], bool]) -> Search[int | None]:
        """The smallest size that passes."""

        def tried(size: int) -> Search[bool]:
            yield from self._complete(size)
            return passes(self._tried(size).decision)

        return smallest(tried, range(self._least, self._most + 1), near, max(1, near // 50))


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

    def cache_worth(self) -> dict[str, Any] | None:
        """``cache_worth`` of the summary; None where the run has none."""
        return cluster_cache_summary(self.run) if isinstance(self.run, ClusterRun) else cache_summary(self.run)


def serve(settings: Settings, work: Workload, cluster: Cluster) -> Served:
    """Serve a workload on a fleet.

    Raises:
        UserError, SimulationFault: As ``simulate`` and ``simulate_cluster``.
    """
    if cluster.size == 1:
        run = simulate(settings, work, compiled_cost(settings))
        return Served(request_times(run), run)
    in_turn = work.shares and work.content is None and cluster == Cluster(num_replicas=cluster.num_replicas)
    if in_turn and is_grouped(settings, work):
        return _in_turn(settings, work, cluster.num_replicas)
    fleet = _fleet_run(settings, work, cluster)
    return Served(cluster_times(fleet), fleet)


def _fleet_run(settings: Settings, work: Workload, cluster: Cluster) -> ClusterRun:
    """A run of a fleet. A prefix cache that no prompt can hit changes no time, and takes most of a divided run."""
    if cluster.disaggregated and not work.may_share_prefixes and settings.kind.caches_prefixes:
        settings = replace(settings, enable_prefix_caching=False)
    decode_cost = compiled_cost(cluster.decode) if isinstance(cluster, Pair) else None
    return simulate_cluster(settings, work, cluster, compiled_cost(settings), decode_cost=decode_cost)


def _in_turn(settings: Settings, work: Workload, replicas: int) -> Served:
    """Requests of sequences that share blocks, which a cluster does not take, dealt in turn to replicas that run one by one."""
    parts = [np.arange(first, len(work), replicas) for first in range(min(replicas, len(work)))]
    runs = [simulate(settings, part_of(work, rows), compiled_cost(settings)) for rows in parts]
    each = [
        replace(times, index=rows[times.index]) for rows, times in zip(parts, map(request_times, runs), strict=True)
    ]
    columns = {part.name: np.concatenate([getattr(times, part.name) for times in each]) for part in fields(each[0])}
    return Served(RequestTimes(**columns), runs[0])


def check_fleet(settings: Settings, work: Workload, cluster: Cluster, goal: Goal) -> SloCheck:
    """The share of a workload's requests that meet the objectives on a fleet.

    Raises:
        UserError, SimulationFault: As ``serve``.
    """
    return check_times(work, serve(settings, work, cluster).times, goal)


def attained_share(settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, rate: float) -> float:
    """The share of a seed's requests that meet the objectives on a fleet at a rate, requests/s."""
    return check_fleet(settings, load.draw(seed, cluster.size).at(rate), cluster, goal).attained


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
    meets = _meets(settings, load, goal, seed, cluster, most)
    start, stride = (0, _FINE_STRIDE) if near is None else (round(log(near / wanted) / log(FINE)), _NEAR_STRIDE)
    found = highest(lambda power: meets(wanted * FINE**power), start, stride)
    if found == MOST:
        return inf
    return 0.0 if found is None else wanted * FINE**found


def takes_rate(
    settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, most: float | None, rate: float
) -> bool:
    """Whether a fleet meets the goal with a seed at a rate, requests/s; the other arguments are those of ``highest_rate``."""
    return _meets(settings, load, goal, seed, cluster, most)(rate)


def in_case(settings: Settings, case: Case) -> Settings:
    """Settings with the step times and the KV cache of a case."""
    blocks, longest = case.memory
    return replace(scaled(settings, case.scale), num_gpu_blocks_override=blocks, max_model_len=longest)


def meets_case(
    settings: Settings,
    load: Load,
    goal: Goal,
    seed: int,
    cluster: Cluster | None,
    wanted: float,
    most: float | None,
    case: Case,
) -> bool:
    """Whether a fleet meets the goal with a seed at the wanted rate in a case (``chance``).

    Args:
        cluster: The fleet; None for one replica whose requests are served alone.
        most: The saturated rate of the fleet with the predicted step times, requests/s; None if it has none.
    """
    chosen = in_case(settings, case)
    if isinstance(cluster, Pair):
        cluster = replace(cluster, decode=in_case(cluster.decode, not_none(case.decode)))
    most = None if most is None else most / case.scale
    try:
        if cluster is None:
            return check_fleet(chosen, load.draw(seed).at(rate_of_power(ALONE)), Cluster(), goal).meets
        return takes_rate(chosen, load, goal, seed, cluster, most, wanted)
    except UserError:
        # So small a KV cache does not hold the longest request.
        return False


def _meets(
    settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, most: float | None
) -> Callable[[float], bool]:
    """Whether a fleet meets the goal with a seed, by the rate."""
    drawn = load.draw(seed, cluster.size)

    @cache
    def saturated() -> float | None:
        return saturated_split_rate(settings, drawn.at(inf), cluster) if cluster.disaggregated else most

    def meets(rate: float) -> bool:
        # Of a divided fleet the limit takes a run of its own, which only a rate that meets the goal needs.
        if not cluster.disaggregated and most is not None and rate > most:
            return False
        if not check_fleet(settings, drawn.at(rate), cluster, goal).meets:
            return False
        limit = saturated()
        return limit is None or rate <= limit

    return meets


def known_rate(
    settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, wanted: float, highest_found: float
) -> float:
    """The highest rate at which a seed's run is a load, requests/s: requests arrive for ``TURNOVERS`` times their mean time in
    the system.

    Args:
        goal: Not read: a run is a load or not, whatever it is to meet.
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

    if near_rate(highest_found) and is_load(highest_found):
        return highest_found
    found = highest(known, 0, _FINE_STRIDE)
    return 0.0 if found is None else wanted * FINE**found


def apart(settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, rate: float) -> Ahead:
    """As ``max_rate.go_ahead``, of a fleet that is divided: its requests one by one on two replicas, all at once, and at a rate that it
    takes, requests/s. Rates are of a replica."""
    drawn = load.draw(seed, cluster.size)
    pair = replace(cluster, prefill_replicas=1, decode_replicas=1, router=Cluster.router)
    alone = check_fleet(settings, load.draw(seed).at(rate_of_power(ALONE)), pair, goal)
    saturated = saturated_split_rate(settings, drawn.at(inf), cluster)
    found = SeedRate(ceil(log(rate / cluster.size) / log(STEP)) if alone.meets else None)
    return Ahead(alone, None if saturated is None else saturated / cluster.size, found)


def saturated_split_rate(settings: Settings, at_once: Workload, cluster: Cluster) -> float | None:
    """Requests/s of a fleet, divided into prefill and decode, that always has requests waiting.

    All requests arrive at once, and the later half of those that begin to decode sets the rate, as in ``slo_check``.

    Args:
        at_once: Requests that arrive together.

    Returns:
        None if fewer than half of those that decode finish before the last one begins to: so few do
        not fill the fleet.
    """
    run = _fleet_run(settings, at_once, cluster)
    decoded = [request_times(part) for part in run.runs[run.num_arriving :]]
    begun = np.sort(np.concatenate([times.first_scheduled_ticks for times in decoded]))
    finish = np.concatenate([times.finish_ticks for times in decoded])
    if not len(begun) or 2 * (finish <= begun[-1]).sum() < len(begun):
        return None
    middle = len(begun) // 2
    served = (len(begun) - 1 - middle) * len(at_once) / len(begun)
    return served * ticks.PER_SECOND / int(begun[-1] - begun[middle])
