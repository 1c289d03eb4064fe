"""The real simulator, served the oracle's cases, and what it did as plain numbers to compare."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import simpy

from fragmeter.sim.config.settings import Settings, settings
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.cost import StepCost
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy.static import FasterTransformer
from fragmeter.sim.runs.run import Run
from fragmeter.sim.spec import block_bytes, model
from fragmeter.sim.types.ticks import PER_SECOND, from_seconds
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.source import OpenLoop
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from paths import DATA
from strategies import Case

_GIB = 1 << 30
#: The shape of OPT-13B with positions for the longest of cases.
LONG_MODEL = str(DATA / "config.json")
#: As most cases have them: of one sequence, without a parent.
ONE_REQUEST = Workload("one", np.array([0]), np.array([1]), np.array([1]))


def seconds_of(ticks: int) -> float:
    """The setting that means exactly so many ticks."""
    seconds = ticks / PER_SECOND
    assert from_seconds(seconds) == ticks
    return seconds


def engine_to_step(chosen: Settings, cost: StepCost, work: Workload, leap: bool = True) -> Engine:
    """An engine that has not begun; its environment is stepped by the caller."""
    replica = build(chosen, cost, work)
    too_large = replica.policy.smallest_pool_blocks(work, replica.block_size) > replica.num_blocks
    source = OpenLoop(work, too_large, replica.max_model_len)
    return Engine(simpy.Environment(initial_time=0), source, replica.policy, replica.memory, replica.cost, leap=leap)


def workload_of(requests: list[Request], max_model_len: int, content: PromptContent | None = None) -> Workload:
    """The oracle's requests as columns; those that declare nothing may run to the model's end."""
    declared = [max_model_len - r.prompt_tokens if r.max_tokens is None else r.max_tokens for r in requests]
    undeclared = all(request.max_tokens is None for request in requests)
    return Workload(
        "case",
        arrival_ticks=np.array([request.arrival_ticks for request in requests]),
        prompt_tokens=np.array([request.prompt_tokens for request in requests]),
        output_tokens=np.array([request.output_tokens for request in requests]),
        max_tokens=None if undeclared else np.array(declared),
        content=content,
    )


@cache
def _token_bytes() -> int:
    return block_bytes(model(LONG_MODEL), block_size=1)


def settings_of(
    policy: str,
    pool: Pool,
    limits: Limits,
    window: tuple[int, int] | None = None,
    work: Workload | None = ONE_REQUEST,
    host_block_bytes: int | None = None,
    **switches,
) -> Settings:
    """The settings for a pool of exactly that size, on the device and on the host; ``window`` is in ticks.

    Blocks of the host have the size of blocks of one KV group, unless ``host_block_bytes`` says otherwise.

    Of the limits those that the policy reads when it serves ``work``; all of them where that is None. As the oracle has it,
    vllm-v1 and sglang decide a step after the one before it; vllm-v1 spends no time outside of the engine, and keeps no prefixes
    unless ``switches`` say so.
    """
    if policy == "vllm-v1":
        switches = {"async_scheduling": False, "enable_prefix_caching": False, "outside_ms": 0} | switches
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    if policy in ("vllm-v1", "sarathi", "fastgen"):
        # A budget below ``max_num_seqs`` is refused.
        tokens = max(tokens, seqs or 0)
    if policy == "sglang":
        # And so are pages of more than a token.
        pool = Pool(pool.slots, 1, pool.host_blocks)
        switches = {"schedule_policy": limits.schedule_policy, "disable_overlap_schedule": True} | switches
    chosen = settings(
        policy=policy,
        model=LONG_MODEL,
        block_size=pool.block_size,
        num_gpu_blocks_override=pool.num_blocks,
        swap_space=pool.host_blocks * (host_block_bytes or pool.block_size * _token_bytes()) / _GIB,
        max_model_len=limits.max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        watermark=limits.watermark_fraction,
        preemption_mode=limits.preemption_mode,
        waiting_served_ratio=limits.waiting_served_ratio,
        max_waiting_tokens=limits.max_waiting_tokens,
        window=None if window is None else (seconds_of(window[0]), seconds_of(window[1])),
        **switches,
    )
    return chosen if work is None else only_read(chosen, work)


def what_is_read(chosen: dict[str, Any], work: Workload) -> dict[str, Any]:
    """Settings by name, those that the run of a workload does not read at their defaults."""
    kept = only_read(settings(**chosen), work)
    return {name: kept.value(name) for name in chosen}


def cached_if_known(policy: str, case: Case) -> dict[str, bool]:
    """The switch for a prefix cache, which vllm-v1 has also where no contents are known, and the oracle has not."""
    return {"enable_prefix_caching": case.content is not None} if policy == "vllm-v1" else {}


def serve(policy: str, case: Case, window: tuple[int, int] | None = None, **switches) -> Run:
    """Run a case; ``switches`` are ``leap``, ``ids`` and ``core``."""
    chosen = settings_of(policy, case.pool, case.limits, window, **(cached_if_known(policy, case) | switches))
    with mock.patch.object(FasterTransformer, "max_batch_tokens", case.limits.ft_max_tokens):
        return simulate(chosen, workload_of(case.requests, case.limits.max_model_len, case.content), case.cost)


class StepRow(NamedTuple):
    """One step, or one span in which blocks are only swapped out (``steps`` 0)."""

    start_ticks: int
    ticks: int
    steps: int
    batch_size: int
    growing: int
    decodes: int
    prefill_tokens: int
    swap_ticks: int


def steps_of(run: Run) -> list[StepRow]:
    """Every step that a run leapt over or took, in plain integers."""
    rows = run.log.rows
    names = ("start_ticks", "steps", "first_ticks", "next_ticks", "slope_ticks", *StepRow._fields[3:])
    expanded: list[StepRow] = []
    for start, steps, ticks, later, slope, batch_size, growing, *first in zip(*(rows[n].tolist() for n in names)):
        expanded.append(StepRow(start, ticks, min(steps, 1), batch_size, growing, *first))
        for step in range(1, steps):
            start += ticks
            ticks = later + slope * (step - 1)
            expanded.append(StepRow(start, ticks, 1, batch_size, growing, batch_size, 0, 0))
    return expanded


def buckets_at_rows(run: Run) -> list[dict[str, int]]:
    """The ledger in the first step of every row."""
    columns = {name: column.tolist() for name, column in run.accounts.at_rows().items()}
    assert list(columns) == [*BUCKETS, *(["state"] if run.log.groups.states else [])]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def residencies_of(run: Run) -> list[tuple[int, ...]]:
    """(start step, request, tokens computed in it or before, tokens generated before, kind) of every residency."""
    residencies = run.log.residencies
    return [*zip(*(residencies[n].tolist() for n in ("start_step", "index", "tokens", "generated_tokens", "kind")))]


def evictions_of(run: Run) -> list[tuple[int, int, int]]:
    """(decode step, request, whether swapped out) of every eviction."""
    evictions, index = run.log.evictions, run.log.residencies["index"]
    return [
        *zip(evictions["decode_step"].tolist(), index[evictions["residency"]].tolist(), evictions["swapped"].tolist())
    ]


def times_of(run: Run) -> dict[int, tuple[int, ...]]:
    """(first scheduled, first token, finish, recomputed, swapped) of every request that was served."""
    times = request_times(run)
    names = ("first_scheduled_ticks", "first_token_ticks", "finish_ticks", "recomputed", "swapped")
    return dict(zip(times.index.tolist(), zip(*(getattr(times, name).tolist() for name in names))))
