"""What one simulated run of a server shows: the objective, the latencies, and the symptoms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import log
from statistics import fmean
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate
from ...sim.config.unread import only_read
from ...sim.cost import StepCost
from ...sim.memory.accounting.buckets import NOT_HELD
from ...sim.memory.accounting.kv_groups import STATE
from ...sim.metrics.cache_bounds import cache_summary
from ...sim.metrics.gaps import Gaps
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.metrics.work import work as work_of
from ...sim.runs.run import Run
from ...sim.types.sums import dot
from ...sim.types.ticks import PER_SECOND
from ..capacity.detail import waiting_shares, waits_for_windows
from ..runs.pool_use import pool_use, use_while_arriving
from ..runs.slo_check import Goal, check_times, compiled_cost

#: Settings that no step time depends on, with any values.
_WITHOUT_EFFECT_ON_STEPS: dict[str, Any] = {
    "num_gpu_blocks_override": 1 << 20, "max_num_seqs": 1, "max_num_batched_tokens": 1 << 14, "enable_prefix_caching": None,
}  # fmt: skip
#: Options that size another pool by that one, and without which it is large enough.
_OF_OTHER_POOLS = ("swa_full_tokens_ratio", "hicache_ratio", "hicache_size")
#: Share of a pool's slots that is free where it is nearly full.
_NEARLY = 1 / 20
#: Latencies below this count as this, in ms: the index takes logarithms.
_LEAST_MS = 1e-3


@dataclass(frozen=True)
class Observation:
    """One run, or the means of several.

    Attributes:
        cost: The objective, lower is better: the logarithm of the latency index, or with a goal the share of the counted
            requests that miss it.
        mean_ttft_ms, p90_ttft_ms, mean_tpot_ms, p99_itl_ms, median_itl_ms, mean_e2el_ms: Latencies.
        request_throughput: Finished requests/s.
        preemptions: Preemptions per 100 requests.
        recomputed: Share of the computed tokens that a preemption had lost.
        mean_usage, max_usage: Share of the KV cache in use.
        prompts, outputs, states, cached: Shares of the KV cache, over time: prompts and outputs of running requests, about, their states, and
            cached prefixes that no request uses.
        running, waiting: Mean requests.
        arriving_usage, arriving_running, arriving_waiting: The same three from the first arrival to the last, as a server's
            metrics are read.
        hit_rate: Share of the tokens looked up that the prefix cache has; 0 without a cache.
        wait_seqs, wait_memory, wait_steps: Shares of the time in which requests wait for ``max_num_seqs``, for the KV cache,
            and for the step to end.
        wait_windows: Of ``wait_memory`` that for windows in a pool of their own.
        own_usage, own_max, own_full: Of a pool of windows or states of their own the share in use, mean and highest, and the share of the
            time in which fewer than a twentieth of its slots is free; 0 without one.
        turnover: Share of the requests that finish before the last one starts.
        arriving: Share of the time from the first arrival to the last finish in which requests arrive.
        behind: Seconds by which the wait before the first step grows per second of arrivals: 0 where the replica keeps up.
    """

    cost: float
    mean_ttft_ms: float
    p90_ttft_ms: float
    mean_tpot_ms: float
    p99_itl_ms: float
    median_itl_ms: float
    mean_e2el_ms: float
    request_throughput: float
    preemptions: float
    recomputed: float
    mean_usage: float
    max_usage: float
    prompts: float
    outputs: float
    states: float
    cached: float
    running: float
    waiting: float
    arriving_usage: float
    arriving_running: float
    arriving_waiting: float
    hit_rate: float
    wait_seqs: float
    wait_memory: float
    wait_steps: float
    wait_windows: float
    own_usage: float
    own_max: float
    own_full: float
    turnover: float
    arriving: float
    behind: float


def observe(
    key: tuple[int, int], settings: Settings, work: Workload, goal: Goal | None
) -> tuple[tuple[int, int], Observation]:
    """Serve a workload; the key comes back with the result, because runs finish in any order.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    return key, observation(served(settings, work), goal)


def served(settings: Settings, work: Workload) -> Run:
    """The run of a server.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    return simulate(only_read(settings, work), work, step_cost(settings), logs_contents=False)


def worth_of_cache(settings: Settings, work: Workload) -> dict[str, Any] | None:
    """``cache_worth`` of the run of a server.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    return cache_summary(simulate(only_read(settings, work), work, step_cost(settings)))


def step_cost(settings: Settings) -> StepCost:
    """The step cost of a replica. Replicas that differ in the pool and the scheduler's limits share one, because filling its
    caches is most of the work of a short run."""
    options = tuple(each for each in settings.options if each[0] not in _OF_OTHER_POOLS)
    return compiled_cost(replace(settings, **_WITHOUT_EFFECT_ON_STEPS, options=options))


def observation(run: Run, goal: Goal | None) -> Observation:
    """What a finished run shows."""
    times, gaps, pool, waits = request_times(run), Gaps.of(run.log), pool_use(run), waiting_shares(run)
    ttft, tpot, e2el = (
        values if len(values) else np.zeros(1) for values in (times.ttft_ms, times.tpot_ms, times.e2el_ms)
    )
    p90_ttft, p99_itl, mean_e2el = float(np.percentile(ttft, 90)), gaps.percentile_ms(99), float(e2el.mean())
    tokens = work_of(run.log).tokens
    count = max(len(times.index), 1)
    arriving = use_while_arriving(run)
    live, of_prompts = run.window.share_of_time("live"), _prompt_share(run.workload, times)
    cost = fmean(log(max(each, _LEAST_MS)) for each in (p90_ttft, p99_itl, mean_e2el))
    if goal is not None:
        cost = 1 - check_times(run.workload, times, goal).attained
    return Observation(
        cost=cost,
        mean_ttft_ms=float(ttft.mean()),
        p90_ttft_ms=p90_ttft,
        mean_tpot_ms=float(tpot.mean()),
        p99_itl_ms=p99_itl,
        median_itl_ms=gaps.percentile_ms(50),
        mean_e2el_ms=mean_e2el,
        request_throughput=len(times.index) * PER_SECOND / max(run.log.end_ticks, 1),
        preemptions=100 * float((times.recomputed + times.swapped).sum()) / count,
        recomputed=tokens["recomputed"] / max(sum(tokens.values()), 1),
        mean_usage=pool.mean_usage,
        max_usage=pool.max_usage,
        prompts=live * of_prompts,
        outputs=live * (1 - of_prompts),
        states=run.window.share_of_time(STATE) if STATE in run.window.slot_ticks else 0.0,
        cached=run.window.share_of_time("cached"),
        running=pool.mean_running,
        waiting=pool.mean_waiting,
        arriving_usage=arriving.mean_usage,
        arriving_running=arriving.mean_running,
        arriving_waiting=arriving.mean_waiting,
        hit_rate=pool.hit_rate or 0.0,
        wait_seqs=waits["max_num_seqs"],
        wait_memory=waits["memory"],
        wait_steps=waits["steps"],
        wait_windows=waits_for_windows(run),
        **_own_pool(run),
        turnover=_turnover(times),
        arriving=_arriving(times),
        behind=0.0 if run.workload.users is not None else _behind(times),
    )


def _own_pool(run: Run) -> dict[str, float]:
    """Use of a pool of windows or states, see ``Observation``."""
    if not run.accounts.pools:
        return dict.fromkeys(("own_usage", "own_max", "own_full"), 0.0)
    (_, accounts), ticks = run.accounts.pools[1], run.log.rows["ticks"]
    levels, slots = accounts.at_rows(), accounts.log.capacity_slots
    used = np.asarray(slots - sum(levels[bucket] for bucket in NOT_HELD)) / slots
    busy, is_full = max(int(ticks.sum()), 1), levels["free"] < _NEARLY * slots
    return {
        "own_usage": dot(used, ticks) / busy,
        "own_max": float(used.max(initial=0)),
        "own_full": dot(is_full, ticks) / busy,
    }


def _prompt_share(work: Workload, times: RequestTimes) -> float:
    """Share of prompts in the tokens that requests hold, if outputs grow evenly."""
    span = (times.finish_ticks - times.first_scheduled_ticks).astype(np.float64)
    prompts = float(work.prompt_tokens[times.index] @ span)
    outputs = float(times.output_tokens @ span) / 2
    return prompts / (prompts + outputs) if prompts + outputs else 0.0


def _turnover(times: RequestTimes) -> float:
    if not len(times.index):
        return 0.0
    return float((times.finish_ticks <= times.first_scheduled_ticks.max()).mean())


def _arriving(times: RequestTimes) -> float:
    if not len(times.index):
        return 0.0
    first, last = int(times.arrival_ticks.min()), int(times.arrival_ticks.max())
    return (last - first) / max(1, int(times.finish_ticks.max()) - first)


def _behind(times: RequestTimes) -> float:
    """Growth of the wait from the second to the last quarter of the requests, over the time between them."""
    order = np.argsort(times.arrival_ticks, kind="stable")
    arrivals = times.arrival_ticks[order].astype(np.float64)
    waits = (times.first_scheduled_ticks - times.arrival_ticks)[order].astype(np.float64)
    quarter = len(order) // 4
    early, late = slice(quarter, 2 * quarter), slice(len(order) - quarter, None)
    if not quarter or (passed := arrivals[late].mean() - arrivals[early].mean()) <= 0:
        return 0.0
    return max(0.0, float((waits[late].mean() - waits[early].mean()) / passed))


def mean_of(observations: Sequence[Observation]) -> Observation:
    """The means of several runs; of latencies and of the cost, too."""
    names = [field.name for field in fields(Observation)]
    return Observation(**{name: fmean(getattr(each, name) for each in observations) for name in names})
