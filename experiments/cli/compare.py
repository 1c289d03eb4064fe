"""``fragmeter compare``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ...reports.data.results import read_documents
from ...reports.page.table import Table
from ...sim.config.settings import Settings
from ...sim.engine.replica import build
from ...sim.metrics.registry import headings, metric_text, share
from ...sim.metrics.views import PAPER_VIEW, definition_lines
from ...sim.output.files import require_apart
from ...sim.policy.options import option_names
from ...sim.types.bounds import Seeds
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading
from ..measured.evidence import evidence_lines, recorded_text
from ..runs.grid import Point, changed, known_name, listed
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files
from ..runs.near_saturation import CHANGE, RANGED, LatencyRange
from ..runs.output import RESULT_FILE, JsonTarget, Report
from ..runs.parallel import Workers
from ..runs.points import flat
from ..runs.serving import load_in_words
from ..runs.sweeping import sweep_points
from ..runs.unread import given
from ..sweep.paired import Difference, differences
from ..sweep.waste_cost_table import BASIS, check, definitions, page, tables, waste_costs
from ..sweep.waste_cost_table import Side as WasteSide
from .compare_engines import compare_engines
from .replica_flags import SETTINGS, SettingsFlags
from .sweep import WORKERS

COMPARISON = Group("Comparison", sort_key=-1)
DEFAULT_SEEDS, DEFAULT_CONFIDENCE = 5, 0.95
#: What a pool is computed from beside options of policies, and the limits of a step.
_OF_A_POOL = (
    "model", "gpu", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "quantization",
    "kv_cache_dtype", "max_model_len", "num_gpu_blocks_override",
)  # fmt: skip
_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
#: Metrics in the terminal table, and their labels.
_SHOWN = headings(
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "mean_normalized_latency_s",
    "mean_batch",
    "preemptions.recompute",
    "preemptions.swap",
    "refused",
    "kv_offloading.hit_rate",
    "speculative_decoding.spec_decode_acceptance_length",
    "speculative_decoding.spec_decode_acceptance_rate",
    share("token_states"),
)


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a name, the metrics of its runs, and the hashes of their workloads.

    Attributes:
        replica: Pool, CUDA graphs and step cost, which differ between policies by default.
        settings: Of its runs; None for result folders.
        is_beside: Whether it has what the first side's policy has by default.
        step_times: What those of a result folder rest on; empty for settings.
        summaries: Of its runs, with the classes of their loads; empty for result folders.
    """

    name: str
    runs: list[dict[str, float]]
    works: list[str]
    replica: dict[str, Any]
    settings: Settings | None = None
    is_beside: bool = False
    step_times: str = ""
    summaries: Sequence[Mapping[str, Any]] = ()

    @property
    def near(self) -> LatencyRange | None:
        """The mean range of its runs, if some are near saturation."""
        return LatencyRange.mean(self.summaries)

    @property
    def num_near(self) -> int:
        """Number of runs near saturation."""
        return sum("near_saturation" in each for each in self.summaries)


def compare(
    *folders: Annotated[Path, Parameter(group=COMPARISON)],
    replica: SETTINGS = SettingsFlags(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    workers: WORKERS = Workers(),
    sets: Annotated[list[str] | None, Parameter(name="--set", group=COMPARISON, negative_iterable="")] = None,
    seeds: Annotated[Seeds, Parameter(group=COMPARISON)] = DEFAULT_SEEDS,
    confidence: Annotated[float, Parameter(group=COMPARISON)] = DEFAULT_CONFIDENCE,
    own_defaults: Annotated[bool, Parameter(group=COMPARISON, negative="")] = False,
    waste: Annotated[bool, Parameter(group=COMPARISON, negative="")] = False,
    price: Annotated[float | None, Parameter(group=COMPARISON)] = None,
    engine_source: Annotated[list[Path] | None, Parameter(group=COMPARISON, negative_iterable="")] = None,
    out: Annotated[Path | None, RESULT_FILE] = None,
    markdown: Annotated[Path | None, RESULT_FILE] = None,
    json: JsonTarget = None,
) -> None:
    """Compare the metrics of runs or settings, with confidence intervals, or two checkouts of vLLM.

    Takes result folders of simulate --out, two or more --set, or --engine-source twice. The settings run over the same seeds, so each
    difference has a confidence interval (Student's t over the pairs of runs with one seed). The other flags are those
    of simulate and apply to every run. Sides with different policies have the pool, CUDA graphs and limits of the first.

    Args:
        folders: Result folders.
        sets: Settings of one side, as NAME=VALUE,NAME=VALUE.
        seeds: Runs of each side, with seeds from --seed on.
        confidence: Confidence level of the intervals, between 0 and 1.
        own_defaults: Give each policy the pool, CUDA graphs and limits of a step that it has by default.
        waste: Compare each --set, or the settings alone, with itself without each kind of waste: the requests/s of the
            same load with the slots of that bucket returned to the pool. All requests arrive at the start.
        price: With --waste: price of one GPU for an hour. Each row then has the price of a million output tokens.
        engine_source: Twice: a checkout of vLLM, a folder with an unpacked wheel, or a wheel. Both schedule the same load by their own
            scheduler and block pool (vllm-real); the answer is what moved, and the first step that differs.
        out: With --waste: file for the HTML page with the picture.
        markdown: With --engine-source: Markdown file for a pull request; - for standard output.
    """
    settings = replica.settings()
    report = Report(json, out=out, markdown=markdown)
    read = named_files(folders=folders, settings=replica, requests=requests, pacing=pacing, reading=reading, sets=sets)
    require_apart({"out": out, "json": json, "markdown": markdown}, read)
    inputs = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    if engine_source is not None:
        inapplicable = {
            "folders": folders,
            "set": sets,
            "waste": waste,
            "price": price,
            "out": out,
            "own_defaults": own_defaults,
        }
        compare_engines(report, inputs, engine_source, inapplicable)
        return
    if waste:
        if confidence != DEFAULT_CONFIDENCE:
            raise SettingError("confidence", confidence, "--waste gives no intervals; leave it out")
        _print_waste(report, inputs, folders, sets or [], seeds, workers, price, out)
        return
    if markdown is not None:
        raise UserError("--markdown goes with --engine-source; add it, or leave --markdown out")
    unused = next((name for name, value in (("price", price), ("out", out)) if value is not None), None)
    if unused:
        raise UserError(f"--{unused} goes with --waste; add it, or leave --{unused} out")
    if not 0 < confidence < 1:
        raise SettingError("confidence", confidence, "must lie between 0 and 1, such as 0.95")
    if bool(folders) == bool(sets) or len(folders or sets or ()) < 2:
        raise UserError("compare takes two or more result folders, or --set two or more times")
    if folders:
        _refuse_flags_of_runs(inputs, seeds, confidence, own_defaults)
        sides = [_read(folder) for folder in folders]
    else:
        sides = _run(inputs, sets or [], seeds, workers, own_defaults)
    base, *others = sides
    found = [(other, differences(base.runs, other.runs, confidence)) for other in others]
    load = load_in_words(inputs)
    if load is not None:
        report.print_line(f"Load, but for what is varied: {load}")
    for other, moved in found:
        report.console.print(_table(base, other, moved, confidence))
        report.print_line()
        for text in _remarks(base, other):
            report.print_line(text)
    for text in (PAPER_VIEW.categories["token_states"].defined, *_steps_text(sides)):
        report.print_line(text)
    report.data(
        {
            **({} if load is None else {"load": load}),
            "base": base.name,
            "runs": len(base.runs),
            "confidence": confidence,
            "near_saturation": [
                {"side": side.name, "runs": side.num_near} | asdict(near)
                for side in sides
                if (near := side.near) is not None
            ],
            "compared": [
                {"other": other.name, "same_requests": base.works == other.works, "metrics": _described(moved)}
                for other, moved in found
            ],
        }
    )


def _print_waste(
    report: Report,
    inputs: Inputs,
    folders: Sequence[Path],
    sets: Sequence[str],
    seeds: int,
    workers: Workers,
    price: float | None,
    out: Path | None,
) -> None:
    """Report the cost of each kind of waste for each side."""
    if folders:
        raise UserError("compare --waste runs settings again; give them with --set, not as result folders")
    check(price)
    _check_twice(sets)
    compared = [(text, changed(inputs, _values(text))) for text in sets] or [(inputs.settings.policy, inputs)]
    if any(side.pacing != Pacing() for _, side in compared):
        raise UserError("compare --waste lets all requests arrive at once; leave out flags of arrivals")
    rows = waste_costs([WasteSide(*each) for each in compared], seeds, workers, price)
    for found in tables(rows):
        report.console.print(found)
        report.print_line()
    defined = definition_lines(definitions(rows))
    for text in (*defined, BASIS, *evidence_lines(side.settings for _, side in compared)):
        report.print_line(text)
    if out is not None:
        load = f"Means over {seeds} seeds, the first of them {inputs.settings.seed}."
        report.point_to("Page", page(rows, load, out))
    report.data({"seeds": seeds, "first_seed": inputs.settings.seed, "price_per_gpu_hour": price, "rows": rows})


def _read(folder: Path) -> Side:
    """The one run of a result folder."""
    summary, about = read_documents(folder)
    replica = about["replica"] | {"cost": about["cost"].get("name")}
    step_times = recorded_text(about["settings"], about["cost"])
    works = [about["workload"]["sha256"]]
    return Side(str(folder), [_metrics(summary)], works, _compared(replica), step_times=step_times)


def _refuse_flags_of_runs(inputs: Inputs, seeds: int, confidence: float, own_defaults: bool) -> None:
    """Refuse flags of simulate and of how sides run if finished results are compared."""
    own = {
        "seeds": (seeds, DEFAULT_SEEDS),
        "confidence": (confidence, DEFAULT_CONFIDENCE),
        "own_defaults": (own_defaults, False),
    }
    given_flags = [*given(inputs), *((name, value) for name, (value, default) in own.items() if value != default)]
    if given_flags:
        raise SettingError(*given_flags[0], "result folders are compared as they are; give --set, or leave it out")


def _run(inputs: Inputs, sets: Sequence[str], seeds: int, workers: Workers, own_defaults: bool) -> list[Side]:
    """Run each side with the same seeds."""
    _check_twice(sets)
    given_sides = [_values(text) for text in sets]
    asked = [changed(inputs, values) for values in given_sides]
    served = asked
    if not own_defaults:
        served = [replace(side, settings=_beside(asked[0].settings, side.settings)) for side in asked]
    points = [
        Point({**values, "seed": seed}, changed(side, {"seed": seed}))
        for side, values in zip(served, given_sides, strict=True)
        for seed in (str(inputs.settings.seed + place) for place in range(seeds))
    ]
    swept = sweep_points(points, workers)
    for each in swept:
        if each.outcome.error:
            raise UserError(f"{each.point.axis_values}: {each.outcome.error}")
    sides = []
    for place, text in enumerate(sets):
        runs = swept[place * seeds : (place + 1) * seeds]
        summaries = [not_none(each.outcome.summary) for each in runs]
        chosen = runs[0].point.inputs.settings
        built = build(chosen)
        replica = _compared(built.describe() | {"cost": built.cost.name})
        works = [each.work_sha256 for each in runs]
        is_beside = served[place].settings is not asked[place].settings
        sides.append(Side(text, [*map(_metrics, summaries)], works, replica, chosen, is_beside, summaries=summaries))
    return sides


def _beside(base: Settings, other: Settings) -> Settings:
    """The settings of a side with the pool, CUDA graphs and limits of the base side in place of defaults of its policy.

    They are the side's own where the two have one policy, or differ in what a pool is computed from. A policy that schedules
    whole batches, whose limit is the size of a batch, keeps its limits and leaves those of others.
    """
    if other.policy == base.policy or any(getattr(base, name) != getattr(other, name) for name in _OF_A_POOL):
        return other
    given_base, given_other = dict(base.options), dict(other.options)
    both = {*option_names(base.kind.options_type)} & {*option_names(other.kind.options_type)}
    if any(given_base.get(name) != given_other.get(name) for name in both):
        return other
    built, own, plain = build(base), build(other), build(replace(other, options=()))
    if own.num_blocks * own.block_size != plain.num_blocks * plain.block_size:
        return other
    shared: dict[str, Any] = {
        "enforce_eager": built.enforce_eager,
        "num_gpu_blocks_override": built.num_blocks * built.block_size // own.block_size,
    }
    if base.kind.has_token_budget and other.kind.has_token_budget:
        shared |= {name: getattr(built.policy.limits, name) for name in _LIMITS}
    # What either side was given is its own.
    defaults = [name for name in shared if getattr(base, name) is getattr(other, name) is None]
    return replace(other, **{name: shared[name] for name in defaults})


def _check_twice(sets: Sequence[str]) -> None:
    if len(set(sets)) < len(sets):
        raise SettingError("set", sets[0], "is compared with itself; change one of the two")


def _values(text: str) -> dict[str, str]:
    """The settings of a side."""
    values = {}
    for part in listed(text):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise SettingError("set", text, "must be NAME=VALUE, such as block_size=8, or several with commas between")
        name = known_name(name, "set", text)
        if name == "seed":
            raise SettingError("set", text, "both sides have the same seeds; set the first with --seed")
        values[name] = value.strip()
    return values


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a summary, by path; ranges of latency have a place of their own."""
    numbers = {name: value for name, value in summary.items() if name not in ("refused_requests", "near_saturation")}
    return {
        name: value for name, value in flat(numbers) if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _steps_text(sides: Sequence[Side]) -> Iterator[str]:
    """How latency depends on the step times where it is near saturation, and what the step times rest on."""
    for side in sides:
        if side.num_near:
            runs = f"{side.num_near} of {len(side.summaries)} runs"
            yield f"{side.name}: latency is near saturation in {runs}, which ran also with steps {CHANGE:.0%} shorter and longer."
    yield from dict.fromkeys(side.step_times for side in sides if side.step_times)
    yield from evidence_lines(
        (side.settings, each["load"]) for side in sides if side.settings is not None for each in side.summaries
    )


def _described(moved: Sequence[Difference]) -> list[dict[str, Any]]:
    return [each.describe() for each in moved]


def _table(base: Side, other: Side, moved: Sequence[Difference], confidence: float) -> Table:
    """The terminal table; a star marks a difference with a confidence interval that excludes 0."""
    title = f"{base.name}  ->  {other.name}"
    table = Table("", "base", "other", "difference", "%", f"{confidence:.0%} interval", title=title)
    for each in moved:
        if each.metric in _SHOWN and (each.base or each.other):
            table.add_row(_SHOWN[each.metric], *_cells(each))
            for end, sign in (("shorter", "-"), ("longer", "+")):
                cells = [_end(side.near, end, each.metric) for side in (base, other)]
                if any(cells):
                    table.add_row(f"  steps {sign}{CHANGE:.0%}", *cells)
    return table


def _end(near: LatencyRange | None, end: str, metric: str) -> str:
    """One end of a range, if it is wide."""
    return (
        ""
        if near is None or metric not in RANGED or not near.is_wide(metric)
        else metric_text(metric, getattr(near, end)[metric])
    )


def _cells(moved: Difference) -> tuple[str, ...]:
    interval = moved.interval
    return (
        metric_text(moved.metric, moved.base),
        metric_text(moved.metric, moved.other),
        f"{_short(moved.difference)}{'*' if moved.is_sure else ''}",
        "" if moved.percent is None else f"{moved.percent:+.1f}",
        "" if interval is None else f"{_short(interval[0])} to {_short(interval[1])}",
    )


def _short(value: float) -> str:
    """A difference, which may be small beside what differs: about three digits; whole for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _compared(replica: Mapping[str, Any]) -> dict[str, Any]:
    """What a remark names where it differs."""
    tokens = replica["num_gpu_blocks"] * replica["block_size"]
    return {"tokens of the pool": tokens} | {name: replica.get(name) for name in ("enforce_eager", "cost")}


def _remarks(base: Side, other: Side) -> list[str]:
    """Remarks on the replicas, and on the confidence of the figures."""
    differ = [
        f"{name} {value} and {other.replica[name]}"
        for name, value in base.replica.items()
        if None not in (value, other.replica[name]) and value != other.replica[name]
    ]
    replicas = [f"The replicas differ, by flags or by the defaults of their policies: {', '.join(differ)}."]
    beside = [
        f"{other.name} has the pool, CUDA graphs and limits of {base.name}; --own-defaults gives each policy its own."
    ]
    alone = [text for side in (base, other) for text in _alone(side)]
    return replicas * bool(differ) + beside * other.is_beside + alone + _confidence(base, other)


def _alone(side: Side) -> Iterator[str]:
    """The number of prompts that had a step of their own, as ``simulate`` says it."""
    number = sum(run.get("prompts_alone", 0) for run in side.runs) / len(side.runs)
    if number:
        yield (
            f"{side.name}: {number:,.0f} prompts of a run, in the mean, are longer than max_num_batched_tokens; "
            "this policy divides no prompt, and each has a step of its own."
        )


def _confidence(base: Side, other: Side) -> list[str]:
    if base.works != other.works:
        return ["The two served different requests, which explain some of the difference."]
    if len(base.runs) == 1:
        return ["One run per side: more seeds give a confidence interval (--set and --seeds)."]
    return [f"* significant: the interval over {len(base.runs)} pairs of runs does not contain 0."]
