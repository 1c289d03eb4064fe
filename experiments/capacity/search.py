"""``fragmeter plan --goodput``: flags, search and report of a capacity plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from ... import __version__
from ...reports.explore.what_if import WhatIf
from ...sim.cluster import Cluster
from ...sim.metrics.objectives import objectives
from ...sim.output.folders import OutputFolder
from ...sim.spec import published_formats
from ...sim.spec.startup.capacity import capacity
from ...sim.types.bounds import Seed, Seeds
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces.arrivals.pacing import read_curve
from ..measured.evidence import drafts_lines, engines_lines, evidence, evidence_lines
from ..runs.grid import NONE
from ..runs.inputs import Inputs
from ..runs.output import Report, print_beside
from ..runs.parallel import Workers
from ..runs.points import Store
from ..runs.slo_check import Goal
from ..runs.unread import LOAD_FIELDS, refuse_unread
from ..vllm_serve.line import ServeLine
from ..vllm_serve.log import StartupLog
from ..vllm_serve.start import shape_of, started
from .again import ASKED, inputs_of, what_moved
from .answer import Answer, Bill, ranked, without_price
from .candidates import CHECKPOINT, Candidate, Choices, candidates
from .confidence import CONFIDENCE, CONTENT, NUM_SEEDS, allowed_misses
from .day import Day, DayPlan
from .day_text import day_lines, day_table
from .fleet import DEFAULT_FLEET_SEEDS
from .least import least_headline
from .load import Load
from .manifest import FILES, Form, loadable, manifest
from .max_rate import DEFAULT_SEEDS
from .measurement import measured_text, next_measurement, with_measured_steps
from .page import write_plan
from .planning import Planner
from .prices import Prices, prices
from .text import (
    EVERY_RATE,
    candidates_table,
    cheaper_text,
    details,
    flags_text,
    headline,
    pair_lines,
    served_at_rate,
    verified_text,
    why_loses,
    why_none,
)
from .uncertainty import uncertainty
from .unlisted import RANKS, Contest, groups_of
from .what_if import MOST_OFFERS, changed_lengths, what_if

_RANKS, _STAGES = "tensor_parallel_size", "pipeline_parallel_size"
#: What is tried with the most ranks where no number of ranks starts on any card.
_MORE_GPUS = {_STAGES: ["1", "2", "4"], "enable_expert_parallel": ["none", "true"]}
#: Axes of parallelism: who lists one has chosen how a model is divided.
_PARALLELISM = {
    _RANKS, "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
}  # fmt: skip
#: Axes of number formats: who lists one has chosen the checkpoint.
_FORMATS = {"quantization", "kv_cache_dtype", "speculative_config"}
#: Least number of seeds to begin with: with fewer, the limit that guides the search is more than five deviations below the mean.
_FEWEST_SEEDS = 4
_GROUP = Group("Goal", sort_key=-1)
#: Seconds until an ordered replica takes requests, if the user gives none.
DEFAULT_STARTUP_S = 120.0
#: Choices of fleets that have one size.
_OF_ONE_SIZE = ("prefill_replicas", "data_parallel_size")
#: Choices that apply to whole fleets.
_OF_FLEETS = ("router", "prefill_replicas")


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Aims:
    """Goal, confidence and prices of a plan.

    Attributes:
        goodput: Objectives of every request, as vllm bench serve has them: ttft:500 tpot:50 e2el:10000, in ms.
        attainment: Share of the requests that must meet them all. DistServe (OSDI'24) plans for 0.9.
        seeds: Draws of the load, from --seed on, to begin with: 4 or more, from which other seeds are predicted. By
            default 4 for a wanted rate, to which seeds are added until the fleet is known, and 12 without. One seed says
            nothing about others.
        confidence: Probability with which the fleet for a wanted rate is to be enough, over draws of the load and over what step times
            and the KV cache may be by the measured servers (chance).
        verify_seeds: Other draws: the share that meets the goal with the fleet and with a replica fewer, or without a
            wanted rate at the recommended rate and at 1.15 times it.
        prices: JSON or TOML file with per_gpu_hour, a price for each GPU. By default examples, with sources. If a GPU has none,
            candidates are ranked by GPUs, and costs are GPU-hours.
        explain: Print why each of the other candidates is not recommended.
        sensitivity: Find the effect of step times and of each objective on the recommendation's bill, by simulations with values that
            are 10 % lower and higher, and that of the price and the wanted rate.
        cost: Step time of all candidates, as for simulate. By default the GPU's profile where it covers the
            candidate, else the roofline.
        startup_seconds: With --rate-curve: seconds from the order of a replica until it takes requests. By default 120, an
            assumption.
        spare: Replicas that may fail while the others are still enough: as many are bought beside those that are.
        measured: Result of vllm bench serve for one replica of the only candidate: steps take as long as it says.
        deploy: Write the manifest of the recommended fleet into --out: compose.yaml for Docker Compose, or kubernetes.yaml.
        server: Constants of the server, as for simulate, with the cost that they were fitted with. Its GPU, model,
            parallelism and release must be those of every candidate.
        seed: Seed of the first draw.
    """

    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable="")] = None
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    seeds: Seeds | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.9
    verify_seeds: Annotated[int, Field(ge=0, le=100_000)] = 0
    spare: Annotated[int, Field(ge=0, le=1000)] = 0
    prices: Path | None = None
    explain: Annotated[bool, Parameter(negative="")] = False
    sensitivity: Annotated[bool, Parameter(negative="")] = False
    startup_seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None
    cost: str | None = None
    measured: Path | None = None
    deploy: Form | None = None
    server: str | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Aims:
        if self.seeds is not None and 1 < self.seeds < _FEWEST_SEEDS:
            raise SettingError(
                "seeds",
                self.seeds,
                f"are too few to begin the search with; give {_FEWEST_SEEDS} or more, or 1 for a result without confidence",
            )
        return self


AIMS = Annotated[Aims, Parameter(name="*", group=_GROUP)]


@dataclass(frozen=True)
class PlanRequest:
    """The request for a plan: the base lines, and the load.

    Attributes:
        gpus: Candidates; empty for every preset with a price.
        searches_ranks: Whether ranks of tensor parallelism that are not listed are open.
        asked: The flags that were given, for ``--again``.
        then: The document of an earlier plan for the same flags; None without one.
    """

    line: ServeLine
    gpus: Sequence[str]
    choices: Choices
    model: str | None
    log: StartupLog | None
    inputs: Inputs
    searches_ranks: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)
    then: Mapping[str, Any] | None = None


def search(aims: Aims, request: PlanRequest, workers: Workers, out: OutputFolder | None, report: Report) -> None:
    """Find the plan and report it.

    Raises:
        UserError: An invalid input, before anything is simulated.
    """
    goal = Goal(objectives(not_none(aims.goodput)), aims.attainment)
    known = prices(aims.prices)
    if aims.deploy is not None:
        if out is None:
            raise SettingError("deploy", aims.deploy, "has no place; give --out")
        loadable(request.model or request.line.model)
    # A line without a length takes the longest that fits on each GPU.
    flags = request.line.flags or {"max-model-len": "auto"}
    line = replace(request.line, flags=flags)
    day, inputs = _day(request.inputs, request.choices, aims)
    request = replace(request, inputs=inputs)
    # The load first: whether each candidate starts, and with which change it would, takes seconds.
    load = _load(inputs, shape_of(line, request.model).name, aims.seed)
    longest = load.longest_tokens
    steps = aims.cost, aims.server
    axes, unlisted = _opened(line, request, aims, known)
    gpus = axes.pop("gpu")
    found = candidates(line, gpus, axes, request.model, request.log, *steps, unlisted=unlisted)
    if _RANKS in unlisted and not any(candidate.settings for candidate in found):
        more = _MORE_GPUS if found[0].started.launch.model.experts else {_STAGES: _MORE_GPUS[_STAGES]}
        wider = candidates(
            line,
            gpus,
            axes | {_RANKS: [RANKS[-1]]} | more,
            request.model,
            request.log,
            *steps,
            unlisted=[*unlisted, *more],
        )
        if any(candidate.settings for candidate in wider):
            found, unlisted = wider, [*unlisted, *more]
    if aims.measured is not None:
        found = with_measured_steps(found, aims.measured)
    groups = groups_of(found, unlisted)
    found = [candidate for group in groups for candidate in group]
    priced = known.for_gpus(candidate.started.launch.gpu.name for candidate in found)
    _refuse_unread(request, [candidate for candidate in found if candidate.settings], load, aims.seed)
    groups = [[_long_enough(candidate, longest) for candidate in group] for group in groups]
    wanted = _wanted(load)
    for name in _OF_FLEETS:
        if wanted is None and name in request.choices.axes():
            remedy = "is of a fleet, for a wanted rate; give --request-rate"
            raise SettingError(name, getattr(request.choices, name), remedy)
    if aims.spare and (wanted is None or day is not None or request.choices.prefill_replicas is not None):
        remedy = "is of a fleet of equal replicas of one size; give --request-rate, without --rate-curve and --prefill-replicas"
        raise SettingError("spare", aims.spare, remedy)
    count = aims.seeds or (DEFAULT_SEEDS if wanted is None else DEFAULT_FLEET_SEEDS)
    aims = replace(aims, seeds=count)
    planner = Planner(
        load,
        goal,
        range(aims.seed, aims.seed + count),
        workers,
        None if out is None else Store(out),
        wanted,
        aims.confidence,
        aims.spare,
    )
    say = _Progress(priced.currency, wanted)
    try:
        answers = planner.answers(groups, priced, say, _tries_pairs(aims, request, unlisted, day))
    except KeyboardInterrupt:
        for contest in planner.contests:
            report.print_line(say.interrupted(contest))
        raise
    if aims.verify_seeds:
        answers = planner.verified(answers, aims.verify_seeds)
    if aims.sensitivity and (ranks := ranked(answers, load, priced, wanted, aims.spare)):
        best = ranks[0][0]
        answers = [without_price(planner.influenced(each), priced) if each is best else each for each in answers]
    plan_of_day = None
    if day is not None and (ranks := ranked(answers, load, priced, wanted)):
        best, bill = ranks[0]
        startup_s = DEFAULT_STARTUP_S if aims.startup_seconds is None else aims.startup_seconds
        plan_of_day = planner.over_day(best, day, startup_s, bill.per_hour / bill.replicas)
    if request.line.uncounted_names:
        report.print_line(f"Without {', '.join(request.line.uncounted_names)}, not counted:")
    _SearchOutput(aims, goal, planner, load, wanted, priced, answers, found, request, plan_of_day).write(report, out)


def _opened(line: ServeLine, request: PlanRequest, aims: Aims, known: Prices) -> tuple[dict[str, list[str]], list[str]]:
    """Axes with their values, the GPU first, and those that are not listed.

    Cards are open where none is listed, and ranks where ``request`` allows it, no parallelism is listed, and one of the listed cards
    does not start the line. With the ranks the checkpoints are open, where no number format is listed: the model in each number format that
    a repository with stored facts has.
    A server's constants are of one number of ranks.
    """
    axes, listed = {"gpu": list(request.gpus) or list(known.per_gpu_hour)}, request.choices.axes()
    unlisted = [] if request.gpus else ["gpu"]
    if request.searches_ranks and not _PARALLELISM & listed.keys() and aims.server is None:
        of_cards = (started(line, each, request.model, request.log) for each in request.gpus)
        if unlisted or any(each.refusal() is not None for each in of_cards):
            others = [] if request.model is None or listed.keys() & _FORMATS else published_formats(request.model)
            opened = {CHECKPOINT: [NONE, *others]} if others else {}
            opened[_RANKS] = list(RANKS)
            axes |= opened
            unlisted += opened
    return axes | listed, unlisted


def _tries_pairs(aims: Aims, request: PlanRequest, unlisted: Sequence[str], day: Day | None) -> bool:
    """Whether prefill and decode are tried apart, with a card and ranks of their own: where ranks are searched, for fleets of one size
    without spare replicas, a manifest or measured steps."""
    others = aims.spare or aims.deploy or aims.measured or day or request.choices.prefill_replicas
    return _RANKS in unlisted and not others


class _Progress:
    """Says the best candidate so far on standard error, each once."""

    def __init__(self, currency: str, wanted: float | None) -> None:
        self._unit = f"{currency}/h" if wanted is not None else f"{currency}/h for 1 request/s"
        self._said = ""

    def __call__(self, name: str, cost: float, confirmed: bool) -> None:
        text = f"{'confirmed' if confirmed else 'best so far, by one seed'}: {name}, {cost:,.2f} {self._unit}"
        if text != self._said:
            print_beside(text)
        self._said = text

    def interrupted(self, contest: Contest) -> str:
        """What is known of a search that was interrupted."""
        best, left = contest.best(), contest.open_names()
        so_far = "No candidate is known to be enough yet."
        if best is not None:
            name, cost, confirmed = best
            by = "confirmed" if confirmed else "by one seed, not confirmed"
            so_far = f"Best so far: {name}, {cost:,.2f} {self._unit} ({by})."
        return f"{so_far} Open: {', '.join(left)}." if left else so_far


def _day(inputs: Inputs, choices: Choices, aims: Aims) -> tuple[Day | None, Inputs]:
    """The day of a rate curve, and inputs at its highest rate; None and the same inputs without one.

    Raises:
        UserError: The curve cannot be read, or a choice has no fleets of changing size.
    """
    path = inputs.pacing.rate_curve
    if path is None:
        if aims.startup_seconds is not None:
            remedy = "is of fleets that change over a day; give --rate-curve, or leave it out"
            raise SettingError("startup_seconds", aims.startup_seconds, remedy)
        return None, inputs
    for name in _OF_ONE_SIZE:
        if (given := getattr(choices, name)) is not None:
            raise SettingError(
                name, given, "cannot be combined with --rate-curve: such fleets do not change their size"
            )
    day = Day.of(read_curve(path), str(path))
    return day, replace(inputs, pacing=replace(inputs.pacing, rate_curve=None, request_rate=day.busiest))


def _load(inputs: Inputs, model_name: str, seed: int) -> Load:
    """The load; refused if a request is longer than the model."""
    settings = replace(inputs.settings, model=model_name, max_model_len=None, seed=seed)
    return Load(replace(inputs, settings=settings))


def _refuse_unread(request: PlanRequest, able: Sequence[Candidate], load: Load, seed: int) -> None:
    """Refuse choices and load flags that no candidate reads; the pasted line may have any flag."""
    work = load.draw(seed).at(1.0)
    runs = [(replace(request.inputs, settings=not_none(candidate.settings)), work) for candidate in able]
    refuse_unread(runs, {*request.choices.axes(), *LOAD_FIELDS}.difference(_OF_FLEETS))


def _wanted(load: Load) -> float | None:
    """Wanted rate in requests/s; None without a flag for it."""
    pacing = load.pacing
    if pacing.rate is not None:
        return pacing.rate
    return load.trace_rate and load.trace_rate * (pacing.rate_scale or 1)


def _long_enough(candidate: Candidate, tokens: int) -> Candidate:
    """The candidate, refused if the longest request does not fit."""
    if candidate.settings is None or not_none(candidate.settings.max_model_len) >= tokens:
        return candidate
    fits = f"max_model_len is {candidate.settings.max_model_len}"
    return replace(candidate, settings=None, refused=f"The load's longest request has {tokens:,} tokens, and {fits}.")


class _SearchOutput:
    """Reports a plan as text and as data."""

    def __init__(
        self, aims: Aims, goal: Goal, planner: Planner, load: Load, wanted: float | None, priced: Prices,
        answers: Sequence[Answer], searched: Sequence[Candidate], request: PlanRequest, day: DayPlan | None = None,
    ) -> None:  # fmt: skip
        self._model, self._searched, self._request = request.model or request.line.model, searched, request
        self._aims, self._goal, self._load, self._wanted, self._priced = aims, goal, load, wanted, priced
        self._answers, self._day, self._planner = answers, day, planner
        self._ranks = ranked(answers, load, priced, wanted, aims.spare)
        priced_answers = [answer for answer, _ in self._ranks]
        # Candidates that can serve come first.
        self._others = sorted(
            (answer for answer in answers if answer not in priced_answers), key=lambda each: not each.every_rate_meets
        )

    def write(self, report: Report, out: OutputFolder | None) -> None:
        """Report the recommendation, the table and the requested details; write the page and the data."""
        currency = self._priced.currency
        text = self._recommendation()
        report.print_line(text)
        report.print_line()
        report.console.print(candidates_table(self._ranks, self._others, currency, self._wanted))
        about = details(self._ranks, self._goal, self._wanted, currency) if self._ranks else []
        about += self._measurements()
        if about:
            report.print_line()
        for line in about:
            report.line(line)
        explained = self._explained()
        for line in explained if self._aims.explain or not self._ranks else ():
            report.line(line)
        for line in self._closed_lines() + self._pair_lines():
            report.line(line)
        verified = [verified_text(answer, self._aims.verify_seeds) for answer, _ in self._ranks if answer.verified]
        for line in verified:
            report.line(line)
        if self._day is not None:
            report.print_line()
            report.console.print(day_table(self._day))
            for line in day_lines(self._day, currency):
                report.print_line(line)
        document = self._document(text, [*about, *verified], explained)
        for line in document.get("again", ()):
            report.line(line)
        assumptions = [f"Requests: {self._load.source()}.", *self._assumptions()]
        report.print_line()
        for line in assumptions:
            report.print_line(line)
        if out is not None:
            report.point_to("Plan", write_plan(out, document, self._ranks, assumptions, self._what_if()))
            if self._aims.deploy is not None and self._ranks:
                name, version = FILES[self._aims.deploy], self._ranks[0][0].candidate.started.line.version
                out.write(name, manifest(self._aims.deploy, *self._ranks[0], loadable(self._model), version).encode())
                report.point_to("Manifest", out.path / name)
        report.data(document)

    def _what_if(self) -> WhatIf | None:
        """Of the first fleets that are enough; None without a wanted rate, or without any."""
        sure = [
            each
            for each in self._ranks
            if not each[0].is_burst and not each[0].is_unsure and each[0].candidate.decode is None
        ]
        if self._wanted is None or not sure:
            return None
        ranks = sure[:MOST_OFFERS]
        rates = self._planner.changed([answer for answer, _ in ranks], changed_lengths(self._load))
        return what_if(ranks, rates, self._load, self._goal, self._wanted, self._aims.confidence, self._priced)

    def _measurements(self) -> list[str]:
        """What a benchmark says of the step times, or the measurement that would narrow the answer most."""
        if not self._ranks:
            return []
        (best, _), given = self._ranks[0], self._aims.measured
        if given is not None:
            return [measured_text(best.candidate, given)]
        return next_measurement(best, uncertainty(best.candidate), self._aims.confidence)

    def _closed_lines(self) -> list[str]:
        """The candidates that cannot be cheaper: how many, or with ``explain`` each."""
        closed = [each for contest in self._planner.contests for each in contest.closed]
        if not closed:
            return []
        unit = f"{self._priced.currency}/h{'' if self._wanted else ' for 1 request/s'}"
        nearest = min((each.at_least for each in closed if each.at_least is not None), default=None)
        if self._aims.explain:
            return [each.text(unit) for each in closed]
        has_formats = any(CHECKPOINT in answer.candidate.axis_values for answer in self._answers)
        parts = "card, ranks and checkpoint" if has_formats else "card and ranks"
        costs = "" if nearest is None else f", which cost {nearest:,.2f} {unit} or more, or"
        return [
            f"Not answered: {len(closed)} other combinations of {parts} that start{costs or ', which'} miss the goal with"
            " requests served alone (--explain has each)."
        ]

    def _pair_lines(self) -> list[str]:
        """Pairs of prefill and decode that were tried and are not cheaper."""
        currency, lines = self._priced.currency, []
        for contest in self._planner.contests:
            pairs, nearest = contest.closed_pairs, contest.nearest_pair
            if self._aims.explain:
                lines += [f"{name}: {_pair_cost(cost, currency)}; not cheaper" for name, cost in pairs.items()]
            elif pairs:
                name, cost = min(pairs.items(), key=lambda each: each[1])
                others = f"Of {len(pairs)} pairs of prefill and decode apart that are not cheaper the nearest is"
                lines.append(f"{others} {name}, {_pair_cost(cost, currency)}.")
            if not contest.pairs and nearest is not None:
                about = f"{nearest.candidate.name}, about {nearest.cost:,.2f} {currency}/h"
                lines.append(
                    f"Prefill and decode apart are not cheaper by a few step times: the nearest pair is {about}."
                )
        return lines

    def _recommendation(self) -> str:
        unpriced = [answer.candidate.name for answer in self._others if answer.every_rate_meets]
        beside = f"Of {', '.join(unpriced)} {EVERY_RATE}. For a price give more requests a run (--num-prompts)."
        if self._ranks:
            text = headline(*self._ranks[0], self._wanted, self._priced.currency)
            cheaper = "" if self._wanted is None else cheaper_text(self._ranks, self._priced.currency)
            return " ".join(filter(None, (text, cheaper, beside if unpriced else "")))
        if unpriced:
            return beside
        if bounds := [answer for answer in self._answers if answer.is_too_large]:
            return least_headline(bounds, self._priced)
        tried = [answer for answer in self._answers if answer.found]
        if not tried:
            return "Buy none of these: no candidate has a rate; the reasons follow."
        best = max(tried, key=lambda answer: answer.rates.alone.attained)
        return f"Buy none of these. The nearest, {best.candidate.name}: {why_none(best, self._goal)}."

    def _explained(self) -> list[str]:
        lines = [
            f"{answer.candidate.name}: {why_loses(answer, bill, self._ranks[0], self._wanted, self._priced.currency)}"
            for answer, bill in self._ranks[1:]
        ]
        equal = [
            f"{name}: the same fleet as {answer.candidate.name}" for answer, _ in self._ranks for name in answer.equal
        ]
        return lines + equal + [f"{answer.candidate.name}: {why_none(answer, self._goal)}" for answer in self._others]

    def _assumptions(self) -> list[str]:
        load = self._load
        wanted = "no rate is asked for" if self._wanted is None else f"{self._wanted:.3g} requests/s wanted"
        chosen = [
            (each.candidate.settings, served_at_rate(each).load) for each in self._answers if each.candidate.settings
        ]
        counts = load.num_prompts(), *(self._load_of(each).num_prompts(each.replicas) for each, _ in self._ranks)
        runs = " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))
        return [
            f"Load: {load.description()}; {wanted}; {runs} requests a run, of which the middle 80% count; {self._seeds()}",
            *evidence_lines(chosen),
            *[_MOVES] * any(answer.candidate.decode is not None for answer in self._answers),
            *dict.fromkeys(
                line for each, _ in chosen for line in (*engines_lines(each, planned=True), *drafts_lines(each))
            ),
            self._priced.line(),
        ]

    def _load_of(self, answer: Answer) -> Load:
        return self._planner.jobs.load_of(not_none(answer.candidate.settings))

    def _seeds(self) -> str:
        seeds = not_none(self._aims.seeds)
        if seeds == 1:
            return "one seed; its result says nothing about other seeds."
        most = max(seeds, NUM_SEEDS)
        if self._ranks and self._ranks[0][0].is_burst:
            return (
                f"{seeds} to {most} seeds. The runs are bursts, and say nothing sure of a load that lasts: give more requests"
                " (--num-prompts)."
            )
        if self._wanted is None:
            return f"{most} seeds. A rate is recommended that {CONTENT:.0%} of other seeds take, with {CONFIDENCE:.0%} confidence."
        chances = [
            answer.fleet.chances for answer, _ in self._ranks if answer.fleet is not None and answer.fleet.chances
        ]
        if chances:
            about = self._ranks[0][0].candidate
            return (
                f"{len(chances[0][0].by_draw)} draws with the step times and the KV caches that they may have: {uncertainty(about).text()}."
                f" A fleet is recommended that is enough with {self._aims.confidence:.0%} or more. Fleets are simulated behind their router."
            )
        short = any(self._load_of(answer).is_short(answer.replicas) for answer, _ in self._ranks)
        return (
            f"{seeds} to {most} seeds. A fleet is recommended with which {CONTENT:.0%} of other seeds meet the goal,"
            f" with {CONFIDENCE:.0%} confidence: at most {allowed_misses(most)} of {most} seeds misses it. Fleets are simulated"
            " behind their router."
            + " Runs with fewer requests than the default (--num-prompts) may overstate it: few of them have the rare long requests."
            * short
        )

    def _document(self, text: str, about: Sequence[str], explained: Sequence[str]) -> dict[str, Any]:
        bills = {answer.candidate.name: bill for answer, bill in self._ranks}
        document = {
            "fragmeter": __version__,
            ASKED: self._request.asked,
            "requests_sha256": self._load.draw(self._aims.seed).at(1.0).sha256(),
            "recommendation": text,
            "details": list(about),
            "recommended": self._ranks[0][0].candidate.axis_values if self._ranks else None,
            "flags": flags_text(self._ranks[0][0]) if self._ranks else None,
            **({"serve": lines} if self._ranks and (lines := pair_lines(self._ranks[0][0], self._model)) else {}),
            "model": self._model,
            "goal": {"goodput": self._goal.objectives.limits, "attainment": self._goal.attainment},
            "load": self._load.description(),
            "requests": self._load.source(),
            "wanted_request_rate": self._wanted,
            "num_prompts": self._load.num_prompts(),
            "seeds": self._aims.seeds,
            "seed": self._aims.seed,
            "currency": self._priced.currency,
            "prices": self._priced.as_dict(),
            "gpus_without_price": list(self._priced.missing),
            "explained": list(explained),
            **({"not_cheaper": closed} if (closed := self._closed()) else {}),
            **({"pairs_not_cheaper": pairs} if (pairs := self._closed_pairs()) else {}),
            **({} if self._day is None else {"day": self._day.as_dict()}),
            "candidates": [_data(answer, bills.get(answer.candidate.name)) for answer in self._by_rank()],
        }
        then = self._request.then
        if then is not None:
            document["again"] = what_moved(then, document, self._ranks, self._searched, self._priced)
        return document

    def _closed(self) -> list[dict[str, Any]]:
        return [asdict(each) for contest in self._planner.contests for each in contest.closed]

    def _closed_pairs(self) -> dict[str, float | None]:
        return {
            name: _finite(cost) for contest in self._planner.contests for name, cost in contest.closed_pairs.items()
        }

    def _by_rank(self) -> list[Answer]:
        return [answer for answer, _ in self._ranks] + self._others


#: Of fleets with prefill and decode apart.
_MOVES = (
    f"Prefill and decode apart: KV caches move by NixlConnector at {Cluster.kv_transfer_bandwidth:g} GB/s from each replica that"
    f" prefills, to the decode replica with the fewest tokens ({Cluster.decode_router})."
)


def _pair_cost(cost: float, currency: str) -> str:
    return "no fleet serves the first draw" if cost == inf else f"{cost:,.2f} {currency}/h by draws"


def _finite(rate: float) -> float | None:
    """A rate as JSON data: None if it is infinite."""
    return None if rate == inf else rate


def _data(answer: Answer, bill: Bill | None) -> dict[str, Any]:
    """All data of a candidate."""
    candidate, found = answer.candidate, answer.found
    data: dict[str, Any] = {"candidate": candidate.axis_values, "refused": candidate.refused, "error": answer.error}
    if candidate.settings is not None:
        pool = capacity(candidate.started.launch)
        data |= {
            "settings": candidate.settings.as_dict(),
            "evidence": evidence(candidate.settings, served_at_rate(answer)).as_dict(),
            "memory": asdict(pool.stage),
            "kv_cache_tokens": pool.num_tokens,
            "inputs": inputs_of(candidate),
        }
    if found is not None:
        data |= {
            "request_rate": _finite(answer.rate),
            "every_rate_meets": answer.every_rate_meets,
            "seed_rates": [_finite(each) for each in found.seed_rates],
            "spread": found.spread,
            "saturated_request_rate": found.saturated,
            "attained_alone": found.alone.attained,
        }
    if answer.least_replicas is not None:
        data["least_replicas"] = answer.least_replicas
    if answer.prefill_replicas is not None:
        data["prefill_replicas"] = answer.prefill_replicas
    if answer.fleet is not None:
        rates = [_finite(each) for each in answer.fleet.rates]
        data["fleet"] = asdict(answer.fleet) | {"rates": rates, "sure_rate": _finite(answer.fleet.sure_rate)}
    if answer.known_rates is not None:
        data["known_rates"] = [_finite(each) for each in answer.known_rates]
    data |= (answer.detail or {}) | ({} if bill is None else {"bill": asdict(bill)})
    if answer.verified:
        data["verified"] = [asdict(each) for each in answer.verified]
    if answer.influences:
        data["sensitivity"] = [asdict(each) for each in answer.influences]
    return data
