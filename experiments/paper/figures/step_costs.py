"""Which step time of OPT-13B serves all figures of the paper: what it depends on beside sequences and prompt tokens.

All candidates have three coefficients from Figs 1 and 19a, and one fitted number, the scale of the whole step, on one
value, vLLM's bar of Fig 13a. Nothing else is fitted: no scale for another model, load or figure, no share of a sample
or a beam (Fig 14), no kernel of small blocks (Fig 18b).

- ``constant``: ``PaperCost``, 0.42 ms for each sequence.
- ``by context``: ``ContextCost``, 0.246 ms for each sequence and 0.53 us for each token of its context, the time in
  which the memory of the A100 reads its keys and values. At 330 tokens of context the two are equal.
- ``by context and batch``: the same, and a step of more than 95 sequences takes as much longer as DistServe measured.

The rule, stated before the runs: of each figure in ``GROUPS``, every published value on which no number is fitted is
compared under all candidates. The error is the absolute logarithm of simulated over published; values printed as 0
have none. Values of a figure share the figure's weight, and all figures have the same weight. The candidate with the
smaller weighted median (``MEDIAN_NOTE``) is adopted. Not among the figures: Figs 1 and 19a, which the coefficients are read from; Fig 15,
which hardly depends on the step time; FasterTransformer, with steps of another kind.

OPT-66B and OPT-175B have the coefficients of ``rate_sweep.costs``; the reading time of a context token is that of their
GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import log
from statistics import median

from ....reports.page.table import Table
from ....sim.types.optional import not_none
from ...runs.output import Report
from ..bench import Bench, Case
from ..block_sizes.block_sizes import ALPACA as ALPACA_LOAD
from ..block_sizes.block_sizes import METRIC as LATENCY_BY_SIZE
from ..block_sizes.block_sizes import RECOMPUTE, SHAREGPT, SWAP, SizeCase, latencies, scales
from ..comparison import Payload
from ..context_cost import Terms
from ..fit import Fit, fit
from ..paper import FIG2, FIG13A, FIG13B, SERIES, Experiment, Source
from ..published import paper_figures
from ..rate_sweep.panels import ALPACA, CROSSING, ORACLE, ORCAS, VLLM, lengths_of, published_panel
from ..rate_sweep.rate_sweep import Load, Search, System, crossings
from ..rows import Row, value_row
from . import fig12, fig14, fig16, fig17

FIGURE = "step-costs"
#: Figures with equal weights, and the documents that each consists of.
GROUPS = {
    "Fig 2": ("fig2",),
    "Fig 12": tuple(f"fig12{letter}" for letter in fig12.PANELS),
    "Fig 13": ("fig13a", "fig13b"),
    "Fig 14": tuple(f"fig14{letter}" for letter in fig14.PANELS),
    "Fig 16": ("fig16",),
    "Fig 17": ("fig17",),
    "Fig 18b": ("fig18b",),
    "Fig 19b": ("fig19b",),
}
_GROUP_OF = {figure: group for group, figures in GROUPS.items() for figure in figures}
#: A value by (figure, series, metric, x).
Key = tuple[str, str, str, float | None]


def compare_step_costs(bench: Bench, groups: Collection[str] = tuple(GROUPS)) -> Payload:
    """Every value of the figures under all candidates, with the first seed, and the candidate that the rule adopts.

    Args:
        groups: The figures that are compared.
    """
    source = replace(bench.source, seeds=bench.source.seeds[:1])
    figures = [figure for group in groups for figure in GROUPS[group]]
    fits = {terms: fit(bench, terms) for terms in Terms}
    found = {terms: dict(_simulated(figures, source, fits[terms])) for terms in Terms}
    published = dict(_published())
    rows = [_row(terms, key, published[key], value) for terms in Terms for key, value in found[terms].items()]
    errors = {str(terms): medians([row for row in rows if row["cost"] == terms]) for terms in Terms}
    return {
        "figure": FIGURE,
        "workload": f"{source.name}, and Alpaca ({source.alpaca.name}), seed {source.seeds[0]}",
        "rows": rows,
        "errors": errors,
        "adopted": min(errors, key=lambda name: errors[name]["all figures"]),
        "fitted": {str(terms): {"constants": 1, **fitted.describe()} for terms, fitted in fits.items()},
        "predicted_values": sum(row["log_error"] is not None for row in rows) // len(Terms),
    }


MEDIAN_NOTE = (
    "The weighted median of all figures: each figure has the same weight, and its values share it equally; it is the smallest"
    " error at which the values with an error no larger have half of the weight."
)


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """The median absolute log error of each figure, and the weighted median of all; see ``MEDIAN_NOTE``."""
    of: dict[str, list[float]] = {group: [] for group in GROUPS}
    for row in rows:
        if row["log_error"] is not None:
            of[_GROUP_OF[row["figure"]]].append(abs(row["log_error"]))
    weighted = [(error, Fraction(1, len(errors))) for errors in of.values() for error in errors]
    return {group: round(median(errors), 4) for group, errors in of.items() if errors} | {
        "all figures": round(_weighted_median(weighted), 4)
    }


def _weighted_median(weighted: Sequence[tuple[float, Fraction]]) -> float:
    """The least value at which half of the weight is reached."""
    half, reached = sum(weight for _, weight in weighted) / 2, Fraction()
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")


def _row(terms: Terms, key: Key, published: float, simulated: float) -> Row:
    figure, series, metric, x = key
    row = value_row(series, metric, published, [simulated], x=x, how="", decimals=4)
    error = None if key == _FITTED or not (published and simulated) else round(log(simulated / published), 4)
    return {
        "figure": figure,
        "cost": str(terms),
        **row,
        "kind": "fitted" if key == _FITTED else "predicted",
        "log_error": error,
    }


#: The value that the scales are fitted on.
_FITTED: Key = (FIG13A.figure, VLLM, FIG13A.metrics[0], None)


def _published() -> Iterator[tuple[Key, float]]:
    """The published values; those that the paper does not print are left out."""
    for experiment in (FIG2, FIG13A, FIG13B):
        for (series, metric), value in experiment.published().items():
            if value is not None:
                yield (experiment.figure, series, str(metric), None), value
    for figure, name in _panels():
        for series, value in published_panel(_facts(figure), name).items():
            yield (figure, _series(figure, series, name), CROSSING, None), value
    for figure, (name, _, _) in _BY_SIZE:
        facts = paper_figures()[figure]
        for size, value in zip(facts["block_sizes"], facts[name], strict=True):
            yield (figure, name, LATENCY_BY_SIZE, size), value


def _simulated(figures: Collection[str], source: Source, found: Fit) -> Iterator[tuple[Key, float]]:
    """The same values of these documents under a candidate with its fitted scale."""
    for experiment, lengths in ((FIG2, source), (FIG13A, source), (FIG13B, source.alpaca)):
        if experiment.figure in figures:
            yield from _bars(experiment, Bench(lengths), found)
    searches = [
        Search((figure, series), _with(system, found.terms), load, found.scale)
        for figure, series, system, load in _searched(source)
        if figure in figures
    ]
    for (figure, series), rate in crossings(searches, f"{FIGURE}, {found.terms}").items():
        yield (figure, series, CROSSING, None), rate
    for figure, (name, load, mode) in _BY_SIZE:
        if figure in figures:
            latency_by_size = _by_size(figure, SizeCase(load, source.seeds[0], 1, mode), source, found)
            yield from (((figure, name, LATENCY_BY_SIZE, size), value) for size, value in latency_by_size)


def _bars(experiment: Experiment, bench: Bench, found: Fit) -> Iterator[tuple[Key, float]]:
    seed = bench.source.seeds[0]
    cases = [Case(experiment, seed, policy, found.scale, found.terms) for policy in SERIES.values()]
    for series, run in zip(SERIES, bench.measure(cases, experiment.figure), strict=True):
        for metric in experiment.metrics:
            if experiment.published()[series, metric] is not None:
                yield (experiment.figure, series, metric, None), run.values[metric]


def _with(system: System, terms: Terms) -> System:
    return replace(system, steps=replace(not_none(system.steps), terms=terms))


def _panels() -> Iterator[tuple[str, str]]:
    """The panels of the rate sweeps: the document, and the name in the published facts."""
    yield from ((f"fig12{letter}", fig12.panel_name(letter)) for letter in fig12.PANELS)
    yield from ((f"fig14{letter}", f"{letter} {kind} {n}") for letter, (kind, n) in fig14.PANELS.items())
    yield from (("fig16", name) for name in fig16.PREFIX_TOKENS)
    yield "fig17", fig17.PANEL


def _facts(figure: str) -> str:
    """The name of a document's figure in the published facts."""
    return figure.rstrip("abcdef") if figure[:5] in ("fig12", "fig14") else figure


def _series(figure: str, series: str, panel: str) -> str:
    """The label of a series; Fig 16 has the same two systems in both of its panels."""
    return f"{series}, {panel.split(',')[0]}" if figure == fig16.FIGURE else series


def _searched(source: Source) -> Iterator[tuple[str, str, System, Load]]:
    """The document, series, system and load of each published rate."""
    seed = source.seeds[0]
    for letter, (model, dataset) in fig12.PANELS.items():
        rates = published_panel(fig12.FIGURE, fig12.panel_name(letter))
        for series in (*ORCAS, VLLM):
            lengths, span_s = lengths_of(dataset, source), fig12.span_s(model, series)
            load = fig12.load_of(series, lengths, rates[series], span_s, seed)
            yield f"fig12{letter}", series, fig12.system(model, dataset, series), load
    for letter, (kind, n) in fig14.PANELS.items():
        rates, most = published_panel(fig14.FIGURE, f"{letter} {kind} {n}"), fig14.trace_requests(letter, source)
        for series, rate in rates.items():
            load = fig14.load_of(lengths_of(ALPACA, source), rate, most, seed)
            yield f"fig14{letter}", series, fig14.system(kind, n, series, fig14.NO_SHARES), load
    for name, prefix_tokens in fig16.PREFIX_TOKENS.items():
        rates, lengths = published_panel(fig16.FIGURE, name), fig16.sentences(prefix_tokens, seed)
        for series in (ORACLE, VLLM):
            load = fig12.load(lengths, rates[series], fig16.DURATION_S, seed)
            yield fig16.FIGURE, _series(fig16.FIGURE, series, name), fig16.system(series, prefix_tokens), load
    for series, rate in published_panel(fig17.FIGURE, fig17.PANEL).items():
        load = fig12.load(fig17.conversations(seed), rate, fig17.DURATION_S, seed)
        yield fig17.FIGURE, series, fig17.system(series), load


#: Figs 18b and 19b: the name of a series, its load and its handling of preempted sequences.
_BY_SIZE = (
    ("fig18b", (SHAREGPT, SHAREGPT, RECOMPUTE)),
    ("fig18b", (ALPACA_LOAD, ALPACA_LOAD, RECOMPUTE)),
    ("fig19b", (RECOMPUTE, SHAREGPT, RECOMPUTE)),
    ("fig19b", (SWAP, SHAREGPT, SWAP)),
)


def _by_size(figure: str, case: SizeCase, source: Source, found: Fit) -> Iterator[tuple[float, float]]:
    """The latency of a load at each block size of a figure."""
    sizes = paper_figures()[figure]["block_sizes"]
    change = found.scale / scales(source)[case.load]
    cases = [replace(case, block_size=size, change=change, extra_ms=0.0, terms=found.terms) for size in sizes]
    return zip(sizes, latencies(source).measure(cases, figure), strict=True)


def print_step_costs(payload: Payload, report: Report) -> None:
    """Print the medians of each figure, and the candidate that the rule adopts."""
    report.print_line(f"{FIGURE}: {payload['workload']}")
    table = Table("median |log error|", *payload["errors"])
    for group in payload["errors"][Terms.NEITHER]:
        table.add_row(group, *(f"{errors[group]:.3f}" for errors in payload["errors"].values()))
    report.console.print(table)
    report.print_line(MEDIAN_NOTE)
    for name, constants in payload["fitted"].items():
        report.print_line(
            f"{name}: s = {constants['step_scale']:g}, {constants['constants']} constant fitted on {constants['on']};"
            f" {payload['predicted_values']} values predicted."
        )
    report.print_line(f"Adopted: {payload['adopted']}.")
