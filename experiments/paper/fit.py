"""The fit of the scale s of the step time of OPT-13B, which all of its figures share.

The step time depends on the context (``ContextCost``). The scale is fitted on vLLM's mean batch in Fig 13a alone, with the
paper's own length pairs. The mean batch rises with s up to about 1.23, where vLLM saturates. The scan tries s = 1.00, 1.05 ... 1.25, then steps of 0.005 where the published value is first crossed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...sim.engine.replica import FITTED_STEP_SCALE
from ...sim.types.optional import not_none
from ..runs.crossing import scan
from .bench import Bench, Case
from .paper import FIG13A, SERIES

FITTED_ON = "vLLM"
METRIC = "batched_requests"
#: The value, in documents.
ON = f"Fig 13a's {FITTED_ON} mean batch, exact pairs"
#: The fit on the paper's own pairs; ``FITTED_STEP_SCALE`` is the same with a step time whatever the context.
CONTEXT_STEP_SCALE = 1.07
#: Scanned scales, in thousandths.
_COARSE, _FINE_STEP = range(1000, 1251, 50), 5
#: Scales at which every bar is reported.
SCALES = tuple(thousandths / 1000 for thousandths in _COARSE)


@dataclass(frozen=True)
class Fit:
    """A scale and its fit.

    Attributes:
        scale: s.
        published: The value that it is fitted on.
        scan: (s, value) of every scanned point, sorted by s; empty for a scale fitted beforehand.
        by_context: Whether it is the scale of a step time that depends on the context.
    """

    scale: float
    published: float
    scan: tuple[tuple[float, float], ...] = ()
    by_context: bool = True

    def describe(self) -> dict[str, Any]:
        """As data."""
        return {
            "step_scale": self.scale,
            "on": ON,
            "published": self.published,
            "kind": "fitted on this workload" if self.scan else "fitted beforehand, on the paper's own length pairs",
            "scan": [{"step_scale": scale, METRIC: round(value, 3)} for scale, value in self.scan],
        }

    def description(self) -> str:
        """As a sentence."""
        start = f"Step time: s = {self.scale:g}, fitted on {ON}, alone: {self.published:g} requests"
        if not self.scan:
            return f"{start}. These lengths took no part in the fit."
        return f"{start} published, {dict(self.scan)[self.scale]:.2f} simulated."


def fitted_before(by_context: bool = True) -> Fit:
    """The scale that was fitted beforehand, on the paper's own pairs of ShareGPT; the argument is that of ``fit``."""
    published = not_none(FIG13A.published()[FITTED_ON, METRIC])
    return Fit(CONTEXT_STEP_SCALE if by_context else FITTED_STEP_SCALE, published, by_context=by_context)


def fit(bench: Bench, by_context: bool = True) -> Fit:
    """The scale for the bench's source: scanned for a file of pairs, a constant for drawn pairs.

    Args:
        by_context: Whether the step time depends on the context.
    """
    if bench.source.exact is None:
        return fitted_before(by_context)
    published = not_none(FIG13A.published()[FITTED_ON, METRIC])
    best, values = scan(partial(_measure, bench, by_context), published, _COARSE, _FINE_STEP)
    return Fit(best / 1000, published, tuple((at / 1000, value) for at, value in values.items()), by_context)


def _measure(bench: Bench, by_context: bool, thousandths: range) -> dict[int, float]:
    seed = bench.source.seeds[0]
    cases = [Case(FIG13A, seed, SERIES[FITTED_ON], at / 1000, by_context) for at in thousandths]
    measured = bench.measure(cases, "fitting the step time")
    return {at: result.values[METRIC] for at, result in zip(thousandths, measured, strict=True)}
