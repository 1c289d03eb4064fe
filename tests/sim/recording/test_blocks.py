"""Recorded block maps: they add up to the ledger, and are what an independent walk finds, block by block."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from dataclasses import fields, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import settings_of, workload_of
from family_runs import group_cases, settings_for, tree_cases
from family_runs import workload_of as family_workload
from fragmeter.sim import Settings, Workload, simulate, summary
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.result import requests_table, steps_table
from fragmeter.sim.policy.static import FasterTransformer
from fragmeter.sim.recording.blocks import GIVEN_UP, MOST_ROWS, NO_SEQUENCE, BlockMap, load, record, recording
from fragmeter.sim.recording.plans import record as record_plan
from fragmeter.sim.recording.plans.layouts import layout_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SettingError, UserError
from plan_cases import caching_case, swapping_case
from radix_cases import shared_cases as radix_cases
from shared_prefixes import caching_settings, shared_cases
from strategies import Case, crowded_cases, medium_cases, small_cases
from walk import Moment, Walk

PAGED = (
    "vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", "tgi", "trtllm-no-evict", "trtllm-max-util", "fastgen", "lightllm",
    "vattention", "llama-cpp",
)  # fmt: skip
BATCHES = ("static", "fastertransformer")
CHUNKED = ("orca-max", "orca-pow2", "orca-oracle")
cases = st.one_of(crowded_cases(), medium_cases(), small_cases())


def results_text(run: Run) -> str:
    """All that a run says of itself."""
    return json.dumps(summary(run)) + requests_table(run).to_csv() + steps_table(run).to_csv()


def check(settings: Settings, workload: Workload, cost=None, addressed: bool = True) -> BlockMap | None:
    """The map of a run adds up to the ledger in every column; the run is the one that is not recorded."""
    plain = simulate(settings, workload, cost)
    if not plain.log.num_steps:
        with pytest.raises(SettingError, match="record_blocks"):
            record(settings, workload, cost)
        return None
    run, found = record(settings, workload, cost)
    assert results_text(run) == results_text(plain)
    steps = simulate(replace(settings, leap=False), workload, cost)
    starts, ledger = steps.log.rows["start_ticks"], steps.accounts.at_rows()
    rows = {start: place for place, start in enumerate(starts.tolist())}
    ends = starts + steps.log.rows["ticks"]
    for column, (at, start) in enumerate(zip(found.at_ticks.tolist(), found.start_ticks.tolist())):
        census = dict(zip(BUCKETS, found.census_slots[column].tolist()))
        assert sum(census.values()) >= plain.log.capacity_slots
        if start not in rows or ends[rows[start]] <= at:
            # No sequence runs.
            assert (found.sequence[column] == NO_SEQUENCE).all() and start == at
            taken = {bucket: slots for bucket, slots in census.items() if slots and bucket not in ("cached", "free")}
            assert taken == ({"live": plain.log.pinned_slots} if plain.log.pinned_slots else {})
            continue
        assert start <= at < ends[rows[start]]
        expected = {bucket: int(ledger[bucket][rows[start]]) for bucket in BUCKETS}
        if not addressed:
            # What is only counted may lie beyond the pool.
            census["free"] = expected["free"]
        assert census == expected, f"column {column}"
        if settings.policy in CHUNKED:
            longest = int(found.largest_free_blocks[column]) * plain.log.block_size
            assert longest == steps.log.rows["largest_free"][rows[start]]
    check_rows(found)
    return found


def check_rows(found: BlockMap) -> None:
    """What a block says of itself is consistent."""
    held = found.sequence != NO_SEQUENCE
    assert (found.references[held] > 0).all()
    assert (found.live_slots <= found.meta["block_size"]).all()
    assert not found.live_slots[found.references == 0].any()
    assert (np.diff(found.at_ticks) > 0).all() or found.num_columns < 2
    given_up = found.bucket == GIVEN_UP
    assert not given_up[held].any() and not found.live_slots[given_up].any()


@pytest.mark.parametrize("policy", PAGED)
@hypothesis_settings(max_examples=4)
@given(case=cases)
def test_blocks_add_up_to_the_ledger(policy, case: Case):
    settings = settings_of(policy, case.pool, case.limits)
    check(settings, workload_of(case.requests, case.limits.max_model_len), case.cost)


@pytest.mark.parametrize("policy", [*BATCHES, "orca", *CHUNKED])
@hypothesis_settings(max_examples=4)
@given(case=cases, arena=st.sampled_from(["buddy", "first-fit", "best-fit"]))
def test_pieces_add_up_to_the_ledger(policy, case: Case, arena):
    settings = settings_of(policy, case.pool, case.limits, **({"arena": arena} if policy in CHUNKED else {}))
    with mock.patch.object(FasterTransformer, "max_batch_tokens", case.limits.ft_max_tokens):
        workload = workload_of(case.requests, case.limits.max_model_len)
        check(settings, workload, case.cost, addressed=policy in CHUNKED)


@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v0", "orca-max", "orca"])
@hypothesis_settings(max_examples=4)
@given(data=st.data())
def test_families_add_up_to_the_ledger(policy, data):
    """Samples and beams, a pinned prefix, swaps; and trees of requests."""
    case = data.draw(st.one_of(group_cases(policy), tree_cases(policy)))
    check(settings_for(case), family_workload(case.requests), case.cost, addressed=policy != "orca")


def test_a_pinned_prefix_is_kept_where_no_sequence_runs():
    """Two blocks of four slots, between requests that come a second apart."""
    arrivals = np.array([0, 10**12])
    sparse = Workload("sparse", arrivals, np.array([9, 9]), np.array([6, 6]), np.array([6, 6]))
    pool = {"model": "toy-opt", "block_size": 4, "num_gpu_blocks_override": 20, "max_model_len": 32}
    found = check(Settings(**pool, policy="vllm-sosp23", shared_prefix_tokens=8), sparse)
    idle = (found.sequence == NO_SEQUENCE).all(axis=1)
    assert idle.any() and set(found.census_slots[idle, BUCKETS.index("live")]) == {8}


@hypothesis_settings(max_examples=4)
@given(case=shared_cases())
def test_cached_prefixes_add_up_to_the_ledger(case):
    check(caching_settings(case), case.workload, case.cost)


@hypothesis_settings(max_examples=4)
@given(case=st.one_of(cases, radix_cases()), caching=st.booleans())
def test_a_radix_tree_adds_up_to_the_ledger(case, caching):
    settings = settings_of("sglang", case.pool, case.limits, enable_prefix_caching=caching)
    check(settings, workload_of(case.requests, case.limits.max_model_len, case.content), case.cost)


def walked(policy: str, case: Case) -> dict[int, Moment]:
    """What the walk finds, by the start of the step; of steps that start together the last."""
    with mock.patch.object(FasterTransformer, "max_batch_tokens", case.limits.ft_max_tokens):
        return {moment.now: moment for moment in Walk(policy, case).moments() if moment.running}


def blocks_of(moment: Moment, size: int) -> dict[int, list[int]]:
    """Which blocks each sequence holds slots of."""
    spans = {index: {slot // size for slot in piece} for index, piece in moment.pieces.items()}
    return {index: sorted(blocks) for index, blocks in (moment.tables or spans).items()}


@pytest.mark.parametrize("policy", ["vllm-sosp23", *BATCHES, *CHUNKED])
def test_every_block_is_what_the_walk_finds(policy):
    """The bucket that most of its slots are in, its first holder, its tokens and references."""
    seen = 0

    @hypothesis_settings(max_examples=8)
    @given(case=cases)
    def hold(case: Case) -> None:
        nonlocal seen
        seen += moments_held(policy, case)

    hold()
    # In some cases no step is as long as a column of the map.
    assert seen >= 8


def moments_held(policy: str, case: Case) -> int:
    """Hold the map of a run to the walk; how many moments could be."""
    settings = settings_of(policy, case.pool, case.limits)
    moments, size = walked(policy, case), case.pool.block_size
    if not moments:
        return 0
    with mock.patch.object(FasterTransformer, "max_batch_tokens", case.limits.ft_max_tokens):
        _, found = record(settings, workload_of(case.requests, case.limits.max_model_len), case.cost)
    seen = 0
    for column, start in enumerate(found.start_ticks.tolist()):
        if start not in moments or found.at_ticks[column] == start and not (found.sequence[column] >= 0).any():
            continue
        seen += 1
        moment = moments[start]
        holders = blocks_of(moment, size)
        for row, block in enumerate(found.block_ids.tolist()):
            own = moment.slots[block * size : (block + 1) * size]
            counts = Counter(own)
            most = max(BUCKETS, key=lambda bucket: (counts[bucket], -BUCKETS.index(bucket)))
            bucket = int(found.bucket[column, row])
            assert most == ("free" if bucket == GIVEN_UP else BUCKETS[bucket])
            named = [index for index, blocks in holders.items() for entry in blocks if entry == block]
            assert found.sequence[column, row] == min(named, default=NO_SEQUENCE)
            assert found.references[column, row] == len(named)
            assert found.live_slots[column, row] == counts["live"]
    return seen


def story() -> tuple[Settings, Workload]:
    """Three requests over six blocks of two slots: C gives way to A and B, and later B to A."""
    settings = Settings(
        policy="vllm-sosp23", model="toy-opt", block_size=2, num_gpu_blocks_override=6, max_model_len=32, watermark=0
    )
    return settings, Workload("story", np.zeros(3, np.int64), np.array([3, 2, 2]), np.array([6, 5, 3]))


def test_a_story_of_six_blocks():
    """A row a step, a cell a block: its holder, and how many tokens; ``!!`` is free since a preemption."""
    _, found = record(*story())
    cells = [
        "!!" if bucket == GIVEN_UP else ".." if holder == NO_SEQUENCE else f"{'ABC'[holder]}{live}"
        for holder, bucket, live in zip(found.sequence.ravel(), found.bucket.ravel(), found.live_slots.ravel())
    ]
    assert [" ".join(row) for row in zip(*[iter(cells)] * 6)] == [
        "A2 A1 B2 C2 .. ..",
        "A2 A2 B2 C2 B1 C1",
        "A2 A2 B2 !! B2 A1",
        "A2 A2 B2 B1 B2 A2",
        "A2 A2 !! A1 !! A2",
        "A2 A2 !! A2 !! A2",
        "C2 B2 !! B2 C2 B2",
    ]


def same_but_rows(fine: BlockMap, coarse: BlockMap) -> None:
    """A coarse map has the rows of the fine one that it names, and all else of it."""
    assert coarse.block_ids.tolist() == fine.block_ids[coarse.block_ids].tolist()
    for name in ("bucket", "sequence", "live_slots", "references"):
        assert np.array_equal(getattr(coarse, name), getattr(fine, name)[:, coarse.block_ids])
    for name in ("at_ticks", "start_ticks", "census_slots", "free_runs", "largest_free_blocks", "preempted_ticks"):
        assert np.array_equal(getattr(coarse, name), getattr(fine, name))
    assert coarse.meta == fine.meta


@pytest.mark.parametrize("policy", ["vllm-sosp23", "lightllm", "sglang", "vattention", "orca", "static", "orca-max"])
@hypothesis_settings(max_examples=5)
@given(case=cases, most=st.integers(1, 9))
def test_a_coarse_map_has_rows_of_the_fine_one(policy, case: Case, most):
    settings = settings_of(policy, case.pool, case.limits)
    workload = workload_of(case.requests, case.limits.max_model_len)
    if not simulate(settings, workload, case.cost).log.num_steps:
        return
    (_, fine), (_, coarse) = (record(settings, workload, case.cost, most_rows=rows) for rows in (2_048, most))
    assert coarse.bucket.shape == (fine.num_columns, min(most, len(fine.block_ids)))
    same_but_rows(fine, coarse)


@hypothesis_settings(max_examples=5)
@given(case=shared_cases(), most=st.integers(1, 9))
def test_a_coarse_map_of_cached_prefixes_has_rows_of_the_fine_one(case, most):
    if simulate(caching_settings(case), case.workload, case.cost).log.num_steps:
        maps = (record(caching_settings(case), case.workload, case.cost, most_rows=rows)[1] for rows in (2_048, most))
        same_but_rows(*maps)


@pytest.mark.parametrize("policy", ["vllm-sosp23", "lightllm", "vattention", "sglang", "tgi", "orca", "static"])
def test_a_pool_that_is_hardly_used_takes_no_memory(policy):
    """67 million blocks: an array of a byte for each would be seven times what is allowed."""
    pool = {"model": "toy-opt", "num_gpu_blocks_override": 1 << 26, "max_model_len": 64, "swap_space": 0}
    work = Workload("few", np.arange(4) * 10**9, np.full(4, 9), np.full(4, 20))
    tracemalloc.start()
    try:
        _, found = record(Settings(policy=policy, **pool), work)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_columns > 10 and found.bucket.shape == (found.num_columns, MOST_ROWS)
    assert found.census_slots.sum(axis=1).min() == found.meta["block_size"] << 26
    # A hundred moments at most, of 2,048 rows of 13 bytes, three times while they are put together.
    assert found.num_columns <= 100 and peak < 3 * 100 * MOST_ROWS * 13 + 2_000_000


@pytest.mark.parametrize("allowed", [1, 300, 3_000])
def test_where_much_is_in_use_fewer_moments_are_kept(allowed):
    """As many as may be read; all looks together, dropped ones included, read at most some times that."""
    settings, workload = swapping_case()
    read: list[int] = []
    most_after = recording._Budget.most_after

    def noting(budget, blocks):
        read.append(blocks)
        return most_after(budget, blocks)

    with (
        mock.patch.object(recording, "MOST_LOOKED_AT", allowed),
        mock.patch.object(recording._Budget, "most_after", noting),
        mock.patch.object(recording, "_least_ticks", return_value=0),
    ):
        _, few = record(settings, workload)
    assert 1 <= few.num_columns <= max(1, allowed // max(read))
    assert sum(read) <= 5 * allowed + 5 * max(read)
    assert few.num_columns < record(settings, workload)[1].num_columns


def test_a_look_is_as_dear_as_the_blocks_in_use_and_32_for_each_sequence():
    settings, workload = swapping_case()
    with mock.patch.object(recording._Budget, "most_after", return_value=2_000) as most_after:
        run, _ = record(settings, workload)
    ledger = run.accounts.at_rows()
    in_use = -(-int((run.log.capacity_slots - ledger["free"]).max()) // run.log.block_size)
    dearest = max(call.args[0] for call in most_after.call_args_list)
    assert in_use <= dearest <= in_use + 32 * int(run.log.rows["batch_size"].max())


def test_rows_of_a_long_run_are_those_of_the_whole_map():
    settings, workload = swapping_case()
    _, whole = record(settings, workload)
    _, few = record(settings, workload, most_columns=7, most_rows=5)
    _, again = record(settings, workload, most_columns=7)
    assert 4 <= few.num_columns <= 7 and few.block_ids.tolist() == [0, 4, 8, 13, 17] and whole.bucket.shape[1] == 18
    same_but_rows(again, few)


class Stepwise(Observer):
    """Looks at the tables in every step by itself, without a grid and without leaps.

    Attributes:
        steps: By the start of the step, of those that start together the last: its end, and the blocks of each sequence.
    """

    every_step = True

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, dict[int, list[int]]]] = {}

    def run_started(self, engine, refused):
        self.state, self.layout = engine.state, layout_of(engine.memory, engine.policy.name)

    def step_started(self, now, ticks, leap, plan):
        state, layout = self.state, self.layout
        layout.settle(state, leap[1])
        there = [*state.running, *state.prefilling, *state.stalled]
        self.steps[now] = now + ticks, {one.index: list(layout.table(one)) for one in there}


@pytest.mark.parametrize("most", [3, 8, 100])
@pytest.mark.parametrize("policy", [*PAGED, "sglang"])
@hypothesis_settings(max_examples=4)
@given(case=cases)
def test_every_column_is_what_another_look_at_its_time_finds(policy, most, case: Case):
    """However often the stride doubles: from one tick on some twenty times."""
    settings = replace(settings_of(policy, case.pool, case.limits), ids=True)
    workload = workload_of(case.requests, case.limits.max_model_len, case.content if policy == "sglang" else None)
    watched = Stepwise()
    run = simulate(settings, workload, case.cost, observers=[watched])
    if not run.log.num_steps:
        return
    with mock.patch.object(recording, "_least_ticks", return_value=0):
        recorded, found = record(replace(settings, ids=False), workload, case.cost, most_columns=most)
    assert results_text(recorded) == results_text(simulate(replace(settings, ids=False), workload, case.cost))
    columns, steps, end = found.num_columns, run.log.num_steps, run.log.end_ticks
    assert columns <= min(most, steps) and (columns > most // 2 or steps < most)
    assert len(set(np.diff(found.at_ticks).tolist())) <= 1 and found.at_ticks[-1] < end
    for column, (at, start) in enumerate(zip(found.at_ticks.tolist(), found.start_ticks.tolist())):
        until, tables = watched.steps.get(start, (0, {}))
        if until <= at:
            assert start == at and not any(begin <= at < stop for begin, (stop, _) in watched.steps.items())
            tables = {}
        named = Counter(block for table in tables.values() for block in table)
        assert found.references[column].tolist() == [named[block] for block in found.block_ids.tolist()]
        for row, block in enumerate(found.block_ids.tolist()):
            holders = [index for index, table in tables.items() if block in table]
            assert found.sequence[column, row] == min(holders, default=NO_SEQUENCE)


@pytest.mark.parametrize(("case", "pins"), [(swapping_case, [0]), (caching_case, [])])
def test_a_block_has_a_reference_for_each_table_and_pin_that_names_it(case, pins):
    """Held to the tables of a recorded plan, of samples behind a pinned prefix and of prompts that begin alike."""
    settings, workload = case()
    found, plan = record(settings, workload)[1], record_plan(settings, workload)[1]
    steps = {start: step for step, start in enumerate(plan.start_ticks.tolist())}
    shared = 0
    for column, start in enumerate(found.start_ticks.tolist()):
        rows = range(len(plan.step(steps[start]).sequence)) if start in steps else []
        named = Counter(block for row in rows for block in plan.block_table(steps[start], row).tolist())
        named.update(pins)
        references = found.references[column].tolist()
        assert references == [named[block] for block in range(len(references))]
        shared += max(references) > 1
    assert shared


def test_free_runs_are_those_of_the_free_blocks():
    """Counted one by one."""
    _, found = record(*story())
    for column in range(found.num_columns):
        held = "".join("." if held == NO_SEQUENCE else "x" for held in found.sequence[column])
        lengths = [len(run) for run in held.replace("x", " ").split()]
        assert found.largest_free_blocks[column] == max(lengths, default=0)
        for power in range(4):
            assert found.free_runs[column, power] == sum(2**power <= length < 2 ** (power + 1) for length in lengths)


def test_the_same_bytes_twice_and_back(tmp_path):
    for name in ("one.npz", "two.npz"):
        record(*story())[1].save(tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    back, found = load(tmp_path / "one.npz"), record(*story())[1]
    assert back.meta == found.meta
    for name in (field.name for field in fields(BlockMap) if field.name != "meta"):
        assert np.array_equal(getattr(back, name), getattr(found, name))
        assert getattr(back, name).dtype == getattr(found, name).dtype


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"bucket": np.zeros((2, 2), np.uint8)}, "bucket is uint8 [2, 2]"),
        ({"sequence": np.zeros((7, 6))}, "sequence is float64 [7, 6]"),
        ({"more": np.zeros(1)}, "array more is missing, or too many"),
        ({"meta": np.array(json.dumps({"schema_version": 9}))}, "schema_version = 9: this version reads 1"),
        ({"meta": np.array("{}")}, "is not a recorded block map"),
    ],
)
def test_files_that_are_no_maps_are_refused_in_a_line(change, complaint, tmp_path):
    path = tmp_path / "blocks.npz"
    record(*story())[1].save(path)
    with np.load(path) as archive:
        content = dict(archive)
    np.savez(path, **(content | change))
    with pytest.raises(UserError) as refused:
        load(path)
    text = str(refused.value)
    assert complaint in text and text.endswith("record it anew with fragmeter simulate --record-blocks")


def test_layers_with_a_window_are_refused():
    settings = Settings(policy="vllm-v1", model="gemma-3-27b", gpu="h200")
    with pytest.raises(SettingError, match="give --disable-hybrid-kv-cache-manager"):
        record(settings, Workload("one", np.array([0]), np.array([7]), np.array([5])))
