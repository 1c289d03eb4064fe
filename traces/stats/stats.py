"""What a trace is like, in a few numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ...sim.types import ticks
from ..types.trace import Trace
from .reuse import reused_tokens

_PERCENTILES = (50, 90, 95, 99)


def stats(trace: Trace) -> dict[str, Any]:
    """Rows, lengths and arrivals of ``trace``, as plain numbers.

    ``prompt_tokens``, ``output_tokens`` and ``total_tokens`` hold mean, standard deviation, extremes
    and percentiles (linear, as numpy's). ``request_rate`` is gaps / (last - first arrival), and
    ``gap_cv`` the standard deviation of the gaps over their mean: 1 for a Poisson process. Both are
    None where there are no times, or all requests arrive at once. ``reuse`` is how much of the prompts was there
    before (``traces.stats.reuse``), None where the trace does not say.
    """
    return {
        "name": trace.name,
        "rows": len(trace),
        "prompt_tokens": _lengths(trace.prompt_tokens),
        "output_tokens": _lengths(trace.output_tokens),
        "total_tokens": _lengths(trace.prompt_tokens + trace.output_tokens),
        **_arrivals(trace.arrival_ticks),
        "reuse": _reuse(trace),
        "left_out": asdict(trace.left_out),
    }


def _reuse(trace: Trace) -> dict[str, object] | None:
    found = reused_tokens(trace)
    if found is None:
        return None
    by, tokens = found
    return {"by": by, "prompt_tokens": int(tokens.sum()), "share": float(tokens.sum() / trace.prompt_tokens.sum())}


def _lengths(tokens: np.ndarray) -> dict[str, float]:
    percentiles = np.percentile(tokens, _PERCENTILES)
    return {
        "mean": float(tokens.mean()),
        "std": float(tokens.std()),
        "min": int(tokens.min()),
        **{f"p{level}": float(value) for level, value in zip(_PERCENTILES, percentiles)},
        "max": int(tokens.max()),
    }


def _arrivals(arrival_ticks: np.ndarray | None) -> dict[str, float | None]:
    if arrival_ticks is None or arrival_ticks[-1] == arrival_ticks[0]:
        return {"duration_s": None, "request_rate": None, "gap_cv": None}
    gaps_s = np.diff(arrival_ticks) / ticks.PER_SECOND
    duration_s = int(arrival_ticks[-1] - arrival_ticks[0]) / ticks.PER_SECOND
    return {
        "duration_s": duration_s,
        "request_rate": len(gaps_s) / duration_s,
        "gap_cv": float(gaps_s.std() / gaps_s.mean()),
    }
