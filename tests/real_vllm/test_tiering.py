"""Tiers behind the host, and chunks of several blocks, beside vLLM's own tiering manager step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fragmeter.sim.types.errors import SettingError, SimulationFault
from tools.live.step_log import Served, StepLog, first_difference

from . import offloading
from .drafts import drawn
from .server import Stuck
from .tiering import Tier
from .workloads import KINDS, number_of_workloads


def _copies(seed: int, chunk_blocks: int, tiers: int) -> offloading.Copies:
    """A host that is too small for all, and tiers that are."""
    draw = random.Random(seed)
    behind = tuple(
        Tier(draw.choice([0, 0, 10, 60]), draw.choice([0, 5, 60]), draw.choice([0, 5, 60]), later)
        for later in draw.sample([False, True], tiers)
    )
    host, load, store = draw.choice([8, 20, 60]), draw.choice([1, 30, 90]), draw.choice([0, 1, 30])
    return offloading.Copies(host, load, store, chunk_blocks, behind)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("tiers", [0, 1, 2])
@pytest.mark.parametrize("chunk_blocks", [1, 3])
@pytest.mark.parametrize(
    ("kind", "method"),
    [("prefixes", None), ("turns", None), ("windows_cached", None), ("states", None), ("prefixes", "eagle")],
)
def test_every_step_is_that_of_the_tiering_manager(
    kind: str, method: str | None, chunk_blocks: int, tiers: int, asynchronous: bool, record_property
):
    if not tiers and chunk_blocks == 1 or chunk_blocks > 1 and kind in ("windows_cached", "states"):
        pytest.skip("is no case of tiers or chunks")
    differing: dict[str, object] = {}
    stuck = loaded = 0
    seeds = range(number_of_workloads(12))
    for seed in seeds:
        case = KINDS[kind](seed) if method is None else drawn(kind, seed, method)
        case = replace(case, prefix_caching=True)
        if case.block_size == 1 and 1 in case.workload.prompt_tokens:
            continue
        copies = _copies(seed, chunk_blocks, tiers)
        try:
            real, recorder = offloading.serve(case, copies, asynchronous)
        except Stuck:
            with pytest.raises((SettingError, SimulationFault), match="for ever|is stuck"):
                offloading.serve_ours(case, copies, asynchronous)
            stuck += 1
            continue
        loaded += recorder.loaded
        log = StepLog()
        try:
            ours = offloading.serve_ours(case, copies, asynchronous, log=log)
        except SettingError:
            # Promoted blocks that evict each other while nothing runs: how it ends depends on how often the idle scheduler turns.
            stuck += 1
            ours = Served(log.steps, [])
            real = Served(offloading.comparable(real).steps[: len(offloading.comparable(ours).steps)], [])
        if difference := first_difference(offloading.comparable(real), offloading.comparable(ours)):
            differing[case.name] = difference
    label = f"tiering {kind} {method or ''} {tiers} {chunk_blocks} {'async' if asynchronous else 'sync'}"
    record_property(f"compared/{label}", [len(seeds), loaded, len(differing)])
    assert not differing
    assert stuck <= len(seeds) // 2
    assert loaded or kind not in ("prefixes", "turns")
