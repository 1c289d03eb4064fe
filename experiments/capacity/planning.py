"""Find the highest rate and the cost of every candidate, and rank the candidates.

    1. ahead     every candidate, with the first seed (``max_rate.go_ahead``)
    2. others    every candidate that meets the goal, with every other seed
    3. detail    results of each candidate at its recommended rate, and its limit
    4. verify    on request: other seeds, at the recommended rate and at 1.15 times it

The jobs of a step are independent and run on all cores or on a cluster. Finished jobs are stored, so an interrupted
plan continues from there. The rates of several replicas add up: a router is taken to share requests evenly, and an even
part of a Poisson process is a Poisson process. The plan recommends the cheapest candidate for the wanted rate: a whole
number of replicas, then fewer GPUs, then the lower price of a token at the full rate. Without a wanted rate it
recommends the lowest price of a token.

If all requests at once meet the goal, every rate does, and one replica is enough for the wanted rate. Such a candidate
has no highest rate, so without a wanted rate its tokens have no price. It is listed after the candidates with a price.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import ceil, inf
from typing import Any

from ...sim.engine.settings import Settings
from ...sim.engine.unread import only_read
from ...sim.types.errors import SimulationFault, UserError
from ...sim.types.optional import not_none
from ...sim.workload.workload import Workload
from ..runs.inputs import Inputs
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.points import Store, key
from ..runs.slo_check import Goal, SloCheck, check_slo
from ..runs.sweeping import Outcome
from .candidates import Candidate
from .detail import BEYOND, detail
from .load import Load
from .max_rate import Ahead, MaxRate, SeedRate, follow, go_ahead
from .prices import HOUR_S, MILLION, Prices

#: Tolerance by which a quotient of rates may exceed a whole number of replicas, for the rounding of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Answer:
    """Results of a candidate.

    Attributes:
        error: Reason why it cannot be simulated.
        found: The rates; None if it does not start or cannot be simulated.
        detail: Results at the recommended rate; None if no rate meets the goal.
        verified: Share of other seeds that meet the goal, by factor of the recommended rate.
    """

    candidate: Candidate
    error: str | None = None
    found: MaxRate | None = None
    detail: dict[str, Any] | None = None
    verified: dict[float, float] | None = None

    @property
    def rate(self) -> float:
        """Recommended rate of one replica, requests/s; 0 if no rate meets the goal, infinite if every rate does."""
        return self.rates.rate if self.detail else 0.0

    @property
    def rates(self) -> MaxRate:
        """The rates of a candidate that was simulated."""
        return not_none(self.found)

    @property
    def at_rate(self) -> dict[str, Any]:
        """The detail of a candidate with a recommended rate."""
        return not_none(self.detail)

    @property
    def every_rate_meets(self) -> bool:
        """Whether the goal is met even if all requests arrive at once."""
        return self.rate == inf


@dataclass(frozen=True)
class Bill:
    """Cost of a candidate.

    Attributes:
        replicas, gpus: Number needed for the wanted rate; one replica without a wanted rate.
        per_hour: Price of all GPUs for an hour.
        per_million: Price of a million tokens at the wanted rate, or at the full rate: the whole bill divided by prompt
            tokens, by output tokens, and by both together.
        full_per_million: Price of a million prompt and output tokens with every replica at its full rate; None if every
            rate meets the goal.
    """

    replicas: int
    gpus: int
    per_hour: float
    per_million: dict[str, float]
    full_per_million: float | None


def bill(answer: Answer, load: Load, prices: Prices, wanted: float | None) -> Bill:
    """Cost of serving the wanted rate, in requests/s.

    Raises:
        SettingError: The GPU has no price.
    """
    launch = answer.candidate.started.launch
    replicas = 1 if wanted is None else max(1, ceil(wanted / answer.rate - _ROUNDING))
    gpu_hour = prices.of(launch.gpu.name)
    gpus = replicas * launch.num_gpus
    prompt, output = load.mean_tokens
    served = HOUR_S / MILLION * (answer.rate if wanted is None else wanted)
    tokens = {"input": prompt, "output": output, "total": prompt + output}
    per_million = {name: gpus * gpu_hour / (served * mean) for name, mean in tokens.items()}
    full = None
    if not answer.every_rate_meets:
        full = launch.num_gpus * gpu_hour / (HOUR_S / MILLION * answer.rate * tokens["total"])
    return Bill(replicas, gpus, gpus * gpu_hour, per_million, full)


def ranked(answers: Sequence[Answer], load: Load, prices: Prices, wanted: float | None) -> list[tuple[Answer, Bill]]:
    """Candidates with a rate and a price, with their bills, the recommended one first."""
    able = [answer for answer in answers if answer.rate and not (wanted is None and answer.every_rate_meets)]
    billed = [(answer, bill(answer, load, prices, wanted)) for answer in able]
    if wanted is None:
        return sorted(billed, key=lambda each: (each[1].full_per_million, each[1].gpus))
    # The price of a token falls as the rate rises.
    return sorted(billed, key=lambda each: (each[1].per_hour, each[1].gpus, each[1].full_per_million or 0.0))


class Planner:
    """Runs the steps of a plan.

    Args:
        seeds: The first seed runs ahead.
        store: Stores finished jobs; None stores nothing.
    """

    def __init__(self, load: Load, goal: Goal, seeds: Sequence[int], workers: Workers, store: Store | None) -> None:
        self._load, self._goal, self._seeds, self._workers, self._store = load, goal, seeds, workers, store
        self._works: dict[int, Workload] = {}

    def answers(self, candidates: Sequence[Candidate]) -> list[Answer]:
        """The answer of each candidate, in their order.

        Raises:
            SimulationFault: An invariant of the simulator is violated.
        """
        first, *others = self._seeds
        able = [candidate.settings for candidate in candidates if candidate.settings]
        ahead = self._stage("go ahead", {(chosen, first): () for chosen in able})
        begun = {chosen: _ahead(outcome.summary) for (chosen, _), outcome in ahead.items() if outcome.summary}
        meeting = {chosen: found for chosen, found in begun.items() if found.found.rate}
        more = {(chosen, seed): (found,) for chosen, found in meeting.items() for seed in others}
        followed = self._stage("follow", more)
        errors = {
            chosen: outcome.error for (chosen, _), outcome in [*ahead.items(), *followed.items()] if outcome.error
        }
        rates = {
            chosen: MaxRate.of(
                found, [SeedRate(**not_none(followed[chosen, seed].summary)) for seed in others if chosen in meeting]
            )
            for chosen, found in begun.items()
            if chosen not in errors
        }
        rated = {(chosen, first): (found.rate, found.seed_rates[0]) for chosen, found in rates.items() if found.rate}
        details = self._stage("detail", rated)
        errors |= {chosen: outcome.error for (chosen, _), outcome in details.items() if outcome.error}
        answers = []
        for candidate in candidates:
            chosen = candidate.settings
            if chosen is None:
                answers.append(Answer(candidate))
                continue
            outcome = details.get((chosen, first))
            detail = outcome.summary if outcome else None
            answers.append(Answer(candidate, error=errors.get(chosen), found=rates.get(chosen), detail=detail))
        return answers

    def verified(self, answers: Sequence[Answer], count: int) -> list[Answer]:
        """The answers with the share of ``count`` other seeds that meet the goal at the rate, and at 1.15 times it."""
        seeds = range(max(self._seeds) + 1, max(self._seeds) + 1 + count)
        result = []
        for answer in answers:
            if answer.rate:
                shares = {factor: self._share(answer, factor, seeds) for factor in (1.0, BEYOND)}
                answer = replace(answer, verified=shares)
            result.append(answer)
        return result

    def _share(self, answer: Answer, factor: float, seeds: Sequence[int]) -> float:
        chosen, rate = not_none(answer.candidate.settings), answer.rate * factor
        if answer.rates.saturated is not None and rate > answer.rates.saturated:
            return 0.0
        outcomes = self._stage("verify", {(chosen, seed): (rate,) for seed in seeds})
        return sum(not_none(each.summary)["meets"] for each in outcomes.values()) / len(seeds)

    def _stage(
        self, stage: str, jobs: Mapping[tuple[Settings, int], tuple[Any, ...]]
    ) -> dict[tuple[Settings, int], Outcome]:
        """Run the jobs that are not in the store, and store their results."""
        keys = {job: self._key(stage, *job, *more) for job, more in jobs.items()}
        found = {
            name: Outcome(name, kept) for name in keys.values() if self._store and (kept := self._store.find(name))
        }
        missing = {keys[job]: (job, more) for job, more in jobs.items() if keys[job] not in found}
        calls = (
            (name, stage, chosen, self._load, self._goal, seed, *more)
            for name, ((chosen, seed), more) in missing.items()
        )
        for outcome in track(as_they_finish(carry_out, calls, len(missing), self._workers), stage, len(missing)):
            if outcome.fault:
                error = SimulationFault(outcome.fault.splitlines()[-1])
                error.add_note(outcome.fault)
                raise error
            if self._store and outcome.summary is not None:
                self._store.keep(outcome.key, Inputs(settings=missing[outcome.key][0][0]), outcome.summary)
            found[outcome.key] = outcome
        return {job: found[name] for job, name in keys.items()}

    def _key(self, stage: str, chosen: Settings, seed: int, *more: Any) -> str:
        """A hash of every input of a job's result."""
        if seed not in self._works:
            self._works[seed] = self._load.draw(seed).at(1.0)
        run = key(Inputs(settings=chosen), self._works[seed])
        parts = [asdict(each) if isinstance(each, Ahead) else each for each in more]
        return sha256(json.dumps([stage, run, asdict(self._goal), seed, parts]).encode()).hexdigest()


def _ahead(data: dict[str, Any]) -> Ahead:
    return Ahead(SloCheck(**data["alone"]), data["saturated"], SeedRate(**data["found"]))


def _verify(chosen: Settings, load: Load, goal: Goal, seed: int, rate: float) -> dict[str, Any]:
    return asdict(check_slo(chosen, load.draw(seed).at(rate), goal))


_STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "go ahead": lambda *arguments: asdict(go_ahead(*arguments)),
    "follow": lambda *arguments: asdict(follow(*arguments)),
    "detail": detail,
    "verify": _verify,
}


def carry_out(name: str, stage: str, chosen: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> Outcome:
    """Run one job of a step. Unread settings are not refused; errors are returned, never raised."""
    try:
        chosen = only_read(chosen, load.draw(seed).at(1.0))
        return Outcome(name, _STAGES[stage](chosen, load, goal, seed, *more))
    except UserError as error:
        return Outcome(name, error=str(error))
    except Exception:
        return Outcome(name, fault=traceback.format_exc())
