"""The order of the free queue under ``vllm-v1`` by release of vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.memory.prefix import FREE_QUEUES, BlockPool
from fragmeter.sim.spec.releases import FIRST_ORDERED, LAST_ORDERED, free_queue
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent

#: By whether blocks without a hash come first.
ORDERS = "least-recently-used", "unhashed-first"


@pytest.mark.parametrize(
    ("minor", "with_caching", "without"),
    [(9, False, False), (22, False, False), (23, False, False), (24, True, True), (26, True, True), (27, True, False)]
    + [(28, True, True), (33, True, True)],
)
def test_the_order_by_release(minor, with_caching, without):
    found = free_queue(minor, True, True), free_queue(minor, False, True)
    assert found == (ORDERS[with_caching], ORDERS[without])


def test_releases_name_orders_that_the_pool_has():
    releases = range(FIRST_ORDERED, LAST_ORDERED + 1)
    assert {free_queue(minor, caching, True) for minor in releases for caching in (True, False)} == {*FREE_QUEUES}
    assert [BlockPool(4, queue).order for queue in FREE_QUEUES.values()] == [*FREE_QUEUES]


def test_0_23_depends_on_the_layer():
    assert free_queue(23, True, False) is None
    work = Workload("one", np.array([0]), np.array([5]), np.array([2]))
    chosen = settings(policy="vllm-v1", model="gpt-oss-120b", gpu="h200", vllm_release="0.23")
    with pytest.raises(SettingError, match="^vllm_release = '0.23': frees blocks of windows and states in an order of"):
        simulate(chosen, work)


@pytest.mark.parametrize("release", ["0.8", "0.34", "1.0", "0.022", "new"])
def test_other_releases_are_refused(release):
    with pytest.raises(SettingError, match=f"^vllm_release = '{release}': must be from 0.9 to 0.33"):
        settings(policy="vllm-v1", vllm_release=release)


def free_and_hits(release: str) -> tuple[list[int], int]:
    """Requests of 5 + 2 tokens, one after the other, in 4 blocks of 4 and vLLM's null block: the free queue at the
    end, and cached tokens of the third one, which has the first one's prompt."""
    ticks = np.arange(3) * 10**13
    content = PromptContent(np.array([0, 1, 2, 3]), np.array([7, 8, 7]), np.array([5, 5, 5]), None)
    work = Workload("three", ticks, np.full(3, 5), np.full(3, 2), content=content)
    chosen = settings(
        policy="vllm-v1", block_size=4, num_gpu_blocks_override=5, max_model_len=8, vllm_release=release, ids=True
    )
    run = simulate(chosen, work)
    return list(run.replica.memory.pool.free_ids), int(run.replica.cache_log.look_up_columns()["hit_tokens"][2])


def test_a_story():
    """The first request has blocks 0, with a hash, and 1, without.

    To the head: 1 2 3 0; the second request takes 1 and 2, so 2 3 0 1; the third finds 0 and takes 2, so 2 3 1 0.
    To the tail: 2 3 1 0; the second request takes 2 and 3, so 1 0 3 2; the third finds 0 and takes 1, so 3 2 1 0.
    """
    assert free_and_hits("0.33") == ([2, 3, 1, 0], 4)
    assert free_and_hits("0.22") == ([3, 2, 1, 0], 4)
