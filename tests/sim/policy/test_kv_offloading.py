"""KV offloading of vllm-v1: blocks that the GPU's prefix cache evicts are found on the host, and loaded beside the steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given

from engine_runs import LONG_MODEL
from fragmeter.sim.cluster import cluster, cluster_summary, simulate_cluster
from fragmeter.sim.config.settings import Settings, settings
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.ledger import Leap
from fragmeter.sim.memory.paged.offload import OffloadedMemory
from fragmeter.sim.memory.prefix.host_tier import HostTier, Offer
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.sequence import Sequence, StepPlan
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import read_with_content
from real_vllm import ours
from real_vllm.workloads import KINDS
from shared_prefixes import SharedCase, caching_settings, shared_cases
from strategies import LineCost

few = hypothesis.settings(max_examples=40)
_V1: dict[str, object] = {"policy": "vllm-v1", "model": "llama-3.1-8b", "kv_offloading_size": 1}
#: Bytes of a token of ``LONG_MODEL`` and of OPT-13B: 40 layers, keys and values of 5,120 numbers of 16 bit.
_TOKEN_BYTES = 40 * 2 * 5120 * 2


@dataclass(frozen=True)
class _Costs(LineCost):
    """Steps of 100 ticks; 250 ticks to load a block, and 30 to store one."""

    load_ticks: int = 250
    store_ticks: int = 30

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 100

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 100, 0, None

    def swap_in_ticks(self, blocks: int) -> int:
        return self.load_ticks * blocks

    def swap_out_ticks(self, blocks: int) -> int:
        return self.store_ticks * blocks


class _Log(Observer):
    """What happens, as (ticks, what)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        if plan.preempted:
            self.lines.append((now, f"preempt {[each.index for each in plan.preempted]}"))
        elif plan.stalls:
            self.lines.append((now, f"stall {[each.index for each in plan.stalls[0]]}"))
        if plan.admitted:
            self.lines.append((now, f"admit {[each.index for each in plan.admitted]}, {plan.prefill_tokens} tokens"))
        elif plan.order:
            self.lines.append((now, f"wait {[each.index for each in plan.order]}"))

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        self.lines.append((now, f"step of {leap[5]}, {ticks} ticks"))

    def idle_started(self, now: int, ticks: int) -> None:
        self.lines.append((now, f"idle, {ticks} ticks"))


def _settings(pool: int, host_blocks: float, block_size: int = 4, **chosen: object) -> Settings:
    given = {"async_scheduling": False, "outside_ms": 0, "max_model_len": 64, "model": LONG_MODEL} | chosen
    size = host_blocks * max(4096, block_size * _TOKEN_BYTES) / (1 << 30)
    return settings(
        policy="vllm-v1", num_gpu_blocks_override=pool, block_size=block_size, kv_offloading_size=size, **given
    )


def _tier(run: Run) -> HostTier:
    memory = run.replica.memory
    assert isinstance(memory, OffloadedMemory)
    return memory.tier


def test_a_story_of_a_prefix_that_is_loaded_while_another_request_runs():
    """Six blocks of four tokens. Request 1 evicts the second block of request 0, which request 2 loads."""
    pieces = PromptContent(np.array([0, 1, 2, 3, 3]), np.array([7, 8, 7]), np.array([8, 16, 8]))
    work = Workload(
        "story", np.array([0, 1000, 2000, 2010]), np.array([9, 17, 9, 3]), np.array([2, 2, 2, 5]), content=pieces
    )
    log = _Log()
    run = simulate(_settings(7, 100), work, _Costs(), observers=[log])
    assert log.lines == [
        (0, "admit [0], 9 tokens"),
        (0, "step of 1, 100 ticks"),
        (100, "step of 1, 100 ticks"),
        (200, "idle, 800 ticks"),
        (1000, "admit [1], 17 tokens"),
        (1000, "step of 1, 100 ticks"),
        (1100, "step of 1, 100 ticks"),
        (1200, "idle, 20 ticks"),
        (1220, "idle, 780 ticks"),
        # Four tokens are on the GPU, and four are loaded in 250 ticks.
        (2000, "wait [2]"),
        (2000, "idle, 10 ticks"),
        (2010, "admit [3], 3 tokens"),
        (2010, "step of 1, 100 ticks"),
        (2110, "wait [2]"),
        (2110, "step of 1, 100 ticks"),
        (2210, "wait [2]"),
        (2210, "step of 1, 100 ticks"),
        # The load ended at 2250, within a step.
        (2310, "admit [2], 1 tokens"),
        # No copy goes on, so nothing is decided before the end.
        (2310, "step of 2, 200 ticks"),
    ]
    tier = _tier(run)
    copies = tier.transfers.columns()
    # Stores begin with the step after the one that computes their tokens, and leave out generated tokens.
    names = ("index", "asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
    assert list(zip(*(copies[name].tolist() for name in names), strict=True)) == [
        (0, 100, 100, 160, 2, 1),
        (1, 1100, 1100, 1220, 4, 1),
        (2, 2000, 2000, 2250, 1, 0),
    ]
    table = requests_table(run)
    assert table["cached_tokens"].tolist() == [0, 0, 4, 0]
    assert table["offloaded_tokens"].tolist() == [0, 0, 4, 0]
    found = summary(run)["kv_offloading"]
    counts = ("hit_tokens", "queried_tokens", "loaded_blocks", "stored_blocks", "max_used_blocks", "evicted_blocks")
    assert [found[name] for name in counts] == [4, 34, 1, 6, 6, 0]
    assert found["flush_seconds"] == 0.0


class _Replay:
    """The dictionaries of both tiers, written anew: fed with the look-ups, stores and ends of copies of a run.

    Attributes:
        differing: Look-ups with another answer than the run's.
        hits: Tokens that each load found on the host, by request.
        stored, evicted: Blocks that came to the host, and left it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.size = num_blocks, block_size
        self.readers: dict[int, int] = {}
        self.order: dict[int, tuple[int, int]] = {}
        self.used_by: dict[int, dict[int, int]] = {}
        self.rank_of: dict[int, int] = {}
        self.rank = self.stored = self.evicted = self.asked = 0
        self.loading: set[int] = set()
        self.stores: list[tuple[int, list[int]]] = []
        self.differing: list[object] = []
        self.hits: list[tuple[int, int]] = []
        self.on_gpu: dict[int, set[int]] = {}
        self.contents: dict[int, int] = {}

    # The GPU's tier.

    def publish(self, blocks: Iterable[int], names: Iterable[int]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.contents[block] = name
            self.on_gpu.setdefault(name, set()).add(block)

    def take(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            name = self.contents.pop(block, None)
            if name is not None:
                self.on_gpu[name].discard(block)

    def look_up_gpu(self, names: list[int], found: int) -> None:
        expected = next((at for at, name in enumerate(names) if not self.on_gpu.get(name)), len(names))
        self.asked += 1
        if expected != found:
            self.differing.append(("gpu", names, expected, found))

    # The host's tier.

    def look_up(self, request: int, names: list[int], found: int | None) -> None:
        here = next((at for at, name in enumerate(names) if name not in self.readers), len(names))
        waits = any(self.readers[name] < 0 or name in self.loading for name in names[:here])
        if (None if waits else here) != found:
            self.differing.append(("host", names, here, found))

    def start_anew(self, request: int, waits: bool) -> None:
        """After a preemption its own stores may go on."""
        if waits != any(owner == request for owner, _ in self.stores):
            self.differing.append(("stores", request, waits))

    def start_load(self, request: int, blocks: list[tuple[int, int]]) -> None:
        for name, _ in blocks:
            self.readers[name] += 1
            self.loading.add(name)
        self.hits.append((request, len(blocks) * self.size))
        self.use(request, blocks)

    def start_store(self, request: int, blocks: list[tuple[int, int]], answer: list[int] | None) -> None:
        offered = {name for name, _ in blocks}
        missing = [name for name, _ in blocks if name not in self.readers]
        self.use(request, [(name, at) for name, at in blocks if self.readers.get(name, 0) >= 0])
        over = len(self.readers) + len(missing) - self.num_blocks
        idle = [name for name, readers in self.readers.items() if not readers and name not in offered]
        if over > len(idle):
            if answer is not None:
                self.differing.append(("refuse", request, blocks))
            return
        for name in nsmallest(over, idle, key=self.order.__getitem__) if over > 0 else ():
            del self.readers[name], self.order[name]
            self.evicted += 1
        for name in missing:
            self.readers[name] = -1
            self.order[name] = self.rank_of[request], -self.used_by[request][name]
        self.stored += len(missing)
        if missing:
            self.stores.append((request, missing))
        if missing != answer:
            self.differing.append(("store", missing, answer))

    def use(self, request: int, blocks: list[tuple[int, int]]) -> None:
        used = self.used_by.setdefault(request, {})
        new = {name: at for name, at in blocks if name not in used}
        used |= new
        if new and request not in self.rank_of:
            self.rank = self.rank_of[request] = self.rank + 1
        for name, at in new.items():
            if name in self.order:
                self.order[name] = max(self.order[name], (self.rank_of[request], -at))

    def end_load(self, names: list[int]) -> None:
        for name in names:
            self.readers[name] -= 1
            self.loading.discard(name)

    def end_store(self, names: list[int]) -> None:
        self.readers |= dict.fromkeys(names, 0)
        self.stores = [store for store in self.stores if store[1] != names]

    def finish(self, request: int) -> None:
        self.rank_of.pop(request, None)
        used = self.used_by.pop(request, {})
        for name in sorted(used, key=lambda name: -used[name]):
            if name in self.readers:
                self.rank += 1
                self.order[name] = self.rank, 0


class _Feed(Observer):
    """Feeds a replay, and checks before every step what both tiers hold.

    Args:
        hides: Whether look-ups on the host find nothing.
    """

    def __init__(self, hides: bool = False) -> None:
        self._hides = hides

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        memory = engine.memory
        assert isinstance(memory, OffloadedMemory) and memory.cache is not None
        self.memory, self.state, tier = memory, engine.state, memory.tier
        self.replay = replay = _Replay(tier.cache.num_blocks, memory.block_size)
        for name in ("start_load", "end_load", "end_store", "finish"):
            _follow(tier.cache, name, lambda answer, *given, to=getattr(replay, name): to(*given))
        _follow(tier.cache, "start_store", lambda answer, request, blocks: replay.start_store(request, blocks, answer))
        _follow(memory.cache.pool, "cache_full_blocks", lambda answer, *given: replay.publish(*given))
        _follow(memory.cache.pool, "get_new_blocks", lambda answer, *given: replay.take(answer))
        _follow(memory.cache, "look_up", self._look_up_gpu)
        _follow(memory, "end_load", self._end_load)
        if self._hides:
            memory.on_host = lambda sequence, known: 0
        else:
            _follow(tier, "starts_anew", lambda answer, one: replay.start_anew(one.index, answer))
            _follow(memory, "on_host", self._look_up_host)

    def _look_up_host(self, answer: int | None, sequence: Sequence, known: int) -> None:
        assert self.memory.cache is not None
        size = self.memory.block_size
        names = self.memory.cache.names_of(sequence)[known // size : sequence.start_tokens // size]
        self.replay.look_up(sequence.index, names, None if answer is None else answer // size)

    def _end_load(self, computed: int, sequence: Sequence) -> None:
        """From now on the GPU has what was loaded, even if the sequence cannot be admitted yet."""
        assert self.memory.cache is not None
        names = self.memory.cache.names_of(sequence)[: self.memory.tier.loaded[sequence] // self.memory.block_size]
        assert names and all(self.replay.on_gpu.get(name) for name in names)

    def _look_up_gpu(self, found, sequence: Sequence) -> None:
        assert self.memory.cache is not None
        names = self.memory.cache.names_of(sequence)[: (sequence.start_tokens - 1) // self.memory.block_size]
        self.replay.look_up_gpu(names, found.blocks)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        memory, tier = self.memory, self.memory.tier
        assert memory.cache is not None and memory.group_tables is not None
        tables = [table for (table,) in memory.group_tables.tables.values()]
        tables += (table for each in memory.fences.deferred.values() for table in each.tables)
        held = {block for table in tables for block in table}
        assert memory.cache.pool.num_free == memory.num_blocks - len(held)
        assert tier.cache.used_blocks == self.replay.stored - self.replay.evicted <= tier.cache.num_blocks
        # What waits is in the queue, and has its blocks; what runs has no load.
        assert set(tier.loading) <= set(tier.loaded) <= set(self.state.waiting)
        assert all(sequence in memory.group_tables.tables for sequence in tier.loaded)


def _follow(owner: object, name: str, note) -> None:
    """Call ``note`` with the answer and the arguments of each call of a method."""
    inner = getattr(owner, name)

    def followed(*given):
        given = tuple(list(each) if isinstance(each, (list, tuple)) else each for each in given)
        answer = inner(*given)
        note(answer, *given)
        return answer

    setattr(owner, name, followed)


def _offloading(case: SharedCase, host_blocks: float, **chosen: object) -> Settings:
    size = host_blocks * max(4096, case.pool.block_size * _TOKEN_BYTES) / (1 << 30)
    return caching_settings(case, kv_offloading_size=size, **chosen)


def _check_replayed(feed: _Feed, run: Run) -> None:
    replay, found = feed.replay, _tier(run).look_ups.columns()
    assert not replay.differing
    loads = found["hit_tokens"] > 0
    assert list(zip(found["index"][loads].tolist(), found["hit_tokens"][loads].tolist(), strict=True)) == replay.hits
    assert _tier(run).cache.evicted_blocks == replay.evicted
    served = ~run.refused
    assert len(run.log.residencies["index"]) and set(run.log.residencies["index"]) == set(np.flatnonzero(served))


def _outcome(run: Run) -> dict[str, list[int]]:
    look_ups = run.replica.cache_log.look_up_columns()
    return {name: column.tolist() for name, column in run.log.residencies.items()} | {
        "end": [run.log.end_ticks],
        "look_ups": sorted(zip(*(column.tolist() for column in look_ups.values()), strict=True)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("host_blocks", [3, 1000])
@few
@given(case=shared_cases())
def test_hits_by_tier_are_those_of_a_replay_and_leaps_change_nothing(case: SharedCase, host_blocks: int, ahead: bool):
    feed, chosen = _Feed(), _offloading(case, host_blocks, async_scheduling=ahead)
    run = simulate(chosen, case.workload, case.cost, observers=[feed])
    if not len(run.log.residencies["index"]):
        return
    _check_replayed(feed, run)
    stepped = simulate(replace(chosen, leap=False), case.workload, case.cost)
    assert _outcome(stepped) == _outcome(run)
    assert summary(stepped) == summary(run)
    assert not run.replica.memory.tier.offering
    assert all(ticks > 0 for ticks in _tier(run).flushes.columns()["ticks"])
    assert min(run.window.slot_ticks.values()) >= 0 <= min(run.window.slot_steps.values())


@pytest.mark.slow
@few
@given(case=shared_cases())
def test_without_hits_on_the_host_all_is_as_without_offloading(case: SharedCase):
    """With synchronous scheduling; otherwise blocks come free later."""
    cost = _Costs(store_ticks=0)
    run = simulate(_offloading(case, 1000, async_scheduling=False), case.workload, cost, observers=[_Feed(hides=True)])
    without = simulate(caching_settings(case, async_scheduling=False), case.workload, cost)
    assert _outcome(run) == _outcome(without)
    assert run.window == without.window


def _admissions(work: Workload, pool: int, host_blocks: int) -> list[tuple[int, str]]:
    """What happens with asynchronous scheduling, without the steps."""
    log = _Log()
    simulate(_settings(pool, host_blocks, async_scheduling=True), work, _Costs(), observers=[log])
    return [line for line in log.lines if not line[1].startswith("step")]


def test_what_the_running_step_computes_in_vain_keeps_its_blocks_until_then():
    """Request 0 ends at an EOS at 200, which the decision for that step does not know. Request 2 needs its blocks."""
    work = Workload("vain", np.array([0, 0, 50]), np.array([9, 4, 21]), np.array([2, 8, 2]), np.array([9, 8, 2]))
    first = (0, "admit [0, 1], 13 tokens")
    # Freed after the decision at 200, or after the one at 300.
    assert _admissions(work, 10, 0) == [first, (300, "admit [2], 21 tokens")]
    assert _admissions(work, 10, 100) == [first, (400, "admit [2], 21 tokens")]


def test_a_sequence_in_the_running_step_is_not_preempted():
    """At 200 request 0 needs a sixth block. Request 1 may be written by the step from 100 on, so it only stalls at first."""
    work = Workload("full", np.array([0, 0]), np.array([7, 7]), np.array([9, 9]), np.array([9, 9]))
    first, last = (0, "admit [0, 1], 14 tokens"), (900, "admit [1], 5 tokens")
    assert _admissions(work, 6, 0) == [first, (200, "preempt [1]"), last]
    assert _admissions(work, 6, 100) == [first, (200, "stall [1]"), (300, "preempt [1]"), last]


def test_what_was_loaded_comes_before_what_waits_for_blocks():
    """Eight blocks. Requests 3 and 5 load a block each, one after the other, while request 4 waits for that of request 3. It then
    needs six blocks more and finds four, until request 3 has ended."""
    texts, tokens = np.array([7, 8, 9, 7, 7, 8]), np.array([4, 4, 28, 4, 4, 4])
    work = Workload(
        "queue", np.array([0, 1000, 2000, 5000, 5000, 5000]), np.array([5, 5, 29, 5, 25, 5]), np.array([2, 2, 2, 7, 2, 2]),
        content=PromptContent(np.arange(7), texts, tokens),
    )  # fmt: skip
    log = _Log()
    simulate(_settings(9, 100), work, _Costs(), observers=[log])
    assert [line for line in log.lines if line[0] >= 5000 and line[1].startswith("admit")] == [
        (5250, "admit [3], 1 tokens"),
        (5550, "admit [5], 1 tokens"),
        (5950, "admit [4], 21 tokens"),
    ]


def test_size_0_is_no_offloading():
    assert settings(policy="vllm-v1", kv_offloading_size=0) == settings(policy="vllm-v1")


@pytest.mark.slow
@few
@given(case=shared_cases())
def test_gpu_and_infinite_host_together_find_what_an_infinite_gpu_does(case: SharedCase):
    """Requests that come one after the other, as stores and loads take time."""
    work, size = case.workload, case.pool.block_size
    work = replace(work, arrival_ticks=np.arange(len(work)) * 1_000_000)
    run = simulate(_offloading(case, 10_000), work, case.cost)
    infinite = simulate(replace(caching_settings(case), num_gpu_blocks_override=2000), work, case.cost)
    gpu, found = run.replica.cache_log.look_up_columns(), _tier(run).look_ups.columns()
    both = dict(zip(gpu["index"].tolist(), (gpu["hit_tokens"] + found["hit_tokens"]).tolist(), strict=True))
    all_on_gpu = infinite.replica.cache_log.look_up_columns()
    for index, tokens in zip(all_on_gpu["index"].tolist(), all_on_gpu["hit_tokens"].tolist(), strict=True):
        if index in both and not run.refused[: index + 1].any() and not infinite.refused[index]:
            # The host may have the block with the last token of the prompt as well, and has no generated tokens.
            found_at_all = min(both[index], (work.prompt_tokens[index] - 1) // size * size)
            assert found_at_all == tokens or (case.content.session_id is not None and found_at_all < tokens)


def test_a_step_waits_for_the_stores_of_blocks_that_are_taken_again():
    """Two requests of five blocks in a pool of six; a store takes 1,000 ticks a block."""
    work = Workload("two", np.array([0, 10]), np.array([17, 17]), np.array([2, 2]))
    run = simulate(_settings(7, 100), work, _Costs(store_ticks=1000))
    # The first request ends at 200, and the stores of its four full blocks run from 100 to 4100.
    assert {name: column.tolist() for name, column in _tier(run).flushes.columns().items()} == {
        "start_ticks": [200],
        "ticks": [3900],
    }
    assert run.log.end_ticks == 4300
    assert summary(run)["kv_offloading"]["flush_seconds"] == 3900 / 10**12


def test_a_step_waits_for_the_stores_of_a_preempted_request():
    """Two prompts of two blocks in a pool of six. At 500 either needs a fourth block, and the second request gives way; the stores of
    its prompt, 2,000 ticks after those of the first one, run to 4100."""
    work = Workload("two", np.zeros(2), np.array([8, 8]), np.array([6, 6]))
    run = simulate(_settings(7, 100), work, _Costs(store_ticks=1000))
    assert run.log.evictions["ticks"].tolist() == [500]
    flushes = _tier(run).flushes.columns()
    assert [*zip(flushes["start_ticks"].tolist(), flushes["ticks"].tolist())] == [(500, 3600)]


@pytest.mark.parametrize(("pool", "waits", "end"), [(7, [(100, 4000)], 4200), (20, [], 200)])
def test_a_step_waits_for_what_a_request_stores_as_it_ends_if_it_takes_those_blocks(pool, waits, end):
    """As above with one token of output: the first request ends at 100, and its four full blocks are stored from then on. In a pool
    of six the second one takes them; in a larger one it takes others."""
    work = Workload("two", np.array([0, 10]), np.array([17, 17]), np.array([1, 1]))
    run = simulate(_settings(pool, 100), work, _Costs(store_ticks=1000))
    flushes = _tier(run).flushes.columns()
    assert [*zip(flushes["start_ticks"].tolist(), flushes["ticks"].tolist())] == waits
    assert run.log.end_ticks == end
    transfers = _tier(run).transfers.columns()
    assert (transfers["blocks"].tolist()[0], transfers["is_store"].tolist()[0]) == (4, 1)


@pytest.mark.parametrize(
    "chosen",
    [
        {"enable_prefix_caching": False},
        {"ids": True},
        {"kv_offloading_size": 1e-5},
    ],
    ids=lambda chosen: next(iter(chosen)),
)
def test_what_is_not_simulated_is_refused(chosen: dict[str, object]):
    work = Workload("one", np.zeros(2), np.array([10, 10]), np.array([2, 2]), priority=np.arange(2))
    with pytest.raises(SettingError, match=r"^kv_offloading_size = [^\n]+; (leave out one of them|give more GiB)$"):
        simulate(settings(**_V1 | chosen), work)


def test_the_host_has_pages_of_kv_groups_and_copies_take_the_time_of_a_page():
    """gpt-oss-120b has 36 layers in two groups: the host has twice the blocks of a model that keeps every token, in half the time each."""
    given = _V1 | {"model": "gpt-oss-120b", "gpu": "h200", "num_gpu_blocks_override": 20_000, "max_model_len": 4096}
    work = Workload(
        "one", np.zeros(1), np.array([10]), np.array([2]), content=PromptContent.of_sessions(np.zeros(1, np.int64))
    )
    grouped = simulate(settings(**given), work).replica
    whole = simulate(settings(**given, disable_hybrid_kv_cache_manager=True), work).replica
    blocks = [replica.memory.tier.cache.num_blocks for replica in (grouped, whole)]
    assert 2 * blocks[1] <= blocks[0] <= 2 * blocks[1] + 1
    for ticks in ("swap_in_ticks", "swap_out_ticks"):
        page, block = (getattr(replica.cost, ticks)(1000) for replica in (grouped, whole))
        assert 1.99 * page < block < 2.01 * page


def test_replicas_that_prefill_have_a_host_and_those_that_decode_have_none():
    work = Workload("one", np.zeros(2), np.array([40, 40]), np.array([2, 2]))
    run = simulate_cluster(settings(**_V1), work, cluster(prefill_replicas=1, decode_replicas=1))
    tiers = [part.replica.memory.transfers for part in run.runs]
    assert [tier is not None for tier in tiers] == [True, False]
    assert _tier(run.runs[0]).cache.used_blocks == 2 * (40 // 16)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["round-robin", "kv-aware"])
def test_each_replica_of_a_fleet_is_a_server_with_a_host_of_its_own(router: str):
    """What a replica did equals a run of its requests alone, also where a request arrives within a leap."""
    work = _dense(7)
    chosen = _settings(15, 40, async_scheduling=True)
    cost = _Costs(load_ticks=40, store_ticks=90)
    fleet = simulate_cluster(chosen, work, cluster(num_replicas=2, router=router), cost)
    hits = 0
    assert work.content is not None
    for run, rows in zip(fleet.runs, fleet.rows, strict=True):
        pieces = PromptContent(np.arange(len(rows) + 1), work.content.ids[rows], work.content.tokens[rows])
        alone = simulate(chosen, replace(run.workload, content=pieces), cost)
        table = requests_table(run)
        assert table.equals(requests_table(alone))
        hits += table["offloaded_tokens"].sum()
    assert cluster_summary(fleet)["kv_offloading"]["hit_tokens"] == hits > 0


@pytest.mark.slow
@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
@pytest.mark.parametrize("file", ["mooncake_conversation.jsonl.gz", "ragpulse.jsonl.gz"])
def test_hits_by_tier_on_a_published_trace_are_those_of_a_replay(file: str):
    """Its first 600 requests, over a pool that keeps few of their prefixes and a host that evicts others."""
    trace = read_with_content(Path(os.environ["FRAGMETER_TRACES"]) / file).first(600)
    assert trace.arrival_ticks is not None
    work = Workload(file, trace.arrival_ticks, trace.prompt_tokens, trace.output_tokens, content=trace.content)
    feed = _Feed()
    run = simulate(
        settings(
            policy="vllm-v1",
            model="llama-3.1-8b",
            gpu="h100-80gb",
            num_gpu_blocks_override=9000 if "mooncake" in file else 1000,
            kv_offloading_size=16 if "mooncake" in file else 2,
        ),
        work,
        observers=[feed],
    )
    _check_replayed(feed, run)
    assert feed.replay.hits and feed.replay.evicted


def _dense(seed: int) -> Workload:
    """Prefixes of six texts, and requests that arrive faster than they are served."""
    draw = np.random.default_rng(seed)
    texts, lengths = draw.integers(0, 6, 120), draw.integers(4, 25, 120)
    content = PromptContent(np.arange(121), texts, lengths)
    arrivals, outputs = np.cumsum(draw.integers(0, 300, 120)), draw.integers(1, 25, 120)
    return Workload("dense", arrivals, lengths + draw.integers(1, 8, 120), outputs, content=content)


@pytest.mark.slow
@pytest.mark.parametrize(("host_blocks", "ahead"), [(12, False), (40, True)])
def test_a_dense_load_is_that_of_a_replay(host_blocks: int, ahead: bool):
    """Over a pool of 14 blocks: loads, evictions on the host, preemptions and waits for stores."""
    work, feed = _dense(5), _Feed()
    chosen = _settings(15, host_blocks, async_scheduling=ahead)
    run = simulate(chosen, work, _Costs(load_ticks=40, store_ticks=90), observers=[feed])
    _check_replayed(feed, run)
    found = summary(run)
    assert found["preemptions"]["recompute"] and found["kv_offloading"]["flush_seconds"]
    assert feed.replay.hits and feed.replay.evicted


def test_what_was_loaded_is_found_on_the_gpu():
    """The second block of a text is evicted, loaded by the third request, and found by the fourth."""
    pieces = PromptContent(np.array([0, 1, 2, 3, 4]), np.array([7, 8, 7, 7]), np.array([8, 16, 8, 8]))
    work = Workload("again", np.array([0, 1000, 2000, 3000]), np.array([9, 17, 9, 9]), np.full(4, 2), content=pieces)
    table = requests_table(simulate(_settings(7, 100), work, _Costs()))
    assert table["cached_tokens"].tolist() == [0, 0, 4, 8]
    assert table["offloaded_tokens"].tolist() == [0, 0, 4, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_sequences_that_finish_in_one_step_are_used_in_the_order_of_the_running_queue(first):
    """Whichever leaves the memory first: the host then evicts the block of the one that entered first."""
    tier = HostTier(num_blocks=2, block_size=1)
    tier.connect(lambda: 0, lambda blocks: 0, lambda blocks: 0)
    two = [Sequence(index, 1, 1, 1) for index in range(2)]
    tier.end_decision((), [Offer(each, 1, [(10 + each.index, 0, [each.index])]) for each in two], set(), False)
    tier.end_decision((), (), set(), False)
    tier.complete(0)
    for each in (two[first], two[1 - first]):
        tier.finish(Offer(each, 1, []))
    tier.end_decision((), (), set(), False)
    third = Sequence(2, 1, 1, 1)
    tier.end_decision((), [Offer(third, 1, [(12, 0, [2])])], set(), False)
    assert [tier.cache.has(name) for name in (10, 11, 12)] == [False, True, True]


def test_a_sequence_that_finds_no_block_has_given_back_what_its_windows_passed():
    """The running step computes the sequence that would be preempted for it, so that it stalls; the ledger adds up (``finished``)."""
    case = replace(KINDS["windows_cached"](65), prefix_caching=True)
    # 5,000 pages of the host.
    chosen = ours.settings_of(case, True, enable_prefix_caching=True, kv_offloading_size=5000 * 4096 / (1 << 30))
    assert simulate(chosen, case.workload, _Costs(load_ticks=90)).accounts is not None
