"""KV offloading beside vLLM's own: the dictionary of host blocks operation by operation, and the scheduler step by step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from fragmeter.sim.memory.prefix.host_cache import HostCache
from tools.live.step_log import first_difference

from . import offloading
from .workloads import KINDS, OPTIONS

#: Random runs, and operations of each.
_SEEDS, _OPERATIONS = 60, 400


def _key(name: int) -> OffloadKey:
    return make_offload_key(name.to_bytes(8, "big"), 0)


class _Both:
    """vLLM's manager and ours, which are given the same operations; each must answer alike."""

    def __init__(self, num_blocks: int) -> None:
        self.real, self.ours = CPUOffloadingManager(num_blocks, cache_policy="lru"), HostCache(num_blocks)
        self.contexts: dict[int, ReqContext] = {}
        self.loads: list[tuple[int, list[int]]] = []
        self.stores: list[tuple[int, list[int]]] = []
        self.evicted = 0

    def begin(self, request: int, names: list[int]) -> None:
        context = self.contexts[request] = ReqContext(req_id=str(request))
        for place, name in enumerate(names):
            context.set_offload_key_position(_key(name), 16 * (place + 1))
        self.real.on_new_request(context)

    def store(self, request: int, names: list[int], first: int, stop: int) -> None:
        real = self.real.prepare_store([_key(name) for name in names[first:stop]], self.contexts[request])
        ours = self.ours.start_store(request, [(names[place], place) for place in range(first, stop)])
        assert (real is None) == (ours is None)
        if real is None or ours is None:
            return
        assert real.keys_to_store == [_key(name) for name in ours]
        self.evicted += len(real.evicted_keys)
        if ours:
            self.stores.append((request, ours))

    def load(self, request: int, names: list[int]) -> None:
        ready = next((at for at, name in enumerate(names) if not self.ours.is_ready(name)), len(names))
        if ready:
            self.real.prepare_load([_key(name) for name in names[:ready]], self.contexts[request])
            self.ours.start_load(request, [(name, place) for place, name in enumerate(names[:ready])])
            self.loads.append((request, names[:ready]))

    def finish(self, request: int) -> None:
        self.real.on_request_finished(self.contexts[request])
        self.ours.finish(request)

    def end_copy(self, draw: random.Random) -> None:
        if self.loads and draw.random() < 0.5:
            request, names = self.loads.pop(draw.randrange(len(self.loads)))
            self.real.complete_load([_key(name) for name in names], self.contexts[request])
            self.ours.end_load(names)
        elif self.stores:
            request, names = self.stores.pop(draw.randrange(len(self.stores)))
            self.real.complete_store([_key(name) for name in names], self.contexts[request])
            self.ours.end_store(names)

    def check(self, names: range) -> None:
        context = ReqContext(req_id="none")
        for name in names:
            answer = self.real.lookup(_key(name), context)
            assert self.ours.has(name) == (answer is not LookupResult.MISS)
            assert self.ours.is_ready(name) == (answer is LookupResult.HIT)
        assert self.ours.evicted_blocks == self.evicted


@pytest.mark.parametrize("num_blocks", [3, 12, 40])
def test_every_answer_and_eviction_is_that_of_vllm(num_blocks: int):
    evicted = 0
    for seed in range(_SEEDS):
        draw, both = random.Random(seed), _Both(num_blocks)
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
                    both.store(chosen, names, first, stop)
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
@pytest.mark.parametrize("first", range(0, 25, 5))
def test_every_step_is_that_of_the_scheduler_with_the_connector(
    kind: str, first: int, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 5), None, asynchronous, record_property)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["prefixes", "turns"])
@pytest.mark.parametrize("option", ["priorities", "intervals"])
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_every_step_under_an_option_is_that_of_the_scheduler_with_the_connector(
    first: int, option: str, kind: str, asynchronous: bool, record_property
):
    _compare(kind, range(first, first + 10), option, asynchronous, record_property)


def _compare(
    kind: str, seeds: range, option: str | None, asynchronous: bool, record_property: Callable[[str, object], None]
) -> None:
    """With hosts of few blocks and of many, and copies that are short and long beside a step."""
    differing: dict[str, object] = {}
    steps = loaded = 0
    for seed in seeds:
        case, draw = KINDS[kind](seed), random.Random(seed)
        if option is not None:
            case = OPTIONS[option](case)
        if case.block_size == 1 and 1 in case.workload.prompt_tokens:
            # vLLM looks up again a prompt of one token that it has loaded whole, and loads it again (docs/policies.md).
            continue
        sizes = draw.choice([3, 20, 200, 5000]), draw.choice([1, 30, 90, 400]), draw.choice([0, 1, 30, 200])
        copies = offloading.Copies(*sizes)
        real, recorder = offloading.serve(case, copies, asynchronous)
        ours = offloading.serve_ours(case, copies, asynchronous)
        steps += len(real.steps)
        loaded += recorder.loaded
        if difference := first_difference(offloading.comparable(real), offloading.comparable(ours)):
            differing[case.name] = difference
    label = f"offloading {option or kind} {'async' if asynchronous else 'sync'}"
    record_property(f"compared/{label}", [len(seeds), steps, len(differing)])
    assert not differing
    assert loaded
