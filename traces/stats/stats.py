"""Statistics of a trace, including prefix reuse.

Reuse is the share of prompt tokens that an infinite prefix cache would hit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ...sim.memory.prefix import HashChain
from ...sim.types import ticks
from ...sim.workload.content import NO_SESSION, PromptContent
from ..types.trace import Trace


def reused_tokens(trace: Trace) -> tuple[str, np.ndarray] | None:
    """The field that identifies reuse, and the length (int64 [n]) of each prompt's longest known prefix in tokens.

    ``hash_ids``: the first blocks, where an earlier prompt began with the same blocks. ``session_id``: the earlier turns of
    the session. ``parent``: the text that a request continues. None if the trace has none of these fields.
    """
    if trace.dialogue is not None:
        return "parent", trace.dialogue.parent_tokens
    if trace.content is None:
        return None
    if len(trace.content.ids):
        return "hash_ids", _by_pieces(trace.content)
    if trace.content.session_id is None:
        return None
    return "session_id", _by_sessions(trace, trace.content.session_id)


def _by_pieces(content: PromptContent) -> np.ndarray:
    chain = HashChain()
    ids, tokens = content.ids.tolist(), content.tokens.tolist()
    offsets = content.offsets.tolist()
    reused = np.zeros(len(content), dtype=np.int64)
    for request, (start, end) in enumerate(zip(offsets, offsets[1:])):
        known = len(chain.parents)
        path = chain.extend(ids[start:end])
        # Prefixes are numbered in the order of first occurrence, and all prefixes of a known prefix are known.
        hits = sum(number < known for number in path)
        reused[request] = sum(tokens[start : start + hits])
    return reused


def _by_sessions(trace: Trace, session_id: np.ndarray) -> np.ndarray:
    reused = np.zeros(len(trace), dtype=np.int64)
    order = np.argsort(session_id, kind="stable")
    session = session_id[order]
    again = np.flatnonzero((session[1:] == session[:-1]) & (session[1:] != NO_SESSION))
    before, turn = order[again], order[again + 1]
    said = (trace.prompt_tokens + trace.output_tokens)[before]
    reused[turn] = np.minimum(said, trace.prompt_tokens[turn])
    return reused


def mean_rate(arrival_ticks: np.ndarray) -> float:
    """Mean rate of arrivals in ascending order, in requests/s: gaps / (last - first arrival).

    The first arrival is the start of the span that is measured, so n requests have n - 1 gaps.

    Raises:
        ZeroDivisionError: All requests arrive at once, or there is only one.
    """
    return (len(arrival_ticks) - 1) * ticks.PER_SECOND / int(arrival_ticks[-1] - arrival_ticks[0])


_PERCENTILES = (50, 90, 95, 99)


def stats(trace: Trace) -> dict[str, Any]:
    """Row count, lengths, arrivals and prefix reuse of ``trace`` as plain numbers.

    Returns:
        ``prompt_tokens``, ``output_tokens``, ``total_tokens``: mean, standard deviation, extremes and percentiles
            (linear, as numpy's). ``request_rate``: see ``mean_rate``.
        ``gap_cv``: coefficient of variation of the gaps between arrivals; 1 for a Poisson process. Both are None if
            there are no times, or if all requests arrive at once.
        ``reuse``: prefix reuse of the prompts (``traces.stats.stats``); None without prompt contents.
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
    return {
        "duration_s": int(arrival_ticks[-1] - arrival_ticks[0]) / ticks.PER_SECOND,
        "request_rate": mean_rate(arrival_ticks),
        "gap_cv": float(gaps_s.std() / gaps_s.mean()),
    }
