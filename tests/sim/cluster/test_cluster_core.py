"""Replicas on the compiled core beside replicas in Python: the same bits in every column and in every file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster_runs import ROUTERS, TIGHT, Views, unrefused
from core_loads import POLICIES, Load, changed_core, columns, needs_core, spied
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim import settings
from fragmeter.sim.cluster import (
    ClusterRun,
    FleetSchedule,
    cluster,
    cluster_summary,
    routed_core,
    simulate_cluster,
)
from fragmeter.sim.cluster import run as cluster_run
from fragmeter.sim.cluster.routed_core import Boundaries
from fragmeter.sim.cluster.routing import Lowest, Router
from fragmeter.sim.engine import core
from fragmeter.sim.engine.core import CoreEngine
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from same_runs import plain


class FleetLoad:
    """A ``Load`` for several replicas, also of a fleet that changes its size."""

    def __init__(self, seed: int, policy: str, router: str, most: int = 80) -> None:
        rng = np.random.default_rng(seed)
        self.load, self.router, self.replicas = Load(seed, policy, most), router, int(rng.integers(2, 7))
        self.work = replace(self.load.work, arrival_ticks=self.load.work.arrival_ticks // self.replicas)
        self.schedule: FleetSchedule | None = None
        if rng.random() < 0.3:
            changes = np.unique(rng.integers(1, 2 + int(self.work.arrival_ticks[-1]), 3)).tolist()
            sizes = rng.integers(1, 5, len(changes)).tolist()
            self.schedule = FleetSchedule((0, *changes), (self.replicas, *sizes), int(rng.integers(2)) * changes[0])

    def run(self, **switches: Any) -> ClusterRun:
        chosen, fleet = self.load.chosen | switches, cluster(num_replicas=self.replicas, router=self.router, **TIGHT)
        with unrefused():
            return simulate_cluster(settings(**chosen), self.work, fleet, self.load.cost, schedule=self.schedule)


def everything(run: ClusterRun) -> list[object]:
    """Which replica served what, all that the ledgers have, the windows and the summary."""
    found: list[object] = [rows.tolist() for rows in run.rows]
    for part in run.runs:
        found += [columns(part), part.workload.arrival_ticks.tolist(), plain(part.window)]
    return [*found, cluster_summary(run)]


def compare(load: FleetLoad) -> None:
    """The core and Python: the same bits, also in a window; and routers that look see the same at every arrival."""
    (compiled, seen), (python, views) = served(load), served(load, core=False)
    assert seen == views
    assert everything(compiled) == everything(python)
    window = load.load.window_of(python.runs[0])
    assert everything(load.run(window=window)) == everything(load.run(window=window, core=False))


def served(load: FleetLoad, **switches: Any) -> tuple[ClusterRun, list[object]]:
    """A run, and what its router saw."""
    noting = Views()
    with noting.noted():
        run = load.run(**switches)
    assert not noting.differences
    return run, noting.seen


@needs_core
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=4)
@given(seed=st.integers(0, 1 << 40))
def test_core_and_python_are_the_same_bits(policy, router, seed):
    compare(FleetLoad(seed, policy, router))


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=200)
@given(seed=st.integers(0, 1 << 40))
def test_core_and_python_are_the_same_bits_at_length(policy, router, seed):
    compare(FleetLoad(seed, policy, router, most=160))


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loads_preempt_refuse_tie_and_grow(policy):
    """The property would say little if they did not."""
    loads = [FleetLoad(seed, policy, "round-robin") for seed in range(60)]
    runs = [load.run() for load in loads]
    assert sum(any(len(part.log.evictions["index"]) for part in run.runs) for run in runs) > 10
    assert sum(bool(run.refused.any()) for run in runs) > 3
    assert sum((np.diff(load.work.arrival_ticks) == 0).any() for load in loads) > 30
    assert sum(len(run.runs) > load.replicas for load, run in zip(loads, runs, strict=True)) > 3
    assert sum(any(not len(rows) for rows in run.rows) for run in runs) > 3


@pytest.mark.slow
@needs_core
def test_the_command_writes_the_same_bytes_with_and_without_the_core(tmp_path):
    preempted = 0
    for place, flags in enumerate(
        (
            ["--request-rate", "9"],
            ["--policy", "vllm-v1", "--request-rate", "12"],
            ["--policy", "vllm-v1", "--request-rate", "12", "--router", "least-outstanding-tokens", "--n", "2"],
            ["--policy", "vllm-v1", "--request-rate", "12", "--router", "kv-aware", "--window", "5", "20"],
        )
    ):
        one, other = tmp_path / f"core{place}", tmp_path / f"python{place}"
        command = ["simulate", "--num-prompts", "300", "--num-replicas", "3", *flags]
        assert status([*command, "--out", str(one), "--json", f"{one}.json"]) == DONE
        assert status([*command, "--no-core", "--out", str(other), "--json", f"{other}.json"]) == DONE
        assert {path.name: path.read_bytes() for path in one.iterdir()} == {
            path.name: path.read_bytes() for path in other.iterdir()
        }
        assert (tmp_path / f"{one.name}.json").read_bytes() == (tmp_path / f"{other.name}.json").read_bytes()
        preempted += json.loads((one / "summary.json").read_text())["preemptions"]["recompute"]
    assert preempted > 0


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("router", ROUTERS)
def test_progress_is_the_same(router):
    load = FleetLoad(7, "vllm-v1", router)
    counts: dict[bool, list[int]] = {True: [], False: []}
    for which, found in counts.items():
        chosen = settings(**load.load.chosen, core=which)
        fleet = cluster(num_replicas=load.replicas, router=router)
        simulate_cluster(chosen, load.work, fleet, load.load.cost, progress=found.append)
    assert counts[True] == counts[False]
    assert counts[True][-1] == len(load.work)


THREE = np.array([0, 1, 2]), np.array([20, 30, 40]), np.array([5, 6, 7])


@needs_core
@pytest.mark.parametrize(
    ("changed", "fleet", "more", "by_core"),
    [
        ({}, {"num_replicas": 2}, {}, 2),
        ({"policy": "vllm-v1"}, {"num_replicas": 2}, {}, 2),
        ({"policy": "vllm-v1"}, {"num_replicas": 2}, {"n": np.array([1, 2, 1])}, 2),
        ({"core": False}, {"num_replicas": 2}, {}, 0),
        ({"policy": "sarathi"}, {"num_replicas": 2}, {}, 0),
        ({}, {"num_replicas": 2}, {"users": Users(2, np.zeros(3, dtype=np.int64))}, 0),
        ({}, {"num_replicas": 2, "router": "kv-aware"}, {}, 2),
        ({"policy": "vllm-v1"}, {"num_replicas": 2, "router": "least-outstanding-tokens"}, {"n": np.array([1, 2, 1])}, 2),
        ({"policy": "vllm-v1"}, {"num_replicas": 2, "router": "prefix-affine"}, {}, 2),
        ({"leap": False}, {"num_replicas": 2, "router": "kv-aware"}, {}, 0),
        ({}, {"num_replicas": 2, "router": "kv-aware"}, {"users": Users(2, np.zeros(3, dtype=np.int64))}, 0),
        ({"policy": "vllm-v1"}, {"prefill_replicas": 1, "decode_replicas": 1}, {}, 0),
        (
            {"policy": "vllm-v1", "model": "deepseek-v3", "gpu": "h200", "data_parallel_size": 8, "quantization": "fp8", "max_model_len": 65536},
            {"num_replicas": 8},
            {},
            0,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_the_core_serves_only_what_it_has(changed, fleet, more, by_core):
    with spied() as started:
        simulate_cluster(settings(**changed), Workload("three", *THREE, **more), cluster(**fleet))
    assert len(started) == by_core


@contextmanager
def another_replica() -> Iterator[None]:
    """One request goes to the replica after the chosen one."""
    make = cluster_run.router

    def made(name: str, count: int, *parts: Any) -> Router:
        router = make(name, count, *parts)
        choose = router.choose

        def wrong(request: int, now: int, among: Sequence[int] | None = None) -> int:
            places = range(count) if among is None else among
            return places[(places.index(choose(request, now, among)) + (request == 3)) % len(places)]

        router.choose = wrong
        return router

    with mock.patch.object(cluster_run, "router", made):
        yield


@contextmanager
def last_of_equals() -> Iterator[None]:
    """Of replicas with the lowest value the one with the highest number is chosen."""

    def wrong(self: Lowest, request: int, now: int, among: Sequence[int] | None = None) -> int:
        places = range(len(self._replicas)) if among is None else among
        return min(places, key=lambda place: (self._value(self._replicas[place], now), -place))

    with mock.patch.object(Lowest, "choose", wrong):
        yield


@contextmanager
def boundary_first() -> Iterator[None]:
    """At one tick, step boundaries come before requests."""
    advance = Boundaries.advance
    with mock.patch.object(Boundaries, "advance", lambda self, now: advance(self, now + 1)):
        yield


@contextmanager
def changed_part(change: Callable[[Workload], Workload]) -> Iterator[None]:
    """The core serves other requests than its replica was sent."""

    def start(env: Any, workload: Workload, *parts: Any) -> CoreEngine:
        return CoreEngine(env, change(workload), *parts)

    with mock.patch.object(cluster_run, "CoreEngine", start):
        yield


def tie_exchanged(part: Workload) -> Workload:
    """The first two requests with the same arrival are exchanged."""
    ties = np.flatnonzero(np.diff(part.arrival_ticks) == 0)
    order = np.arange(len(part))
    if len(ties):
        order[ties[0] : ties[0] + 2] = order[ties[0] : ties[0] + 2][::-1]
    own = {name: getattr(part, name)[order] for name in part.columns() if name != "arrival_ticks"}
    return replace(part, **own)


def a_tick_later(part: Workload) -> Workload:
    """The last request comes a tick later."""
    arrivals = part.arrival_ticks.copy()
    arrivals[-1:] += 1
    return replace(part, arrival_ticks=arrivals)


LOOKING = ROUTERS[1:]
PLANTED: list[tuple[str, Callable[[], Any]]] = [
    *((router, another_replica) for router in ROUTERS),
    ("round-robin", partial(changed_part, tie_exchanged)),
    ("round-robin", partial(changed_part, a_tick_later)),
    *((router, last_of_equals) for router in LOOKING[:2]),
    *((router, boundary_first) for router in LOOKING),
]


@needs_core
@pytest.mark.parametrize(("router", "planted"), PLANTED)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_planted_difference_is_caught(policy, router, planted):
    assert any(differs(FleetLoad(seed, policy, router), planted) for seed in range(40))


def differs(load: FleetLoad, planted: Callable[[], Any]) -> bool:
    python = everything(load.run(core=False))
    with planted():
        return everything(load.run()) != python


#: Changes of the C: policy and router of the runs that notice them, the header, and what is replaced.
PLANTED_IN_C = {
    "a leap that ends at an arrival": ("vllm-v1", "kv-aware", "batch", "r->open && end >= until", "r->open && end > until"),
    "the step that ends at an arrival": (
        "vllm-sosp23", "least-outstanding-tokens", "routed", "now - r->now - r->leap.first - 1", "now - r->now - r->leap.first"
    ),
    "no step of a leap": ("vllm-v1", "least-outstanding-tokens", "routed", "r->leap.steps < 2 || ahead < 0", "true"),
    "no blocks of a leap": ("vllm-sosp23", "kv-aware", "routed", "growth_of(r, steps_over(r, now))", "0"),
    "computed tokens of a prefill": (
        "vllm-v1", "kv-aware", "routed", "r->slots[r->prefilling].computed_tokens", "0"
    ),
    "preempted tokens": (
        "vllm-sosp23", "least-outstanding-tokens", "batch",
        "r->queued_tokens += r->prompt_tokens[head->request] + head->generated_tokens", "(void)head",
    ),
    "a prefill in a count": ("vllm-v1", "prefix-affine", "routed", "(r->prefilling != NONE)", "0"),
    "the end of a part of the run": ("vllm-v1", "kv-aware", "v1", "any_ended && !r->open &&", "any_ended &&"),
    "no end before max_tokens": ("vllm-v1", "kv-aware", "routed", "&sent->early_room, ends_early)", "&sent->early_room, false)"),
    "no names": ("vllm-v1", "prefix-affine", "routed", "shares = names != Py_None", "shares = false && names != Py_None"),
}  # fmt: skip


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED_IN_C)
def test_a_difference_in_c_is_caught(name, tmp_path, monkeypatch):
    catch(name, tmp_path, monkeypatch)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("name", ["a leap that ends at an arrival", "no blocks of a leap", "preempted tokens"])
def test_one_of_these_differences_is_caught(name, tmp_path, monkeypatch):
    """A few of those above, in every run of the tests."""
    catch(name, tmp_path, monkeypatch)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("policy", POLICIES)
def test_a_core_without_a_planted_difference_is_no_different(policy, tmp_path, monkeypatch):
    """Otherwise a comparison that always failed would catch all of them."""
    _, _, header, before, _ = next(iter(PLANTED_IN_C.values()))
    unchanged = changed_core(tmp_path, header, before, before)
    monkeypatch.setattr(core, "compiled", lambda: (unchanged, "unchanged"))
    for seed in range(10):
        compare(FleetLoad(seed, policy, "kv-aware"))


@needs_core
def test_max_num_seqs_above_the_number_of_requests_needs_no_memory(monkeypatch):
    """Of twenty million sequences the core would allocate 160 MB for each engine, where Python has a list of those that run."""
    load, most = FleetLoad(0, "vllm-v1", "kv-aware"), []

    def noting(*parts: Any, **how: Any) -> Any:
        most.append(parts[2])
        return core.started(*parts, **how)

    monkeypatch.setattr(routed_core, "started", noting)
    load.load.chosen |= {"max_num_seqs": 20_000_000, "max_num_batched_tokens": 20_000_000}
    assert everything(load.run()) == everything(load.run(core=False))
    assert most and max(most) <= load.work.num_sequences.sum()


def catch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a difference, and find it."""
    policy, router, header, before, after = PLANTED_IN_C[name]
    changed = changed_core(tmp_path, header, before, after)
    monkeypatch.setattr(core, "compiled", lambda: (changed, "changed"))
    assert any(fails(FleetLoad(seed, policy, router)) for seed in range(150))


def fails(load: FleetLoad) -> bool:
    """Whether any of the comparisons fails."""
    try:
        compare(load)
    except Exception:
        return True
    return False
