"""The ledger of SGLang's two pools: windows in slots of their own, added up by their bytes."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.memory import RadixMemory
from fragmeter.sim.metrics.kv_groups import group_buckets_at_rows
from fragmeter.sim.metrics.result import memory_table
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent

#: 12 layers that keep every token and 12 with a window of 128, whose slots have equally many bytes; and 10 and 50 layers of 8 and 16 heads.
EQUAL, UNEQUAL = "gpt-oss-20b", "google/gemma-4-31b-it"
FULL, SLIDING = "full_attention", "sliding_attention"


def sessions(number: int = 80) -> Workload:
    """Requests of ten sessions, with prompts up to 3,000 tokens."""
    rng = np.random.default_rng(3)
    arrivals = np.sort(rng.integers(0, 2 * 10**12, number))
    prompts, outputs = rng.integers(100, 3000, number), rng.integers(1, 300, number)
    return Workload("sessions", arrivals, prompts, outputs, content=PromptContent.of_sessions(np.arange(number) % 10))


def served(model: str = EQUAL, work: Workload | None = None, **given):
    chosen = {"gpu": "h100-80gb", "num_gpu_blocks_override": 16_000 // given.get("block_size", 1)} | given
    return simulate(settings(policy="sglang", model=model, **chosen), work or sessions())


def columns(run, bucket: str) -> tuple[list[int], list[int]]:
    rows = group_buckets_at_rows(run)
    return rows[f"{FULL}.{bucket}"].tolist(), rows[f"{SLIDING}.{bucket}"].tolist()


def test_a_request_that_waits_for_ever_is_refused_with_a_remedy():
    """Its prefix locks a window of the 4,000 that it needs 3,001 of; SGLang never admits it."""
    content = PromptContent(np.array([0, 1, 2]), np.array([7, 7]), np.array([2000, 2000]))
    work = Workload("two", np.array([0, 10**13]), np.array([2000, 5000]), np.array([10, 10]), content=content)
    flags = {"swa_full_tokens_ratio": 0.02, "num_gpu_blocks_override": 200_000}
    with pytest.raises(SettingError, match=r"swa_full_tokens_ratio = 0.02: 1 request.* wait for ever.* = 16384$"):
        served("gemma-4-26b-a4b", work, max_num_batched_tokens=16_384, **flags)
    assert len(served("gemma-4-26b-a4b", work, max_num_batched_tokens=2048, **flags).workload) == 2


def test_one_request_by_the_rules():
    """A prompt of 1,000 tokens and 200 of output, decided one step ahead. All windows of the prompt are there while it is computed; then those of its
    last 127 tokens, of which the last is not yet in the tree. A decode adds one, and gives back 128 when 256 are there beside the
    window of the tree. Afterwards the tree keeps every token, and windows of those that were left."""
    run = served(work=Workload("one", np.array([0]), np.array([1000]), np.array([200])))
    live, windows = columns(run, "live")
    assert live[:3] == [1000, 1001, 1002] and live[199] == 1199
    assert windows[:4] == [1000, 128, 129, 130]
    assert windows[199] == 128 + 198
    own, kept = columns(run, "cached")
    # The first token of the prompt's last page beyond the window joins the tree unlocked.
    assert own[:200] == [0] * 200 and kept[:3] == [0, 1, 1]
    pools = [np.sum([columns(run, bucket)[place] for bucket in ("live", "cached", "free")], axis=0) for place in (0, 1)]
    assert set(pools[0]) == {16_000} and set(pools[1]) == {12_800}


@pytest.mark.parametrize("size", [1, 64])
def test_cached_windows_are_those_of_the_tree_without_locks(size, monkeypatch):
    """By a walk over all nodes of the tree as each row begins."""
    walked, begin = [], RadixMemory._begin_row

    def begun(memory: RadixMemory, *args):
        found, nodes, pages = begin(memory, *args), [memory.tree.root], 0
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            pages += node.tokens * (node.component and not node.component_locks)
        walked.append(pages * size)
        return found

    monkeypatch.setattr(RadixMemory, "_begin_row", begun)
    cached = columns(served(block_size=size), "cached")[1]
    assert cached == walked and len(set(cached)) > 50


@pytest.mark.parametrize(
    "given", [{}, {"block_size": 64}, {"disable_overlap_schedule": True}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("model", [EQUAL, UNEQUAL])
def test_every_slot_of_both_pools_is_in_one_bucket(model, given):
    run = served(model, **given)
    (first, full), (second, sliding) = run.accounts.pools
    assert (first, second) == ((1, 1) if model == EQUAL else (1, 10))
    rows, whole = [each.at_rows() for each in (full, sliding)], run.accounts.at_rows()
    slots = run.log.capacity_slots, run.replica.memory.windows.pages * run.replica.block_size
    for found, capacity in zip(rows, slots, strict=True):
        assert (sum(found.values()) == capacity).all() and all((column >= 0).all() for column in found.values())
    assert all((whole[name] == first * rows[0][name] + second * rows[1][name]).all() for name in whole)
    # Pages that are not full are the last ones of sequences, which both pools have.
    assert (rows[0]["reserved"] == rows[1]["reserved"]).all() and (rows[0]["block_tail"] == rows[1]["block_tail"]).all()
    # What runs has no more windows than tokens, and of each sequence a window at least once its prompt is computed.
    assert (rows[1]["live"] <= rows[0]["live"]).all()
    window = run.window
    assert sum(window.slot_steps.values()) == run.log.ledger_slots * window.num_steps
    assert sum(window.slot_ticks.values()) == run.log.ledger_slots * run.log.end_ticks


@pytest.mark.parametrize("given", [{}, {"block_size": 64}, {"disable_overlap_schedule": True}])
@pytest.mark.parametrize("model", [EQUAL, UNEQUAL])
def test_every_byte_of_one_buffer_is_in_one_bucket(model, given):
    """Each kind for itself could have all of it; what is free is free for both."""
    run = served(model, enable_unified_memory=True, **given)
    buffer, (first, second) = run.replica.memory.buffer, run.log.pool_weights
    rows, whole = [each.at_rows() for _, each in run.accounts.pools], run.accounts.at_rows()
    assert run.log.ledger_slots * buffer.slot_bytes == buffer.bytes * first
    assert (sum(whole.values()) == run.log.ledger_slots).all() and all((each >= 0).all() for each in whole.values())
    for name in whole.keys() - {"free"}:
        assert (whole[name] == first * rows[0].get(name, 0) + second * rows[1].get(name, 0)).all()
    assert (rows[1]["live"] <= rows[0]["live"]).all()
    window = run.window
    assert sum(window.slot_steps.values()) == run.log.ledger_slots * window.num_steps
    assert sum(window.slot_ticks.values()) == run.log.ledger_slots * run.log.end_ticks
    assert all("free" not in each["mean_over_time_pct"] for each in summary(run)["kv_groups"])


def test_one_buffer_gives_tokens_what_windows_leave():
    """Two prompts of 13,000 tokens have no room in 16,000 slots, of which the windows beside them leave 12,800 of as many bytes."""
    outputs = np.array([300, 300])
    work = Workload("two", np.array([0, 0]), np.array([13_000, 13_000]), outputs, outputs)
    given = {"work": work, "max_num_batched_tokens": 1024}
    apart, together = (served(enable_unified_memory=shared, **given) for shared in (False, True))
    live = [max(group_buckets_at_rows(run)[f"{FULL}.live"]) for run in (apart, together)]
    assert live[0] <= 16_000 < 26_000 < live[1]
    assert together.log.end_ticks < apart.log.end_ticks


def test_shares_of_the_summary_are_of_the_bytes_of_both():
    run = served(UNEQUAL)
    groups, waste = summary(run)["kv_groups"], summary(run)["waste"]["mean_over_time_pct"]["buckets"]
    assert [(each["name"], each["layers"], each["window"]) for each in groups] == [
        (FULL, 10, None),
        (SLIDING, 50, 1024),
    ]
    for bucket in ("live", "cached", "free"):
        assert waste[bucket] == pytest.approx(sum(each["mean_over_time_pct"][bucket] for each in groups))
    one, other = (sum(each["mean_over_time_pct"].values()) for each in groups)
    assert (one + other, other / one) == pytest.approx((100, 10 * 0.8), rel=1e-4)


def test_without_pools_of_their_own_all_is_as_before():
    run = served(disable_hybrid_swa_memory=True)
    assert run.log.second_pool is None and not run.accounts.pools and run.log.ledger_slots == run.log.capacity_slots
    assert not any("." in name for name in memory_table(run))
