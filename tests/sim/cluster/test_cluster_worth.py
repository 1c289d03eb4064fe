"""The worth of the cached slots of a fleet, and the copies that several replicas cache."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from core_loads import shared_content
from engine_runs import LONG_MODEL
from family_runs import CopyCost
from fragmeter.sim.cluster import Cluster, cluster_summary, simulate_cluster
from fragmeter.sim.cluster.worth import duplicate_slot_ticks
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.cache_worth import cache_worth
from fragmeter.sim.runs.cluster_run import ClusterRun
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

MODELS = {
    "plain": {"model": LONG_MODEL, "block_size": 4, "num_gpu_blocks_override": 40},
    "windows": {"model": "gemma-3-27b", "gpu": "h200", "num_gpu_blocks_override": 300},
}


def served(seed: int, model: str = "plain", **fleet) -> ClusterRun:
    rng, longest = np.random.default_rng(seed), 48 if model == "plain" else 900
    count = int(rng.integers(20, 40))
    columns = np.cumsum(rng.integers(0, 40, count)), rng.integers(1, longest // 2, count), rng.integers(1, 12, count)
    work = Workload("load", *columns)
    work = Workload("load", *columns, content=shared_content(rng, work))
    chosen = settings(policy="vllm-v1", max_model_len=2 * longest, max_num_seqs=4, outside_ms=0, **MODELS[model])
    return simulate_cluster(chosen, work, Cluster(**fleet), CopyCost())


def contents_of(run: ClusterRun, number: int) -> dict[int, tuple]:
    """The tokens up to the end of each block of a replica, by its name there and KV group."""
    part, memory = run.runs[number], run.runs[number].replica.memory
    runs, size, groups = (
        run.workload.sequences.token_runs(),
        part.replica.block_size,
        memory.contents_kept.num_kv_groups,
    )
    chains = memory.chains if hasattr(memory, "chains") else memory.cache._chains
    found = {}
    for index, row in enumerate(run.sequence_rows(number).tolist()):
        parts = [*runs.runs(row), *runs.output_runs(row)]
        text = tuple((stream, start + at) for stream, start, length in parts for at in range(length))
        for place, name in enumerate(chains.names(index)):
            for group in range(groups):
                # As the log has it: a chain for each chain and group.
                chain = ((name >> 32) * groups + group << 32) + (name & ((1 << 32) - 1))
                found[chain] = group, text[: (place + 1) * size]
    return found


def by_sweeping(run: ClusterRun) -> int:
    """Copies beyond the first of each content, counted between any two changes."""
    spans = defaultdict(list)
    for number, part in enumerate(run.runs):
        worth = cache_worth(part)
        if worth is None:
            continue
        contents = contents_of(run, number)
        for columns in (worth.names.stays, worth.names.kept):
            for since, until, name, blocks in zip(
                *(columns[each].tolist() for each in ("since", "until", "name", "blocks")), strict=True
            ):
                start, end = (
                    run.end_ticks if at < 0 else int(ticks_of(part.log, np.array([at]))[0]) for at in (since, until)
                )
                for place in range(blocks):
                    if name + place in contents:
                        spans[contents[name + place]].append((start, end))
    copies = 0
    for of_one in spans.values():
        for start, end in pairwise(sorted({edge for span in of_one for edge in span})):
            here = sum(first <= start and end <= last for first, last in of_one)
            copies += max(0, here - 1) * (end - start)
    return copies * run.runs[0].replica.block_size


@pytest.mark.parametrize("model", ["plain", pytest.param("windows", marks=pytest.mark.slow)])
def test_copies_are_those_that_comparing_tokens_finds(model):
    seen = 0
    for seed in range(6):
        run = served(seed, model, num_replicas=3)
        if all(cache_worth(part) is None for part in run.runs):
            continue
        assert duplicate_slot_ticks(run) == by_sweeping(run)
        seen += duplicate_slot_ticks(run) > 0
    assert seen


@pytest.mark.parametrize(
    "fleet",
    [
        {"num_replicas": 3},
        pytest.param({"num_replicas": 2, "router": "prefix-affine"}, marks=pytest.mark.slow),
        pytest.param({"prefill_replicas": 1, "decode_replicas": 1}, marks=pytest.mark.slow),
    ],
    ids=["same", "affine", "apart"],
)
def test_the_worths_of_a_fleet_are_those_of_its_replicas(fleet):
    divided = 0
    for seed in range(8):
        run = served(seed, **fleet)
        found = cluster_summary(run, divided=True).get("cache_worth")
        assert "cache_worth" not in cluster_summary(run)
        if found is None:
            continue
        divided += 1
        for part in run.runs:
            worth = cache_worth(part)
            if worth is not None:
                assert all((column >= 0).all() for column in worth.at_rows.values())
        cached = sum(part.accounts.window().slot_ticks["cached"] for part in run.runs)
        assert sum(found["slot_seconds"].values()) == pytest.approx(cached / 1e12)
        assert found["duplicates"]["slot_seconds"] <= sum(found["slot_seconds"].values())
        assert (
            found["hit_blocks"]
            <= found["fixed_schedule_hit_blocks"]
            <= found["infinite_hit_blocks"]
            <= found["asked_blocks"]
        )
    assert divided


def test_a_router_by_prefix_saves_the_copies():
    """Six turns of one session: in turn over two replicas both cache its beginning; by prefix one of them does."""
    turns = np.arange(6)
    content = PromptContent.of_sessions(np.zeros(6, dtype=np.int64))
    work = Workload("turns", turns * 1000 * 10**6, 8 + 8 * turns, np.full(6, 4), content=content)
    chosen = settings(
        policy="vllm-v1", model=LONG_MODEL, block_size=4, num_gpu_blocks_override=60, max_model_len=96, outside_ms=0
    )
    copies = {
        router: duplicate_slot_ticks(simulate_cluster(chosen, work, Cluster(num_replicas=2, router=router), CopyCost()))
        for router in ("round-robin", "prefix-affine")
    }
    assert copies["round-robin"] > 0 == copies["prefix-affine"]
