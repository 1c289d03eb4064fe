"""Rings of GLM-5.3-Flash: a block of each sequence from its first chunk to its end, which no other sequence finds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.metrics.kv_groups import group_buckets_at_rows, kv_groups
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.workload.content import PromptContent

REQUESTS, PROMPT, SHARED = 12, 5000, 4000


def _work() -> Workload:
    """Prompts that begin with the same tokens, one after the other, so that most find three blocks of 1,152 tokens."""
    pieces = np.arange(REQUESTS + 1), np.zeros(REQUESTS, dtype=np.int64), np.full(REQUESTS, SHARED)
    arrivals = np.arange(REQUESTS) * 1_000_000_000
    lengths = np.full(REQUESTS, PROMPT), np.full(REQUESTS, 200)
    return Workload("alike", arrivals, *lengths, content=PromptContent(*pieces))


def _run(**chosen):
    others = {"num_gpu_blocks_override": 60, "max_num_seqs": 4, "max_num_batched_tokens": 2048} | chosen
    return simulate(
        settings(policy="vllm-v1", model="glm-5.3-flash", gpu="h200", tensor_parallel_size=4, **others), _work()
    )


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_sequence_in_a_step_has_a_ring(cached, asynchronous):
    run = _run(enable_prefix_caching=cached, async_scheduling=asynchronous, leap=False)
    rows, size = run.log.rows, run.log.block_size
    rings, steps = group_buckets_at_rows(run)["ring.state"] // size, rows["ticks"] > 0
    # That of a sequence that ended in the step before may be held for one more decision.
    held = rings[steps] - rows["batch_size"][steps]
    assert set(held.tolist()) <= {0, 1} and not held[rows["batch_size"][steps] == 4].any()
    assert {1, 2, 3, 4} == set(rings[steps].tolist())
    found = summary(run)["prefix_cache"]
    assert (found is not None and found["hit_tokens"] >= 3 * 1152 * 8) if cached else found is None


@pytest.mark.parametrize("cached", [False, True])
def test_ids_and_leaps_change_no_number(cached):
    alike = [
        kv_groups(_run(enable_prefix_caching=cached, ids=ids, leap=leap))
        for ids in (False, True)
        for leap in (False, True)
    ]
    assert alike[0] == alike[1] == alike[2] == alike[3]
    assert [group["name"] for group in alike[0]][-1] == "ring"


def test_a_state_has_a_block_more_for_each_draft_and_a_ring_is_longer():
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    config = json.dumps(drafts | {"synthetic_acceptance_length": 2})
    run = _run(enable_prefix_caching=False, speculative_config=config)
    buckets = {name: slots for name, slots in group_buckets_at_rows(run).items() if name.endswith("state")}
    rings = buckets.pop("ring.state")
    assert rings.any() and all((slots == 3 * rings).all() for slots in buckets.values())
    # Four tokens of a key and two drafts: two keys.
    config = run.replica.layout.config
    assert [group.block_size for group in config.groups if group.kind == "ring"] == [8]


@pytest.mark.slow
@pytest.mark.parametrize(("cached", "states"), [(True, 3), (False, 1)])
def test_a_request_needs_a_block_for_its_ring(cached, states):
    """Its 5,199 tokens are five blocks; there are four groups of states, and the null block."""
    least = 5 + 4 * states + 1 + 1
    chosen = {"max_model_len": 5200, "enable_prefix_caching": cached}
    assert _run(num_gpu_blocks_override=least, **chosen).log.rows["batch_size"].max() == 1
    assert not len(_run(num_gpu_blocks_override=least - 1, **chosen).log.rows["batch_size"])
