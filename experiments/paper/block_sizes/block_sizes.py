"""Figs 18b and 19b: mean normalised latency by block size, and by the handling of preempted requests.

Set-up, from the paper: OPT-13B on an A100-40GB, ShareGPT at 2.01 and Alpaca at 30.1 requests/s, block sizes 1 to 256.
The paper does not give the span over which requests arrive. Here it is the 900 s of its Fig 2, and the remarks give the
results for 450 and 1,800 s. The step time depends on the context (``ContextCost``). For ShareGPT it has the scale
fitted on Fig 13a.

Two sets of numbers are fitted on Fig 18b. The first is the kernel time per token of context beyond the reading, one
number each for blocks of 1, 2, 4 and 8 tokens, on ShareGPT's exact pairs. The paper gives the kernel as the reason for the left
flank, and prints no curve of it by block size. The second is the scale for Alpaca, on block size 64, because the scale
of Fig 13a leaves that server idle; one for drawn lengths and one for the exact pairs. All else is predicted: the right flank, which is memory; all of Alpaca's values but
one point; and all of Fig 19b.

Latencies of an overloaded server grow with the length of the trace. One percent of step time changes them by tens of
percent. So an error of a factor is a few percent of step time; docs/results/rates.md has the change for each value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ....sim import Workload, simulate
from ....sim.metrics.requests import request_times
from ...runs.output import track
from ...runs.parallel import in_parallel
from ..bench import Bench
from ..comparison import Payload
from ..constants import STEP, SWAPS, Constant, constant, scale
from ..context_cost import ContextCost, reading_ms
from ..fit import CONTEXT_STEP_SCALE, ON
from ..paper import FIG2, SERIES, Experiment, Source
from ..published import paper_figures
from ..rows import OTHER_SEEDS, STEP_CHANGES, Row, accuracy, as_finding, moved, value_row
from ..settings import paper_settings

#: Approximate error of values read off a plot.
_READING = 0.05


def best_size(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    """A finding: whether the best simulated block size, of those not fitted, is nearly the best in the figure.

    Args:
        rows: One series.
        limit: Allowed excess of its published latency over the lowest published one, as a share of that.
    """
    mine = min((row for row in rows if row["kind"] == "predicted"), key=lambda row: row["simulated"])
    best = min(rows, key=lambda row: row["published"])
    above = mine["published"] / best["published"] - 1
    text = (
        f"{mine['series']}: the best block size, of those not fitted, is {mine['x']:g}; by the figure its latency is"
        f" {above:.0%} above that of the best there, {best['x']:g}, limit {limit:.0%}."
    )
    return as_finding(text, above <= limit)


def wasted(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    """A finding: whether nearly empty blocks cost as much as in the figure, from the first row to the last.

    Args:
        rows: One series, by block size.
        limit: Allowed error of the ratio of the two latencies, as a share of the published ratio.
    """
    first, last = rows[0], rows[-1]
    found, published = (last[side] / first[side] for side in ("simulated", "published"))
    text = (
        f"{first['series']}: block size {last['x']:g} takes {found:.1f} times as long as {first['x']:g}, in the figure"
        f" {published:.1f} times; limit {limit:.0%}."
    )
    return as_finding(text, abs(found / published - 1) <= limit)


def quicker_series(rows: Sequence[Row], first: str, second: str) -> dict[str, Any]:
    """A finding: whether the same one of two series has the lower latency at each block size.

    Block sizes at which the two published values differ by less than their reading error are left out.
    """
    at = {(row["series"], row["x"]): row for row in rows}
    clear, same = 0, []
    for x in sorted({row["x"] for row in rows}):
        one, other = at[first, x], at[second, x]
        if abs(one["published"] / other["published"] - 1) > _READING:
            clear += 1
            # On a tie neither series is quicker.
            if (one["published"] - other["published"]) * (one["simulated"] - other["simulated"]) > 0:
                same.append(x)
    text = (
        f"{first.capitalize()} or {second}, the same one is quicker at {len(same)} of the {clear} block sizes at which"
        f" the figure's two values differ by more than {_READING:.0%}: {', '.join(f'{x:g}' for x in same) or 'none'}."
    )
    return as_finding(text, len(same) == clear)


METRIC = "normalized_latency_s_per_token"
SHAREGPT, ALPACA = "ShareGPT 2.01 req/s", "Alpaca 30.1 req/s"
_RATES = {SHAREGPT: 2.01, ALPACA: 30.1}
#: ms per token of context beyond the reading, by block size: fitted on ShareGPT in Fig 18b.
EXTRA_MS = {1: 0.00143, 2: 0.00126, 4: 0.00127, 8: 0.00063}
#: Fitted on Alpaca in Fig 18b, at this block size: on drawn lengths, and on the exact pairs.
ALPACA_SCALE, ALPACA_EXACT_SCALE, ALPACA_FITTED_ON = 1.258, 1.297, 64
RECOMPUTE, SWAP = "recompute", "swap"
#: Spans reported beside the 900 s, and their block sizes.
_SPANS_S, _SPAN_SIZES = (450, 900, 1800), (16, 256)
_WITHIN = 0.50


@dataclass(frozen=True, slots=True)
class SizeCase:
    """One run.

    Attributes:
        load: The requests, by the name in the figure.
        change: Factor on the load's scale of the step time.
        extra_ms: Kernel time per token of context in place of ``EXTRA_MS``.
    """

    load: str
    seed: int
    block_size: int
    preemption_mode: str = RECOMPUTE
    change: float = 1.0
    duration_s: float = FIG2.duration_s
    extra_ms: float | None = None

    @property
    def experiment(self) -> Experiment:
        """The experiment that determines the requests."""
        return replace(FIG2, request_rate=_RATES[self.load], duration_s=self.duration_s)


def scales(source: Source) -> dict[str, float]:
    """Scale of the step time of each load, given the source of ShareGPT's lengths."""
    of_alpaca = ALPACA_SCALE if source.alpaca.exact is None else ALPACA_EXACT_SCALE
    return {SHAREGPT: CONTEXT_STEP_SCALE, ALPACA: of_alpaca}


def measure(workload: Workload, case: SizeCase, of_load: float) -> float:
    """Serve a workload to the last request; return the mean normalised latency in s/token.

    Args:
        of_load: Scale of the step time of the load.
    """
    scale = round(of_load * case.change, 6)
    extra_ms = EXTRA_MS.get(case.block_size, 0.0) if case.extra_ms is None else case.extra_ms
    cost = ContextCost(scale, case.block_size, extra_ms)
    chosen = paper_settings(policy=SERIES["vLLM"], block_size=case.block_size, preemption_mode=case.preemption_mode)
    return float(request_times(simulate(chosen, workload, cost)).normalized_latency_s.mean())


class Latencies:
    """Runs cases over one source of ShareGPT's lengths, each once."""

    def __init__(self, source: Source) -> None:
        self._sources = {SHAREGPT: source, ALPACA: source.alpaca}
        self._scales = scales(source)
        self._found: dict[SizeCase, float] = {}

    def measure(self, cases: Sequence[SizeCase], subject: str) -> list[float]:
        """The results of the cases, in their order."""
        missing = [case for case in dict.fromkeys(cases) if case not in self._found]
        works = {key: self._sources[key[0]].workload(key[1], key[2]) for key in {_key(case) for case in missing}}
        results = in_parallel(measure, [(works[_key(case)], case, self._scales[case.load]) for case in missing])
        for case, found in zip(missing, track(results, subject, len(missing)), strict=True):
            self._found[case] = found
        return [self._found[case] for case in cases]

    def description(self, load: str) -> str:
        """Description of a load, for titles."""
        source = self._sources[load]
        return source.description(SizeCase(load, source.seeds[0], 1).experiment)


def _key(case: SizeCase) -> tuple[str, Experiment, int]:
    return case.load, case.experiment, case.seed


@lru_cache(maxsize=2)
def latencies(source: Source) -> Latencies:
    """The runs over a source, shared by both figures."""
    return Latencies(source)


def fig18b(bench: Bench) -> Payload:
    """Fig 18b as a document."""
    modes = {SHAREGPT: (SHAREGPT, RECOMPUTE), ALPACA: (ALPACA, RECOMPUTE)}
    payload = _document("fig18b", modes, bench.source)
    rows = payload["rows"]
    remarks = [step_change_text(_side(rows, SHAREGPT)), *_spans(bench.source), _idle_text(bench.source), _curve_text()]
    return payload | {"findings": findings(rows), "remarks": remarks}


#: What the scale of each load is fitted on.
_SCALED_ON = {SHAREGPT: ON, ALPACA: f"Fig 18b's Alpaca at block size {ALPACA_FITTED_ON}"}


def _constants(runs: Iterable[tuple[str, str]], source: Source) -> Iterator[Constant]:
    """The constants of runs, given by load and handling of preempted sequences."""
    loads, modes = map(set, zip(*runs, strict=True))
    yield from STEP
    yield from (scale(value, _SCALED_ON[load]) for load, value in scales(source).items() if load in loads)
    for size, ms in EXTRA_MS.items():
        on = f"Fig 18b's ShareGPT at block size {size}, exact pairs"
        yield constant("kernel, context token (us)", 1000 * ms, on)
    if SWAP in modes:
        yield from SWAPS


def findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Findings of Fig 18b: the error on either side, the best block size, and the cost of the largest."""
    right = _side(rows, SHAREGPT)
    return [
        accuracy(right, "ShareGPT, block sizes 16 to 256, where memory decides"),
        *(best_size([row for row in rows if row["series"] == load], _WITHIN) for load in (SHAREGPT, ALPACA)),
        wasted(right, _WITHIN),
        accuracy(_side(rows, ALPACA, left=True), "Alpaca, block sizes 1 to 8, by ShareGPT's fitted kernel"),
        accuracy(_side(rows, ALPACA), "Alpaca, block sizes 16 to 256, where memory decides"),
    ]


def _side(rows: Sequence[Row], series: str, left: bool = False) -> list[Row]:
    """The block sizes at which memory determines the latency, or on the left those at which the kernel does."""
    return [row for row in rows if row["series"] == series and (row["x"] <= max(EXTRA_MS)) == left]


def fig19b(bench: Bench) -> Payload:
    """Fig 19b as a document."""
    modes = {mode: (SHAREGPT, mode) for mode in (RECOMPUTE, SWAP)}
    payload = _document("fig19b", modes, bench.source)
    rows = payload["rows"]
    right = [row for row in rows if row["x"] > max(EXTRA_MS)]
    return payload | {
        "findings": [
            quicker_series(rows, RECOMPUTE, SWAP),
            accuracy(right, "Block sizes 16 to 256, where memory decides"),
        ],
        "remarks": [step_change_text(right), _own_noise()],
    }


def _document(figure: str, series: Mapping[str, tuple[str, str]], source: Source) -> Payload:
    runs = latencies(source)
    published = paper_figures()[figure]
    sizes = published["block_sizes"]
    rows = []
    for name, (load, mode) in series.items():
        cases = {size: _cases(load, mode, size, source.seeds) for size in sizes}
        every = [case for group in cases.values() for some in group.values() for case in some]
        runs.measure(every, f"{figure}, {name}")
        for size, value in zip(sizes, published[name], strict=True):
            found = {what: runs.measure(some, figure) for what, some in cases[size].items()}
            kind = "fitted" if figure == "fig18b" and _is_fitted(load, size) else "predicted"
            rows.append(_row(name, size, value, published["how"], kind, found))
    loads = dict.fromkeys(load for load, _ in series.values())
    return {
        "figure": figure,
        "workload": "; ".join(runs.description(load) for load in loads),
        "x_is": "block size, tokens",
        "rows": rows,
        "seeds": list(source.seeds),
        "constants": list(_constants(series.values(), source)),
        "basis": [_scales_text(loads, scales(source)), _extra_text()],
    }


def _cases(load: str, mode: str, size: int, seeds: Sequence[int]) -> dict[Any, list[SizeCase]]:
    requested = [SizeCase(load, seed, size, mode) for seed in seeds]
    other_seeds = [SizeCase(load, seed, size, mode) for seed in OTHER_SEEDS[:2]]
    changed = {change: [replace(case, change=change) for case in requested[:1]] for change in STEP_CHANGES}
    return {"requested": requested, "other_seeds": other_seeds, "one": requested[:1], **changed}


def _row(series: str, size: int, published: float, how: str, kind: str, found: Mapping[Any, list[float]]) -> Row:
    return value_row(
        series,
        METRIC,
        published,
        found["requested"],
        x=size,
        how=how,
        kind=kind,
        other_seeds=found["other_seeds"],
        step_1pct=moved(found["one"], *(found[change] for change in STEP_CHANGES)),
    )


def _is_fitted(load: str, size: int) -> bool:
    return size in EXTRA_MS if load == SHAREGPT else size == ALPACA_FITTED_ON


def step_change_text(rows: Sequence[Row]) -> str:
    """The change in step time that meets each published value, to first order.

    Latencies near a full pool are a steep power of the step time.
    """
    changes = [
        (row["published"] / row["simulated"]) ** (row["simulated"] / (100 * row["step_1pct"])) - 1 for row in rows
    ]
    return (
        f"How steep this is: step times changed by {min(changes):+.1%} to {max(changes):+.1%} would meet the values at block"
        f" sizes {min(row['x'] for row in rows)} and more, each by itself and to first order."
    )


def _own_noise() -> str:
    """The difference between the paper's two figures for the values that both show."""
    one, other = (paper_figures()[name] for name in ("fig18b", "fig19b"))
    pairs = list(zip(one["block_sizes"], one[SHAREGPT], other[RECOMPUTE], strict=True))
    x, first, second = max(pairs, key=lambda pair: abs(pair[1] / pair[2] - 1))
    return (
        "Fig 18b's ShareGPT values and Fig 19b's for recomputing are of one set-up; they differ by up to"
        f" {abs(first / second - 1):.0%} (block size {x}: {first:g} and {second:g}), and no simulation can meet both."
    )


def _spans(source: Source) -> Iterator[str]:
    """Results for other lengths of the trace, with the first seed."""
    for size in _SPAN_SIZES:
        cases = [SizeCase(SHAREGPT, source.seeds[0], size, duration_s=span) for span in _SPANS_S]
        found = latencies(source).measure(cases, "other spans")
        values = ", ".join(f"{value:.3f} ({span:g} s)" for span, value in zip(_SPANS_S, found, strict=True))
        yield f"ShareGPT at block size {size}, seed {source.seeds[0]}, by how long requests arrive: {values}."


def _idle_text(source: Source) -> str:
    """Alpaca with the step-time scale of ShareGPT."""
    of_load = scales(source)
    change = of_load[SHAREGPT] / of_load[ALPACA]
    cases = [SizeCase(ALPACA, source.seeds[0], size, change=change) for size in (16, ALPACA_FITTED_ON)]
    found = latencies(source).measure(cases, "Alpaca, ShareGPT's scale")
    values = " and ".join(f"{value:.3f} at {case.block_size}" for case, value in zip(cases, found, strict=True))
    return (
        f"With ShareGPT's scale Alpaca's latencies are {values}: the server keeps up, as it does in Fig 13b, and the"
        " figure's does not. No one step time meets both figures."
    )


def _curve_text() -> str:
    fitted = ", ".join(f"{1000 * ms:.2f} us at {size}" for size, ms in EXTRA_MS.items())
    return (
        f"The kernel beyond its reading of {1000 * reading_ms():.2f} us a token of context: {fitted}. A cost a block"
        " would halve with each doubling; this one hardly falls from 1 to 4."
    )


def _scales_text(loads: Iterable[str], of_load: Mapping[str, float]) -> str:
    texts = (f"{load}: s = {of_load[load]:g}, fitted on {_SCALED_ON[load]}" for load in loads)
    return f"Step time, by context: {'; '.join(texts)}."


def _extra_text() -> str:
    return (
        f"Block sizes {', '.join(map(str, EXTRA_MS))}: the kernel's inefficiency is fitted on Fig 18b's ShareGPT"
        " values with the exact pairs, one number each."
    )
