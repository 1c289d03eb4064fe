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

from .answer import Answer
from .candidates import Candidate
from .contender import Contender, Question
from .fleet import first_fleet
from .pairs import HOPE, MOST_PAIRS, SAVES, Offer, hourly, offers
from .prices import Prices
from .tasks import Runner
from .trials import MOST_REPLICAS

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
        members: Its candidates that start; the pairs that are tried come behind them.
        contender: Makes that of a pair.
        bounds, estimates: Costs that are known.
        answers: Results of the whole test.
        tries_pairs: Whether prefill and decode are tried apart, too, with a card and ranks of their own.
        say: Called with the name and the cost of the best candidate, and whether the whole test confirms it.
    """

    members: list[Contender]
    question: Question
    runner: Runner
    contender: Callable[[Candidate], Contender]
    prices: Prices
    say: Callable[[str, float, bool], None]
    tries_pairs: bool = False
    bounds: dict[Contender, float] = field(default_factory=dict)
    estimates: dict[Contender, float] = field(default_factory=dict)
    answers: dict[Contender, Answer] = field(default_factory=dict)
    #: Replicas by the rate of one, and costs by one draw.
    _near: dict[Contender, int | None] = field(default_factory=dict)
    _drawn: dict[Contender, float] = field(default_factory=dict)
    #: The cheapest pair by the estimate, and costs of those that were tried.
    nearest_pair: Offer | None = None
    pairs: dict[Contender, float] = field(default_factory=dict)
    #: Members of which the bound is by runs, too.
    _limited: set[Contender] = field(default_factory=set)

    def search(self) -> None:
        """Find the cheapest member."""
        self._bound({each: (inf, None if self._wanted is None else each.fewest_at(inf)) for each in self.members})
        ranked = self._rank()
        if self.tries_pairs and self._wanted is not None:
            self._draw_pairs(self._wanted)
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
            self._answer(first)
            self._say()
        if not self.answers:
            # Every member misses the goal alone: the answer of one says so.
            self._answer(self.members[0])
        self._test_pairs()

    @property
    def _wanted(self) -> float | None:
        return self.question.wanted

    def _answer(self, member: Contender) -> None:
        self.answers |= self.runner.side_by_side({member: member.answer()})

    def _draw_pairs(self, wanted: float) -> None:
        """Size the pairs that may cost less than the lowest fleet of one draw, by that draw."""
        lowest = min(self._drawn.values(), default=inf) * (1 - SAVES)
        sides = self.runner.side_by_side({each: each.rough_side() for each in self.members})
        found = offers([each for each in sides.values() if each is not None], self.prices, wanted)
        self.nearest_pair = found[0] if found else None
        likely = [each for each in found if each.hoped < lowest][:MOST_PAIRS]
        pairs = {self.contender(each.candidate): each for each in likely}
        self.members += pairs
        sizes = self.runner.side_by_side({pair: pair.pair_size(offer) for pair, offer in pairs.items()})
        self.pairs = {pair: inf if size is None else self._cost(pair, inf, size) for pair, size in sizes.items()}

    def _test_pairs(self) -> None:
        """Answer the pairs that may cost less than the best answer, cheapest first."""
        for pair in self._by({each: cost for each, cost in self.pairs.items() if cost < inf}):
            of_pairs = [each for each in self.answers if each.is_pair]
            alike = min(self.cost_of(each) for each in self.answers if each not in of_pairs) * (1 - SAVES)
            lowest = min((alike, *map(self.cost_of, of_pairs))) * (1 - _ROUNDING)
            size = pair.drawn
            if self.pairs[pair] >= lowest:
                continue
            while size < MOST_REPLICAS and self._cost(pair, inf, size + 1) < lowest < inf:
                size += 1
            if lowest < inf and self._calls_too_few(pair, size):
                self.pairs[pair] = self._cost(pair, inf, size + 1)
                continue
            self._answer(pair)
            self._say()

    @property
    def closed(self) -> list[Closed]:
        """The members without an answer, by their bound."""
        bounds = {each: cost for each, cost in self.bounds.items() if each not in self.answers}
        return [self._closed(each) for each in self._by(bounds)]

    @property
    def closed_pairs(self) -> dict[str, float]:
        """The pairs without an answer: name, and cost by one draw, or of the next fleet where draws call a cheaper one too small."""
        return {each.candidate.name: cost for each, cost in self.pairs.items() if each not in self.answers}

    def _closed(self, member: Contender) -> Closed:
        bound, name = self.bounds[member], member.candidate.name
        if bound == inf:
            return Closed(name, None)
        replicas = None if self._wanted is None else round(bound / self._hour(member)) - self._spare(member)
        return Closed(name, bound, replicas)

    def _bound(self, found: Mapping[Contender, tuple[float, int | None]]) -> None:
        self.bounds |= {each: self._cost(each, rate, replicas) for each, (rate, replicas) in found.items()}

    def _rank(self) -> bool:
        """Estimate the members that may be cheaper than the lowest estimate and the best answer; returns whether there were any."""
        ranked = False
        while True:
            if left := self._below(self.bounds, self.estimates):
                self._rate(left[:_ROUND])
            elif self._wanted is not None and (left := self._below(self.estimates, self._drawn)):
                self._draw(left[:_PAIR])
            else:
                break
            ranked = True
        return ranked

    def _rate(self, members: Sequence[Contender]) -> None:
        for each, rate in self.runner.side_by_side({each: each.rough_rate() for each in members}).items():
            self._near[each], hoped = self._replicas_at(rate), rate * HOPE
            self.estimates[each] = max(self.bounds[each], self._cost(each, hoped, self._replicas_at(hoped)))

    def _replicas_at(self, rate: float) -> int | None:
        """Replicas that take the wanted rate, if there is one, each at ``rate``."""
        return None if self._wanted is None else first_fleet(self._wanted, rate) if rate else 1

    def _draw(self, members: Sequence[Contender]) -> None:
        searches = {each: each.rough_size(self._near[each] or 1) for each in members}
        for each, size in self.runner.side_by_side(searches).items():
            self._drawn[each] = self.estimates[each] = inf if size is None else self._cost(each, inf, size)

    def _below(self, costs: Mapping[Contender, float], known: Mapping[Contender, float]) -> list[Contender]:
        """The members of which something is not known, with costs below the best answer and the lowest that is known."""
        unanswered = (cost for each, cost in known.items() if each not in self.answers)
        best = min((*map(self.cost_of, self.answers), *unanswered), default=inf)
        return [
            each for each in self._by(costs) if each not in known and each not in self.answers and costs[each] < best
        ]

    def _limit(self, members: Sequence[Contender]) -> None:
        self._limited.update(members)
        self._bound(self.runner.side_by_side({each: each.bound() for each in members}))
        for each in members:
            self.estimates[each] = max(self.estimates[each], self.bounds[each])

    def _is_open(self, member: Contender) -> bool:
        costs = [self.cost_of(each) for each in self.answers]
        lowest = min(costs, default=inf)
        return member not in self.answers and self.bounds[member] < lowest * (1 - _ROUNDING)

    def _is_too_few(self, member: Contender) -> bool:
        """Whether the first seeds call the largest fleet too few that costs less than the best answer; its bound is then above."""
        lowest = min(map(self.cost_of, self.answers))
        if self._wanted is None or lowest == inf:
            return False
        hour, engines = self._hour(member), member.candidate.engines
        size = (ceil(lowest / hour / engines * (1 - _ROUNDING)) - 1) * engines - self._spare(member)
        if not self._calls_too_few(member, size):
            return False
        self.bounds[member] = self._cost(member, inf, size + engines)
        self.estimates[member] = max(self.estimates[member], self.bounds[member])
        return True

    def _calls_too_few(self, member: Contender, size: int) -> bool:
        return self.runner.side_by_side({member: member.is_too_few(size)})[member]

    def cost_of(self, member: Contender) -> float:
        """The cost of an answer; infinite without one, and where only bursts are known or no fleet is sure: a bound closes no other."""
        answer = self.answers[member]
        if (
            not answer.rate
            or answer.full_rate == 0
            or (answer.fleet is not None and (answer.is_burst or answer.is_unsure))
        ):
            return inf
        return self._cost(member, answer.full_rate, None if answer.fleet is None else answer.replicas)

    def _cost(self, member: Contender, rate: float, replicas: int | None) -> float:
        hour, candidate = self._hour(member), member.candidate
        if replicas is not None and candidate.decode is not None:
            sizes = member.divided_sizes(replicas)
            sides = zip(sizes, (candidate, candidate.decode), strict=True)
            return sum(size * hourly(each, self.prices) for size, each in sides)
        if replicas is not None:
            return (replicas + self._spare(member)) * hour if rate else inf
        return hour / rate if rate else inf

    def _spare(self, member: Contender) -> int:
        return self.question.spare * member.candidate.engines

    def _hour(self, member: Contender) -> float:
        return hourly(member.candidate, self.prices)

    def _by(self, costs: Mapping[Contender, float]) -> list[Contender]:
        """Members with a cost, the lowest first, then fewer GPUs, then in their order."""
        places = {each: place for place, each in enumerate(self.members)}
        return sorted(costs, key=lambda each: (costs[each], each.candidate.num_gpus, places[each]))

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
        return first.candidate.name, known[first], bool(confirmed)

    def open_names(self) -> list[str]:
        """The other members that may still be cheaper than the best one."""
        best, bounds = self.best(), dict.fromkeys(self.members, 0.0) | self.bounds
        cost = inf if best is None else best[1]
        left = (each for each in self._by(bounds) if each not in self.answers and bounds[each] < cost)
        return [name for each in left if (name := each.candidate.name) != (best and best[0])]

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
