"""The ledger of SGLang's pool of states beside the KV cache, added up by their bytes."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.memory import RadixMemory
from fragmeter.sim.metrics.kv_groups import group_buckets_at_rows
from fragmeter.sim.metrics.result import memory_table
from fragmeter.sim.spec import model
from fragmeter.sim.spec.startup.sglang_states import state_bytes
from fragmeter.sim.workload.content import PromptContent

MODEL, NOT_COPIED = "qwen3-next-80b-a3b", "lfm2-1.2b"
ALONE, TOGETHER = {"disable_overlap_schedule": True}, {"enable_unified_memory": True}


def sessions(number: int = 80) -> Workload:
    """Requests of ten sessions, with prompts up to 3,000 tokens."""
    rng = np.random.default_rng(3)
    arrivals = np.sort(rng.integers(0, 2 * 10**12, number))
    prompts, outputs = rng.integers(100, 3000, number), rng.integers(1, 300, number)
    return Workload("sessions", arrivals, prompts, outputs, content=PromptContent.of_sessions(np.arange(number) % 10))


def served(work: Workload | None = None, **given):
    chosen = {"model": MODEL, "gpu": "h100-80gb", "tensor_parallel_size": 4, "max_mamba_cache_size": 40}
    chosen |= {"num_gpu_blocks_override": 16_000 // given.get("block_size", 1)}
    return simulate(settings(policy="sglang", **chosen | given), work or sessions())


def states(run, bucket: str) -> list[int]:
    return group_buckets_at_rows(run)[f"state.{bucket}"].tolist()


@pytest.mark.parametrize(
    ("given", "held", "cached"),
    [
        ({}, [3, 4, 0, 3, 3], [0, 0, 2, 2, 2]),
        (ALONE, [1, 2, 1, 2], [0, 0, 2, 2]),
        ({"enable_prefix_caching": False}, [1, 1, 0, 1, 1], [0] * 5),
    ],
)
def test_one_request_by_the_rules(given, held, cached):
    """A prompt of 1,000 tokens and 200 of output, then another one of 10: a prefill, a leap of decodes and, with the overlap schedule, the step
    in flight when the last token was out. It has its state and two copies of it (``extra_buffer``), or that state alone; then, locked in the
    tree, the one of token 960, where the kernel's grid ends, or of token 1,000. Afterwards the tree has that and the one of token
    1,024, a multiple of 256, or of token 1,199, which is the last with KV.."""
    two = Workload("two", np.array([0, 10**14]), np.array([1000, 10]), np.array([200, 2]))
    run = served(two, **given)
    assert (states(run, "state"), states(run, "cached")) == (held, cached)
    assert states(run, "free") == [40 - sum(each) for each in zip(held, cached, strict=True)]


@pytest.mark.parametrize("given", [{}, ALONE, TOGETHER, {"block_size": 64}, {"ids": True}, {"model": NOT_COPIED}])
def test_states_are_those_of_sequences_and_of_the_tree(given, monkeypatch):
    """By a walk over all sequences and all nodes of the tree as each row begins."""
    walked, begin = [], RadixMemory._begin_row

    def begun(memory: RadixMemory, *args):
        found, nodes, held, cached = begin(memory, *args), [memory.tree.root], 0, 0
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            held += node.component and node.component_locks > 0
            cached += node.component and not node.component_locks
        walked.append((held + sum(each.states for each in memory.holdings.values()), cached))
        return found

    monkeypatch.setattr(RadixMemory, "_begin_row", begun)
    run = served(**given)
    assert [*zip(states(run, "state"), states(run, "cached"), strict=True)] == walked
    assert len(set(walked)) > 20


@pytest.mark.parametrize(
    "given", [{}, ALONE, {"block_size": 64}, {"enable_prefix_caching": False}, {"max_mamba_cache_size": 10}]
)
def test_every_slot_of_both_pools_is_in_one_bucket(given):
    run = served(**given)
    (first, tokens), (second, fixed) = run.accounts.pools
    # 12 layers of 2 heads on four ranks, of which each has one; 36 with a state.
    assert second * 12 * 2 * 256 * 2 == first * state_bytes(model(MODEL), 4, 1, None)
    rows, whole = [each.at_rows() for each in (tokens, fixed)], run.accounts.at_rows()
    slots = run.log.capacity_slots, run.replica.memory.states.slots
    for found, capacity in zip(rows, slots, strict=True):
        assert (sum(found.values()) == capacity).all() and all((column >= 0).all() for column in found.values())
    for name, column in whole.items():
        assert (column == first * rows[0].get(name, 0) + second * rows[1].get(name, 0)).all()
    assert not rows[1]["live"].any() and rows[1]["state"].any() and "state" not in rows[0]
    window = run.window
    assert sum(window.slot_steps.values()) == run.log.ledger_slots * window.num_steps
    assert sum(window.slot_ticks.values()) == run.log.ledger_slots * run.log.end_ticks


@pytest.mark.parametrize("given", [{}, ALONE, {"block_size": 64}, {"enable_prefix_caching": False}])
def test_every_byte_of_one_buffer_is_in_one_bucket(given):
    """Each kind for itself could have all of it; what is free is free for both."""
    run = served(**TOGETHER | given)
    buffer, (first, second) = run.replica.memory.buffer, run.log.pool_weights
    rows, whole = [each.at_rows() for _, each in run.accounts.pools], run.accounts.at_rows()
    assert run.log.ledger_slots * buffer.slot_bytes == buffer.bytes * first
    assert (sum(whole.values()) == run.log.ledger_slots).all() and all((each >= 0).all() for each in whole.values())
    for name in whole.keys() - {"free"}:
        assert (whole[name] == first * rows[0].get(name, 0) + second * rows[1].get(name, 0)).all()
    window = run.window
    assert sum(window.slot_steps.values()) == run.log.ledger_slots * window.num_steps
    assert sum(window.slot_ticks.values()) == run.log.ledger_slots * run.log.end_ticks
    groups = summary(run)["kv_groups"]
    assert all("free" not in each["mean_over_time_pct"] for each in groups)
    assert {"free", "state.cached"} <= set(memory_table(run)) and "state.free" not in memory_table(run)


def test_one_buffer_gives_tokens_what_states_leave():
    """40 states have 2.4 times the bytes of 16,000 slots. A prompt of 30,000 tokens is longer than the KV cache of its own; beside it, fewer
    states are kept. The longest request is bounded by the split, as with SGLang, so 15,000 tokens come twice."""
    work = Workload("two", np.array([0, 0]), np.array([15_000, 15_000]), np.array([300, 300]))
    apart, together = (served(work, **given) for given in ({}, TOGETHER))
    live = [max(group_buckets_at_rows(run)["full_attention.live"]) for run in (apart, together)]
    assert live[0] <= 16_000 < 30_000 < live[1]
    assert together.log.end_ticks < apart.log.end_ticks


def test_a_long_queue_takes_its_states_ahead():
    """SGLang takes one for each waiting request before it looks at them, so these lack room: with more requests fewer are admitted at once."""
    admitted = []
    for number in (20, 30):
        columns = [np.full(number, each) for each in (0, 2000, 10)]
        run = served(Workload("queue", *columns), max_num_seqs=8, num_gpu_blocks_override=8000, **TOGETHER)
        admitted.append(run.log.rows["batch_size"][0])
    assert admitted[0] > admitted[1]


@pytest.mark.parametrize("given", [{}, TOGETHER])
def test_leaps_have_the_ledger_of_their_steps(given):
    leaps, steps = served(**given), served(leap=False, **given)
    assert len(leaps.log.row_step) < len(steps.log.row_step)
    assert leaps.window == steps.window


def test_shares_of_the_summary_are_of_the_bytes_of_both():
    run = served()
    groups, waste = summary(run)["kv_groups"], summary(run)["waste"]["mean_over_time_pct"]
    assert [(each["name"], each["layers"], each["window"]) for each in groups] == [
        ("full_attention", 12, None),
        ("state", 36, None),
    ]
    one, other = (each["mean_over_time_pct"] for each in groups)
    assert other["state"] == pytest.approx(waste["buckets"]["state"]) and waste["buckets"]["state"] > 0
    assert one["cached"] + other["cached"] == pytest.approx(waste["buckets"]["cached"])
    assert waste["paper_view"]["token_states"] == pytest.approx(one["live"] + other["state"])
    page = groups[1]["page_bytes"] * 40
    assert sum(other.values()) / 100 == pytest.approx(page / (page + groups[0]["page_bytes"] * 16_000))
    assert {"state", "state.state", "state.cached", "full_attention.live"} <= set(memory_table(run))
