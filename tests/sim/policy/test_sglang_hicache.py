"""SGLang's HiCache: a story with every copy, leaps as single steps, sizes of the host, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.engine.replica import build
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy.sglang_options import SGLangOptions
from fragmeter.sim.spec import model
from fragmeter.sim.spec.tiers import TierSpec
from fragmeter.sim.types.errors import NotSimulated, SettingError
from fragmeter.sim.types.sequence import LayeredLoad
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent
from same_runs import same
from strategies import LineCost

#: OPT-13B: 40 layers, 819,200 bytes a token.
PLAIN = {"policy": "sglang", "enable_hierarchical_cache": True, "outside_ms": 0}
TOKEN_BYTES, TOKEN_TICKS = 819_200, 10


@pytest.fixture
def link(monkeypatch):
    """As fast as ``LineCost`` is."""
    monkeypatch.setattr(TierSpec, "ticks", lambda spec, size, writes: size // TOKEN_BYTES * TOKEN_TICKS)


def story(kinds: list[int], prompts: list[int], gap: int, outputs: list[int] | None = None) -> Workload:
    """Prompts that are the beginnings of streams, one after the other."""
    rows = np.arange(len(kinds))
    lengths = np.array(outputs or [1] * len(kinds))
    content = PromptContent(np.arange(len(kinds) + 1), np.array(kinds), np.array(prompts))
    return Workload("story", rows * gap, np.array(prompts), lengths, max_tokens=lengths, content=content)


def test_a_story_of_two_prompts_in_a_pool_for_one(link):
    """A is written and evicted for B; A again finds 59 of its 60 tokens on the host, whose load its step waits for."""
    gap = 200 * TOKEN_TICKS
    chosen = settings(**PLAIN, num_gpu_blocks_override=100, disable_overlap_schedule=True)
    run = simulate(chosen, story([0, 1, 0], [60, 60, 60], gap), LineCost())
    tier, step = run.replica.memory.transfers, LineCost().step_ticks(0, 0, 60, 0)
    again = LineCost().step_ticks(0, 0, 1, 0)
    copies = [tuple(int(value) for value in row) for row in zip(*tier.transfers.columns().values(), strict=True)]
    wait = -(-59 * TOKEN_TICKS // 40) + again
    wait = max(wait, 59 * TOKEN_TICKS - (-again // 40)) - again
    assert copies == [
        (-1, step, step, step + 60 * TOKEN_TICKS, 60, 1),
        (-1, gap + step, gap + step, gap + step + 60 * TOKEN_TICKS, 60, 1),
        (-1, 2 * gap, 2 * gap, 2 * gap + 59 * TOKEN_TICKS, 59, 0),
    ]
    assert tier.flushes.columns()["ticks"].tolist() == [wait]
    assert run.log.end_ticks == 2 * gap + again + wait
    assert requests_table(run)["offloaded_tokens"].tolist() == [0, 0, 59]
    found = summary(run)["kv_offloading"]
    assert (found["num_blocks"], found["max_used_blocks"], found["stored_blocks"], found["loaded_blocks"]) == (
        201,
        120,
        120,
        59,
    )
    assert (found["queried_tokens"], found["hit_tokens"], found["evicted_blocks"]) == (180, 59, 0)


@pytest.mark.parametrize("load, step, wait", [((100, 4), 1000, 25), ((1000, 4), 100, 925), ((0, 4), 100, 0)])
def test_a_load_is_hidden_layer_by_layer(load, step, wait):
    """A short one delays the first layer, of a long one the last layer is computed when all is there."""
    assert LayeredLoad(*load).wait(step) == wait


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("overlap", [False, True])
def test_leaps_are_single_steps(overlap, write_policy, link):
    kinds = [0, 1, 2, 0, 3, 1, 0, 2, 3, 0, 1, 2] * 2
    work = story(kinds, [50 + 7 * kind for kind in kinds], 40 * TOKEN_TICKS, [1 + 5 * row % 40 for row in range(24)])
    chosen = settings(
        **PLAIN,
        num_gpu_blocks_override=220,
        disable_overlap_schedule=not overlap,
        hicache_write_policy=write_policy,
        hicache_ratio=1.5,
    )
    leapt, stepped = (simulate(replace(chosen, leap=leap), work, LineCost()) for leap in (True, False))
    same(leapt, stepped)
    assert summary(leapt)["kv_offloading"]["loaded_blocks"] > 0


def test_the_link_is_that_of_the_card():
    """0.8 of the 32 GB/s of an A100, one way."""
    memory = build(settings(**PLAIN, num_gpu_blocks_override=100)).memory
    assert (
        memory.transfers.ticks(7, 0, False)
        == memory.transfers.ticks(7, 0, True)
        == 7 * TOKEN_BYTES * PER_SECOND // 25_600_000_000
    )


def test_a_pool_that_copies_lock_is_refused():
    """SGLang aborts a request that finds no slot for its next token while the others are being written."""
    work = story([0, 1, 2, 3], [100, 10, 27, 12], 1000, [1, 60, 1, 1])
    with pytest.raises(SettingError, match="aborts"):
        simulate(settings(**PLAIN, num_gpu_blocks_override=200), work, LineCost())


@pytest.mark.parametrize(
    "given, pages",
    [({}, 20_001), ({"hicache_ratio": 0.35}, 3_501), ({"hicache_size": 3}, 3 * 10**9 // TOKEN_BYTES + 1)],
)
def test_the_host_is_sized_by_ratio_or_by_size(given, pages):
    replica = build(settings(**PLAIN, num_gpu_blocks_override=10_000, **given))
    assert replica.memory.transfers.cache.num_blocks == pages


def test_the_host_has_a_pool_for_windows_or_states():
    """Of 10,000 slots and 8,000 windows of as many bytes, and a page of each; 7 GB are 284,830 slots of 24,576 bytes."""
    given = PLAIN | {"model": "gpt-oss-20b", "gpu": "h100-80gb", "num_gpu_blocks_override": 10_000}
    for sized, slots, windows in (({"hicache_ratio": 1.5}, 15_001, 12_001), ({"hicache_size": 7}, 158_238, 126_594)):
        memory = build(settings(**given | sized)).memory
        assert (memory.transfers.cache.num_blocks, memory.transfers.beside[0]) == (slots, windows)
        assert (memory._host.chunk_bytes, memory._host.component_bytes) == memory.windows.slot_bytes


def test_step_3_5_keeps_every_token_beside_it():
    """``_step3p_overrides``."""
    options = SGLangOptions(enable_hierarchical_cache=True)
    shape = replace(model("gpt-oss-20b"), model_type="step3p5")
    assert options.window_of(shape) is None and SGLangOptions().window_of(shape) is not None


@pytest.mark.parametrize(
    "given, error",
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching = False"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"ids": True}, "block ids, which recordings need"),
    ],
)
def test_what_is_refused_beside_it(given, error):
    with pytest.raises(NotSimulated, match=error):
        build(settings(**PLAIN, gpu="h100-80gb", num_gpu_blocks_override=10_000, **given))


def test_write_back_is_refused():
    with pytest.raises(SettingError, match="hicache_write_policy"):
        settings(**PLAIN, hicache_write_policy="write_back")


def test_the_options_are_those_of_sglang():
    """By default a node is written when it is cached, and the host has two slots for each of the device."""
    options = SGLangOptions()
    assert (options.hicache_ratio, options.hicache_size, options.hicache_write_policy) == (2.0, 0, "write_through")
