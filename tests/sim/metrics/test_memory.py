"""Memory of a run with results: what is held to the end, and what a table takes, is bounded a request."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine import core
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix import residency
from fragmeter.sim.metrics import gaps, prefix_cache, result
from fragmeter.sim.runs import growth, integrals, run_log
from fragmeter.sim.types import columns
from fragmeter.traces import synthetic_pairs, workload

#: Bytes that a request more adds to the largest memory: 10 million requests within 2 GB, less 0.2 GB of packages.
MOST_BYTES = 180
#: Requests of the shorter run; the longer one has twice as many.
REQUESTS = 2_000
#: Limits of values in memory at a time, so small that these runs have many parts.
LIMITS = (
    (growth, "_CHUNK_STEPS"), (residency, "_CHUNK"), (integrals, "_CHUNK_ROWS"), (integrals, "_CHUNK_CHANGES"), (gaps, "_CHUNK_ROWS"),
    (gaps, "_CHUNK_OBJECTS"), (gaps, "_SORTED_ROWS"), (gaps, "_SAMPLE"), (columns, "CHUNK"), (columns, "_SHORT"), (result, "ROW_GROUP"),
    (prefix_cache, "_MOST_KEPT"), (run_log, "_MOST_TABLE_STEPS"),
)  # fmt: skip


NEEDS_CORE = pytest.mark.skipif(
    core.compiled()[0] is None, reason="the engine in Python holds 65,536 requests as objects"
)


def peak_bytes(policy: str, requests: int, folder: Path | None, target: Path) -> int:
    """The most that Python and numpy allocate in a run with results; maps of files are not among it."""
    pairs = synthetic_pairs("vllm_sosp23_sharegpt_opt", requests, 0, 2048)
    tracemalloc.start()
    try:
        with columns.spilling(folder):
            result.write(simulate(settings(policy=policy), workload(pairs, 1.5)), target, {})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("in_core", [pytest.param(True, marks=NEEDS_CORE), False])
def test_changes_of_a_cache_are_joined_in_parts(in_core, tmp_path, monkeypatch):
    """A long column that is a map of a file counts as memory while it is read whole, which ``peak_bytes`` does not see."""
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 1 << 10)
    pairs, lengths = synthetic_pairs("vllm_sosp23_sharegpt_opt", REQUESTS, 0, 2048), list[int]()
    with columns.spilling(tmp_path):
        run = simulate(settings(policy="vllm-v1", core=in_core), workload(pairs, 1.5))
        append = columns.Column.append
        monkeypatch.setattr(
            columns.Column, "append", lambda self, values: (lengths.append(len(values)), append(self, values))
        )
        changes = run.log.cached_level.change_columns()["moment"]
    assert len(changes) > 4 * columns.CHUNK
    assert max(lengths, default=0) <= columns.CHUNK


@pytest.mark.slow
@NEEDS_CORE
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1"])
def test_a_request_more_takes_a_bounded_number_of_bytes(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(core, "_LEAPS", 1 << 10)
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, 1 << 10)
    peak_bytes(policy, 100, tmp_path, tmp_path / "first")
    short, long = (peak_bytes(policy, count, tmp_path, tmp_path / "result") for count in (REQUESTS, 2 * REQUESTS))
    assert (long - short) / REQUESTS < MOST_BYTES
    in_memory = peak_bytes(policy, REQUESTS, None, tmp_path / "result")
    assert in_memory - short > MOST_BYTES * REQUESTS
