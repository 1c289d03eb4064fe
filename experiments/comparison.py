"""Figs 2 and 13a rerun: published beside simulated, and how each value hangs on the step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from ..reports.labels import metric_label
from .bench import Bench, Case, Measured
from .facts import published_mean_tokens, published_slots
from .fit import FITTED_ON, SCALES, Fit
from .paper import FIG2, FIG13A, MAX_MODEL_LEN, SERIES, Experiment

Row = dict[str, Any]
Payload = dict[str, Any]
_DECIMALS = 3


def compare(experiment: Experiment, bench: Bench, fit: Fit) -> Payload:
    """The figure as a document: design.md's table, and what it rests on."""
    source = bench.source
    rows = compared_rows(experiment, bench, fit)
    one = bench.measure([Case(experiment, source.seeds[0], SERIES[FITTED_ON], fit.scale)], "pool")[0]
    sensitivity_seeds = source.seeds if experiment is FIG2 else source.seeds[:1]
    return {
        "figure": experiment.figure,
        "workload": source.told(experiment),
        "rows": rows,
        "num_blocks": one.num_blocks,
        "block_size": one.block_size,
        "step_scale": fit.scale,
        "fit": fit.describe(),
        "seeds": list(source.seeds),
        "sensitivity": {
            "workload": source.told(experiment, sensitivity_seeds),
            "seeds": list(sensitivity_seeds),
            "rows": sensitivity(experiment, bench, sensitivity_seeds),
        },
        "basis": [pool_told(one), fit.told()],
        "remarks": [*lengths_told(bench), *_wandering_told(rows, len(source.seeds))],
    }


def compared_rows(experiment: Experiment, bench: Bench, fit: Fit) -> list[Row]:
    """Every value of the figure, published and simulated with all seeds of the source."""
    cases = {
        name: [Case(experiment, seed, policy, fit.scale) for seed in bench.source.seeds]
        for name, policy in SERIES.items()
    }
    runs = bench.measure_groups(cases, experiment.figure)
    return [row for name in SERIES for row in _rows(experiment, name, runs[name])]


def _rows(experiment: Experiment, series: str, runs: list[Measured]) -> Iterator[Row]:
    published = experiment.published()
    for metric in experiment.metrics:
        fitted = experiment is FIG13A and series == FITTED_ON
        yield row(series, metric, published[series, metric], runs, "fitted" if fitted else "predicted")


def row(series: str, metric: str, published: float | None, runs: list[Measured], kind: str = "predicted") -> Row:
    """One value beside the published one, in design.md's form.

    ``simulated`` is the mean over the runs, with ``minimum`` and ``maximum`` where there are several;
    ``over_time`` is the same value as a mean over time in place of iterations.
    """
    values = [run.values[metric] for run in runs]
    simulated = round(fmean(values), _DECIMALS)
    cells = {
        "series": series,
        "metric": metric,
        "x": None,
        "published": published,
        "how": None if published is None else "label",
        "simulated": simulated,
        "error": None if published is None else round(simulated - published, _DECIMALS),
        "kind": kind,
    }
    if len(runs) > 1:
        cells |= {"minimum": round(min(values), _DECIMALS), "maximum": round(max(values), _DECIMALS)}
    if metric in runs[0].over_time:
        cells["over_time"] = round(fmean(run.over_time[metric] for run in runs), _DECIMALS)
    return cells


def sensitivity(experiment: Experiment, bench: Bench, seeds: Sequence[int]) -> list[Row]:
    """Every value of the figure at every scale of ``SCALES``, as a mean over the seeds."""
    published = experiment.published()
    cases = {
        (scale, name): [Case(experiment, seed, policy, scale) for seed in seeds]
        for name, policy in SERIES.items()
        for scale in SCALES
    }
    measured = bench.measure_groups(cases, f"{experiment.figure}, s = {SCALES[0]:.2f} to {SCALES[-1]:.2f}")
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


def pool_told(run: Measured) -> str:
    """The size of the pool beside the published one."""
    slots = run.num_blocks * run.block_size
    told = f"Pool: {run.num_blocks} blocks of {run.block_size} slots, {slots:,} in all"
    return f"{told}; the paper's Table 1 prints {published_slots():,.0f}."


def lengths_told(bench: Bench) -> Iterator[str]:
    """Whether a file of pairs is the paper's."""
    exact = bench.source.exact
    if exact is not None:
        held = exact.capped(MAX_MODEL_LEN, strict=False)
        prompt, output = published_mean_tokens()
        yield (
            f"Lengths: {len(held):,} pairs fit the model, means {held.prompt_tokens.mean():.2f} and"
            f" {held.output_tokens.mean():.2f} tokens; the paper's Fig 11 prints {prompt:g} and {output:g}."
        )


def _wandering_told(rows: list[Row], num_seeds: int) -> Iterator[str]:
    """That one draw is not the truth."""
    if num_seeds > 1:
        widest = max(rows, key=lambda row: row["maximum"] - row["minimum"])
        label = metric_label(widest["metric"])
        yield (
            f"Single seeds wander: {widest['series']}, {label}, from {widest['minimum']:.1f} to"
            f" {widest['maximum']:.1f} over {num_seeds} seeds. Take the mean, and no one draw for the truth."
        )
