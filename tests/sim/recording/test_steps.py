"""Recorded steps: the tables beside the pool's own counts, the slots beside the ledger, the tokens beside their tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim import Settings, Workload
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.recording.steps import Step, StepRecording, record
from fragmeter.sim.types.errors import SettingError

#: vllm-real needs vLLM.
RESERVING = ("orca-max", "orca-pow2", "static", "fastertransformer")
POLICY_NAMES = [name for name in POLICIES if name != "vllm-real"]


def settings_of(policy: str, blocks: int, size: int = 2, **switches) -> Settings:
    if policy in ("sglang", "lightllm"):
        blocks, size = blocks * size, 1
    pool = {"block_size": size, "num_gpu_blocks_override": blocks}
    return Settings(policy=policy, model="toy-opt", max_model_len=32, **pool, **switches)


def workload_of(prompts: list[int], outputs: list[int], **columns) -> Workload:
    return Workload("story", np.zeros(len(prompts), np.int64), np.array(prompts), np.array(outputs), **columns)


def replayed(steps: list[Step], size: int) -> list[dict[int, tuple[int, int]]]:
    """Contents of the slots after each step, (sequence, position), by the moves and tokens of the steps alone."""
    device: dict[int, tuple[int, int]] = {}
    host: dict[int, tuple[int, int]] = {}
    seen = []
    for step in steps:
        for source, target in step.swap_outs:
            host |= {target * size + at: device.get(source * size + at) for at in range(size)}
        for source, target in step.swap_ins:
            device |= {target * size + at: host.get(source * size + at) for at in range(size)}
        for source, target, slots in step.copies:
            unit = size if step.references else 1
            device |= {target * unit + at: device.get(source * unit + at) for at in range(slots)}
        slots_of = {each.sequence: each.slots for each in step.held}
        for each in step.computed:
            for position in range(each.first, each.stop):
                device[slots_of[each.sequence][position]] = each.sequence, position
        seen.append(dict(device))
    return seen


@pytest.mark.parametrize("policy", POLICY_NAMES)
@hypothesis_settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_slots_add_up_to_the_ledger_and_hold_the_tokens_of_their_tables(policy, data):
    sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
    prompts, outputs = zip(*data.draw(st.lists(sizes, min_size=1, max_size=4)))
    settings = settings_of(
        policy, blocks=data.draw(st.integers(6 if policy not in RESERVING else 16, 24)), max_num_seqs=3
    )
    workload = workload_of(list(prompts), list(outputs))
    run, steps = record(settings, workload, OneSecondStep())
    counts = np.array([[step.buckets.count(bucket) for bucket in BUCKETS] for step in steps])
    assert len(set(map(len, (step.buckets for step in steps)))) == 1
    ledger = np.stack([*run.accounts.at_rows().values()], axis=1)
    assert counts[:-1].tolist() == ledger.tolist()
    # No request is left, and nothing is held.
    assert steps[-1].held == () and not steps[-1].host and not any(steps[-1].references)
    for step, contents in zip(steps, replayed(steps, run.replica.block_size)):
        for each in step.held:
            held = [contents[slot] for slot in each.slots[: each.tokens]]
            assert [position for _, position in held] == list(range(each.tokens))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_run_is_that_of_simulate(policy):
    settings, workload = settings_of(policy, blocks=12), workload_of([3, 5, 2, 4], [4, 3, 6, 2])
    recorded, _ = record(settings, workload, OneSecondStep())
    plain = simulate(replace(settings, leap=False), workload, OneSecondStep())
    assert recorded.settings == settings
    assert recorded.log.residency_end.tolist() == plain.log.residency_end.tolist()
    assert {name: column.tolist() for name, column in recorded.accounts.at_rows().items()} == {
        name: column.tolist() for name, column in plain.accounts.at_rows().items()
    }


class PoolCounts(StepRecording):
    """Beside the recording: what the pool itself counts in each step."""

    def __init__(self):
        super().__init__()
        self.counted, self.host_counted = [], []

    def step_started(self, now, ticks, leap, plan):
        super().step_started(now, ticks, leap, plan)
        tables = self._memory.tables
        self.counted.append(tuple(tables.pool.reference_counts))
        self.host_counted.append(tables.host_pool.num_free)


@pytest.mark.slow
@given(
    n=st.integers(1, 3),
    beams=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 6)), min_size=1, max_size=3),
    blocks=st.integers(12, 18),
    mode=st.sampled_from(["recompute", "swap"]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_references_are_those_that_the_pool_counts(n, beams, sizes, blocks, mode):
    prompts, outputs = zip(*sizes)
    beams = {"use_beam_search": True, "beam_survival": 0.5} if beams and n > 1 else {}
    settings = settings_of("vllm-sosp23", blocks, preemption_mode=mode, ids=True, leap=False, **beams)
    workload = workload_of(list(prompts), list(outputs), n=np.full(len(sizes), n))
    counts = PoolCounts()
    run = simulate(settings, workload, OneSecondStep(), observers=(counts,))
    assert [step.references for step in counts.steps] == counts.counted
    on_host = [len({block for table in step.host.values() for block in table}) for step in counts.steps]
    assert on_host == [run.replica.host_blocks - free for free in counts.host_counted]
    for step, contents in zip(counts.steps, replayed(counts.steps, 2)):
        for each in step.held:
            assert [contents[slot][1] for slot in each.slots[: each.tokens]] == list(range(each.tokens))
        # A slot that is written in the step is named by one table.
        slots_of = {each.sequence: each.slots for each in step.held}
        for each in step.computed:
            if each.decodes:
                assert step.references[slots_of[each.sequence][each.first] // 2] == 1


def test_a_copy_on_write_and_a_finish():
    """Three tokens of prompt in blocks of two; the leader copies, its sibling writes in place."""
    settings = settings_of("vllm-sosp23", blocks=6)
    _, (prefill, fork, end) = record(settings, workload_of([3], [2], n=np.array([2])), OneSecondStep())
    assert (prefill.admitted, prefill.references, prefill.copies) == ((0,), (1, 1, 0, 0, 0, 0), ())
    assert (fork.forked, fork.copies, fork.references) == ((1,), ((1, 2, 2),), (2, 1, 1, 0, 0, 0))
    assert [each.table for each in fork.held] == [(0, 2), (0, 1)]
    assert fork.buckets == ("live",) * 6 + ("free",) * 6
    assert (end.held, end.references) == ((), (0,) * 6)


def test_a_swap_out_and_in():
    """Six blocks of two. S1 needs a fourth, and the last to arrive, S2, goes to the host until S1 is done."""
    settings = settings_of("vllm-sosp23", blocks=6, preemption_mode="swap")
    _, steps = record(settings, workload_of([5, 5], [4, 4]), OneSecondStep())
    out = next(step for step in steps if step.swapped_out)
    back = next(step for step in steps if step.swapped_in)
    assert (out.swapped_out, out.host, out.swapped) == ((1,), {1: (0, 1, 2)}, (1,))
    assert out.swap_outs == ((3, 0), (4, 1), (5, 2))
    assert back.swapped_in == (1,) and not back.host
    assert [source for source, _ in back.swap_ins] == [0, 1, 2]


def test_a_beam_that_dies():
    settings = settings_of("vllm-sosp23", blocks=12, use_beam_search=True, beam_survival=0.0)
    _, steps = record(settings, workload_of([3], [5], n=np.array([2])), OneSecondStep())
    assert any(step.replaced for step in steps)
    for step in steps:
        for dead, parent in step.replaced:
            tables = {each.sequence: each.table for each in step.held}
            assert dead != parent and tables[dead][0] == tables[parent][0]


def test_kv_groups_are_refused():
    settings = Settings(policy="vllm-v1", model="gpt-oss-20b", num_gpu_blocks_override=400, max_model_len=512)
    with pytest.raises(SettingError, match="policy = 'vllm-v1': .* give disable_hybrid_kv_cache_manager"):
        record(settings, workload_of([3], [2]), OneSecondStep())
