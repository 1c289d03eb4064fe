"""Rows of the waste table, as ``by_policy`` makes them, from percentages by bucket."""

from __future__ import annotations

from typing import Any

from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.views import PAPER_VIEW


def waste_row(policy: str, output_tokens_per_s: float, batched_requests: float, **buckets: float) -> dict[str, Any]:
    """A row with the shares of both views; buckets that are not named are empty."""
    shares = dict.fromkeys(BUCKETS, 0.0) | buckets
    views = shares | PAPER_VIEW.grouped(shares)
    row = {"policy": policy, "output_tokens_per_s": output_tokens_per_s, "batched_requests": batched_requests}
    return row | {f"{name}_pct": value for name, value in views.items()}
