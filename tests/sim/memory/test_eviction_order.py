"""An order of eviction of its own: the example of docs/extending.md beside a search from end to end."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import numpy as np
import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue
from fragmeter.sim.metrics.cache_bounds import cache_bounds
from fragmeter.sim.metrics.prefix_cache import prefix_cache
from fragmeter.sim.policy import registry
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.ticks import PER_SECOND
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


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    """A policy is loaded once in a process: what a test replaces in its module would be replaced in another one after a second import."""
    monkeypatch.syspath_prepend(str(FOLDER))
    registry._imported_policy.cache_clear()


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
def test_least_frequently_used_hits_as_often_as_a_search_says(seed, monkeypatch):
    example = import_module("least_frequently_used")
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
    example, work = import_module("pinned_prefixes"), prompts_of_an_agent(5, 30)
    for pinned_tokens in (0, 32, 64):
        monkeypatch.setattr(example, "PINNED_TOKENS", pinned_tokens)
        looks = served("pinned_prefixes:PinnedV1", work).replica.cache_log.look_up_columns()["hit_tokens"]
        assert looks.tolist() == [0] * 5 + [pinned_tokens] * 25
    assert not served("vllm-v1", work).replica.cache_log.look_up_columns()["hit_tokens"].any()


class Waiting(Clairvoyant):
    """All free blocks in the order in which they were freed, and of each until when it is kept."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.until, self.expected = {}, 0

    def popleft_n(self, count):
        taken = []
        for _ in range(count):
            found = min(self.queue, key=lambda block: (block in self.hashed, self.until.get(block, 0)))
            self.queue.remove(found)
            self.hashed.discard(found)
            taken.append(found)
        self.num_free_blocks -= count
        self.num_touched = max([self.num_touched, *(block + 1 for block in taken)])
        return taken

    def free_n(self, blocks, unhashed):
        # Behind those that are kept as long.
        self.hashed.update(block for block in blocks if block not in unhashed)
        self.queue = [*unhashed, *self.queue, *(block for block in blocks if block not in unhashed)]
        self.num_free_blocks += len(blocks)
        for block in blocks:
            comes_back = block not in unhashed and self.next_use(block) < len(self.prompts)
            self.until[block] = self.memory.clock() + self.expected * comes_back


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_an_order_that_knows_the_time_is_that_of_a_search(seed, monkeypatch):
    """In leaps and step by step; one that is told no time hits other blocks."""
    example, work = import_module("session_aware"), load(seed)
    policy, expected = "session_aware:SessionV1", PER_SECOND
    monkeypatch.setattr(example, "EXPECTED", expected)
    runs = [served(policy, work), served(policy, work, leap=False)]
    whole = example.SessionV1.memory

    def memory(self, pool):
        memory = VllmV1.memory(self, pool)
        self.queue = queue = memory.pool.free_block_queue
        queue.pool, queue.prompts, queue.memory = memory.pool, prompts_of(memory, pool), memory
        queue.expected = expected
        return memory

    monkeypatch.setattr(example.SessionV1, "eviction_order", Waiting)
    monkeypatch.setattr(example.SessionV1, "memory", memory)
    runs.append(served(policy, work))
    looks = [run.replica.cache_log.look_up_columns()["hit_tokens"].tolist() for run in runs]
    assert looks[0] == looks[1] == looks[2]
    monkeypatch.setattr(example.SessionV1, "memory", whole)
    monkeypatch.setattr(example.SessionV1, "eviction_order", example.SessionAware)
    monkeypatch.setattr(example.SessionAware, "rank", lambda self, block: self.next_use(block) < example.NEVER)
    assert served(policy, work).replica.cache_log.look_up_columns()["hit_tokens"].tolist() != looks[0]


def agents(sessions: int = 60, turns: int = 12) -> Workload:
    """Agents with one system prompt of 4,000 tokens: each turn adds 1,000 to 3,000 after a tool that takes 20 s on average, in a few cases
    minutes; one in three ends after its first turn."""
    rng = np.random.default_rng(0)
    length = np.where(np.arange(sessions) % 3 == 0, 1, turns)
    rows = []
    for session, (start, count) in enumerate(zip(np.cumsum(rng.exponential(10, sessions)), length)):
        tools = np.append(0, np.cumsum(rng.lognormal(2.3, 1.2, count - 1)))
        prompts = 4000 + np.cumsum(rng.integers(1000, 3001, count))
        rows += [(start + tool, session, prompt) for tool, prompt in zip(tools, prompts)]
    arrivals, session, prompts = map(np.array, zip(*sorted(rows), strict=True))
    ids, tokens = np.stack([0 * session, 1 + session], axis=1), np.stack([0 * prompts + 4000, prompts - 4000], axis=1)
    content = PromptContent(2 * np.arange(len(prompts) + 1), ids.ravel(), tokens.ravel())
    return Workload(
        "agents", (arrivals * PER_SECOND).astype(np.int64), prompts, np.full(len(prompts), 200), content=content
    )


@pytest.mark.slow
def test_agents_come_back_to_what_an_order_that_knows_them_kept(monkeypatch):
    """The table of docs/cache-worth.md: tokens hit in percent, with 9,000 blocks of 16 tokens."""
    example, work, found = import_module("session_aware"), agents(), []
    for policy, seconds in (("vllm-v1", 0), *(("session_aware:SessionV1", each) for each in (10, 60, 300))):
        monkeypatch.setattr(example, "EXPECTED", seconds * PER_SECOND)
        chosen = settings(policy=policy, model="llama-3.1-8b", gpu="h200", num_gpu_blocks_override=9_000)
        found.append(round(100 * prefix_cache(simulate(chosen, work))["hit_rate"], 1))
    assert found == [73.8, 76.0, 79.1, 79.2]
