"""What a plan says of the prefix cache of its recommendation: the worth of the cached blocks, and the price of those in vain."""

from __future__ import annotations

from statistics import fmean

from ...reports.data.cache_worth import says_worth, worth_sentence
from .answer import Answer, Bill


def cache_text(answer: Answer, bill: Bill, currency: str) -> list[str]:
    """A line; none where prompts share nothing.

    The price is that of the GPUs, by the share of their memory that is KV cache, and of this by the slots in vain.
    """
    found = answer.at_rate.get("cache_worth")
    if found is None:
        return []
    text = f"Prefix cache: {worth_sentence(found)}"
    if not says_worth(found):
        return [text]
    stages = answer.candidate.started.stages()
    share = fmean(stage.kv_cache_bytes / stage.total_bytes for stage in stages)
    in_vain = (found["pool_pct"]["never"] + found["pool_pct"]["too_late"]) / 100
    price = bill.per_hour * share * in_vain
    return [f"{text} The memory of those without a hit is {price:,.2f} {currency} an hour of the bill."]
