"""Metrics of KV offloading: hits by tier, the blocks on the host, and the time of copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..memory.prefix.host_copies import HostCopies
from ..runs.run import Run
from ..types.sums import dot, total
from ..types.ticks import PER_SECOND
from .prefix_cache import first_look_ups, last_to_end


def kv_offloading(run: Run) -> dict[str, Any] | None:
    """Look-ups on the host, its blocks and copies; None without offloading.

    As in vLLM, the host is asked for the tokens that the GPU's prefix cache does not have, and the look-ups of preempted
    requests are counted separately. ``load_seconds`` and ``store_seconds`` are the times in which the link copies in a
    direction, and ``mean_load_wait_ms`` is the time of a load from the step that asks for it, queued behind others, to its end.
    SGLang's host has a second pool for windows or states that have one on the GPU: ``second_pool_blocks`` are pages or states.
    ``flush_seconds`` is what steps waited for copies: under vLLM for stores, under SGLang for loads that they could not hide.
    """
    tier = run.replica.memory.transfers
    if tier is None:
        return None
    columns, used = tier.look_ups.columns(), tier.levels.columns()
    first = first_look_ups(columns["index"])
    queried, hits = total(columns["queried_tokens"][first]), total(columns["hit_tokens"][first])
    until = np.append(used["ticks"][1:], run.log.end_ticks)
    return {
        "num_blocks": tier.cache.num_blocks,
        "queried_tokens": queried,
        "hit_tokens": hits,
        "hit_rate": hit_rate({"hit_tokens": hits}, queried),
        "preempted_queried_tokens": total(columns["queried_tokens"]) - queried,
        "preempted_hit_tokens": total(columns["hit_tokens"]) - hits,
        "evicted_blocks": tier.cache.evicted_blocks,
        "refused_stores": tier.cache.refused_stores,
        "max_used_blocks": int(used["used_blocks"].max(initial=0)),
        "mean_used_blocks": dot(used["used_blocks"], until - used["ticks"]) / max(1, run.log.end_ticks),
        **_copies(tier),
        **(
            {}
            if tier.beside is None
            else dict(zip(("second_pool_blocks", "max_used_second_pool_blocks"), tier.beside, strict=True))
        ),
        **({"tiers": _tiers(run, tier, first, queried)} if tier.behind else {}),
    }


def hit_rate(found: Mapping[str, Any], queried_tokens: int) -> float:
    """Share of the tokens that were looked up that a tier had; those of a tier behind the host are among the host's."""
    return found["hit_tokens"] / queried_tokens if queried_tokens else 0.0


def _tiers(run: Run, tier: HostCopies, first: np.ndarray, queried_tokens: int) -> dict[str, dict[str, Any]]:
    """The tiers behind the host, by vLLM's labels.

    Args:
        first: The rows of the look-ups that are the first of their requests.
        queried_tokens: What the host was asked for in these.
    """
    found = {}
    columns = tier.behind_hits.columns()
    for place, (label, link) in enumerate(zip(tier.labels, tier.behind, strict=True)):
        hits = columns["hit_tokens"][(columns["tier"] == place) & np.isin(columns["look_up"], first)]
        levels, copies = link.store.levels.columns(), link.copies.columns()
        writes, ticks = copies["is_store"] == 1, copies["end_ticks"] - copies["start_ticks"]
        until = np.append(levels["ticks"][1:], run.log.end_ticks)
        found[label] = {
            "num_blocks": link.store.num_blocks,
            "hit_tokens": total(hits),
            "evicted_blocks": link.store.evicted_blocks,
            "max_used_blocks": link.store.most_used_blocks,
            "mean_used_blocks": dot(levels["used_blocks"], until - levels["ticks"]) / max(1, run.log.end_ticks),
            "loaded_blocks": total(copies["blocks"][~writes]),
            "stored_blocks": total(copies["blocks"][writes]),
            "load_seconds": total(ticks[~writes]) / PER_SECOND,
            "store_seconds": total(ticks[writes]) / PER_SECOND,
        }
        found[label]["hit_rate"] = hit_rate(found[label], queried_tokens)
    return found


def _copies(tier: HostCopies) -> dict[str, Any]:
    """Blocks and seconds of loads and stores, and of steps that wait for copies."""
    copies = tier.transfers.columns()
    ticks, stores = copies["end_ticks"] - copies["start_ticks"], copies["is_store"] == 1
    waits = (copies["end_ticks"] - copies["asked_ticks"])[~stores]
    return {
        "loaded_blocks": total(copies["blocks"][~stores]),
        "stored_blocks": total(copies["blocks"][stores]),
        "load_seconds": total(ticks[~stores]) / PER_SECOND,
        "store_seconds": total(ticks[stores]) / PER_SECOND,
        "mean_load_wait_ms": float(waits.mean()) * 1e3 / PER_SECOND if len(waits) else 0.0,
        "flush_seconds": total(tier.flushes.columns()["ticks"]) / PER_SECOND,
    }


def offloaded_tokens(run: Run, tier: HostCopies) -> np.ndarray:
    """Prompt tokens of each request that its first admission loaded from the host, int64 [n]; of several samples those of
    the sample that finishes last, as in ``cached_tokens``."""
    columns = tier.look_ups.columns()
    first = first_look_ups(columns["index"])
    found = np.zeros(int(run.workload.num_sequences.sum()), dtype=np.int64)
    found[columns["index"][first]] = columns["hit_tokens"][first]
    return found[last_to_end(run)]
