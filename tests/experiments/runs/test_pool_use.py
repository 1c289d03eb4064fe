"""The use of a KV cache over spans of time, against the exact gauges of the whole run."""

from __future__ import annotations

import numpy as np
import pytest

from engine_runs import settings_of
from fragmeter.experiments.runs.pool_use import pool_use, usage_over_spans
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from ramp_cost import RampCost


def test_spans_add_up_to_the_use_of_the_run():
    """40 requests together, nothing for some seconds, and then one."""
    arrivals = np.array([0] * 40 + [30 * PER_SECOND])
    lengths = np.random.default_rng(1).integers(20, 200, size=(2, 41))
    run = simulate(
        settings_of("vllm-v1", Pool(400, 16), Limits(512)),
        Workload("two", arrivals, *lengths),
        RampCost(base_ticks=PER_SECOND // 20),
    )
    whole, rows = pool_use(run), run.log.rows
    end = int(rows["start_ticks"][-1] + rows["ticks"][-1])
    edges = [0, PER_SECOND, 5 * PER_SECOND, 29 * PER_SECOND, end, 2 * end]
    used, busy, peak = usage_over_spans(run, edges)
    assert busy.sum() == rows["ticks"].sum() and busy[-1] == peak[-1] == used[-1] == 0
    # A leap's blocks are taken to grow evenly.
    assert used.sum() / busy.sum() == pytest.approx(whole.mean_usage, rel=0.01)
    assert max(peak) == whole.max_usage > peak[3] > 0
    assert 0 < used[0] < PER_SECOND == busy[0]
