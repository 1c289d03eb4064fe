"""Fig 2: contents of the KV pool under four policies, OPT-13B on ShareGPT at 4 requests/s.

Set-up, from the paper: 900 s of requests, in percent of the pool, means over the iterations from 300 to 900 s. All 13
printed values are predicted: the scale of the step time is fitted on Fig 13a's vLLM value. Single draws of lengths move the
values by points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..bench import Bench, Case
from ..comparison import Payload, compare
from ..fit import Fit, fit
from ..grades import POINTS
from ..paper import FIG2, SERIES
from ..rows import Row, accuracy, ordered

#: A seed with every bar this near is counted in the remarks.
_NEAR_POINTS = 1.0


def fig2(bench: Bench) -> Payload:
    """The figure as a document."""
    fitted = fit(bench)
    payload = compare(FIG2, bench, fitted)
    remarks = [*payload["remarks"], *_single_seeds(bench, fitted)]
    return payload | {"findings": findings(payload["rows"]), "remarks": remarks}


def _single_seeds(bench: Bench, fitted: Fit) -> Iterator[str]:
    """How far single seeds are off, each at its worst bar; nothing for one seed."""
    seeds = bench.source.seeds
    if len(seeds) == 1:
        return
    cases = {
        (seed, name): [Case(FIG2, seed, policy, fitted.scale, fitted.by_context)]
        for seed in seeds
        for name, policy in SERIES.items()
    }
    runs = bench.measure_groups(cases, "single seeds")
    printed = {key: value for key, value in FIG2.published().items() if value is not None}
    worst = [
        max(abs(runs[seed, name][0].values[str(metric)] - value) for (name, metric), value in printed.items())
        for seed in seeds
    ]
    within = sum(error <= _NEAR_POINTS for error in worst)
    yield (
        f"The worst bar of a single seed is {min(worst):.1f} to {max(worst):.1f} points off; seeds with every bar within"
        f" {_NEAR_POINTS:g} point: {within} of {len(seeds)}."
    )


def findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Accuracy of the bars, and the order of the systems by share of the pool in use."""
    used = [row for row in rows if row["metric"] == "token_states_pct"]
    return [accuracy(rows, "Fig 2", POINTS), ordered(used, "token states")]
