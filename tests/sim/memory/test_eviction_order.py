"""An order of eviction of its own: the example of docs/extending.md beside a search from end to end."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module

import numpy as np
import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue
from fragmeter.sim.metrics.cache_bounds import cache_bounds
from fragmeter.sim.metrics.prefix_cache import prefix_cache
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from paths import ROOT

FOLDER = ROOT / "examples" / "extending"


class Searched(FreeKVCacheBlockQueue):
    """All free blocks in the order in which they were freed, and every hit of each."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.queue, self.hits, self.hashed = list(range(num_blocks)), Counter(), set()

    def popleft_n(self, count):
        taken = []
        for _ in range(count):
            found = min(self.queue, key=lambda block: (block in self.hashed, self.hits[block]))
            self.queue.remove(found)
            self.hashed.discard(found)
            self.hits[found] = 0
            taken.append(found)
        self.num_free_blocks -= count
        self.num_touched = max([self.num_touched, *(block + 1 for block in taken)])
        return taken

    def remove_n(self, blocks):
        for block in blocks:
            self.queue.remove(block)
        self.num_free_blocks -= len(blocks)

    def free_n(self, blocks, unhashed):
        self.hashed.update(block for block in blocks if block not in unhashed)
        self.queue = [*unhashed, *self.queue, *(block for block in blocks if block not in unhashed)]
        self.num_free_blocks += len(blocks)

    def note_hits(self, blocks):
        self.hits.update(blocks)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("least_frequently_used")
    sys.modules.pop("least_frequently_used", None)


def load(seed: int) -> Workload:
    """Some texts that are asked for often, and many that are asked for once in a while."""
    rng = np.random.default_rng(seed)
    count = 160
    text = np.minimum(rng.zipf(1.4, count), 60)
    prompts = 40 + 8 * (text % 9) + rng.integers(0, 20, count)
    content = PromptContent(np.arange(count + 1), text, np.minimum(prompts, 40 + 8 * (text % 9)))
    return Workload(
        "texts", np.cumsum(rng.exponential(0.4, count)) * 1e12, prompts, rng.integers(4, 40, count), content=content
    )


def served(policy, work: Workload, **more):
    return simulate(
        settings(
            policy=policy,
            model="llama-3.1-8b",
            gpu="h100-80gb",
            num_gpu_blocks_override=60,
            block_size=8,
            max_model_len=256,
            **more,
        ),
        work,
    )


@pytest.mark.parametrize("seed", range(4))
def test_least_frequently_used_hits_as_often_as_a_search_says(example, seed, monkeypatch):
    policy, work = "least_frequently_used:FrequentV1", load(seed)
    runs = [served(policy, work), served(policy, work, leap=False)]
    monkeypatch.setattr(example.FrequentV1, "eviction_order", Searched)
    runs.append(served(policy, work))
    found = [prefix_cache(run) for run in runs]
    assert found[0] == found[1] == found[2]
    looks = [run.replica.cache_log.look_up_columns()["hit_tokens"].tolist() for run in runs]
    assert looks[0] == looks[1] == looks[2]
    assert prefix_cache(served("vllm-v1", work))["hit_tokens"] != found[0]["hit_tokens"]
    assert found[0]["evicted_blocks"] > 100


class Clairvoyant(FreeKVCacheBlockQueue):
    """All free blocks in the order in which they were freed; the prompts to come as lists of hashes."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.queue, self.hashed = list(range(num_blocks)), set()
        self.coming, self.pool, self.prompts = 0, None, []

    def next_use(self, block):
        name, first = self.pool.block_hash[block], self.pool._cached_block_hash_to_block
        later = (at for at in range(self.coming, len(self.prompts)) if name in self.prompts[at])
        return next(later, len(self.prompts)) if first.get(name) == block else len(self.prompts)

    def popleft_n(self, count):
        taken = []
        for _ in range(count):
            found = max(
                self.queue, key=lambda block: (block not in self.hashed, block in self.hashed and self.next_use(block))
            )
            self.queue.remove(found)
            self.hashed.discard(found)
            taken.append(found)
        self.num_free_blocks -= count
        self.num_touched = max([self.num_touched, *(block + 1 for block in taken)])
        return taken

    def pass_to(self, coming):
        self.coming = max(self.coming, coming)

    remove_n = Searched.remove_n
    free_n = Searched.free_n


def prompts_of(memory, pool) -> list[set[int]]:
    """What each request looks up."""
    lengths = [sum(length for _, _, length in pool.token_runs.runs(at)) for at in range(len(memory.unshared))]
    return [
        set() if alone else {*memory.chains.names(at)[: (length - 1) // memory.block_size]}
        for at, (alone, length) in enumerate(zip(memory.unshared, lengths, strict=True))
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_an_order_that_knows_the_future_is_that_of_a_search(seed, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    example = import_module("farthest_next_use")
    policy, work = "farthest_next_use:FutureV1", load(seed)
    runs = [served(policy, work), served(policy, work, leap=False)]

    def memory(self, pool):
        memory = VllmV1.memory(self, pool)
        self.queue = queue = memory.pool.free_block_queue
        queue.pool, queue.prompts = memory.pool, prompts_of(memory, pool)
        return memory

    monkeypatch.setattr(example.FutureV1, "eviction_order", Clairvoyant)
    monkeypatch.setattr(example.FutureV1, "memory", memory)
    runs.append(served(policy, work))
    sys.modules.pop("farthest_next_use", None)
    looks = [run.replica.cache_log.look_up_columns()["hit_tokens"].tolist() for run in runs]
    assert looks[0] == looks[1] == looks[2]
    plain, bounds = served("vllm-v1", work), cache_bounds(runs[0])
    assert cache_bounds(plain).hits < bounds.hits <= bounds.fixed_schedule


def prompts_of_an_agent(prefixes: int, requests: int) -> Workload:
    """Requests in turns of few system prompts of 64 tokens, each with 120 tokens that no other asks for, and that the trace names."""
    text, own = np.arange(requests) % prefixes, prefixes + np.arange(requests)
    ids, tokens = np.stack([text, own], axis=1).ravel(), np.tile([64, 120], requests)
    content = PromptContent(2 * np.arange(requests + 1), ids, tokens)
    arrivals = np.arange(requests) * 1_000_000_000_000
    return Workload("agents", arrivals, np.full(requests, 190), np.full(requests, 4), content=content)


def test_pinned_prefixes_hit_what_is_pinned(monkeypatch):
    """Five system prompts, and room for two requests: from the sixth request on exactly the pinned tokens are hit."""
    monkeypatch.syspath_prepend(str(FOLDER))
    example, work = import_module("pinned_prefixes"), prompts_of_an_agent(5, 30)
    for pinned_tokens in (0, 32, 64):
        monkeypatch.setattr(example, "PINNED_TOKENS", pinned_tokens)
        looks = served("pinned_prefixes:PinnedV1", work).replica.cache_log.look_up_columns()["hit_tokens"]
        assert looks.tolist() == [0] * 5 + [pinned_tokens] * 25
    sys.modules.pop("pinned_prefixes", None)
    assert not served("vllm-v1", work).replica.cache_log.look_up_columns()["hit_tokens"].any()
