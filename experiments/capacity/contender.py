"""What a plan finds of one candidate that starts: about its rate, its fleet for the wanted rate, and its answer.

Each method that returns a ``Search`` reads from top to bottom for this candidate alone; a ``Runner`` runs those of several side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from ...sim.cluster import Cluster
from ...sim.config.settings import Settings
from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ..runs.grid import NONE
from ..runs.slo_check import Goal, SloCheck
from .answer import Answer
from .candidates import Candidate
from .chance import NUM_DRAWS, Chance, ChanceSearch, Uncertainty
from .detail import detail
from .fleet import (
    Fleet,
    FleetSearch,
    RateSearch,
    apart,
    attained_share,
    first_fleet,
    highest_rate,
    known_rate,
    meets_case,
    takes_rate,
)
from .least import BY_SATURATION, fewest, too_many
from .load import Load
from .max_rate import ALONE, Ahead, Bounds, MaxRate, bounds, follow, go_ahead
from .max_rate import rate as rate_of_power
from .pairs import Offer, Side, may_be_side
from .split import AUTO, best_share, divided, fewest_replicas
from .steady import rough_rate, rough_sides
from .tasks import Runner, Search, Task, result, results, task
from .trials import MOST_REPLICAS, Case
from .uncertainty import uncertainty
from .what_if import Lengths, changed_rates

#: What is known of one replica, by its saturated rate.
Known = Ahead | MaxRate | Bounds
#: Of a replica of which nothing is known.
_UNLIMITED = Bounds(SloCheck(meets=True, counted=0, met=0, missed={}), None)


class Service(NamedTuple):
    """Settings of a replica, its router, and the replicas that only prefill, as the flag; and the settings of those that only decode,
    where they are others."""

    settings: Settings
    router: str
    prefill_replicas: str
    decode: Settings | None = None


def service_of(candidate: Candidate) -> Service:
    """The service of a candidate that starts."""
    decode = None if candidate.decode is None else candidate.decode.settings
    return Service(not_none(candidate.settings), candidate.router, candidate.prefill_replicas, decode)


@dataclass(frozen=True)
class Question:
    """What a plan asks of every candidate.

    Attributes:
        seeds: The first seed runs ahead.
        wanted: The wanted rate, requests/s; None asks for the highest rate of one replica.
        confidence: Probability with which a fleet is to be enough (``chance``).
        spare: Replicas that are bought beside those that are enough; they serve no run.
    """

    load: Load
    goal: Goal
    seeds: Sequence[int]
    wanted: float | None = None
    confidence: float = 0.9
    spare: int = 0


class Contender:
    """A candidate that starts, and what is known of it."""

    def __init__(self, candidate: Candidate, question: Question, runner: Runner) -> None:
        self.candidate, self.question, self._runner = candidate, question, runner
        self._service = service_of(candidate)
        self.settings, self._first = self._service.settings, question.seeds[0]
        #: Share of the replicas that prefill, where it is asked for.
        self._share: float | None = None
        self._bounds: Bounds | None = None
        #: Replicas of a pair that serve the first draw.
        self.drawn = 0

    @property
    def is_pair(self) -> bool:
        """Whether its replicas that only decode have settings of their own."""
        return self._service.decode is not None

    @property
    def is_divided(self) -> bool:
        """Whether some of its replicas only prefill."""
        return self._service.prefill_replicas != NONE

    @property
    def _engines(self) -> int:
        return self.settings.data_parallel_size

    @property
    def wanted(self) -> float:
        return not_none(self.question.wanted)

    @cached_property
    def _about(self) -> Uncertainty:
        """What step times and the KV cache may be."""
        return uncertainty(self.candidate)

    @cached_property
    def longer(self) -> float:
        """Step times with which a fleet has to meet the goal, over the predicted ones: 1 or the decisive scale."""
        return max(1.0, self._about.decisive(self.question.confidence))

    @cached_property
    def least(self) -> int | None:
        """The fewest replicas that may serve the wanted rate, by the data sheet; None without one, of a pair, and where its runs say
        why it cannot be simulated."""
        question = self.question
        if question.wanted is None or self.is_pair:
            return None
        work = self._runner.work(question.load, self._first)
        try:
            return fewest(self.candidate, work, question.wanted, question.goal.attainment)
        except UserError:
            return None

    @property
    def is_simulated(self) -> bool:
        """Whether a fleet that a plan simulates may serve the wanted rate, if there is one, by the data sheet."""
        return self.least is None or self.least <= MOST_REPLICAS

    def cluster(self, replicas: int) -> Cluster:
        """A fleet of so many replicas."""
        service = self._service
        return divided(replicas, service.router, service.prefill_replicas, self._share, service.decode)

    def divided_sizes(self, replicas: int) -> tuple[int, int]:
        """How many of the replicas of a pair prefill, and how many decode."""
        cluster = self.cluster(replicas)
        return cluster.num_arriving, cluster.size - cluster.num_arriving

    def fewest_at(self, most: float) -> int:
        """The fewest replicas for the wanted rate, of which each serves ``most`` requests/s."""
        of_rate = 1
        if 0 < most < inf and not self.is_divided:
            of_rate = first_fleet(self.wanted * self.longer, most)
        return max(of_rate, self.least or 1, fewest_replicas(self._service.prefill_replicas))

    def _least_of(self, begun: Ahead | Bounds) -> int:
        """The fewest replicas that may serve the wanted rate: by the data sheet, and by what one replica serves."""
        least = fewest_replicas(self._service.prefill_replicas)
        if least == 1 and begun.saturated is not None:
            least = first_fleet(self.wanted, begun.saturated)
        return max(least, self.least or least)

    # The answer.

    def answer(self) -> Search[Answer]:
        """The whole test: the rates of one replica, or the fleet for the wanted rate, and its detail."""
        wanted, least = self.question.wanted, self.least
        none = Answer(self.candidate, wanted=wanted, least_replicas=least, share=self._share if self.is_pair else None)
        if not self.is_simulated:
            return replace(none, error=too_many(self.candidate, not_none(least), wanted))
        try:
            begun = yield from self._begin()
            found = yield from (self._rated(none, begun) if wanted is None else self._sized(none, begun))
        except UserError as error:
            return replace(none, error=str(error))
        return (yield from self._detailed(found))

    def _begin(self) -> Search[Ahead]:
        """The first seed, with one replica; of a pair with both sides."""
        if self.is_pair:
            wanted = self.wanted * self.longer
            return (yield from result(task(apart, self.settings, self._first, self.cluster(self.drawn), wanted)))
        begun = yield from result(task(go_ahead, self.settings, self._first))
        if self.question.wanted is not None:
            # A pair is filled as its prefill side alone, if that was tried.
            self._runner.fill(self.settings, begun.in_flight)
        return begun

    def _rated(self, answer: Answer, begun: Ahead) -> Search[Answer]:
        """With the rates of one replica over all seeds."""
        found = MaxRate.of(begun)
        if begun.found.rate:
            search = RateSearch(self._trials(begun), self.question.seeds)
            found = MaxRate.of(begun, *(yield from search.rates(1, (begun.found.rate,))))
        if found.saturated is not None:
            return replace(answer, found=found)
        rates = {seed: rate for seed, rate in self._by_seed(found.seed_rates).items() if 0 < rate < inf}
        known = yield from self._known_rates(Cluster(), rates)
        return replace(answer, found=found, known_rates=known)

    def _sized(self, answer: Answer, begun: Ahead) -> Search[Answer]:
        """With the fleet for the wanted rate."""
        found, (_, router, prefill_replicas, _) = replace(answer, found=MaxRate.of(begun)), self._service
        if not begun.found.rate:
            return found
        least = self._least_of(begun)
        if least > MOST_REPLICAS:
            why = too_many(self.candidate, least, self.wanted, BY_SATURATION)
            return replace(answer, error=why, least_replicas=least)
        near = max(first_fleet(self.wanted * self.longer, begun.found.rate), fewest_replicas(prefill_replicas))
        if prefill_replicas == AUTO and not self.is_pair:
            best = task(best_share, self.settings, self._first, near, router, self.wanted)
            self._share = yield from result(best)
        size: int | None = None
        chances: tuple[Chance, ...] = ()
        # The runs of a replica without a saturated rate are bursts, and their cases, too.
        if begun.saturated is not None:
            size, chances = yield from self._chance_search(self._about, near, begun).steps()
        fleet = yield from self._fleet_search(begun, near, size or 1).steps()
        if fleet.replicas is None:
            return replace(found, fleet=fleet)
        cluster = self.cluster(fleet.replicas)
        if begun.saturated is not None:
            fleet = self._with_chances(fleet, size, chances)
        known = yield from self._known_of_fleet(cluster, begun, fleet.rates)
        return replace(found, fleet=fleet, prefill_replicas=cluster.prefill_replicas, known_rates=known)

    def _with_chances(self, fleet: Fleet, size: int | None, chances: tuple[Chance, ...]) -> Fleet:
        replicas, least = not_none(fleet.replicas), 1 - self.question.confidence
        open_ones = (each.replicas for each in chances if least < each.chance and each.replicas < replicas)
        return replace(fleet, chances=chances, is_unsure=size is None, fewest=min((replicas, *open_ones)))

    def _known_of_fleet(
        self, cluster: Cluster, known: Known, highest: Sequence[float]
    ) -> Search[tuple[float, ...] | None]:
        """``Answer.known_rates`` of a fleet; None if its saturated rate bounds its highest rates, by seed."""
        if known.saturated is not None and not cluster.disaggregated:
            return None
        return (yield from self._known_rates(cluster, self._by_seed(highest)))

    def _known_rates(self, cluster: Cluster, highest: Mapping[int, float]) -> Search[tuple[float, ...] | None]:
        """The rates that runs tell by seed; None if all of these are the highest ones."""
        wanted = self.question.wanted
        known = yield from results(
            task(known_rate, self.settings, seed, cluster, wanted or rate, rate) for seed, rate in highest.items()
        )
        is_known = all(rate >= most for rate, most in zip(known, highest.values(), strict=True))
        return None if is_known else tuple(known)

    def _by_seed(self, rates: Sequence[float]) -> dict[int, float]:
        return dict(enumerate(rates, start=self._first))

    def _detailed(self, answer: Answer) -> Search[Answer]:
        """With the detail, if it meets the goal."""
        if answer.found is None or not answer.rates.seed_rates[0]:
            return answer
        highest, fleet = answer.rates.seed_rates[0], answer.fleet
        if fleet is not None and fleet.replicas is not None:
            highest = fleet.rates[0] if answer.prefill_replicas else highest
            cluster, rate = self.cluster(fleet.replicas), self.wanted
        elif fleet is None and answer.rates.rate:
            cluster, rate = Cluster(), answer.rates.rate
        else:
            return answer
        try:
            found = yield from result(task(detail, self.settings, self._first, cluster, rate, highest))
        except UserError as error:
            return replace(answer, error=str(error))
        return replace(answer, detail=found)

    # Bounds and estimates, for a contest.

    def rough_rate(self) -> Search[float]:
        """About the rate of one replica (``steady``), requests/s, at the decisive step times; 0 if it meets the goal at none, or
        cannot be simulated."""
        if not self.is_simulated:
            return 0.0
        try:
            return (yield from result(task(rough_rate, self.settings, self._first, self.longer)))
        except UserError:
            return 0.0

    def rough_side(self) -> Search[Side | None]:
        """As ``rough_rate``, of a replica that only prefills, and of one that only decodes; None where it cannot be."""
        if not may_be_side(self.candidate):
            return None
        try:
            rates = yield from result(task(rough_sides, self.settings, self._first, self.longer))
        except UserError:
            return None
        return Side(self.candidate, *rates)

    def rough_size(self, near: int) -> Search[int | None]:
        """The smallest fleet that serves the first draw at the decisive step times; None if there is none, or it cannot be simulated.

        Args:
            near: A size to begin with.
        """
        if near > MOST_REPLICAS:
            return None
        about, least = self._about.likely(self.longer), self.fewest_at(inf)
        search = ChanceSearch(self._trials(_UNLIMITED), about, self.question.seeds[:1], 1.0, near, least, self._engines)
        try:
            size, _ = yield from search.steps()
        except UserError:
            return None
        return size

    def pair_size(self, offer: Offer) -> Search[int | None]:
        """As ``rough_size``, of a pair: of its cheapest division that serves the first draw.

        Of two divisions the dearer is taken to serve what the cheaper one serves: they are bisected in the order of their costs.
        """
        self._share = offer.share
        size = yield from self.rough_size(offer.replicas)
        if size is None:
            return None
        share, self.drawn, left = self._share, size, offer.cheaper(self.divided_sizes(size))
        case = self._about.likely(self.longer).case(0, 0)
        while left:
            middle = len(left) // 2
            prefill, decode = left[middle]
            self._share = prefill / (prefill + decode)
            try:
                meets = yield from result(self._trials(_UNLIMITED).case(prefill + decode, self._first, case))
            except UserError:
                meets = False
            if meets:
                share, self.drawn, left = self._share, prefill + decode, left[middle + 1 :]
            else:
                left = left[:middle]
        self._share = share
        return self.drawn

    def bound(self) -> Search[tuple[float, int | None]]:
        """The most that a replica serves, requests/s, and the fewest replicas for the wanted rate, if there is one; a rate of 0 if
        requests served alone miss the goal. Where it cannot be simulated there is no bound: its answer says why."""
        if not self.is_simulated:
            return inf, self.least
        most = inf
        try:
            found = self._bounds = yield from result(task(bounds, self.settings, self._first))
            most = 0.0 if not found.alone.meets else inf if found.saturated is None else found.saturated
        except UserError:
            pass
        return most, None if self.question.wanted is None else self.fewest_at(most)

    def is_too_few(self, size: int) -> Search[bool]:
        """Whether a fleet is too few by a run of each draw, after ``bound``.

        The runs have as many requests as those of a replica of which nothing is known. Where longer ones would fill it, they take no more.
        """
        known = _UNLIMITED._replace(saturated=inf) if self.is_pair else self._bounds
        if known is None or not known.alone.meets or (self.is_divided and not self.is_pair):
            return False
        if size < self._least_of(known):
            return True
        try:
            if known.saturated is None:
                return (yield from self._fleet_search(known, size).too_few(size))
            return (yield from self._chance_search(self._about, size, known).too_few())
        except UserError:
            return False

    # Other questions.

    def changed(self, answer: Answer, lengths: Lengths) -> Search[list[float | None] | None]:
        """The rates of a replica with other lengths and objectives; None of a fleet divided into prefill and decode, and where it
        cannot be simulated."""
        near = answer.rates.seed_rates[0]
        if self.is_divided:
            return None
        start = near if 0 < near < inf else 1.0
        try:
            return (yield from result(task(changed_rates, self.settings, self._first, *lengths, start)))
        except UserError:
            return None

    def rate_of_smaller(self, answer: Answer, size: int, count: int) -> Search[tuple[float, bool]]:
        """The highest rate of a smaller fleet than that of the answer, in requests/s, by ``count`` seeds; and whether its runs are too
        short to find it, so that it is a lower bound."""
        seeds = range(self._first, self._first + count)
        near = self.wanted * size / answer.replicas
        rates, sure = yield from RateSearch(self._trials(answer.rates), seeds).rates(size, near=near)
        known = yield from self._known_of_fleet(self.cluster(size), answer.rates, rates)
        return (sure, False) if known is None else (min(sure, *known), True)

    # Its searches and their runs.

    def _trials(self, known: Known) -> FleetTrials:
        return FleetTrials(self, known)

    def _fleet_search(self, begun: Ahead | Bounds, near: int, least: int = 1) -> FleetSearch:
        question, least = self.question, max(least, self._least_of(begun))
        return FleetSearch(
            self._trials(begun), self.wanted, near, least, question.goal.attainment, begun.alone.counted,
            question.seeds, self._engines,
        )  # fmt: skip

    def _chance_search(self, about: Uncertainty, size: int, begun: Ahead | Bounds) -> ChanceSearch:
        question = self.question
        count = 1 if len(question.seeds) == 1 else max(NUM_DRAWS, len(question.seeds))
        draws, least = range(self._first, self._first + count), self._least_of(begun)
        return ChanceSearch(self._trials(begun), about, draws, question.confidence, size, least, self._engines)


@dataclass(frozen=True)
class FleetTrials:
    """The ``Trials`` of a contender, of which one replica is ``known``."""

    of: Contender
    known: Known

    def _fleet(self, replicas: int) -> tuple[Cluster, float | None]:
        """A fleet, and its saturated rate, requests/s."""
        cluster = self.of.cluster(max(fewest_replicas(self.of.candidate.prefill_replicas), replicas))
        return cluster, None if self.known.saturated is None else self.known.saturated * cluster.size

    def share(self, replicas: int, seed: int) -> Task[float]:
        cluster, _ = self._fleet(replicas)
        return task(attained_share, self.of.settings, seed, cluster, self.of.wanted)

    def rate(self, replicas: int, seed: int, near: float | None) -> Task[float]:
        if self.of.question.wanted is None and isinstance(self.known, Ahead):
            return task(follow, self.of.settings, seed, self.known)
        cluster, most = self._fleet(replicas)
        return task(highest_rate, self.of.settings, seed, cluster, self.of.wanted, most, near)

    def takes(self, replicas: int, seed: int, rate: float) -> Task[bool]:
        cluster, most = self._fleet(replicas)
        return task(takes_rate, self.of.settings, seed, cluster, most, rate)

    def case(self, replicas: int, seed: int, case: Case) -> Task[bool]:
        cluster, most = self._fleet(replicas)
        served = cluster if replicas or self.of.is_divided else None
        rate = self.of.wanted if replicas else rate_of_power(ALONE)
        return task(meets_case, self.of.settings, seed, served, rate, most, case)
