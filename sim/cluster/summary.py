"""The summary of a cluster run: the keys of a single replica over all requests, and a row per replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..metrics.gaps import Gaps
from ..metrics.kv_offloading import hit_rate, kv_offloading
from ..metrics.prefix_cache import hits_and_evictions
from ..metrics.requests import RequestTimes, preemptions, request_times
from ..metrics.speculative_decoding import most_drafts, speculative_decoding
from ..metrics.summary import prompts_alone, refused_requests, serving, waste, work_summary
from ..metrics.work import Work, work
from ..runs.cluster_run import ClusterRun
from ..runs.integrals import Window
from ..runs.run import Run
from ..types.sums import total
from ..types.ticks import PER_MS
from .worth import cluster_cache_summary

#: What is known where a request begins, where it ends, and what of that is counted on both.
_BEGIN = ("first_scheduled_ticks", "first_token_ticks")
_END = ("finish_ticks", "recomputed", "swapped")
_COUNTS = _END[1:]
_HITS = ("queried_tokens", "hit_tokens", "preempted_queried_tokens", "preempted_hit_tokens", "evicted_blocks")
#: Keys of a tier that are those of its store.
_OF_STORE = ("num_blocks", "evicted_blocks", "max_used_blocks", "mean_used_blocks")
_HOST_HITS = (*_HITS, "num_blocks", "max_used_blocks", "loaded_blocks", "stored_blocks")


def cluster_summary(run: ClusterRun, *, divided: bool = False) -> dict[str, Any]:
    """All metrics of a cluster.

    The keys are those of ``summary``: latencies are those of all requests, ``waste`` and ``batch`` those of all
    pools together. ``num_gpu_blocks`` is the size of each pool.

    Args:
        divided: As of ``summary``.
    """
    first = run.runs[0]
    window = _together([part.window for part in run.runs])
    return {
        **serving(run.workload, cluster_times(run), cluster_gaps(run), run.end_ticks),
        "copied_slots": sum(int(part.log.copies["slots"].sum()) for part in run.runs),
        "refused": int(run.refused.sum()),
        "refused_requests": refused_requests(run.refused, run.smallest_pool_blocks),
        **({"prompts_alone": alone} if (alone := sum(map(prompts_alone, run.runs))) else {}),
        "num_replicas": len(run.runs),
        "router": run.cluster.router,
        "kv_transfer": _kv_transfer(run),
        "num_gpu_blocks": first.replica.num_blocks,
        "block_size": first.replica.block_size,
        "num_steps": sum(part.log.num_steps for part in run.runs),
        "mean_batch": window.mean_batch,
        "waste": waste(window),
        "work": work_summary(_work(run)),
        "prefix_cache": _hits(map(hits_and_evictions, run.runs), _HITS),
        **({"cache_worth": cached} if divided and (cached := cluster_cache_summary(run)) is not None else {}),
        "kv_offloading": _offloaded(run),
        "speculative_decoding": _speculative_decoding(run),
        "replicas": [_replica(number, run.role(number), part) for number, part in enumerate(run.runs)],
    }


def cluster_times(run: ClusterRun) -> RequestTimes:
    """Times of every request that was served, by row of the workload: begun where it was prefilled, done where its
    last token came, and preempted on either."""
    columns = {name: np.zeros(len(run.workload), dtype=np.int64) for name in (*_BEGIN, *_END)}
    for number, (rows, part) in enumerate(zip(run.rows, run.runs, strict=True)):
        times = request_times(part)
        own = rows[times.index]
        for name in _END if run.only_decodes(number) else (*_BEGIN, *_END):
            columns[name][own] = getattr(times, name) + (columns[name][own] if name in _COUNTS else 0)
    index = np.sort(np.concatenate(run.rows[: run.num_arriving]))
    return RequestTimes(
        index=index,
        arrival_ticks=run.workload.arrival_ticks[index],
        output_tokens=run.workload.output_tokens[index],
        **{name: column[index] for name, column in columns.items()},
    )


def cluster_gaps(run: ClusterRun) -> Gaps:
    """All gaps: those on each replica, and those during transfers."""
    times, moved = cluster_times(run), run.transfers["row"]
    first_token, second_token = (np.zeros(len(run.workload), dtype=np.int64) for _ in range(2))
    first_token[times.index] = times.first_token_ticks
    for rows, part in zip(run.rows[run.num_arriving :], run.runs[run.num_arriving :], strict=True):
        decoded = request_times(part)
        second_token[rows[decoded.index]] = decoded.first_token_ticks
    between = Gaps.single(second_token[moved] - first_token[moved])
    return Gaps.pooled([*(Gaps.of(part.log) for part in run.runs), between])


def _kv_transfer(run: ClusterRun) -> dict[str, Any] | None:
    """Transfers from prefill to decode replicas; None if prefill is not disaggregated."""
    if not run.cluster.disaggregated:
        return None
    moved = run.transfers
    took_ms, waited_ms = ((moved[name] - moved["ready_ticks"]) / PER_MS for name in ("end_ticks", "start_ticks"))
    return {
        "requests": len(moved["row"]),
        "bytes": total(moved["bytes"]),
        "mean_ms": float(took_ms.mean()) if len(took_ms) else 0.0,
        "p99_ms": float(np.percentile(took_ms, 99)) if len(took_ms) else 0.0,
        "mean_wait_ms": float(waited_ms.mean()) if len(waited_ms) else 0.0,
    }


def _together(windows: list[Window]) -> Window:
    """The sum of all replicas over one span of time."""
    slot_steps: Counter[str] = Counter()
    slot_ticks: Counter[str] = Counter()
    for window in windows:
        slot_steps.update(window.slot_steps)
        slot_ticks.update(window.slot_ticks)
    return Window(
        start_ticks=windows[0].start_ticks,
        end_ticks=windows[0].end_ticks,
        num_steps=sum(window.num_steps for window in windows),
        batch_steps=sum(window.batch_steps for window in windows),
        slot_steps=dict(slot_steps),
        slot_ticks=dict(slot_ticks),
    )


def _work(run: ClusterRun) -> Work:
    tokens: Counter[str] = Counter()
    ticks: Counter[str] = Counter()
    for part in run.runs:
        done = work(part.log)
        tokens.update(done.tokens)
        ticks.update(done.ticks)
    return Work(dict(tokens), dict(ticks))


def _hits(found: Iterable[dict[str, Any] | None], names: Iterable[str]) -> dict[str, Any] | None:
    """Sums over all replicas of one tier of the prefix cache; None without it."""
    caches = [cache for cache in found if cache is not None]
    if not caches:
        return None
    sums = {name: sum(cache[name] for cache in caches) for name in names}
    return sums | {"hit_rate": hit_rate(sums, sums["queried_tokens"])}


def _offloaded(run: ClusterRun) -> dict[str, Any] | None:
    """Sums over all replicas of the host, and of the tiers behind it; a tier that they share has its blocks once."""
    found = [each for each in map(kv_offloading, run.runs) if each is not None]
    together, transfers = _hits(found, _HOST_HITS), run.runs[0].replica.memory.transfers
    if together is None or transfers is None or not transfers.behind:
        return together
    behind = [[each["tiers"][label] for each in found] for label in transfers.labels]
    tiers = {
        label: {
            name: value
            if link.store.shared and name in _OF_STORE or value is None
            else sum(each[name] for each in replicas)
            for name, value in replicas[0].items()
        }
        for label, link, replicas in zip(transfers.labels, transfers.behind, behind, strict=True)
    }
    for each in tiers.values():
        each["hit_rate"] = hit_rate(each, together["queried_tokens"])
    return together | {"tiers": tiers}


def _speculative_decoding(run: ClusterRun) -> dict[str, Any] | None:
    """Drafts of all replicas; None without speculative decoding."""
    drafts = [part.log.drafts for part in run.runs if part.log.drafts is not None]
    if not drafts:
        return None
    together = {name: np.concatenate([each[name] for each in drafts]) for name in drafts[0]}
    return speculative_decoding(together, most_drafts(run.runs[0]))


def _replica(number: int, role: str, part: Run) -> dict[str, Any]:
    """Metrics of one replica: its requests, steps, slots and time."""
    window, cache = part.window, hits_and_evictions(part)
    return {
        "replica": number,
        "role": role,
        "requests": len(part.workload),
        "input_tokens": int(part.workload.prompt_tokens.sum()),
        "output_tokens": int((part.workload.output_tokens * part.workload.num_sequences).sum()),
        "num_steps": part.log.num_steps,
        "mean_batch": window.mean_batch,
        "preemptions": len(preemptions(part).ticks),
        "kv_usage_pct": 100 * (1 - window.share_of_time("free") - window.share_of_time("cached")),
        "prefix_cache_hit_rate": None if cache is None else cache["hit_rate"],
        "waste": waste(window),
        "work": work_summary(work(part.log)),
    }
