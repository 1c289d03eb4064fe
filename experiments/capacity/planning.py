"""Finds what every candidate bears, what it costs, and which to buy.

    1. ahead     every candidate, with the first seed (``max_rate.go_ahead``)
    2. others    every candidate that meets the goal, with every other seed
    3. detail    what each does at its recommended rate, and what limits it
    4. verify    if asked for: other seeds, at the recommended rate and at 1.15 times it

Each step's jobs are independent, run on all cores or a cluster, and are kept as they finish, so that a plan that is
interrupted continues from there. Several replicas are as many of one: a router is taken to share requests evenly, and
a part of a Poisson process is one. The cheapest for the wanted rate is recommended: a whole number of replicas, then
fewer GPUs, then the lower price of a token at the full rate. Without a wanted rate, the lowest price of a token.

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

#: By how little a quotient of rates may exceed a whole number of replicas: the rounding of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Answer:
    """What is found of a candidate.

    Attributes:
        error: Why it cannot be simulated.
        found: The rates; None where it does not start or cannot be simulated.
        detail: At the recommended rate; None where no rate meets the goal.
        verified: Of other seeds, the share that meets the goal at a factor of the recommended rate.
    """

    candidate: Candidate
    error: str | None = None
    found: MaxRate | None = None
    detail: dict[str, Any] | None = None
    verified: dict[float, float] | None = None

    @property
    def rate(self) -> float:
        """Recommended for one replica, requests/s; 0 where there is none, infinite where every rate meets."""
        return self.rates.rate if self.detail else 0.0

    @property
    def rates(self) -> MaxRate:
        """The rates of a candidate that could be simulated."""
        return not_none(self.found)

    @property
    def at_rate(self) -> dict[str, Any]:
        """The detail of a candidate with a recommended rate."""
        return not_none(self.detail)

    @property
    def every_rate_meets(self) -> bool:
        """Whether the goal is met however fast requests come: all at once."""
        return self.rate == inf


@dataclass(frozen=True)
class Bill:
    """What a candidate costs.

    Attributes:
        replicas, gpus: So many are needed for the wanted rate; one replica where none is wanted.
        per_hour: Of all GPUs.
        per_million: Of tokens at the wanted rate, or at the full one: the whole bill laid on prompt tokens, on output
            tokens, and on both together.
        full_per_million: Of both together if every replica had its full rate; None where every rate meets.
    """

    replicas: int
    gpus: int
    per_hour: float
    per_million: dict[str, float]
    full_per_million: float | None


def bill(answer: Answer, load: Load, prices: Prices, wanted: float | None) -> Bill:
    """What it costs to serve the wanted rate, requests/s.

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
    """Those with a rate, and a price, and what they cost, the one to buy first."""
    able = [answer for answer in answers if answer.rate and not (wanted is None and answer.every_rate_meets)]
    billed = [(answer, bill(answer, load, prices, wanted)) for answer in able]
    if wanted is None:
        return sorted(billed, key=lambda each: (each[1].full_per_million, each[1].gpus))
    # A token costs less and less as the rate rises.
    return sorted(billed, key=lambda each: (each[1].per_hour, each[1].gpus, each[1].full_per_million or 0.0))


class Planner:
    """Runs the steps.

    Args:
        seeds: The first one goes ahead.
        store: Keeps what is finished; None keeps nothing.
    """

    def __init__(self, load: Load, goal: Goal, seeds: Sequence[int], workers: Workers, store: Store | None) -> None:
        self._load, self._goal, self._seeds, self._workers, self._store = load, goal, seeds, workers, store
        self._works: dict[int, Workload] = {}

    def answers(self, candidates: Sequence[Candidate]) -> list[Answer]:
        """What is found of each candidate, in their order.

        Raises:
            SimulationFault: A fault of ours.
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
        """The answers with the share of ``count`` other seeds that meet the goal at the rate, and 1.15 times it."""
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
        """Carry out what the store has not, and keep it."""
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
        """A hash of all that a job's result follows from."""
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
    "go ahead": lambda *asked: asdict(go_ahead(*asked)),
    "follow": lambda *asked: asdict(follow(*asked)),
    "detail": detail,
    "verify": _verify,
}


def carry_out(name: str, stage: str, chosen: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> Outcome:
    """One job of a step, whatever of the settings is not read; never raises."""
    try:
        chosen = only_read(chosen, load.draw(seed).at(1.0))
        return Outcome(name, _STAGES[stage](chosen, load, goal, seed, *more))
    except UserError as error:
        return Outcome(name, error=str(error))
    except Exception:
        return Outcome(name, fault=traceback.format_exc())
