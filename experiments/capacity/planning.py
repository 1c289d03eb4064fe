"""Find the fleet and the cost of every candidate for a wanted rate, or the highest rate of a replica, and rank them.

    0. least     with a wanted rate: the fewest replicas by the data sheet, without a run (``least``); candidates that need more
                 than a plan simulates go no further
    1. ahead     every candidate, with the first seed and one replica (``max_rate.go_ahead``)
       with a wanted rate (the runs of a candidate have as many requests as fill its replicas, ``Load``):
    2. share     with --prefill-replicas auto, the best share of the fleet that prefills (``split``)
       cases     the smallest fleet that is enough with the confidence, over draws, step times and memory (``chance``); no smaller one counts
       fleets    the smallest fleet of every candidate that meets the goal, simulated behind its router (``fleet``)
    3. headroom  its highest rate, which confirms its size
       known     where runs have too few requests to fill a replica, the rate up to which they are a load
       without:
    2. follow    every candidate that meets the goal, with every other seed and one replica
       other seeds   the rate that they take
    4. detail    results of each candidate at the wanted or the recommended rate, and its limit
    what if      for the page: rates of the first candidates with other lengths and objectives (``what_if``)

The jobs of a step are independent and run on all cores or on a cluster. Finished jobs are stored, so an interrupted
plan continues from there. The plan recommends the cheapest candidate for the wanted rate, then fewer GPUs, then the
lower price of a token at the full rate; candidates of which only bursts are known (``Answer.is_burst``) come last. Without a wanted
rate it recommends the lowest price of a token.

If all requests at once meet the goal, every rate does. Such a candidate has no highest rate, so without a wanted rate its
tokens have no price. It is listed after the candidates with a price. For a wanted rate its smallest fleet is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, nextafter
from typing import Any, NamedTuple, TypeVar

from ...sim import Settings
from ...sim.cluster import Cluster
from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ..runs.grid import NONE
from ..runs.parallel import Workers
from ..runs.points import Store
from ..runs.slo_check import Goal, SloCheck
from ..runs.sweeping import Outcome
from .answer import Answer
from .candidates import DECODE, Candidate
from .chance import NUM_DRAWS, Chance, ChanceSearch, Uncertainty
from .confidence import Kind
from .day import Day, DayPlan, replicas_for, sizes_below
from .fleet import (
    Fleet,
    FleetSearch,
    RateSearch,
    first_fleet,
)
from .jobs import Job, Jobs
from .least import BY_SATURATION, fewest, too_many
from .load import Load
from .max_rate import ALONE, Ahead, Limits, MaxRate, SeedRate
from .max_rate import rate as rate_of_power
from .pairs import Offer, Side, may_be_side
from .prices import Prices
from .split import AUTO, divided, fewest_replicas
from .stages import rate_of
from .trials import MOST_REPLICAS, Results, Trial
from .uncertainty import uncertainty
from .unlisted import Contest
from .what_if import Lengths, Rates


class Service(NamedTuple):
    """Settings of a replica, its router, and the replicas that only prefill, as the flag; and the settings of those that only decode,
    where they are others."""

    settings: Settings
    router: str
    prefill_replicas: str
    decode: Settings | None = None

    @property
    def is_divided(self) -> bool:
        """Whether some replicas only prefill."""
        return self.prefill_replicas != NONE


#: Called with the name and the cost of the best candidate so far, and whether it is confirmed.
Say = Callable[[str, float, bool], None]
#: What is known of one replica, by its saturated rate.
Known = Ahead | MaxRate | Limits
#: Of a replica of which nothing is known.
_UNLIMITED = Limits(SloCheck(meets=True, counted=0, met=0, missed={}), None)
_Name = TypeVar("_Name")
_Found = TypeVar("_Found")


class Planner:
    """Runs the steps of a plan.

    Args:
        seeds: The first seed runs ahead.
        store: Stores finished jobs; None stores nothing.
        wanted: The wanted rate, requests/s.
        confidence: Probability with which a fleet is to be enough (``chance``).
        spare: Replicas that are bought beside those that are enough; they serve no run.
    """

    def __init__(
        self,
        load: Load,
        goal: Goal,
        seeds: Sequence[int],
        workers: Workers,
        store: Store | None,
        wanted: float | None = None,
        confidence: float = 0.9,
        spare: int = 0,
    ) -> None:
        self._load, self._goal, self._seeds = load, goal, seeds
        self.jobs = Jobs(load, goal, workers, store)
        self._run = self.jobs.run
        self.wanted, self._confidence, self.spare = wanted, confidence, spare
        #: Searches of what is not listed, as far as they are.
        self.contests: list[Contest] = []
        #: Of members of a contest, as far as they are known.
        self._limits: dict[Service, Limits] = {}
        #: Share of the replicas that prefill, where it was asked for.
        self._shares: dict[Service, float] = {}
        #: The fewest replicas that may serve the wanted rate, by the data sheet.
        self._least: dict[Service, int] = {}
        #: Whether a fleet that a plan simulates may be enough, of members of a contest.
        self._simulated: dict[Service, bool] = {}
        #: Replicas of pairs that serve the first draw.
        self._drawn: dict[Service, int] = {}
        #: What step times and KV caches may be.
        self._abouts: dict[Service, Uncertainty] = {}

    def answers(
        self, groups: Sequence[Sequence[Candidate]], prices: Prices, say: Say, tries_pairs: bool = False
    ) -> list[Answer]:
        """The answer of each candidate that may be the cheapest of its group, in their order; of candidates with equal settings and
        fleets, that of the first. ``contests`` then have what is known of the others.

        Raises:
            SimulationFault: An invariant of the simulator is violated.
        """
        candidates = [each for group in groups for each in group]
        single = {service_of(each): each for group in groups for each in group if each.settings and len(group) == 1}
        answers = self.answered(single)
        self.contests = [
            Contest(self, {service_of(each): each for each in group}, prices, say, tries_pairs)
            for group in groups
            if len(group) > 1
        ]
        for contest in self.contests:
            contest.search()
            answers |= contest.answers
        of_none = Answer(candidates[0], wanted=self.wanted)
        pairs = [answer.candidate for service, answer in answers.items() if service.decode is not None]
        if pairs:
            both = {DECODE: NONE}
            candidates = [replace(each, axis_values=each.axis_values | both) for each in candidates] + pairs
        return self._distinct(
            replace(of_none if each.settings is None else answers[service_of(each)], candidate=each)
            for each in candidates
            if each.settings is None or service_of(each) in answers
        )

    def answered(self, services: Mapping[Service, Candidate]) -> dict[Service, Answer]:
        """The answers of candidates that start."""
        few = {service: self._is_simulated(service, candidate) for service, candidate in services.items()}
        able = [each for each in services if few[each]]
        jobs = {each.settings: Job(each.settings, self._seeds[0]) for each in able if each.decode is None}
        ahead = self._run("go ahead", jobs)
        apart = self._run("apart", {each: self._apart_job(each) for each in able if each.decode is not None})
        ended = {each: ahead[each.settings] if each.decode is None else apart[each] for each in able}
        begun = {each: _ahead(found) for each, outcome in ended.items() if (found := outcome.summary)}
        answers = {
            service: Answer(
                candidate,
                ended[service].error if few[service] else too_many(candidate, self._least[service], self.wanted),
                wanted=self.wanted,
                least_replicas=self._least.get(service),
                share=self._shares.get(service) if service.decode is not None else None,
            )
            for service, candidate in services.items()
        }
        if self.wanted is None:
            answers |= self._rated(answers, begun)
        else:
            # A pair is filled as its prefill side alone, if that was tried.
            self.jobs.fill({each.settings: found.in_flight for each, found in begun.items() if each.decode is None})
            answers |= self._sized(answers, begun)
        return answers | self._detailed(answers)

    def least(self, services: Mapping[Service, Candidate]) -> dict[Service, tuple[float, int | None]]:
        """As ``limits``, by the data sheet alone: no rate is known, and no run is made."""
        for each, candidate in services.items():
            self._simulated[each] = self._is_simulated(each, candidate)
        return {each: (inf, None if self.wanted is None else self._fewest_at(each, inf)) for each in services}

    def rough_rates(self, services: Mapping[Service, Candidate]) -> dict[Service, float]:
        """About the rates of one replica (``steady``), requests/s, with a wanted rate at the decisive step times; 0 if none meets the goal
        or it cannot be simulated."""
        jobs = {}
        for each, candidate in services.items():
            if self._simulated[each]:
                self._about(each, candidate)
                jobs[each] = Job(each.settings, self._seeds[0], (self._longer(each),))
        found = {each: rate_of(outcome) for each, outcome in self._run("rough", jobs).items() if outcome.summary}
        return {each: found.get(each, 0.0) for each in services}

    def replicas_at(self, rate: float) -> int | None:
        """Replicas that take the wanted rate, if there is one, each at ``rate``."""
        return None if self.wanted is None else first_fleet(self.wanted, rate) if rate else 1

    def rough_sizes(self, near: Mapping[Service, int]) -> dict[Service, int | None]:
        """The smallest fleets that serve the first draw at the decisive step times, sought from those near; None if there is none, or it
        cannot be simulated."""
        searches = {}
        for each, size in near.items():
            if size > MOST_REPLICAS:
                continue
            one_case = self._abouts[each].likely(self._longer(each))
            least, engines = self._fewest_at(each, inf), each.settings.data_parallel_size
            searches[each] = ChanceSearch(one_case, self._seeds[:1], 1.0, size, least, engines).steps()
        ended = self._drive(searches, {each: (each, _UNLIMITED) for each in searches})
        found = {each: size_found[0] for each, (size_found, _) in ended.items() if size_found is not None}
        return {each: found.get(each) for each in near}

    def side_rates(self, services: Mapping[Service, Candidate]) -> list[Side]:
        """About the rates of a replica that only prefills, and of one that only decodes (``steady``), requests/s, at the decisive step
        times."""
        able = {each: candidate for each, candidate in services.items() if may_be_side(candidate)}
        jobs = {}
        for each, candidate in able.items():
            self._about(each, candidate)
            jobs[each] = Job(each.settings, self._seeds[0], (self._longer(each),))
        found = self._run("sides", jobs)
        return [Side(able[each], *outcome.summary["sides"]) for each, outcome in found.items() if outcome.summary]

    def offered(self, offers: Sequence[Offer]) -> dict[Service, tuple[Candidate, int | None]]:
        """The services of pairs, with their candidates, and the smallest fleets that serve the first draw at the decisive step times, if
        any."""
        near = {}
        for offer in offers:
            service = service_of(offer.candidate)
            self._shares[service], near[service] = offer.share, offer.replicas
            self._about(service, offer.candidate)
        sizes = self.rough_sizes(near)
        for service, offer in zip(near, offers, strict=True):
            if (size := sizes[service]) is not None:
                sizes[service] = self._redivided(service, offer, size)
        self._drawn |= {service: size for service, size in sizes.items() if size is not None}
        return {service: (offer.candidate, sizes[service]) for service, offer in zip(near, offers, strict=True)}

    def _redivided(self, service: Service, offer: Offer, size: int) -> int:
        """The size of the cheapest division of a pair that serves the first draw, from one that does; its share is then that of the pair.

        Of two divisions the dearer is taken to serve what the cheaper one serves: they are bisected in the order of their costs.
        """
        share, kept = self._shares[service], size
        left = offer.cheaper(self.divided_sizes(service, size))
        while left:
            middle = len(left) // 2
            prefill, decode = left[middle]
            self._shares[service] = prefill / (prefill + decode)
            case = self._abouts[service].likely(self._longer(service)).case(0, 0)
            trial = Trial(Kind.CASE, prefill + decode, self._seeds[0], case=case)
            job = {service: self._trial_job(service, _UNLIMITED, trial)[1]}
            found = self._run("cases", job)[service].summary
            if found is not None and found[Kind.CASE]:
                share, kept, left = self._shares[service], prefill + decode, left[middle + 1 :]
            else:
                left = left[:middle]
        self._shares[service] = share
        return kept

    def pair_size(self, service: Service) -> int:
        """The fleet of a pair that serves the first draw."""
        return self._drawn[service]

    def divided_sizes(self, service: Service, replicas: int) -> tuple[int, int]:
        """How many of the replicas of a pair prefill, and how many decode."""
        cluster = self._cluster(service, replicas)
        return cluster.num_arriving, cluster.size - cluster.num_arriving

    def _apart_job(self, service: Service) -> Job:
        wanted = not_none(self.wanted) * self._longer(service)
        return Job(service.settings, self._seeds[0], (self._cluster(service, self._drawn[service]), wanted))

    def limits(self, services: Sequence[Service]) -> dict[Service, tuple[float, int | None]]:
        """The most that a replica serves, requests/s, and the fewest replicas for the wanted rate, if there is one; a rate of 0 if
        requests served alone miss the goal. A candidate that cannot be simulated has no bound: its answer says why."""
        jobs = {each: Job(each.settings, self._seeds[0]) for each in services if self._simulated[each]}
        found: dict[Service, tuple[float, int | None]] = {}
        for each, outcome in self._run("limits", jobs).items():
            most = inf
            if outcome.summary is not None:
                limits = Limits(SloCheck(**outcome.summary["alone"]), outcome.summary["saturated"])
                self._limits[each] = limits
                most = 0.0 if not limits.alone.meets else inf if limits.saturated is None else limits.saturated
            found[each] = most, None if self.wanted is None else self._fewest_at(each, most)
        return {each: found.get(each, (inf, self._least.get(each))) for each in services}

    def _fewest_at(self, service: Service, most: float) -> int:
        of_rate = (
            first_fleet(not_none(self.wanted) * self._longer(service), most)
            if 0 < most < inf and not service.is_divided
            else 1
        )
        return max(of_rate, self._least.get(service, 1), fewest_replicas(service.prefill_replicas))

    def is_too_few(self, service: Service, size: int) -> bool:
        """Whether a fleet is too few by a run of each draw, of a service with ``limits``.

        The runs have as many requests as those of a replica of which nothing is known. Where longer ones would fill it, they take no more.
        """
        limits = self._limits.get(service)
        if service.decode is not None:
            limits = _UNLIMITED._replace(saturated=inf)
        if limits is None or not limits.alone.meets or (service.is_divided and service.decode is None):
            return False
        if size < self._least_of(service, limits):
            return True
        if limits.saturated is None:
            steps = self._search(service, limits, size).too_few(size)
        else:
            steps = self._chance_search(service, self._abouts[service], size, limits).too_few()
        found, _ = self._drive({service: steps}, {service: (service, limits)})[service]
        return bool(found)

    def _is_simulated(self, service: Service, candidate: Candidate) -> bool:
        """Whether a fleet that a plan simulates may serve the wanted rate, if there is one, by the data sheet."""
        if self.wanted is None or service.decode is not None:
            return True
        work = self.jobs.work(self._load, self._seeds[0])
        try:
            self._least[service] = fewest(candidate, work, self.wanted, self._goal.attainment)
        except UserError:
            # Its runs say why.
            return True
        return self._least[service] <= MOST_REPLICAS

    def _distinct(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers, without those of fleets that another one has, too."""
        distinct: dict[object, Answer] = {}
        for place, answer in enumerate(answers):
            same: object = place
            if answer.detail is not None and answer.fleet is not None:
                service = service_of(answer.candidate)
                same = service.settings, self._cluster(service, answer.replicas)
            first = distinct.setdefault(same, answer)
            if first is not answer:
                distinct[same] = replace(first, equal=(*first.equal, answer.candidate.name))
        return list(distinct.values())

    def _rated(self, answers: dict[Service, Answer], begun: dict[Service, Ahead]) -> dict[Service, Answer]:
        """The answers with the rates of one replica over all seeds."""
        searches = {
            service: RateSearch(self._seeds).rates(1, (found.found.rate,))
            for service, found in begun.items()
            if found.found.rate
        }
        rated = {service: replace(answers[service], found=MaxRate.of(found)) for service, found in begun.items()}
        ended = self._drive(searches, {service: (service, begun[service]) for service in searches})
        for service, (of_seeds, error) in ended.items():
            found = None if of_seeds is None else MaxRate.of(begun[service], *of_seeds)
            rated[service] = replace(answers[service], error=error, found=found)
        bursts = {
            service: [
                Job(service.settings, seed, (Cluster(), rate, rate))
                for seed, rate in enumerate(answer.found.seed_rates, start=self._seeds[0])
                if 0 < rate < inf
            ]
            for service, answer in rated.items()
            if answer.found is not None and answer.found.saturated is None
        }
        for service, known in self._known(bursts).items():
            rated[service] = replace(rated[service], known_rates=known)
        return rated

    def _sized(self, answers: dict[Service, Answer], begun: dict[Service, Ahead]) -> dict[Service, Answer]:
        """The answers with the fleet for the wanted rate."""
        wanted = not_none(self.wanted)
        sized = {service: replace(answers[service], found=MaxRate.of(found)) for service, found in begun.items()}
        able = {service: found for service, found in begun.items() if found.found.rate}
        least = {service: self._least_of(service, found) for service, found in able.items()}
        for service, replicas in least.items():
            if replicas > MOST_REPLICAS:
                why = too_many(answers[service].candidate, replicas, wanted, BY_SATURATION)
                sized[service] = replace(answers[service], error=why, least_replicas=replicas)
        for service in able:
            self._about(service, answers[service].candidate)
        near = {
            service: max(
                first_fleet(wanted * self._longer(service), found.found.rate), fewest_replicas(service.prefill_replicas)
            )
            for service, found in able.items()
            if least[service] <= MOST_REPLICAS
        }
        failed = self._find_shares(near)
        found = self._chances(
            {service: size for service, size in near.items() if service not in failed},
            begun,
            {service: answer.candidate for service, answer in answers.items()},
        )
        searches = {
            service: self._search(service, begun[service], size, found.get(service, (1, ()))[0] or 1).steps()
            for service, size in near.items()
            if service not in failed
        }
        ended = self._drive(searches, {service: (service, begun[service]) for service in searches})
        ended |= {service: (None, error) for service, error in failed.items()}
        for service, (fleet, error) in ended.items():
            if fleet is None:
                sized[service] = replace(sized[service], error=error, found=None)
            elif fleet.replicas is None:
                sized[service] = replace(sized[service], fleet=fleet)
            else:
                prefill = self._cluster(service, fleet.replicas).prefill_replicas
                if service in found:
                    fleet = self._with_chances(fleet, *found[service])
                sized[service] = replace(sized[service], fleet=fleet, prefill_replicas=prefill)
        of_fleets = {
            service: self._known_jobs(service, answer.fleet.replicas, answer.rates.saturated, answer.fleet.rates)
            for service, answer in sized.items()
            if answer.fleet is not None and answer.fleet.replicas is not None
        }
        for service, known in self._known(of_fleets).items():
            sized[service] = replace(sized[service], known_rates=known)
        return sized

    def _with_chances(self, fleet: Fleet, size: int | None, chances: tuple[Chance, ...]) -> Fleet:
        replicas = not_none(fleet.replicas)
        open_ones = (
            each.replicas for each in chances if 1 - self._confidence < each.chance and each.replicas < replicas
        )
        return replace(fleet, chances=chances, is_unsure=size is None, fewest=min((replicas, *open_ones)))

    def _chances(
        self, near: Mapping[Service, int], begun: Mapping[Service, Ahead], candidates: Mapping[Service, Candidate]
    ) -> dict[Service, tuple[int | None, tuple[Chance, ...]]]:
        """The smallest size with the chance, if any has it, and the chances that are known; of candidates with a saturated rate: the
        runs of others are bursts, and their cases, too."""
        searches = {
            each: self._chance_search(each, self._about(each, candidates[each]), size, begun[each]).steps()
            for each, size in near.items()
            if begun[each].saturated is not None
        }
        ended = self._drive(searches, {each: (each, begun[each]) for each in searches})
        return {each: found for each, (found, _) in ended.items() if found is not None}

    def _chance_search(self, service: Service, about: Uncertainty, size: int, begun: Ahead | Limits) -> ChanceSearch:
        count = 1 if len(self._seeds) == 1 else max(NUM_DRAWS, len(self._seeds))
        draws = range(self._seeds[0], self._seeds[0] + count)
        engines = service.settings.data_parallel_size
        return ChanceSearch(about, draws, self._confidence, size, self._least_of(service, begun), engines)

    def _about(self, service: Service, candidate: Candidate) -> Uncertainty:
        if service not in self._abouts:
            self._abouts[service] = uncertainty(candidate)
        return self._abouts[service]

    def _longer(self, service: Service) -> float:
        """Step times with which a fleet has to meet the goal, over the predicted ones: 1 or the decisive scale; 1 if it is not known."""
        about = self._abouts.get(service)
        return 1.0 if about is None else max(1.0, about.decisive(self._confidence))

    def _known_jobs(
        self, service: Service, replicas: int, saturated: float | None, highest: Sequence[float]
    ) -> list[Job]:
        """The searches of the rates of a fleet that its runs tell, by seed; none if its saturated rate limits its highest rates."""
        if saturated is not None and not self._cluster(service, replicas).disaggregated:
            return []
        return [
            self._fleet_job(service, replicas, seed).with_more(rate)
            for seed, rate in enumerate(highest, start=self._seeds[0])
        ]

    def _known(self, jobs: Mapping[Service, Sequence[Job]]) -> dict[Service, tuple[float, ...]]:
        """The rates that runs tell by seed, of the fleets with a seed of which the highest rate is unknown."""
        numbered = {(service, place): job for service, some in jobs.items() for place, job in enumerate(some)}
        found = {name: rate_of(outcome) for name, outcome in self._run("known", numbered).items()}
        rates = {service: tuple(found[service, place] for place in range(len(some))) for service, some in jobs.items()}
        return {
            service: known
            for service, known in rates.items()
            if any(rate < job.more[-1] for rate, job in zip(known, jobs[service], strict=True))
        }

    def _find_shares(self, near: Mapping[Service, int]) -> dict[Service, str]:
        """Find the best share of replicas that prefill, where it is asked for; and the errors."""
        jobs = {
            service: Job(service.settings, self._seeds[0], (size, service.router, not_none(self.wanted)))
            for service, size in near.items()
            if service.prefill_replicas == AUTO and service.decode is None
        }
        failed = {}
        for service, outcome in self._run("prefill share", jobs).items():
            if outcome.summary is None:
                failed[service] = not_none(outcome.error)
            else:
                self._shares[service] = outcome.summary["share"]
        return failed

    def _cluster(self, service: Service, replicas: int) -> Cluster:
        return divided(replicas, *service[1:3], self._shares.get(service), service.decode)

    def _least_of(self, service: Service, begun: Ahead | Limits) -> int:
        """The fewest replicas that may serve the wanted rate: by the data sheet, and by what one replica serves."""
        least = fewest_replicas(service.prefill_replicas)
        if least == 1 and begun.saturated is not None:
            least = first_fleet(not_none(self.wanted), begun.saturated)
        return max(least, self._least.get(service, least))

    def _search(self, service: Service, begun: Ahead | Limits, near: int, least: int = 1) -> FleetSearch:
        wanted, least = not_none(self.wanted), max(least, self._least_of(service, begun))
        engines = service.settings.data_parallel_size
        return FleetSearch(wanted, near, least, self._goal.attainment, begun.alone.counted, self._seeds, engines)

    def _drive(
        self,
        searches: Mapping[_Name, Generator[list[Trial], Results, _Found]],
        begun: Mapping[_Name, tuple[Service, Known]],
    ) -> dict[_Name, tuple[_Found | None, str | None]]:
        """Run searches side by side to their ends: each one's result, or its error."""
        ended: dict[_Name, tuple[_Found | None, str | None]] = {}
        asked: dict[_Name, list[Trial]] = {}
        results: dict[_Name, Results | None] = dict.fromkeys(searches)
        while results:
            for name, found in results.items():
                try:
                    asked[name] = next(searches[name]) if found is None else searches[name].send(found)
                except StopIteration as end:
                    ended[name] = end.value, None
                    asked.pop(name, None)
            outcomes = self._tried(begun, asked)
            results = {}
            for name, trials in [*asked.items()]:
                error = next((error for trial in trials if (error := outcomes[name, trial].error)), None)
                if error:
                    ended[name] = None, error
                    del asked[name]
                    continue
                values = {trial: not_none(outcomes[name, trial].summary)[trial.kind] for trial in trials}
                results[name] = {trial: inf if value is None else value for trial, value in values.items()}
        return ended

    def _tried(
        self, begun: Mapping[_Name, tuple[Service, Known]], trials: Mapping[_Name, list[Trial]]
    ) -> dict[tuple[_Name, Trial], Outcome]:
        """The outcomes of the next trials of every search."""
        jobs: dict[str, dict[tuple[_Name, Trial], Job]] = {}
        for name, of_name in trials.items():
            for trial in of_name:
                stage, job = self._trial_job(*begun[name], trial)
                jobs.setdefault(stage, {})[name, trial] = job
        return {of: outcome for stage, some in jobs.items() for of, outcome in self._run(stage, some).items()}

    def _trial_job(self, service: Service, begun: Known, trial: Trial) -> tuple[str, Job]:
        """The step of a trial, and its job."""
        settings, seed = service.settings, trial.seed
        cluster = self._cluster(service, max(fewest_replicas(service.prefill_replicas), trial.replicas))
        most = None if begun.saturated is None else begun.saturated * cluster.size
        match trial.kind:
            case Kind.SHARE:
                return "fleets", Job(settings, seed, (cluster, not_none(self.wanted)))
            case Kind.CASE:
                served = cluster if trial.replicas or service.is_divided else None
                rate = not_none(self.wanted) if trial.replicas else rate_of_power(ALONE)
                return "cases", Job(settings, seed, (served, rate, most, not_none(trial.case)))
            case Kind.MEETS:
                return "other seeds", Job(settings, seed, (cluster, most, trial.near))
            case Kind.RATE if self.wanted is None:
                return "follow", Job(settings, seed, (begun,))
            case Kind.RATE:
                return "headroom", Job(settings, seed, (cluster, self.wanted, most, trial.near))

    def _fleet_job(self, service: Service, replicas: int, seed: int) -> Job:
        return Job(service.settings, seed, (self._cluster(service, replicas), not_none(self.wanted)))

    def _detailed(self, answers: dict[Service, Answer]) -> dict[Service, Answer]:
        """The answers with the detail of those that meet the goal."""
        jobs = {}
        for service, answer in answers.items():
            if answer.error or answer.found is None or not answer.rates.seed_rates[0]:
                continue
            highest = answer.rates.seed_rates[0]
            if answer.fleet is not None and answer.fleet.replicas is not None:
                highest = answer.fleet.rates[0] if answer.prefill_replicas else highest
                jobs[service] = self._fleet_job(service, answer.replicas, self._seeds[0]).with_more(highest)
            elif answer.fleet is None and answer.rates.rate:
                jobs[service] = Job(service.settings, self._seeds[0], (Cluster(), answer.rates.rate, highest))
        found = self._run("detail", jobs)
        return {
            service: replace(answers[service], error=outcome.error, detail=outcome.summary)
            for service, outcome in found.items()
        }

    def changed(self, answers: Sequence[Answer], lengths: Sequence[Lengths]) -> list[Rates]:
        """The rates of a replica of each answer with other lengths and objectives; none of a fleet divided into prefill and decode."""
        jobs = {}
        for place, answer in enumerate(answers):
            service, near = service_of(answer.candidate), answer.rates.seed_rates[0]
            for each in lengths if not service.is_divided else ():
                jobs[place, each] = Job(service.settings, self._seeds[0], (*each, near if 0 < near < inf else 1.0))
        found = self._run("what if", jobs)
        known = {name: outcome.summary["rates"] for name, outcome in found.items() if outcome.summary is not None}
        return [{each: known.get((place, each)) for each in lengths} for place in range(len(answers))]

    def over_day(self, answer: Answer, day: Day, startup_s: float, replica_hour: float) -> DayPlan:
        """The plan of a day for a candidate with a fleet for its busiest step.

        Raises:
            UserError: The day cannot be simulated.
        """
        fleet, service, most = not_none(answer.fleet), service_of(answer.candidate), answer.replicas
        smaller, short = self._taken(answer, sizes_below(most), len(fleet.rates))
        known = min((fleet.sure_rate, *(answer.known_rates or ())))
        rate = max(known, day.busiest) if known < inf else day.busiest
        takes = {most: rate} | smaller
        if fleet.chance is not None:
            # Steps take the share of their rates that the decisive step time leaves; the fewest for the busiest step are known.
            longer, below = self._longer(service), nextafter(day.busiest, 0)
            takes = {size: min(taken / longer, below) for size, taken in smaller.items()}
            takes[most] = max(rate / longer, day.busiest)
        replicas = tuple(replicas_for(day.rates, takes, most))
        first, cluster = self._seeds[0], self._cluster(service, most)
        days = {
            name: Job(service.settings, first, (cluster, day, sizes, startup_s))
            for name, sizes in (("following", replicas), ("constant", (most,) * len(replicas)))
        }
        full = {"targets": Job(service.settings, first, (cluster, rate))}
        found = self._run("day", days) | self._run("full load", full)
        for outcome in found.values():
            if outcome.error:
                raise UserError(outcome.error)
        results = {name: not_none(outcome.summary) for name, outcome in found.items()}
        return DayPlan(
            day, replicas, takes, startup_s, **results, replica_hour=replica_hour, short_runs=short, full_rate=rate,
            attainment=self._goal.attainment,
        )  # fmt: skip

    def _taken(self, answer: Answer, sizes: Sequence[int], count: int) -> tuple[dict[int, float], bool]:
        """The highest rate of each of some smaller fleets of a candidate, by its replicas, in requests/s; and whether the runs of one were too short to
        find it, so that its rate is a lower bound."""
        service, wanted = service_of(answer.candidate), not_none(self.wanted)
        seeds = range(self._seeds[0], self._seeds[0] + count)
        searches = {size: RateSearch(seeds).rates(size, near=wanted * size / answer.replicas) for size in sizes}
        takes, short = {}, False
        for size, (found, error) in self._drive(searches, dict.fromkeys(sizes, (service, answer.rates))).items():
            if found is None:
                raise UserError(not_none(error))
            rates, takes[size] = found
            jobs = self._known_jobs(service, size, answer.rates.saturated, rates)
            for known in self._known({service: jobs}).values():
                takes[size], short = min(takes[size], *known), True
        return takes, short


def service_of(candidate: Candidate) -> Service:
    """The service of a candidate that starts."""
    decode = None if candidate.decode is None else candidate.decode.settings
    return Service(not_none(candidate.settings), candidate.router, candidate.prefill_replicas, decode)


def _ahead(data: dict[str, Any]) -> Ahead:
    return Ahead(SloCheck(**data["alone"]), data["saturated"], SeedRate(**data["found"]), data["in_flight"])
