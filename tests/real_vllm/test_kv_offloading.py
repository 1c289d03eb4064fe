"""KV offloading beside vLLM's own: the dictionary of host blocks operation by operation, and the scheduler step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from fragmeter.sim.memory.accounting.kv_groups import PageGroups
from fragmeter.sim.memory.paged.host_tier_memory import HostTierMemory
from fragmeter.sim.memory.paged.offload import OffloadedMemory
from fragmeter.sim.memory.prefix.host_cache import HostCache
from fragmeter.sim.types.errors import SimulationFault
from tools.live.step_log import first_difference

from . import offloading
from .drafts import METHODS, PACKED, drawn
from .server import Stuck
from .workloads import KINDS, OPTIONS, number_of_workloads

#: Kinds of workloads over several KV groups.
HYBRIDS = ("windows_cached", "states", "block_sizes", "compressed", "rings")
#: Kinds and methods of drafts.
_DRAFTED = [
    *product(("prefixes", "turns", "windows_cached", "states", "block_sizes"), METHODS),
    *PACKED,
]
#: Random runs, and operations of each.
_SEEDS, _OPERATIONS = 60, 400


def _key(name: int, groups: int = 1) -> OffloadKey:
    return make_offload_key((name // groups).to_bytes(8, "big"), name % groups)


class _Both:
    """vLLM's manager and ours, which are given the same operations; each must answer alike."""

    def __init__(self, num_blocks: int, groups: int) -> None:
        self.real, self.ours = CPUOffloadingManager(num_blocks, cache_policy="lru"), HostCache(num_blocks, groups)
        self.groups = groups
        self.contexts: dict[int, ReqContext] = {}
        self.loads: list[tuple[int, list[int]]] = []
        self.stores: list[tuple[int, list[int]]] = []
        self.evicted = 0

    def _placed(self, names: list[int], first: int) -> list[tuple[int, int]]:
        """The blocks of all groups, one group after the other."""
        return [
            (name * self.groups + group, place)
            for group in range(self.groups)
            for place, name in enumerate(names, first)
        ]

    def _keys(self, blocks: Iterable[int]) -> list[OffloadKey]:
        return [_key(name, self.groups) for name in blocks]

    def begin(self, request: int, names: list[int]) -> None:
        context = self.contexts[request] = ReqContext(req_id=str(request))
        for name, place in self._placed(names, 0):
            context.set_offload_key_position(_key(name, self.groups), 16 * (place + 1))
        self.real.on_new_request(context)

    def store(self, request: int, names: list[int], first: int, stop: int, draw: random.Random) -> None:
        """Blocks of all groups, or of some."""
        offers = draw.choice([range(self.groups), draw.sample(range(self.groups), draw.randint(1, self.groups))])
        blocks = [each for each in self._placed(names[first:stop], first) if each[0] % self.groups in offers]
        real = self.real.prepare_store(self._keys(name for name, _ in blocks), self.contexts[request])
        ours = self.ours.start_store(request, blocks)
        assert (real is None) == (ours is None)
        if real is None or ours is None:
            return
        assert real.keys_to_store == self._keys(ours)
        self.evicted += len(real.evicted_keys)
        if ours:
            self.stores.append((request, ours))

    def load(self, request: int, names: list[int]) -> None:
        is_ready = [all(self.ours.is_ready(block) for block, _ in self._placed([name], 0)) for name in names]
        blocks = self._placed(names[: [*is_ready, False].index(False)], 0)
        if blocks:
            self.real.prepare_load(self._keys(name for name, _ in blocks), self.contexts[request])
            self.ours.start_load(request, blocks)
            self.loads.append((request, [name for name, _ in blocks]))

    def finish(self, request: int) -> None:
        self.real.on_request_finished(self.contexts[request])
        self.ours.finish(request)

    def end_copy(self, draw: random.Random) -> None:
        if self.loads and draw.random() < 0.5:
            request, names = self.loads.pop(draw.randrange(len(self.loads)))
            self.real.complete_load(self._keys(names), self.contexts[request])
            self.ours.end_load(names)
        elif self.stores:
            request, names = self.stores.pop(draw.randrange(len(self.stores)))
            self.real.complete_store(self._keys(names), self.contexts[request])
            self.ours.end_store(names)

    def check(self, names: range) -> None:
        context = ReqContext(req_id="none")
        for name in names:
            answer = self.real.lookup(_key(name, self.groups), context)
            assert self.ours.has(name) == (answer is not LookupResult.MISS)
            assert self.ours.is_ready(name) == (answer is LookupResult.HIT)
        assert self.ours.evicted_blocks == self.evicted


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("num_blocks", [3, 12, 40])
def test_every_answer_and_eviction_is_that_of_vllm(num_blocks: int, groups: int):
    evicted = 0
    for seed in range(_SEEDS):
        draw, both = random.Random(seed), _Both(num_blocks, groups)
        running: dict[int, tuple[list[int], int]] = {}
        for request in range(_OPERATIONS):
            chance = draw.random()
            if chance < 0.2:
                # Prefixes of three texts, which then go on differently.
                text = draw.randrange(3)
                names = [100 * text + at for at in range(draw.randrange(1, 12))]
                names += [1000 + 40 * draw.randrange(8) + at for at in range(draw.randrange(4))]
                both.begin(request, names)
                running[request] = names, 0
                if draw.random() < 0.6:
                    both.load(request, names)
            elif chance < 0.6 and running:
                chosen = draw.choice(list(running))
                names, first = running[chosen]
                stop = draw.randrange(first, len(names) + 1)
                if stop > first:
                    both.store(chosen, names, first, stop, draw)
                    running[chosen] = names, stop
            elif chance < 0.75 and running:
                chosen = draw.choice(list(running))
                del running[chosen]
                both.finish(chosen)
            else:
                both.end_copy(draw)
            both.check(range(1500) if request % 50 == 0 else range(12))
        evicted += both.evicted
    assert evicted > 100


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["prefixes", "turns"])
@pytest.mark.parametrize("first", range(0, number_of_workloads(25), 5))
def test_every_step_is_that_of_the_scheduler_with_the_connector(
    kind: str, first: int, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 5), None, asynchronous, record_property)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["prefixes", "turns"])
@pytest.mark.parametrize("option", ["priorities", "intervals"])
@pytest.mark.parametrize("first", range(0, number_of_workloads(100), 10))
def test_every_step_under_an_option_is_that_of_the_scheduler_with_the_connector(
    first: int, option: str, kind: str, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 10), option, asynchronous, record_property)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("first", range(0, number_of_workloads(40), 10))
def test_every_step_over_several_kv_groups_is_that_of_the_scheduler_with_the_connector(
    first: int, kind: str, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 10), None, asynchronous, record_property)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("option", ["priorities", "intervals"])
@pytest.mark.parametrize("first", range(0, number_of_workloads(30), 10))
def test_several_kv_groups_under_an_option_are_those_of_the_scheduler_with_the_connector(
    first: int, option: str, asynchronous: bool, record_property
):
    for kind in HYBRIDS:
        _compare(kind, range(first, first + 10), option, asynchronous, record_property)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "method"),
    _DRAFTED,
)
@pytest.mark.parametrize("first", range(0, number_of_workloads(24), 6))
def test_every_step_with_drafts_is_that_of_the_scheduler_with_the_connector(
    first: int, kind: str, method: str, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 6), None, asynchronous, record_property, method)


def test_a_chunk_that_finds_too_few_blocks_has_passed_those_before_its_windows(record_property):
    """While another sequence is in flight, so that it may not be preempted for it."""
    _compare("block_sizes", range(151, 152), None, True, record_property)


def test_a_load_that_leaves_no_room_for_a_step_with_drafts_is_noticed(monkeypatch):
    """Beside a load the next step of a sequence with drafts must fit."""
    connect = HostTierMemory._connect

    def without(memory: HostTierMemory, *given: int) -> None:
        connect(memory, *given)
        monkeypatch.setattr(type(memory), "step_blocks", property(lambda _: 0, lambda *_: None), raising=False)

    monkeypatch.setattr(HostTierMemory, "_connect", without)
    copies, differing = offloading.Copies(200, 30, 30), 0
    for seed in range(24):
        case = drawn("prefixes", seed, "ngram", prefix_caching=True)
        real, _ = offloading.serve(case, copies)
        ours = offloading.serve_ours(case, copies)
        differing += first_difference(offloading.comparable(real), offloading.comparable(ours)) is not None
    assert differing


@pytest.mark.parametrize("kind", ["prefixes", "windows_cached"])
def test_a_drafters_last_block_that_is_kept_is_noticed(kind: str, monkeypatch):
    replaced = PageGroups._replace
    monkeypatch.setattr(
        PageGroups, "_replace", lambda groups, **given: replaced(groups, **given | {"drops_block": False})
    )
    copies, differing = offloading.Copies(200, 30, 30), 0
    for seed in range(12):
        case = drawn(kind, seed, "eagle", prefix_caching=True)
        real, _ = offloading.serve(case, copies)
        ours = offloading.serve_ours(case, copies)
        differing += first_difference(offloading.comparable(real), offloading.comparable(ours)) is not None
    assert differing


def _differing(kind: str, seeds: range) -> int:
    copies, differing = offloading.Copies(200, 30, 30), 0
    for seed in seeds:
        case = replace(KINDS[kind](seed), prefix_caching=True)
        real, _ = offloading.serve(case, copies)
        ours = offloading.serve_ours(case, copies)
        differing += first_difference(offloading.comparable(real), offloading.comparable(ours)) is not None
    return differing


def test_states_that_are_not_offered_are_noticed(monkeypatch):
    monkeypatch.setattr(OffloadedMemory, "_take_states", lambda memory: [])
    assert _differing("states", range(6)) > 1


def test_windows_that_keep_their_blocks_until_a_sequence_leaves_are_noticed(monkeypatch):
    """A finished sequence gives back what its windows have passed, before its other blocks."""
    monkeypatch.setattr(OffloadedMemory, "_pass_at_end", lambda *given: None)
    assert _differing("windows_cached", range(6)) > 1


def test_windows_offered_as_on_the_gpu_are_noticed(monkeypatch):
    """There prefixes end where the blocks of all groups do; on the host where those of the groups that keep every token do."""
    connect = HostTierMemory._connect

    def aligned(memory: HostTierMemory, *given: int) -> None:
        connect(memory, *given)
        memory._aligned = memory.block_size

    monkeypatch.setattr(HostTierMemory, "_connect", aligned)
    assert _differing("block_sizes", range(12)) > 1


def _compare(
    kind: str,
    seeds: range,
    option: str | None,
    asynchronous: bool,
    record_property: Callable[[str, object], None],
    method: str | None = None,
) -> None:
    """With hosts of few blocks and of many, and copies that are short and long beside a step."""
    differing: dict[str, object] = {}
    steps = loaded = stuck = 0
    for seed in seeds:
        case, draw = replace(KINDS[kind](seed), prefix_caching=True), random.Random(seed)
        if method is not None:
            case = drawn(kind, seed, method, prefix_caching=True)
        if option is not None:
            case = OPTIONS[option](case)
        if case.block_size == 1 and 1 in case.workload.prompt_tokens:
            # vLLM looks up again a prompt of one token that it has loaded whole, and loads it again (docs/results/schedulers.md).
            continue
        sizes = draw.choice([3, 20, 200, 5000]), draw.choice([1, 30, 90, 400]), draw.choice([0, 1, 30, 200])
        copies = offloading.Copies(*sizes)
        try:
            real, recorder = offloading.serve(case, copies, asynchronous)
        except Stuck:
            with pytest.raises(SimulationFault, match="is stuck"):
                offloading.serve_ours(case, copies, asynchronous)
            stuck += 1
            continue
        ours = offloading.serve_ours(case, copies, asynchronous)
        steps += len(real.steps)
        loaded += recorder.loaded
        if difference := first_difference(offloading.comparable(real), offloading.comparable(ours)):
            differing[case.name] = difference
    name = " ".join(dict.fromkeys((kind if kind in HYBRIDS else option or kind, option or kind, method or "")))
    label = f"offloading {name} {'async' if asynchronous else 'sync'}"
    record_property(f"compared/{label}", [len(seeds), steps, len(differing)])
    assert not differing and stuck <= len(seeds) // 2
    # Windows and sparse blocks seldom find what the host has.
    assert loaded or kind in HYBRIDS
