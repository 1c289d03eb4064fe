"""Pools with blocks of several sizes: accounts worked out by hand, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.memory import GroupSize, PagedMemory, PageGroups
from fragmeter.sim.metrics.kv_groups import group_buckets_at_rows, kv_groups

#: Two layers that keep every token, and two with a window of 17 and twice the heads: blocks of 32 tokens beside blocks of 16.
CONFIG = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 1,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "sliding_window_size": 17,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0] * 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 20,
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def served(path, leap=True, **others):
    work = Workload("one", np.zeros(1), np.full(1, 40), np.full(1, 4))
    chosen = {
        "policy": "vllm-v1",
        "model": path,
        "num_gpu_blocks_override": 11,
        "max_model_len": 100,
        "max_num_batched_tokens": 64,
    }
    return simulate(settings(**chosen, outside_ms=0, leap=leap, async_scheduling=False, **others), work)


@pytest.mark.parametrize("caching", [False, True])
def test_the_account_of_one_request(path, caching):
    """40 tokens and three more that are stored. Of 10 blocks of 32 slots the full group has two. The window's has three, and two once the
    first decode has passed the first 24 tokens; a token there has two slots."""
    run = served(path, leap=False, enable_prefix_caching=caching)
    full = {"live": [40, 41, 42, 43], "reserved": [4, 3, 2, 1], "block_tail": [20] * 4}
    window = {"live": [40, 25, 26, 27], "reserved": [4, 3, 2, 1], "block_tail": [4] * 4}
    found = {name: slots.tolist() for name, slots in group_buckets_at_rows(run).items()}
    assert found == {f"full_attention.{bucket}": slots for bucket, slots in full.items()} | {
        f"sliding_attention.{bucket}": [2 * each for each in slots] for bucket, slots in window.items()
    }
    pool = {name: slots.tolist() for name, slots in run.accounts.at_rows().items()}
    assert [sum(each) for each in zip(*pool.values(), strict=True)] == [320] * 4
    assert pool["free"] == [320 - 64 - 96, *[320 - 64 - 64] * 3]
    assert pool["live"] == [one + 2 * other for one, other in zip(full["live"], window["live"], strict=True)]


@pytest.mark.parametrize("caching", [False, True])
def test_leaps_have_the_same_account(path, caching):
    runs = [served(path, leap, enable_prefix_caching=caching) for leap in (False, True)]
    assert kv_groups(runs[0]) == kv_groups(runs[1])
    assert runs[0].accounts.window() == runs[1].accounts.window()
    runs[1].accounts.require_conserved()


def test_an_admission_asks_for_blocks_of_each_size():
    """Of 50 tokens: four blocks of 16, two of 32, and of a window that needs three of 16 no more."""
    groups = PageGroups(("full", "full", "sliding"), 20, sizes=(GroupSize(16), GroupSize(32), GroupSize(16, 20, 3)))
    memory = PagedMemory(20, 32, groups=groups)
    assert memory.wanted_blocks(50) == 4 + 2 + 3
    assert memory.pages_for(50) == 4 + 2 + (4 - 1)
    assert [each.number for each in memory.classes] == [1, 1, 1]
