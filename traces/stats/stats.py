"""Statistics of a trace, including prefix reuse.

Reuse is the share of prompt tokens that an infinite prefix cache would hit.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...sim.memory.prefix import HashChain
from ...sim.types import ticks
from ...sim.workload.content import PromptContent, turns_before
from ..types.trace import Trace


class Reused(NamedTuple):
    """Known prefixes of prompts.

    Attributes:
        by: Field that identifies them. ``hash_ids``: the first blocks, where an earlier prompt began with the same blocks;
            ``session_id``: the earlier turns of the session; ``parent``: the text that a request continues.
        tokens: Length of the longest one of each prompt, int64 [n].
        source: The latest earlier request with this prefix, int64 [n]; -1 if there is none.
    """

    by: str
    tokens: np.ndarray
    source: np.ndarray


def reused(trace: Trace) -> Reused | None:
    """The known prefixes of the prompts; None if the trace has none of the fields."""
    if trace.dialogue is not None:
        return Reused("parent", trace.dialogue.parent_tokens, trace.dialogue.parent)
    if trace.content is None:
        return None
    if len(trace.content.ids):
        return Reused("hash_ids", *_by_pieces(trace.content))
    if trace.content.session_id is None:
        return None
    before = turns_before(trace.content.session_id)
    said = np.minimum((trace.prompt_tokens + trace.output_tokens)[before], trace.prompt_tokens)
    return Reused("session_id", np.where(before < 0, 0, said), before)


def _by_pieces(content: PromptContent) -> tuple[np.ndarray, np.ndarray]:
    chain, last = HashChain(), [-1]
    ids, tokens, offsets = content.ids.tolist(), content.tokens.tolist(), content.offsets.tolist()
    found, source = np.zeros(len(content), dtype=np.int64), np.full(len(content), -1)
    for request, (start, end) in enumerate(pairwise(offsets)):
        known = len(chain.parents)
        path = chain.extend(ids[start:end])
        # Prefixes are numbered in the order of first occurrence, and all prefixes of a known prefix are known.
        hits = sum(number < known for number in path)
        last += [request] * (len(chain.parents) - known)
        if hits:
            found[request], source[request] = sum(tokens[start : start + hits]), last[path[hits - 1]]
        for number in path[:hits]:
            last[number] = request
    return found, source


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
    found = reused(trace)
    if found is None:
        return None
    tokens = int(found.tokens.sum())
    return {"by": found.by, "prompt_tokens": tokens, "share": tokens / int(trace.prompt_tokens.sum())}


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
