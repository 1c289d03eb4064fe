"""A window over a longer run: what came before it has warmed the cache, and what is measured is the cut of the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core_loads import Load
from engine_runs import seconds_of
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.cache_bounds import CacheBounds, cache_bounds
from fragmeter.sim.metrics.cache_worth import cache_worth
from fragmeter.sim.metrics.prefix_cache import hits_and_evictions
from fragmeter.sim.metrics.time_to_live import time_to_live
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

COUNTS = ("queried_tokens", "hit_tokens", "preempted_queried_tokens", "preempted_hit_tokens")


def cuts(load: Load, parts: int = 3, **more) -> tuple[Run, list[Run]]:
    """A run, and the same one measured in windows that follow one another from its start to its end."""
    whole = load.run(**more)
    end = whole.log.end_ticks
    edges = [0, *sorted({int(share * end) for share in np.linspace(0.1, 0.9, parts - 1)} - {0, end}), end]
    spans = [(seconds_of(low), seconds_of(high)) for low, high in zip(edges, edges[1:]) if low < high]
    return whole, [load.run(window=span, **more) for span in spans]


@pytest.mark.slow
@hypothesis_settings(max_examples=25)
@given(seed=st.integers(0, 1 << 40), core=st.booleans())
def test_windows_that_follow_one_another_add_up_to_the_run(seed, core):
    whole, parts = cuts(Load(seed, "vllm-v1"), core=core)
    found = hits_and_evictions(whole)
    if found is None or not parts:
        return
    for count in COUNTS:
        assert sum(hits_and_evictions(part)[count] for part in parts) == found[count]
    worth, bounds = cache_worth(whole), cache_bounds(whole)
    if worth is None or bounds is None:
        return
    slots = [cache_worth(part).slot_ticks() for part in parts]
    assert {name: sum(each[name] for each in slots) for name in slots[0]} == worth.slot_ticks()
    of_parts = [cache_bounds(part) for part in parts]
    for count in ("asked", "hits", "infinite"):
        assert sum(getattr(each, count) for each in of_parts) == getattr(bounds, count)
    # An order of eviction that cares for one window only keeps more for it.
    assert sum(each.fixed_schedule for each in of_parts) >= bounds.fixed_schedule
    assert all(each.hits <= each.fixed_schedule <= each.infinite <= each.asked for each in of_parts)
    for ticks in (0, whole.log.end_ticks // 7):
        lost = [time_to_live(cache_worth(part), ticks) for part in parts]
        assert sum(each.lost_blocks for each in lost) == time_to_live(worth, ticks).lost_blocks
        assert sum(each.freed_slot_ticks for each in lost) == time_to_live(worth, ticks).freed_slot_ticks


@hypothesis_settings(max_examples=10)
@given(seed=st.integers(0, 1 << 40))
def test_a_look_up_is_measured_where_its_step_starts(seed):
    """By the tokens that enter: a look-up's own step computes what it did not hit."""
    run = Load(seed, "vllm-v1", most=20).run(core=False)
    log = run.replica.cache_log
    if log is None:
        return
    ticks = ticks_of(run.log, log.look_up_moments())
    assert (np.diff(ticks) >= 0).all(), "look-ups are in the order of time"
    assert np.isin(ticks, run.log.rows["start_ticks"]).all()


def test_a_warm_cache_hits_what_a_cold_one_does_not():
    """Two turns of a session: the second, measured after the first and served alone."""

    def served(arrivals: list[float], prompts: list[int], window: tuple[float, float] | None = None) -> Run:
        sessions = PromptContent.of_sessions(np.zeros(len(prompts), dtype=np.int64))
        ticks = (np.array(arrivals) * PER_SECOND).astype(np.int64)
        work = Workload("turns", ticks, np.array(prompts), np.ones(len(prompts), dtype=np.int64), content=sessions)
        return simulate(settings(policy="vllm-v1", window=window, num_gpu_blocks_override=100), work)

    warm, cold = served([0, 100], [160, 320], window=(100, 200)), served([100], [320], window=(100, 200))
    for run, hit in ((warm, 160), (cold, 0)):
        found = hits_and_evictions(run)
        assert (found["queried_tokens"], found["hit_tokens"]) == (320, hit)
    assert cache_bounds(warm) == CacheBounds(asked=19, hits=10, fixed_schedule=10, infinite=10, closing_blocks=100)
    # Of the first turn nothing is measured but what it left: ten blocks, from the start of the window to their hit.
    begins = int(ticks_of(warm.log, warm.replica.cache_log.look_up_moments())[1])
    assert cache_worth(warm).slot_ticks()["hit_later"] == 160 * (begins - 100 * PER_SECOND)
    assert cache_worth(served([0, 100], [160, 320])).slot_ticks()["hit_later"] > 90 * PER_SECOND * 160


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        {"policy": "sglang"},
        {"policy": "llama-cpp"},
        {"policy": "vllm-v1", "model": "gemma-3-27b"},
        {"policy": "vllm-v1", "kv_offloading_size": 1},
    ],
    ids=str,
)
def test_every_memory_says_when_a_look_up_was(chosen):
    """A look-up that every memory dated at the start would lie in the first window."""
    turn, count = np.repeat(np.arange(4), 20), 80
    content = PromptContent.of_sessions(np.tile(np.arange(20), 4))
    arrivals = np.arange(count) * PER_SECOND // 20
    work = Workload("turns", arrivals, 300 * (turn + 1), np.full(count, 10), content=content)
    chosen = {"model": "llama-3.1-8b", "gpu": "h200", **chosen}
    whole = simulate(settings(**chosen), work)
    end = whole.log.end_ticks / PER_SECOND
    spans = [(0, end / 3), (end / 3, end / 2), (end / 2, end + 1)]
    found = [hits_and_evictions(simulate(settings(**chosen, window=span), work)) for span in spans]
    for count in COUNTS:
        assert sum(part[count] for part in found) == hits_and_evictions(whole)[count]
    assert all(part["queried_tokens"] for part in found)
