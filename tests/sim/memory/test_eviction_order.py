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
from fragmeter.sim.metrics.prefix_cache import prefix_cache
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


def test_the_example_is_short():
    lines = (FOLDER / "least_frequently_used.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60
