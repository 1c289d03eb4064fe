"""A panel of a rate sweep as a document: its crossings beside the published ones, and its curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...runs.crossing import Crossing
from ..comparison import Payload
from ..constants import STEP
from ..constants import scale as scale_constant
from ..paper import SERIES, Source
from ..published import paper_figures
from ..rows import OTHER_SEEDS, Row, value_row
from .rate_sweep import TARGET_S, Load, Search, System, find_rates, fit_scale, latencies, moved_to, per_step_pct

CROSSING, LATENCY = "crossing_req_per_s", "normalized_latency_s_per_token"
VLLM, ORACLE, MAX = "vLLM", "Orca (Oracle)", "Orca (Max)"
ORCAS = tuple(name for name in SERIES if name != VLLM)
SHAREGPT, ALPACA = "ShareGPT", "Alpaca"


@dataclass(frozen=True)
class Scale:
    """A scale of the step time.

    Attributes:
        value: The factor.
        on: The published value that it is fitted on.
    """

    value: float
    on: str


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        figure: Its name here.
        published: Crossings by series, in requests/s.
        systems: Systems by series, in the paper's order.
        scales: Scales by series; if a scale is fitted on this panel, the ``kind`` of its value is fitted.
        loads: Loads by (series, seed).
        seeds: Seeds over which values are averaged.
        other_seeds: Other seeds, for the range of single ones.
        fitted: Series with a value on which a scale is fitted.
        workload: Description of the workload.
        markers: Other published points of the curves, by series: rate in requests/s and latency in s/token.
    """

    figure: str
    published: Mapping[str, float]
    systems: Mapping[str, System]
    scales: Mapping[str, Scale]
    loads: Mapping[tuple[str, int], Load]
    seeds: tuple[int, ...]
    other_seeds: tuple[int, ...]
    workload: str
    fitted: tuple[str, ...] = ()
    markers: Mapping[str, Mapping[float, float]] = field(default_factory=dict)

    def search(self, series: str, seed: int) -> Search:
        """The job for one series and seed; with the first seed it includes the other published points."""
        rates = tuple(self.markers.get(series, ())) if seed == self.seeds[0] else ()
        return Search((series, seed), self.systems[series], self.loads[series, seed], self.scales[series].value, rates)

    def kind(self, series: str) -> str:
        """Kind of a crossing: ``fitted`` or ``predicted``."""
        return "fitted" if series in self.fitted else "predicted"


def published_panel(figure: str, name: str) -> dict[str, float]:
    """Crossings by series, of a panel of a figure."""
    facts = paper_figures()[figure]
    return dict(zip(facts["series"], facts[name], strict=True))


def published_markers(figure: str, name: str) -> dict[str, dict[float, float]]:
    """Published points of a panel's curves, by series: rate in requests/s and latency in s/token; most panels have none."""
    facts = paper_figures()[figure].get("markers", {}).get(name, {})
    return {series: dict(map(tuple, points)) for series, points in facts.items()}


def lengths_of(name: str, source: Source) -> Source:
    """The source of a data set's lengths."""
    return source if name == SHAREGPT else source.alpaca


def spare_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Other seeds, if a single one is requested."""
    return tuple(seed for seed in OTHER_SEEDS if seed not in seeds) if len(seeds) == 1 else ()


@cache
def scale_fitted(system: System, load: Load, on: str) -> Scale:
    """The scale at which the system crosses at the published rate; cached per process."""
    return Scale(fit_scale(system, load).at, on)


def panel_document(panel: Panel) -> Payload:
    """The panel as a document, without findings."""
    searches = [panel.search(series, seed) for series in panel.systems for seed in panel.seeds]
    found = find_rates(searches, panel.figure)
    shifted = _shifted(panel, found)
    rows = [_crossing_row(panel, series, found, shifted) for series in panel.systems]
    return {
        "figure": panel.figure,
        "workload": panel.workload,
        "x_is": "requests/s",
        "rows": rows,
        "curves": [row for series in panel.systems for row in _curve(panel, series, found[series, panel.seeds[0]])],
        "seeds": list(panel.seeds),
        "scales": {
            series: {"step_scale": round(scale.value, 4), "fitted_on": scale.on}
            for series, scale in panel.scales.items()
        },
        "constants": [
            *STEP,
            *(scale_constant(round(own.value, 4), own.on) for own in dict.fromkeys(panel.scales.values())),
        ],
        "basis": list(_basis(panel)),
        "remarks": list(_remarks(panel)),
    }


def _shifted(panel: Panel, found: Mapping[tuple[Any, ...], Crossing]) -> dict[tuple[Any, ...], float]:
    """Crossings of the spare seeds, by (series, seed)."""
    first = {(series, seed): found[series, panel.seeds[0]] for series in panel.systems for seed in panel.other_seeds}
    searches = [panel.search(*key) for key in first]
    by_key = latencies(searches, {key: crossing.at for key, crossing in first.items()}, f"{panel.figure}, other seeds")
    return {key: moved_to(first[key], latency) for key, latency in by_key.items()}


def _crossing_row(
    panel: Panel, series: str, found: Mapping[tuple[Any, ...], Crossing], shifted: Mapping[tuple[Any, ...], float]
) -> Row:
    crossings = [found[series, seed] for seed in panel.seeds]
    return value_row(
        series,
        CROSSING,
        panel.published[series],
        [crossing.at for crossing in crossings],
        how="digitised",
        kind=panel.kind(series),
        other_seeds=[shifted[series, seed] for seed in panel.other_seeds],
        step_1pct=max(per_step_pct(crossing) for crossing in crossings),
    )


def _curve(panel: Panel, series: str, crossing: Crossing) -> Iterator[Row]:
    """The points reported for the first seed; for the figure the crossing, and for some series its markers."""
    crossed = panel.published[series]
    known = {**panel.markers.get(series, {}), crossed: TARGET_S}
    for rate, latency in sorted({crossed: None, **dict(crossing.points)}.items()):
        yield value_row(
            series,
            LATENCY,
            known.get(rate),
            [] if latency is None else [latency],
            x=round(rate, 4),
            how="digitised",
            kind=panel.kind(series) if rate == crossed else "predicted",
            decimals=4,
        )


def _basis(panel: Panel) -> Iterator[str]:
    yield (
        f"Crossing: the rate at which the mean of (finish - arrival) / output tokens reaches {TARGET_S:g} s/token, by"
        " bisection, over the requests that the artifact's trace rule draws at the published rate; at other rates the"
        " same ones come with the same gaps, further apart or closer together."
    )
    for scale in dict.fromkeys(panel.scales.values()):
        series_names = ", ".join(series for series, own in panel.scales.items() if own == scale)
        yield f"Step time: s = {scale.value:.3f} for {series_names}, fitted on {scale.on}, alone."


def _remarks(panel: Panel) -> Iterator[str]:
    if panel.other_seeds:
        seeds = " and ".join(map(str, panel.other_seeds))
        yield (
            f"The ranges add seeds {seeds}, to first order: their latency where seed {panel.seeds[0]} crosses, turned"
            " into a rate by the slope of its curve there."
        )


def ratio_text(rows: Sequence[Row], above: str, below: str) -> str:
    """The ratio of the crossings of two series, published and simulated."""
    by = {row["series"]: row for row in rows}
    published, simulated = (by[above][side] / by[below][side] for side in ("published", "simulated"))
    return f"{above} takes {simulated:.2f} times the rate of {below}; published {published:.2f}."
