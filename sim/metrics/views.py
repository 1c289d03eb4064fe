"""Views of the nine buckets: the paper's, the popular one, and the paper's with free slots apart."""

from __future__ import annotations

from collections.abc import Mapping

#: SOSP'23, Fig 2: their sum is the whole pool.
PAPER_VIEW = {
    "token_states": ("live",),
    "reservation": ("reserved",),
    "internal": ("over_estimate", "block_tail", "finished_hold"),
    "external_and_others": ("round_up", "stranded", "free", "cached"),
}
#: The paper's groups, with unused slots apart: in a pool that is not full these are no waste.
HELD_VIEW = {
    "live": ("live",),
    "reservation": ("reserved",),
    "internal": ("over_estimate", "block_tail", "finished_hold"),
    "external": ("round_up", "stranded"),
    "free": ("free", "cached"),
}
#: The three kinds of waste as popular texts explain them; free slots do not count as waste.
POPULAR_VIEW = {
    "live": ("live",),
    "reservation": ("reserved", "over_estimate"),
    "internal": ("finished_hold", "block_tail"),
    "external": ("round_up", "stranded"),
    "free": ("free", "cached"),
}
#: KV cache usage in vLLM's two units: ``vllm:kv_cache_usage_perc`` counts blocks in use, cached blocks without references
#: as free; ``vllm:kv_cache_token_usage_perc``, of its pull request 57336, counts slots with keys and values.
USAGE_VIEW = {
    "by_blocks": ("live", "reserved", "over_estimate", "block_tail", "finished_hold", "round_up"),
    "by_tokens": ("live",),
}


def grouped(amounts: Mapping[str, float], view: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Amounts by bucket, added up to a view's groups, in the unit of the amounts."""
    return {group: sum(amounts[bucket] for bucket in buckets) for group, buckets in view.items()}


def percent(shares: Mapping[str, float], view: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Shares of the pool by bucket, as fractions of 1, added up to a view's groups, in percent."""
    return {group: 100 * share for group, share in grouped(shares, view).items()}


def nine_buckets(buckets: Mapping[str, float]) -> dict[str, float]:
    """The nine buckets that views know: states of fixed size are live, and slots of rejected drafts, which the next step writes
    again, are reserved."""
    nine = dict(buckets)
    nine["live"] += nine.pop("state", 0)
    nine["reserved"] += nine.pop("rejected", 0)
    return nine
