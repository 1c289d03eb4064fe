"""Bars of the tiers of a prefix cache: where prompt tokens were found, and what the blocks of each tier were worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ...sim.memory.accounting.worths import HOST_WORTHS
from ..style.palette import BLACK_TEXT, TIERS, Hue
from .memory import stacked_shares

#: What stands beside the tiers behind the host.
_GPU, _HOST, _COMPUTED = "GPU", "host", "computed"
_FREE = "free"


def hits_by_tier(summaries: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Horizontal stacked bars, one per run, in percent of the prompt tokens that were looked up.

    Args:
        summaries: Summaries by the names of their runs; those with offloading count.
    """
    shares = {name: _found(summary) for name, summary in summaries.items() if summary.get("kv_offloading")}
    tiers = [
        label for label in dict.fromkeys(label for found in shares.values() for label in found) if label != _COMPUTED
    ]
    hues = [TIERS[min(place, len(TIERS) - 2)] for place in range(len(tiers))]
    parts = dict(zip(tiers, hues, strict=True)) | {_COMPUTED: TIERS[-1]}
    return stacked_shares(
        "Where prompt tokens are found",
        "Percent of the tokens that requests look up, without those of preempted requests.",
        [(name, "") for name in shares],
        [[found.get(part, 0.0) for part in parts] for found in shares.values()],
        parts,
        [
            (_COMPUTED, "tokens that no tier has"),
            (_HOST, "tokens that the GPU does not have and no slower tier had to bring"),
        ],
    )


def _found(summary: Mapping[str, Any]) -> dict[str, float]:
    """Percent of the tokens looked up on the GPU, by the tier that had them."""
    gpu, host = summary["prefix_cache"], summary["kv_offloading"]
    behind = {label: tier["hit_tokens"] for label, tier in host.get("tiers", {}).items()}
    tokens = {_GPU: gpu["hit_tokens"], _HOST: host["hit_tokens"] - sum(behind.values()), **behind}
    whole = max(1, gpu["queried_tokens"])
    return {name: 100 * each / whole for name, each in tokens.items()} | {
        _COMPUTED: 100 * (gpu["queried_tokens"] - sum(tokens.values())) / whole
    }


def worth_by_tier(worths: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Horizontal stacked bars, one per tier of each run, in percent of its slots over time.

    Args:
        worths: ``cache_worth`` of summaries with a host, by the names of their runs.
    """
    names: list[tuple[str, str]] = []
    values: list[Sequence[float]] = []
    for name, found in worths.items():
        for label, tier in {_HOST: found["host"], **found.get("tiers", {})}.items():
            pct = [tier["pool_pct"].get(worth, 0.0) for worth in HOST_WORTHS]
            names.append((name, label))
            values.append([*pct, 100 - sum(pct)])
    hues = {worth: Hue(*each.hue, BLACK_TEXT) for worth, each in HOST_WORTHS.items()} | {_FREE: TIERS[-1]}
    definitions = [(each.label, f"slots {each.which}") for each in HOST_WORTHS.values()]
    subtitle = "Percent of the slots of each tier over time, by what became of their contents."
    return stacked_shares("What the blocks of each tier are worth", subtitle, names, values, hues, definitions)
