"""The diagnosis of a server: simulate it as it serves, test each cause, and simulate the flags that may remove it.

1. The server serves draws of its load, one a seed. Their means show symptoms (``causes``). Draws that are bursts are refused: fewer
   than half of their requests finish before the last one starts, so that no time of the run has the server at a rate; or, where
   arrivals are those of a file, all requests arrive within a tenth of the time that the server needs for them. A rate that the
   user or the server states is taken, however slow the server is: a flag may be the reason.
2. The flags of each cause with a symptom are simulated on the first seed. The best of each cause go on.
3. These are simulated on the other seeds: the same requests as served, so that differences are paired. A change helps if its
   gain is at least ``LEAST_GAIN`` and its confidence interval excludes 0.
4. Changes that help are ranked by their gain. One that changes what the model answers comes after those that do not and reach
   half of its gain.
5. What helps without a restart (``relief``) is simulated in the same way, of each kind the best.
6. A second change of another cause is added to the first if its symptom is still there with the first, and both together
   gain ``LEAST_GAIN`` more.

The objective of a run is the geometric mean of p90 TTFT, p99 ITL and mean E2EL, because each flag trades one of them for
another; with ``--goodput`` it is the share of the requests that miss the objectives. A server is healthy if no change gains
``LEAST_GAIN`` in the mean and its KV cache is large enough, and with ``--goodput`` if and only if it meets its goal: else it misses its
objectives as well as its flags can. It is undecided where a change gains as much in the mean, and the interval includes 0. It is
overloaded if its queue keeps growing and no change stops that. A server that would be healthy, or miss its objectives, is "contradicted" where its own measurements are others
(``contradictions``): then the simulation is not of this server. One that would be healthy with a full KV cache has no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import expm1, hypot, inf, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

from ...sim import Settings
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ..measured.intervals import SHARE
from ..measured.server_metrics import ServerMetrics
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.slo_check import Goal
from ..runs.student_t import below, student_t
from .causes import FULL, Case, Suspect, pressure, suspects
from .contradictions import Contradiction, contradictions, meets
from .load import ServedLoad
from .measured import ClientLatencies
from .relief import Measure, measures
from .run import Observation, mean_of, observe, worth_of_cache
from .server import Change, Server, flags_text

#: Least gain: of the latency index, or of the share of requests that meet their objectives; and the confidence of its interval.
LEAST_GAIN, CONFIDENCE = 0.05, 0.95
#: Difference of the objective within which the milder of two changes is taken.
_AS_GOOD = 0.01
#: Share of the gain of a change of the answers that another change must reach to come before it.
_LOSSLESS_SHARE = 0.5
#: Share of the requests that finish before the last one starts, below which a draw is a burst; as for ``saturated_rate``.
_LEAST_TURNOVER = 0.5
#: Share of the time to the last finish in which requests arrive, below which a draw is a burst, too.
_LEAST_ARRIVING = 0.1
#: Ends of an interval at ``CONFIDENCE`` over those at ``SHARE``, of a normal distribution.
_AT_CONFIDENCE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) / NormalDist().inv_cdf((1 + SHARE) / 2)
#: Seconds by which the wait grows per second, from which on the server does not keep up.
_BEHIND = 0.1


@dataclass(frozen=True)
class Gain:
    """Effect of a change on the objective, over the seeds.

    Attributes:
        value: Relative decrease of the latency index, or increase of the share of requests that meet their objectives.
        interval: Confidence interval of the mean over all draws, by which a change is advised; None for a single seed.
        chance: Probability that the mean over all draws is a gain; None for a single seed.
        prediction: Prediction interval of one more draw with the same requests before and after, which is what a server shows
            where its load is sent once, with the error of step times; None for a single seed.
    """

    value: float
    interval: tuple[float, float] | None
    chance: float | None = None
    prediction: tuple[float, float] | None = None

    @classmethod
    def over(cls, saved: Sequence[float], shares: bool, by_steps: tuple[float, float] = (0.0, 0.0)) -> Gain:
        """The effect that paired differences of costs show.

        Args:
            saved: The cost as served less that with the change, one a draw.
            shares: Costs are shares of the requests, else logarithms of the index.
            by_steps: By how much step times of other lengths may lower and raise ``saved``, at ``CONFIDENCE``.
        """
        mean, draws = fmean(saved), len(saved)
        if draws == 1:
            return cls(_gained(mean, shares), None)
        deviation, t = stdev(saved), student_t(CONFIDENCE, draws - 1)
        error = deviation / sqrt(draws)
        chance = below(mean / error, draws - 1) if error else (1 + (mean > 0) - (mean < 0)) / 2
        of_draws = t * deviation * sqrt(1 + 1 / draws)
        interval, prediction = (
            (_gained(mean - low, shares), _gained(mean + high, shares))
            # Draws and step times are independent.
            for low, high in ((t * error, t * error), [hypot(of_draws, each) for each in by_steps])
        )
        return cls(_gained(mean, shares), interval, chance, prediction)

    @property
    def helps(self) -> bool:
        """Whether it is large enough and sure."""
        return self.is_large and self.is_certain

    @property
    def is_large(self) -> bool:
        """Whether the mean is at least ``LEAST_GAIN``."""
        return self.value >= LEAST_GAIN

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes 0; of a single seed nothing more is known."""
        return self.interval is None or self.interval[0] > 0 or self.interval[1] < 0

    @property
    def is_known(self) -> bool:
        """Whether it is certain, or surely too small to matter: otherwise it may be an improvement or a harm."""
        return self.is_certain or (self.interval is not None and max(map(abs, self.interval)) < LEAST_GAIN)


@dataclass(frozen=True)
class Remedy:
    """Flags that were simulated.

    Attributes:
        suspects: Their causes: one, or two for a pair.
        change: The flags.
        seen: Means of the runs with them.
        gain: Their effect.
        flags: The flags as text.
    """

    suspects: tuple[Suspect, ...]
    change: Change
    seen: Observation
    gain: Gain
    flags: str

    @property
    def lossless(self) -> bool:
        """Whether they leave the answers of the model alone."""
        return all(each.cause.lossless for each in self.suspects)


@dataclass(frozen=True)
class Relief:
    """A measure without a restart that was simulated.

    Attributes:
        measure: What to do.
        seen: Means of the runs with it.
        gain: Its effect on the requests that are served.
    """

    measure: Measure
    seen: Observation
    gain: Gain


@dataclass(frozen=True)
class Diagnosis:
    """The result.

    Attributes:
        case: The server as it serves.
        state: "healthy", "no room" if it is but for a KV cache that is full, "misses" if the objectives are missed and no change helps, "contradicted" if only the simulation is either,
            "remedy", "limited" if its KV cache is too small and no change helps, "undecided" if a change may help, or "overloaded".
        remedies: Changes that were simulated on all seeds, the advised one first; those that do not help last.
        caching: Effect of prefix caching, on against off, if the contents of prompts are known.
        seeds: Seeds of the draws.
        contradictions: What the server measures that contradicts a simulation in which nothing helps.
        reliefs: Measures without a restart, the best first.
    """

    case: Case
    state: str
    remedies: tuple[Remedy, ...]
    caching: Gain | None
    seeds: Sequence[int]
    contradictions: tuple[Contradiction, ...] = ()
    reliefs: tuple[Relief, ...] = ()

    @property
    def advised(self) -> Remedy | None:
        """The change to make; None if none helps."""
        return self.remedies[0] if self.remedies and self.remedies[0].gain.helps else None

    @property
    def uncertain(self) -> Remedy | None:
        """The best change with a large gain that more draws have to confirm; None if a change helps, or none may."""
        if self.advised is not None:
            return None
        return next((each for each in self.remedies if each.gain.is_large), None)


class Diagnoser:
    """Runs the simulations of a diagnosis.

    Args:
        metrics, clients: What the server and a benchmark of it measured.
        goal: Objectives of the requests; None takes the latency index.
        seeds: Seeds of the draws.
    """

    def __init__(
        self, server: Server, load: ServedLoad, metrics: ServerMetrics | None, clients: ClientLatencies | None, goal: Goal | None,
        seeds: Sequence[int], workers: Workers = Workers(jobs=1),
    ) -> None:  # fmt: skip
        self._server, self._load, self._metrics, self._clients, self._goal = server, load, metrics, clients, goal
        self._seeds, self._workers = tuple(seeds), workers
        self._runs: dict[tuple[Settings, int, float], Observation] = {}
        self._factors = () if len(self._seeds) == 1 else server.step_interval() or ()

    def diagnose(self) -> Diagnosis:
        """The diagnosis.

        Raises:
            SettingError: The draws are bursts.
            UserError, SimulationFault: As ``simulate``.
        """
        served, toggled = self._server, self._toggled()
        self._simulate([served, *toggled], self._seeds)
        case = Case(served, self._load, self._mean(served), self._metrics)
        self._require_no_burst(case.seen)
        caching = None
        if toggled:
            (other,) = toggled
            on, off = (served, other) if served.launch.enable_prefix_caching else (other, served)
            case = replace(case, would_hit=self._mean(on).hit_rate)
            caching = self._gain(off, on)
        case = replace(case, cache_worth=self._cache_worth())
        if self._goal is not None and meets(case.seen, self._goal):
            return self._confirmed(Diagnosis(case, "healthy", (), caching, self._seeds))
        settled = "healthy" if self._goal is None else "misses"
        remedies = self._ranked(self._best(case))
        remedies = self._with_pair(case, remedies)
        helps = bool(remedies) and remedies[0].gain.helps
        behind = case.seen.behind > _BEHIND and not (helps and remedies[0].seen.behind <= _BEHIND)
        state = "overloaded" if behind else "remedy" if helps else "limited" if pressure(case) else settled
        reliefs = tuple(self._reliefs(case))
        found = Diagnosis(case, state, tuple(remedies), caching, self._seeds, reliefs=reliefs)
        if state == settled and found.uncertain:
            return replace(found, state="undecided")
        return self._confirmed(found) if state == settled else found

    def _confirmed(self, settled: Diagnosis) -> Diagnosis:
        """A diagnosis without a change, unless the server's own measurements contradict it."""
        found = contradictions(settled.case, self._clients, self._goal)
        if found:
            return replace(settled, state="contradicted", contradictions=found)
        return replace(settled, state="no room") if settled.state == "healthy" and is_full(settled.case) else settled

    def _require_no_burst(self, seen: Observation) -> None:
        load = self._load
        if seen.turnover < _LEAST_TURNOVER:
            all_known = load.knows_contents and load.num_prompts >= len(load.trace)
            remedy = "give a longer recording, or a lower --request-rate" if all_known else "give more requests"
            what = f"{seen.turnover:.0%} of the requests finish before the last one starts, and half must"
            raise SettingError("num_prompts", load.num_prompts, f"the draws are bursts: {what}; {remedy}")
        stated = load.max_concurrency is not None or load.rate not in (None, inf)
        if not stated and seen.arriving < _LEAST_ARRIVING:
            what = f"all requests arrive within {seen.arriving:.1%} of the time that the server needs for them"
            remedy = "give the rate of the server's clients, or --max-concurrency"
            raise SettingError("request_rate", None, f"the draws are bursts: {what}; {remedy}")

    def _cache_worth(self) -> dict[str, Any] | None:
        """What the cached blocks are worth on the first seed, where that can be known."""
        if not (self._load.knows_contents and self._server.launch.enable_prefix_caching):
            return None
        return worth_of_cache(self._server.settings(), self._load.work(self._seeds[0]))

    def _toggled(self) -> list[Server]:
        """The server with prefix caching on instead of off, or off instead of on, where that can be simulated."""
        if not self._load.knows_contents:
            return []
        other = self._server.changed({"enable-prefix-caching": not self._server.launch.enable_prefix_caching})
        return [] if other is None else [other]

    def _best(self, case: Case) -> list[Remedy]:
        """The best change of each cause, on all seeds; of changes that are about as good, the mildest, which comes first."""
        now, seed = self._server.settings(), self._seeds[0]
        tried = []
        for suspect in suspects(case):
            servers = [(change, self._server.changed(change)) for change in suspect.changes]
            able = [(change, other) for change, other in servers if other is not None and other.settings() != now]
            if able:
                tried.append((suspect, able))
        self._simulate([other for _, able in tried for _, other in able], self._seeds[:1])
        best = []
        for suspect, able in tried:
            least = min(self._cost(other, seed) for _, other in able)
            best.append((suspect, *next(each for each in able if self._cost(each[1], seed) <= least + _AS_GOOD)))
        self._simulate([other for *_, other in best], self._seeds)
        return [self._remedy((suspect,), change, other) for suspect, change, other in best]

    def _reliefs(self, case: Case) -> list[Relief]:
        """The best measure of each kind, on all seeds; of measures that are about as good, the mildest, which comes first."""
        seed, found = self._seeds[0], []
        for kind in measures(case, behind=case.seen.behind > _BEHIND):
            able = [(each, other) for each in kind if (other := self._server.changed(each.change)) is not None]
            if not able:
                continue
            for each, other in able:
                self._simulate([other], self._seeds[:1], each.share)
            least = min(self._cost(other, seed, each.share) for each, other in able)
            best, other = next(each for each in able if self._cost(each[1], seed, each[0].share) <= least + _AS_GOOD)
            self._simulate([other], self._seeds, best.share)
            gain = self._gain(self._server, other, best.share)
            found.append(Relief(best, self._mean(other, best.share), gain))
        return sorted(found, key=lambda each: (not each.gain.helps, each.measure.share < 1, -each.gain.value))

    def _ranked(self, remedies: list[Remedy]) -> list[Remedy]:
        """Changes that help first, by their gains; a change of the answers after those that reach half of its gain."""
        most = max((each.gain.value for each in remedies if not each.lossless), default=0.0)

        def place(each: Remedy) -> tuple[bool, bool, float]:
            before_lossy = each.lossless and each.gain.value >= _LOSSLESS_SHARE * most
            return not each.gain.helps, not before_lossy, -each.gain.value

        return sorted(remedies, key=place)

    def _with_pair(self, case: Case, remedies: list[Remedy]) -> list[Remedy]:
        """The remedies, with the first of them and another one together in front if that gains more."""
        if not remedies or not remedies[0].gain.helps:
            return remedies
        first = remedies[0]
        with_first = not_none(self._server.changed(first.change))
        # The metrics are of the server without it.
        left = {each.cause.name for each in suspects(replace(case, server=with_first, seen=first.seen, metrics=None))}
        for second in remedies[1:]:
            (suspect,), change = second.suspects, {**first.change, **second.change}
            both = self._server.changed(change)
            if not second.gain.helps or suspect.cause.name not in left or both is None:
                continue
            self._simulate([both], self._seeds)
            if self._gain(with_first, both).helps:
                return [self._remedy((*first.suspects, suspect), change, both), *remedies]
        return remedies

    def _remedy(self, of: tuple[Suspect, ...], change: Change, other: Server) -> Remedy:
        flags = flags_text(change, self._server.line)
        return Remedy(of, change, self._mean(other), self._gain(self._server, other), flags)

    def _cost(self, server: Server, seed: int, share: float = 1.0) -> float:
        return self._runs[server.settings(), seed, share].cost

    def _mean(self, server: Server, share: float = 1.0) -> Observation:
        return mean_of([self._runs[server.settings(), seed, share] for seed in self._seeds])

    def _gain(self, base: Server, other: Server, share: float = 1.0) -> Gain:
        """The paired difference of the objective; ``other`` may serve a share of the requests."""
        saved = [self._cost(base, seed) - self._cost(other, seed, share) for seed in self._seeds]
        return Gain.over(saved, self._goal is not None, self._by_steps(base, other, share, saved[0]))

    def _by_steps(self, base: Server, other: Server, share: float, saved: float) -> tuple[float, float]:
        """By how much longer and shorter steps lower and raise the difference on the first seed, of ``saved`` with those predicted.

        Both servers have the same steps: what is not known of them is how long all are. The interval of ``SHARE`` of the servers or steps is
        taken for that of a normal distribution.
        """
        seed, moved = self._seeds[0], [0.0]
        for factor in self._factors:
            paced, changed = base.paced(factor), other.paced(factor)
            if paced is not None and changed is not None:
                self._simulate([paced], [seed])
                self._simulate([changed], [seed], share)
                moved.append(self._cost(paced, seed) - self._cost(changed, seed, share) - saved)
        return -_AT_CONFIDENCE * min(moved), _AT_CONFIDENCE * max(moved)

    def _simulate(self, servers: Iterable[Server], seeds: Sequence[int], share: float = 1.0) -> None:
        """Run what has not been run yet."""
        wanted = [(server.settings(), seed, share) for server in servers for seed in seeds]
        missing = [each for each in dict.fromkeys(wanted) if each not in self._runs]
        load = replace(self._load, share=share)
        works = {seed: load.work(seed) for _, seed, _ in missing}
        jobs = (((place, seed), chosen, works[seed], self._goal) for place, (chosen, seed, _) in enumerate(missing))
        found = as_they_finish(observe, jobs, len(missing), self._workers)
        for (place, _), observation in track(found, "Simulating", len(missing)):
            self._runs[missing[place]] = observation


def _gained(saved: float, shares: bool) -> float:
    return saved if shares else -expm1(-saved)


def is_full(case: Case) -> bool:
    """Whether the KV cache is in use nearly as a whole while requests arrive, by the metrics if they say it."""
    measured = None if case.metrics is None else case.metrics.kv_usage
    return (case.seen.arriving_usage if measured is None else measured[0]) >= FULL
