"""The cheapest of the candidates that differ only in what the user left open: cards, and ranks of tensor parallelism.

    open       what is not listed: without ``--gpu`` every preset with a price; with ``--model`` and without a flag of parallelism 1, 2,
               4 and 8 ranks, where no card is listed or a listed one does not start with one; combinations that do not start are
               left out
    group      candidates with the same listed values. Each listed combination is answered, and within its group one candidate wins
    bound      of the cost, without a fleet: the replicas by the data sheet (``least``), in closed form; once there is an answer, also by
               the rate of a replica that always has requests waiting, by two runs; infinite if requests served alone miss the goal
    estimate   of the cost: as many replicas as take the wanted rate at about the rate of one, by a few step times and no run (``steady``),
               taken ``HOPE`` times as high; then the smallest fleet that serves one draw at the decisive step times
    1. estimates best bound first, until no bound is below the lowest; then draws, lowest estimate first, until no estimate without one is
       below the lowest with one; then pairs of prefill and decode apart (``pairs``): this first answer is printed, within seconds
    2. the whole test answers the one with the lowest estimate
    3. every other candidate of which the bound is below that cost is tested at the largest fleet that costs less, by one run of each draw
       (``chance``): if they call it too few, the candidate is closed; else the whole test answers it, too; in the end pairs likewise

A closed candidate cannot be cheaper than the winner by a bound, or by the same rule by which a plan calls a size too few. Rounds have
a fixed size, so that the order does not depend on the machine. Without a wanted rate the cost is of a request at the full rate, and
step 3 goes straight to the whole test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import TYPE_CHECKING

from .answer import Answer
from .candidates import Candidate
from .pairs import HOPE, MOST_PAIRS, SAVES, Offer, hourly, offers
from .prices import Prices
from .trials import MOST_REPLICAS

if TYPE_CHECKING:
    from .planning import Planner, Service

#: Ranks that are tried where none are listed.
RANKS = ("1", "2", "4", "8")
#: Candidates of which something is found in a round.
_ROUND = 8
#: Members of which a draw is tried at a time.
_PAIR = 2
#: Least relative difference of two costs.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Closed:
    """A candidate that was not answered, because it cannot cost less than the winner of its group.

    Attributes:
        name: Of the candidate.
        at_least: Its cost: by the hour, or without a wanted rate of a request/s; None if requests served alone miss the goal.
        replicas: The replicas that it is of; None without a wanted rate.
    """

    name: str
    at_least: float | None
    replicas: int | None = None

    def text(self, unit: str) -> str:
        """One line: why it is not answered."""
        if self.at_least is None:
            return f"{self.name}: requests served alone miss the goal"
        size = "" if self.replicas is None else f", {self.replicas:,} replicas"
        return f"{self.name}: at least {self.at_least:,.2f} {unit}{size}; not cheaper"


@dataclass
class Contest:
    """A group of two or more, and what is known of it so far.

    Attributes:
        members: Its candidates that start, by service.
        bounds, estimates: Costs that are known.
        answers: Results of the whole test.
        tries_pairs: Whether prefill and decode are tried apart, too, with a card and ranks of their own.
        say: Called with the name and the cost of the best candidate, and whether the whole test confirms it.
    """

    planner: Planner
    members: dict[Service, Candidate]
    prices: Prices
    say: Callable[[str, float, bool], None]
    tries_pairs: bool = False
    bounds: dict[Service, float] = field(default_factory=dict)
    estimates: dict[Service, float] = field(default_factory=dict)
    answers: dict[Service, Answer] = field(default_factory=dict)
    #: Replicas by the rate of one, and costs by one draw.
    _near: dict[Service, int | None] = field(default_factory=dict)
    _drawn: dict[Service, float] = field(default_factory=dict)
    #: The cheapest pair by the estimate, and costs of those that were tried.
    nearest_pair: Offer | None = None
    pairs: dict[Service, float] = field(default_factory=dict)
    #: Members of which the bound is by runs, too.
    _limited: set[Service] = field(default_factory=set)

    def search(self) -> None:
        """Find the cheapest member."""
        self._bound(self.planner.least(self.members))
        ranked = self._rank()
        if self.tries_pairs and self.planner.wanted is not None:
            self._draw_pairs(self.planner.wanted)
        if ranked:
            self._say()
        while True:
            # Again after each answer: it may cost more than its estimate, which closed others.
            if self._rank():
                self._say()
            left = [each for each in self._by(self.estimates) if self._is_open(each)]
            if not left:
                break
            first = left[0]
            if (self.answers or self.estimates[first] == inf) and first not in self._limited:
                self._limit([each for each in left if each not in self._limited][:_ROUND])
                continue
            if self.answers and self._is_too_few(first):
                continue
            self.answers |= self.planner.answered({first: self.members[first]})
            self._say()
        if not self.answers:
            # Every member misses the goal alone: the answer of one says so.
            first = next(iter(self.members))
            self.answers = self.planner.answered({first: self.members[first]})
        self._test_pairs()

    def _draw_pairs(self, wanted: float) -> None:
        """Size the pairs that may cost less than the lowest fleet of one draw, by that draw."""
        lowest = min(self._drawn.values(), default=inf) * (1 - SAVES)
        found = offers(self.planner.side_rates(self.members), self.prices, wanted)
        self.nearest_pair = found[0] if found else None
        likely = [each for each in found if each.hoped < lowest][:MOST_PAIRS]
        for service, (candidate, size) in self.planner.offered(likely).items():
            self.members[service] = candidate
            self.pairs[service] = inf if size is None else self._cost(service, inf, size)

    def _test_pairs(self) -> None:
        """Answer the pairs that may cost less than the best answer, cheapest first."""
        for service in self._by({each: cost for each, cost in self.pairs.items() if cost < inf}):
            of_pairs = [each for each in self.answers if each.decode is not None]
            alike = min(self.cost_of(each) for each in self.answers if each not in of_pairs) * (1 - SAVES)
            lowest = min((alike, *map(self.cost_of, of_pairs))) * (1 - _ROUNDING)
            size = self.planner.pair_size(service)
            if self.pairs[service] >= lowest:
                continue
            while size < MOST_REPLICAS and self._cost(service, inf, size + 1) < lowest < inf:
                size += 1
            if lowest < inf and self.planner.is_too_few(service, size):
                self.pairs[service] = self._cost(service, inf, size + 1)
                continue
            self.answers |= self.planner.answered({service: self.members[service]})
            self._say()

    @property
    def closed(self) -> list[Closed]:
        """The members without an answer, by their bound."""
        bounds = {each: cost for each, cost in self.bounds.items() if each not in self.answers}
        return [self._closed(each) for each in self._by(bounds)]

    @property
    def closed_pairs(self) -> dict[str, float]:
        """The pairs without an answer: name, and cost by one draw, or of the next fleet where draws call a cheaper one too small."""
        return {self.members[each].name: cost for each, cost in self.pairs.items() if each not in self.answers}

    def _closed(self, service: Service) -> Closed:
        bound = self.bounds[service]
        name = self.members[service].name
        if bound == inf:
            return Closed(name, None)
        replicas = None if self.planner.wanted is None else round(bound / self._hour(service)) - self._spare(service)
        return Closed(name, bound, replicas)

    def _bound(self, found: Mapping[Service, tuple[float, int | None]]) -> None:
        self.bounds |= {each: self._cost(each, rate, replicas) for each, (rate, replicas) in found.items()}

    def _rank(self) -> bool:
        """Estimate the members that may be cheaper than the lowest estimate and the best answer; returns whether there were any."""
        ranked = False
        while True:
            if left := self._below(self.bounds, self.estimates):
                self._rate({each: self.members[each] for each in left[:_ROUND]})
            elif self.planner.wanted is not None and (left := self._below(self.estimates, self._drawn)):
                self._draw(left[:_PAIR])
            else:
                break
            ranked = True
        return ranked

    def _rate(self, services: Mapping[Service, Candidate]) -> None:
        for each, rate in self.planner.rough_rates(services).items():
            self._near[each], hoped = self.planner.replicas_at(rate), rate * HOPE
            self.estimates[each] = max(self.bounds[each], self._cost(each, hoped, self.planner.replicas_at(hoped)))

    def _draw(self, services: Sequence[Service]) -> None:
        for each, size in self.planner.rough_sizes({each: self._near[each] or 1 for each in services}).items():
            self._drawn[each] = self.estimates[each] = inf if size is None else self._cost(each, inf, size)

    def _below(self, costs: Mapping[Service, float], known: Mapping[Service, float]) -> list[Service]:
        """The members of which something is not known, with costs below the best answer and the lowest that is known."""
        unanswered = (cost for each, cost in known.items() if each not in self.answers)
        best = min((*map(self.cost_of, self.answers), *unanswered), default=inf)
        return [
            each for each in self._by(costs) if each not in known and each not in self.answers and costs[each] < best
        ]

    def _limit(self, services: Sequence[Service]) -> None:
        self._limited.update(services)
        self._bound(self.planner.limits(services))
        for each in services:
            self.estimates[each] = max(self.estimates[each], self.bounds[each])

    def _is_open(self, service: Service) -> bool:
        costs = [self.cost_of(each) for each in self.answers]
        lowest = min(costs, default=inf)
        return service not in self.answers and self.bounds[service] < lowest * (1 - _ROUNDING)

    def _is_too_few(self, service: Service) -> bool:
        """Whether the first seeds call the largest fleet too few that costs less than the best answer; its bound is then above."""
        lowest = min(map(self.cost_of, self.answers))
        if self.planner.wanted is None or lowest == inf:
            return False
        hour, engines = self._hour(service), self.members[service].engines
        size = (ceil(lowest / hour / engines * (1 - _ROUNDING)) - 1) * engines - self._spare(service)
        if not self.planner.is_too_few(service, size):
            return False
        self.bounds[service] = self._cost(service, inf, size + engines)
        self.estimates[service] = max(self.estimates[service], self.bounds[service])
        return True

    def cost_of(self, service: Service) -> float:
        """The cost of an answer; infinite without one, and where only bursts are known or no fleet is sure: a bound closes no other."""
        answer = self.answers[service]
        if (
            not answer.rate
            or answer.full_rate == 0
            or (answer.fleet is not None and (answer.is_burst or answer.is_unsure))
        ):
            return inf
        return self._cost(service, answer.full_rate, None if answer.fleet is None else answer.replicas)

    def _cost(self, service: Service, rate: float, replicas: int | None) -> float:
        hour = self._hour(service)
        candidate = self.members[service]
        if replicas is not None and candidate.decode is not None:
            sizes = self.planner.divided_sizes(service, replicas)
            sides = zip(sizes, (candidate, candidate.decode), strict=True)
            return sum(size * hourly(each, self.prices) for size, each in sides)
        if replicas is not None:
            return (replicas + self._spare(service)) * hour if rate else inf
        return hour / rate if rate else inf

    def _spare(self, service: Service) -> int:
        return self.planner.spare * self.members[service].engines

    def _hour(self, service: Service) -> float:
        return hourly(self.members[service], self.prices)

    def _by(self, costs: Mapping[Service, float]) -> list[Service]:
        """Services with a cost, the lowest first, then fewer GPUs, then in their order."""
        places = {each: place for place, each in enumerate(self.members)}
        return sorted(costs, key=lambda each: (costs[each], self.members[each].num_gpus, places[each]))

    def best(self) -> tuple[str, float, bool] | None:
        """Name and cost of the best member so far, and whether the whole test confirms it."""
        confirmed = {each: cost for each in self.answers if (cost := self.cost_of(each)) < inf}
        known = confirmed or {each: cost for each, cost in self.estimates.items() if cost < inf}
        if not confirmed:
            most = min(known.values(), default=inf) * (1 - SAVES)
            known |= {each: cost for each, cost in self.pairs.items() if cost < most}
        if not known:
            return None
        first = self._by(known)[0]
        return self.members[first].name, known[first], bool(confirmed)

    def open_names(self) -> list[str]:
        """The other members that may still be cheaper than the best one."""
        best, bounds = self.best(), dict.fromkeys(self.members, 0.0) | self.bounds
        cost = inf if best is None else best[1]
        left = (each for each in self._by(bounds) if each not in self.answers and bounds[each] < cost)
        return [name for each in left if (name := self.members[each].name) != (best and best[0])]

    def _say(self) -> None:
        if (best := self.best()) is not None:
            self.say(*best)


def groups_of(candidates: Sequence[Candidate], unlisted: Sequence[str]) -> list[list[Candidate]]:
    """The candidates with the same values on every listed axis; of those that do not start only the first, and that only where none
    of its group starts."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for each in candidates:
        same = tuple(value for name, value in each.axis_values.items() if name not in unlisted)
        groups.setdefault(same, []).append(each)
    return [[each for each in some if each.settings] or some[:1] for some in groups.values()]
