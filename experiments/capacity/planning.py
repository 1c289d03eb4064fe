"""Find the fleet and the cost of every candidate for a wanted rate, or the highest rate of a replica, and rank them.

    0. least       with a wanted rate: the fewest replicas by the data sheet, without a run (``least``); candidates that need more
                   than a plan simulates go no further
    1. go_ahead    every candidate, with the first seed and one replica (``max_rate``); of a pair ``fleet.apart``
       with a wanted rate (the runs of a candidate have as many requests as fill its replicas, ``Load``):
    2. best_share  with --prefill-replicas auto, the best share of the fleet that prefills (``split``)
       meets_case  the smallest fleet that is enough with the confidence, over draws, step times and memory (``chance``); no smaller
                   one counts
       attained_share, highest_rate, takes_rate   the smallest fleet that meets the goal, simulated behind its router (``fleet``), and its
                   highest rates, which confirm its size
       known_rate  where runs have too few requests to fill a replica, the rate up to which they are a load
       without:
    2. follow, takes_rate   every candidate that meets the goal, with every other seed and one replica
    3. detail      results of each candidate at the wanted or the recommended rate, and its limit
    changed_rates  for the page: rates of the first candidates with other lengths and objectives (``what_if``)

``Contender`` has these steps for one candidate, ``Contest`` the order of candidates that differ only in what is not listed, and
``Runner`` their runs, side by side on all cores or on a cluster. Finished runs are stored, so an interrupted plan continues from there.

The plan recommends the cheapest candidate for the wanted rate, then fewer GPUs, then the lower price of a token at the full rate;
candidates of which only bursts are known (``Answer.is_burst``) come last. Without a wanted rate it recommends the lowest price of a
token.

If all requests at once meet the goal, every rate does. Such a candidate has no highest rate, so without a wanted rate its
tokens have no price. It is listed after the candidates with a price. For a wanted rate its smallest fleet is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, nextafter

from ...sim import Settings
from ...sim.types.optional import not_none
from ..runs.grid import NONE
from ..runs.parallel import Workers
from ..runs.points import Store
from .answer import Answer
from .candidates import DECODE, Candidate
from .contender import Contender, Question, Service, service_of
from .day import Day, DayPlan, full_load, replicas_for, served_day, sizes_below
from .load import Load
from .prices import Prices
from .tasks import Runner, result, task
from .unlisted import Contest
from .what_if import Lengths, Rates

#: Called with the name and the cost of the best candidate so far, and whether it is confirmed.
Say = Callable[[str, float, bool], None]


class Planner:
    """Answers the question of a plan for every candidate.

    Args:
        store: Stores finished tasks; None stores nothing.
    """

    def __init__(self, question: Question, workers: Workers, store: Store | None) -> None:
        self.question = question
        self._runner = Runner(question.load, question.goal, workers, store)
        self._contenders: dict[Service, Contender] = {}
        #: Searches of what is not listed, as far as they are.
        self.contests: list[Contest] = []

    def contender(self, candidate: Candidate) -> Contender:
        """That of a candidate that starts; equal settings and fleets have one."""
        service = service_of(candidate)
        if service not in self._contenders:
            self._contenders[service] = Contender(candidate, self.question, self._runner)
        return self._contenders[service]

    def load_of(self, settings: Settings) -> Load:
        """The load of a candidate, with runs that fill its replicas."""
        return self._runner.load_of(settings)

    def answers(
        self, groups: Sequence[Sequence[Candidate]], prices: Prices, say: Say, tries_pairs: bool = False
    ) -> list[Answer]:
        """The answer of each candidate that may be the cheapest of its group, in their order; of candidates with equal settings and
        fleets, that of the first. ``contests`` then have what is known of the others.

        Raises:
            SimulationFault: An invariant of the simulator is violated.
        """
        candidates = [each for group in groups for each in group]
        single = [self.contender(group[0]) for group in groups if len(group) == 1 and group[0].settings]
        answers = self._runner.side_by_side({each: each.answer() for each in single})
        self.contests = [
            Contest(
                list(dict.fromkeys(map(self.contender, group))), self.question, self._runner, self.contender, prices, say,
                tries_pairs,
            )
            for group in groups
            if len(group) > 1
        ]  # fmt: skip
        for contest in self.contests:
            contest.search()
            answers |= contest.answers
        pairs = [each.candidate for each in answers if each.is_pair]
        if pairs:
            both = {DECODE: NONE}
            candidates = [replace(each, axis_values=each.axis_values | both) for each in candidates] + pairs
        return self._distinct(
            replace(answer, candidate=each) for each in candidates if (answer := self._known(each, answers)) is not None
        )

    def _known(self, candidate: Candidate, answers: dict[Contender, Answer]) -> Answer | None:
        if candidate.settings is None:
            return Answer(candidate, wanted=self.question.wanted)
        return answers.get(self.contender(candidate))

    def _distinct(self, answers: Iterable[Answer]) -> list[Answer]:
        """The answers, without those of fleets that another one has, too."""
        distinct: dict[object, Answer] = {}
        for place, answer in enumerate(answers):
            same: object = place
            if answer.detail is not None and answer.fleet is not None:
                contender = self.contender(answer.candidate)
                same = contender.settings, contender.cluster(answer.replicas)
            first = distinct.setdefault(same, answer)
            if first is not answer:
                distinct[same] = replace(first, equal=(*first.equal, answer.candidate.name))
        return list(distinct.values())

    def changed(self, answers: Sequence[Answer], lengths: Sequence[Lengths]) -> list[Rates]:
        """The rates of a replica of each answer with other lengths and objectives; none of a fleet divided into prefill and decode."""
        found = self._runner.side_by_side(
            {
                (place, each): self.contender(answer.candidate).changed(answer, each)
                for place, answer in enumerate(answers)
                for each in lengths
            }
        )
        return [{each: found[place, each] for each in lengths} for place in range(len(answers))]

    def over_day(self, answer: Answer, day: Day, startup_s: float, replica_hour: float) -> DayPlan:
        """The plan of a day for a candidate with a fleet for its busiest step.

        Raises:
            UserError: The day cannot be simulated.
        """
        fleet, contender, most = not_none(answer.fleet), self.contender(answer.candidate), answer.replicas
        searches = {each: contender.rate_of_smaller(answer, each, len(fleet.rates)) for each in sizes_below(most)}
        of_smaller = self._runner.side_by_side(searches)
        smaller = {size: rate for size, (rate, _) in of_smaller.items()}
        known = min((fleet.sure_rate, *(answer.known_rates or ())))
        rate = max(known, day.busiest) if known < inf else day.busiest
        takes = {most: rate} | smaller
        if fleet.chance is not None:
            # Steps take the share of their rates that the decisive step time leaves; the fewest for the busiest step are known.
            longer, below = contender.longer, nextafter(day.busiest, 0)
            takes = {size: min(taken / longer, below) for size, taken in smaller.items()}
            takes[most] = max(rate / longer, day.busiest)
        replicas = tuple(replicas_for(day.rates, takes, most))
        settings, first, cluster = contender.settings, self.question.seeds[0], contender.cluster(most)
        following, constant = (
            result(task(served_day, settings, first, cluster, day, sizes, startup_s))
            for sizes in (replicas, (most,) * len(replicas))
        )
        served = self._runner.side_by_side({"following": following, "constant": constant})
        targets = self._runner.side_by_side({0: result(task(full_load, settings, first, cluster, rate))})[0]
        return DayPlan(
            day, replicas, takes, startup_s, **served, targets=targets, replica_hour=replica_hour,
            short_runs=any(is_short for _, is_short in of_smaller.values()), full_rate=rate,
            attainment=self.question.goal.attainment,
        )  # fmt: skip
