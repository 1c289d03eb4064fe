"""``fragmeter plan --goodput``: the candidates and the search of a capacity plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...sim.metrics.objectives import objectives
from ...sim.output.folders import OutputFolder
from ...sim.spec import published_formats
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces.arrivals.pacing import read_curve
from ..measured.scrapes import VLLM
from ..runs.grid import NONE
from ..runs.inputs import Inputs
from ..runs.output import Report, print_beside
from ..runs.parallel import Workers
from ..runs.points import Store
from ..runs.slo_check import Goal
from ..runs.unread import LOAD_FIELDS, refuse_unread
from ..sglang_server.start import started
from ..vllm_serve.line import ServeLine
from ..vllm_serve.start import shape_of
from .answer import ranked
from .candidates import CHECKPOINT, Candidate, Choices, candidates
from .contender import Question
from .day import Day
from .fleet import DEFAULT_FLEET_SEEDS
from .load import Load
from .loads import Shared
from .manifest import loadable
from .max_rate import DEFAULT_SEEDS
from .measurement import with_measured_steps
from .plan import Plan
from .planning import Planner
from .prices import Prices, prices
from .request import Aims, PlanRequest
from .unlisted import RANKS, Contest, groups_of

_RANKS, _STAGES = "tensor_parallel_size", "pipeline_parallel_size"
#: What is tried with the most ranks where no number of ranks starts on any card.
_MORE_GPUS = {_STAGES: ["1", "2", "4"], "enable_expert_parallel": ["none", "true"]}
#: Axes of parallelism: who lists one has chosen how a model is divided.
_PARALLELISM = {
    _RANKS, "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
}  # fmt: skip
#: Axes of number formats: who lists one has chosen the checkpoint.
_FORMATS = {"quantization", "kv_cache_dtype", "speculative_config"}
#: Seconds until an ordered replica takes requests, if the user gives none.
DEFAULT_STARTUP_S = 120.0
#: Choices of fleets that have one size.
_OF_ONE_SIZE = ("prefill_replicas", "data_parallel_size")
#: Choices that apply to whole fleets.
_OF_FLEETS = ("router", "prefill_replicas")


def search(aims: Aims, request: PlanRequest, workers: Workers, out: OutputFolder | None, report: Report) -> Plan:
    """Find the plan.

    Raises:
        UserError: An invalid input, before anything is simulated.
    """
    shared, known = request.shared, prices(aims.prices)
    goal = shared.goal(aims.attainment) if shared else Goal(objectives(not_none(aims.goodput)), aims.attainment)
    if aims.deploy is not None:
        if out is None:
            raise SettingError("deploy", aims.deploy, "has no place; give --out")
        if request.line.server != VLLM:
            remedy = f"writes manifests of vLLM, and the line starts {request.line.server}; leave it out"
            raise SettingError("deploy", aims.deploy, remedy)
        loadable(request.model or request.line.model)
    line = request.line.as_planned()
    day, inputs = _day(request.inputs, request.choices, aims)
    request = replace(request, line=line, inputs=inputs)
    # The load first: whether each candidate starts, and with which change it would, takes seconds.
    load = _load(inputs, shape_of(line, request.model).name, aims.seed, shared)
    longest = load.longest_tokens
    found, unlisted = _candidates(request, aims, known)
    groups = groups_of(found, unlisted)
    found = [candidate for group in groups for candidate in group]
    priced = known.for_gpus(candidate.started.launch.gpu.name for candidate in found)
    _refuse_unread(request, [candidate for candidate in found if candidate.settings], load, aims.seed)
    groups = [[_long_enough(candidate, longest) for candidate in group] for group in groups]
    wanted = _wanted(load)
    _refuse_of_fleets(aims, request.choices, wanted, day)
    aims = replace(aims, seeds=aims.seeds or (DEFAULT_SEEDS if wanted is None else DEFAULT_FLEET_SEEDS))
    seeds = range(aims.seed, aims.seed + not_none(aims.seeds))
    question = Question(load, goal, seeds, wanted, aims.confidence, aims.spare)
    planner, say = Planner(question, workers, None if out is None else Store(out)), _Progress(priced.currency, wanted)
    try:
        answers = planner.answers(groups, priced, say, _tries_pairs(aims, request, unlisted, day))
    except KeyboardInterrupt:
        for contest in planner.contests:
            report.print_line(say.interrupted(contest))
        raise
    plan_of_day = None
    if day is not None and (ranks := ranked(answers, load, priced, wanted)):
        best, bill = ranks[0]
        startup_s = DEFAULT_STARTUP_S if aims.startup_seconds is None else aims.startup_seconds
        plan_of_day = planner.over_day(best, day, startup_s, bill.per_hour / bill.replicas)
    return Plan(aims, request, planner, priced, answers, plan_of_day)


def _candidates(request: PlanRequest, aims: Aims, known: Prices) -> tuple[list[Candidate], list[str]]:
    """The candidates, and the axes that are not listed; where no number of ranks starts, those with stages, too."""
    axes, unlisted = _opened(request.line, request, aims, known)
    gpus = axes.pop("gpu")

    def of(axes: dict[str, list[str]], unlisted: list[str]) -> list[Candidate]:
        rest = request.model, request.log, aims.cost, aims.server
        return candidates(request.line, gpus, axes, *rest, unlisted=unlisted)

    found = of(axes, unlisted)
    if _RANKS in unlisted and not any(candidate.settings for candidate in found):
        more = _MORE_GPUS if found[0].started.launch.model.experts else {_STAGES: _MORE_GPUS[_STAGES]}
        wider = of(axes | {_RANKS: [RANKS[-1]]} | more, [*unlisted, *more])
        if any(candidate.settings for candidate in wider):
            found, unlisted = wider, [*unlisted, *more]
    return found if aims.measured is None else with_measured_steps(found, aims.measured), unlisted


def _refuse_of_fleets(aims: Aims, choices: Choices, wanted: float | None, day: Day | None) -> None:
    """Refuse what is of fleets without a wanted rate, and spare replicas of fleets of several sizes."""
    for name in _OF_FLEETS:
        if wanted is None and name in choices.axes():
            remedy = "is of a fleet, for a wanted rate; give --request-rate"
            raise SettingError(name, getattr(choices, name), remedy)
    if aims.spare and (wanted is None or day is not None or choices.prefill_replicas is not None):
        remedy = "is of a fleet of equal replicas of one size; give --request-rate, without --rate-curve and --prefill-replicas"
        raise SettingError("spare", aims.spare, remedy)


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
    without spare replicas or measured steps."""
    others = aims.spare or aims.measured or day or request.choices.prefill_replicas
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


def _load(inputs: Inputs, model_name: str, seed: int, shared: Shared | None) -> Load:
    """The load; refused if a request is longer than the model."""
    settings = replace(inputs.settings, model=model_name, max_model_len=None, seed=seed)
    if shared is not None:
        return shared.load(settings, inputs.requests.num_prompts)
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
