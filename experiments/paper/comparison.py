"""Figs 2, 13a and 13b rerun: published beside simulated values, and the sensitivity of each to the step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from ...reports.style.labels import metric_label
from .bench import Bench, Case, Measured
from .constants import STEP, scale
from .fit import FITTED_ON, ON, SCALES, Fit
from .paper import ALPACA_SET, FIG2, MAX_MODEL_LEN, SERIES, Experiment
from .published import published_mean_tokens, published_slots
from .rows import OTHER_SEEDS, STEP_CHANGES, Row, moved, value_row
from .sharing import Saved

Payload = dict[str, Any]
_DECIMALS, _SCALE_DECIMALS = 3, 6


def compare(experiment: Experiment, bench: Bench, fit: Fit, scales: Sequence[float] = SCALES) -> Payload:
    """The figure as a document: rows of published and simulated values, and their basis.

    Args:
        scales: Further scales of the step time at which every value is reported.
    """
    source = bench.source
    rows = compared_rows(experiment, bench, fit)
    one = bench.measure([Case(experiment, source.seeds[0], SERIES[FITTED_ON], fit.scale, fit.by_context)], "pool")[0]
    sensitivity = {"sensitivity": _sensitivities(experiment, bench, scales)} if scales else {}
    return {
        "figure": experiment.figure,
        "workload": source.description(experiment),
        "rows": rows,
        "num_blocks": one.num_blocks,
        "block_size": one.block_size,
        "step_scale": fit.scale,
        "fit": fit.describe(),
        "constants": [*STEP, scale(fit.scale, ON)],
        "seeds": list(source.seeds),
        **sensitivity,
        "basis": [pool_text(one), fit.description()],
        "remarks": [*lengths_lines(bench), *_seed_range_lines(rows, len(source.seeds))],
    }


def _sensitivities(experiment: Experiment, bench: Bench, scales: Sequence[float]) -> dict[str, Any]:
    seeds = bench.source.seeds[: len(OTHER_SEEDS) if experiment is FIG2 else 1]
    rows = sensitivity(experiment, bench, seeds, scales)
    return {"workload": bench.source.description(experiment, seeds), "seeds": list(seeds), "rows": rows}


def compared_rows(
    experiment: Experiment,
    bench: Bench,
    fit: Fit,
    systems: Mapping[str, str] = SERIES,
    metrics: Sequence[str] = (),
    to_the_end: bool = False,
) -> list[Row]:
    """Every value of the figure, published and simulated with all seeds of the source.

    If the source has a single seed, further seeds give the range. The change for 1 % of step time is a mean over the
    first seeds of the source.

    Args:
        systems: Series of the rows, and their policies.
        metrics: Metrics of the rows; by default those of the figure.
        to_the_end: See ``Case``.
    """
    seeds = bench.source.seeds
    few = seeds[: len(OTHER_SEEDS)]
    other_seeds = seeds if len(seeds) > 1 else OTHER_SEEDS
    groups: dict[str | float, tuple[tuple[int, ...], float]] = {
        "requested": (seeds, 1),
        "other_seeds": (other_seeds, 1),
        "few": (few, 1),
    }
    groups |= {change: (few, change) for change in STEP_CHANGES}
    cases = {
        (name, what): [
            Case(experiment, seed, policy, round(fit.scale * change, _SCALE_DECIMALS), fit.by_context, to_the_end)
            for seed in chosen
        ]
        for name, policy in systems.items()
        for what, (chosen, change) in groups.items()
    }
    runs = bench.measure_groups(cases, experiment.figure)
    return [
        row
        for name in systems
        for row in _rows(experiment, name, metrics or experiment.metrics, {what: runs[name, what] for what in groups})
    ]


def _rows(
    experiment: Experiment, series: str, metrics: Sequence[str], runs: dict[Any, list[Measured]]
) -> Iterator[Row]:
    published = experiment.published()
    for metric in metrics:
        values = {what: [run.values[metric] for run in mine] for what, mine in runs.items()}
        yield row(
            series,
            metric,
            published.get((series, metric)),
            runs["requested"],
            kind="fitted" if series in experiment.fitted else "predicted",
            other_seeds=values["other_seeds"],
            step_1pct=moved(values["few"], *(values[change] for change in STEP_CHANGES)),
        )


def row(series: str, metric: str, published: float | None, runs: Sequence[Measured | Saved], **more: Any) -> Row:
    """One value beside the published one, as ``value_row``, and its mean over time (``over_time``)."""
    cells = value_row(series, metric, published, [run.values[metric] for run in runs], **more)
    if metric in runs[0].over_time:
        cells["over_time"] = round(fmean(run.over_time[metric] for run in runs), _DECIMALS)
    return cells


def sensitivity(
    experiment: Experiment, bench: Bench, seeds: Sequence[int], scales: Sequence[float] = SCALES
) -> list[Row]:
    """Every value of the figure at every scale, as a mean over the seeds."""
    published = experiment.published()
    cases = {
        (scale, name): [Case(experiment, seed, policy, scale) for seed in seeds]
        for name, policy in SERIES.items()
        for scale in scales
    }
    measured = bench.measure_groups(cases, f"{experiment.figure}, s = {scales[0]:.2f} to {scales[-1]:.2f}")
    return [
        {
            "scale": scale,
            "series": name,
            "metric": metric,
            "published": published[name, metric],
            "simulated": round(fmean(run.values[metric] for run in runs), _DECIMALS),
        }
        for (scale, name), runs in measured.items()
        for metric in experiment.metrics
    ]


def pool_text(run: Measured) -> str:
    """The size of the pool beside the published one."""
    slots = run.num_blocks * run.block_size
    text = f"Pool: {run.num_blocks} blocks of {run.block_size} slots, {slots:,} in all"
    return f"{text}; the paper's Table 1 prints {published_slots():,.0f}."


def lengths_lines(bench: Bench) -> Iterator[str]:
    """Remark on whether a file of pairs is the paper's."""
    exact = bench.source.exact
    if exact is not None:
        held = exact.capped(MAX_MODEL_LEN, strict=False)
        prompt, output = published_mean_tokens("Alpaca" if bench.source.drawn_from == ALPACA_SET else "ShareGPT")
        yield (
            f"Lengths: {len(held):,} pairs fit the model, means {held.prompt_tokens.mean():.2f} and"
            f" {held.output_tokens.mean():.2f} tokens; the paper's Fig 11 prints {prompt:g} and {output:g}."
        )


def _seed_range_lines(rows: list[Row], num_seeds: int) -> Iterator[str]:
    """Remark on the range over seeds: one draw is a sample."""
    if num_seeds > 1:
        widest = max(rows, key=lambda row: row["maximum"] - row["minimum"])
        label = metric_label(widest["metric"])
        yield (
            f"Single seeds vary: {widest['series']}, {label}, from {widest['minimum']:.1f} to"
            f" {widest['maximum']:.1f} over {num_seeds} seeds. Compare the mean, not a single seed."
        )
