"""The summary of a run: the keys of ``vllm bench serve``, plus waste and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..memory.accounting.buckets import BUCKETS, OPTIONAL_BUCKETS
from ..runs.integrals import Window
from ..runs.run import Run
from ..types.ticks import PER_SECOND
from ..workload.workload import Workload
from .cache_bounds import cache_summary
from .gaps import Gaps
from .host_pool import host_pool
from .kv_groups import kv_groups
from .kv_offloading import kv_offloading
from .objectives import Objectives
from .prefix_cache import prefix_cache
from .registry import PERCENTILES, key
from .requests import RequestTimes, end_of_answers, request_times
from .sharing import sharing
from .speculative_decoding import most_drafts, speculative_decoding
from .views import PAPER_VIEW, USAGE_VIEW, nine_buckets
from .work import Work, work

#: Refused requests that are named; ``requests.parquet`` has them all.
MOST_REFUSED = 20
#: Groups of a division that no table shows, because its names have other values than the paper's; readers of older summaries have it.


def summary(run: Run, goal: Objectives | None = None, *, divided: bool = False) -> dict[str, Any]:
    """The metrics of a run.

    Serving metrics are over all requests served; ``waste``, ``batch``, ``prefix_cache`` (but its evictions and histograms) and
    ``cache_worth`` are over the settings' window. Times are in ms, as in ``vllm bench serve``, except for ``duration`` (s).

    Args:
        goal: Objectives of every request. With them there are ``goodput``, their limits in ms, and
            ``request_goodput``, the requests/s that meet all of them.
        divided: With ``cache_worth``, as in ``summary.json``. It takes much of the time of the run: commands that compare
            many runs leave it out.
    """
    times = request_times(run)
    return {
        **serving(run.workload, times, Gaps.of(run.log), end_of_answers(run)),
        **({} if goal is None else goodput(goal, times, end_of_answers(run))),
        "copied_slots": int(run.log.copies["slots"].sum()),
        "refused": int(run.refused.sum()),
        "refused_requests": refused_requests(run.refused, run.smallest_pool_blocks),
        **({} if run.rejected is None else {"rejected": int(run.rejected.sum())}),
        **({"prompts_alone": alone} if (alone := prompts_alone(run)) else {}),
        "host_pool": host_pool(run),
        "sharing": sharing(run),
        "num_gpu_blocks": run.replica.num_blocks,
        "block_size": run.replica.block_size,
        "num_steps": run.log.num_steps,
        "mean_batch": run.window.mean_batch,
        "waste": waste(run.window),
        "kv_groups": kv_groups(run),
        "external_fragmentation_index": _external_fragmentation(run),
        "work": work_summary(work(run.log)),
        "prefix_cache": prefix_cache(run),
        **({"cache_worth": cached} if divided and (cached := cache_summary(run)) is not None else {}),
        "kv_offloading": kv_offloading(run),
        "speculative_decoding": speculative_decoding(run.log.drafts, most_drafts(run)),
    }


def prompts_alone(run: Run) -> int:
    """Prompts, recomputed ones included, that exceed ``max_num_batched_tokens`` and had a step of their own: their policy divides none."""
    policy = run.replica.policy
    if not policy.has_token_budget:
        return 0
    return int((run.log.rows["prefill_tokens"] > policy.limits.max_num_batched_tokens).sum())


def serving(workload: Workload, times: RequestTimes, gaps: Gaps, end_ticks: int) -> dict[str, Any]:
    """Throughput, latencies and preemptions of a run, under the names in the JSON result of ``vllm bench serve``."""
    return {
        **_throughput(workload, times, end_ticks),
        **_distribution("ttft", times.ttft_ms),
        **_distribution("tpot", times.tpot_ms),
        **_statistics("itl", gaps.mean_ms(), gaps.std_ms(), gaps.percentile_ms),
        **_distribution("e2el", times.e2el_ms),
        "mean_normalized_latency_s": _mean(times.normalized_latency_s),
        "preemptions": {"recompute": int(times.recomputed.sum()), "swap": int(times.swapped.sum())},
    }


def goodput(goal: Objectives, times: RequestTimes, end_ticks: int) -> dict[str, Any]:
    """The limits, and the requests/s that meet all of them, by the key of ``vllm bench serve``."""
    met = int(goal.met(times)["all"].sum())
    return {"goodput": goal.limits, "request_goodput": met / (end_ticks / PER_SECOND) if end_ticks else 0.0}


def waste(window: Window) -> dict[str, Any]:
    """The ledger of a window in percent of the pool, by buckets, in the paper's view, and as usage by blocks and by tokens, as
    means over iterations (the paper's) and over time."""
    means: dict[str, Callable[[str], float]] = {"iterations": window.share_of_steps, "time": window.share_of_time}
    result: dict[str, Any] = {
        "window_s": [window.start_ticks / PER_SECOND, window.end_ticks / PER_SECOND],
        "num_steps": window.num_steps,
    }
    for name, share in means.items():
        others = [bucket for bucket in OPTIONAL_BUCKETS if bucket in window.slot_steps]
        shares = {bucket: share(bucket) for bucket in (*BUCKETS, *others)}
        nine = nine_buckets(shares)
        result[f"mean_over_{name}_pct"] = {
            "buckets": {bucket: 100 * value for bucket, value in shares.items()},
            "paper_view": PAPER_VIEW.percent(nine),
            "usage": USAGE_VIEW.percent(nine),
        }
    return result


def _throughput(workload: Workload, times: RequestTimes, end_ticks: int) -> dict[str, Any]:
    seconds = end_ticks / PER_SECOND
    prompts = int(workload.prompt_tokens[times.index].sum())
    outputs = int((times.output_tokens * workload.num_sequences[times.index]).sum())
    per_second = 1 / seconds if seconds else 0.0
    return {
        "duration": seconds,
        "completed": len(times.index),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(times.index) * per_second,
        "request_throughput_while_arriving": _served_while_arriving(workload.arrival_ticks, times.finish_ticks),
        "output_throughput": outputs * per_second,
        "total_token_throughput": (prompts + outputs) * per_second,
    }


def _served_while_arriving(arrival_ticks: np.ndarray, finish_ticks: np.ndarray) -> float | None:
    """Requests/s that finish from the first arrival to the last; None where all arrive at once.

    ``request_throughput`` is over the duration, as in ``vllm bench serve``: of a few requests much of it is the drain behind the
    last arrival, and the rate is below the offered one on a server that keeps up.
    """
    first, last = (int(arrival_ticks.min()), int(arrival_ticks.max())) if len(arrival_ticks) else (0, 0)
    if last == first:
        return None
    return int((finish_ticks <= last).sum()) / ((last - first) / PER_SECOND)


def _distribution(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        values = np.zeros(1)
    # All ranks at once: one sort.
    percentiles = (50, *PERCENTILES)
    ranks = dict(zip(percentiles, np.percentile(values, percentiles).tolist(), strict=True))
    return _statistics(name, _mean(values), float(np.std(values)), ranks.__getitem__)


def _statistics(name: str, mean: float, std: float, ranked: Callable[[int], float]) -> dict[str, float]:
    """The statistics of a latency by their paths, in the order of ``vllm bench serve``."""
    first = {"mean": mean, "median": ranked(50), "std": std}
    found = first | {f"p{rank}": ranked(rank) for rank in PERCENTILES}
    return {key(statistic, name): value for statistic, value in found.items()}


def _external_fragmentation(run: Run) -> dict[str, float]:
    window = run.window
    over_steps, over_time = run.accounts.external_fragmentation(window.start_ticks, window.end_ticks)
    return {"mean_over_iterations": over_steps, "mean_over_time": over_time}


def refused_requests(refused: np.ndarray, smallest_pool_blocks: np.ndarray) -> list[dict[str, int]]:
    """The first refused requests, each with the smallest pool that could serve it."""
    first = np.flatnonzero(refused)[:MOST_REFUSED]
    needed = smallest_pool_blocks[first]
    return [
        {"request": int(request), "smallest_pool_blocks": int(blocks)}
        for request, blocks in zip(first, needed, strict=True)
    ]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def work_summary(done: Work) -> dict[str, Any]:
    """The time ledger, and whether the run thrashes: most computed tokens had been computed before."""
    return {
        "tokens": done.tokens,
        "seconds": {name: value / PER_SECOND for name, value in done.ticks.items()},
        "thrashing": done.tokens["recomputed"] * 2 > sum(done.tokens.values()),
    }
