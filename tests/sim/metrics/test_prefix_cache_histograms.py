"""vLLM's histograms of KV-cache residency, as Prometheus counts them."""

from __future__ import annotations

import numpy as np

from fragmeter.sim.metrics.prefix_cache import RESIDENCY_BUCKETS_MS, _histogram
from fragmeter.sim.types.ticks import PER_MS


def test_a_bound_belongs_to_its_bucket():
    """Of 1 ms, 1 ms and a tick, and 2,000 s: the first is in all buckets, the last in none but +Inf."""
    histogram = _histogram(np.array([PER_MS, PER_MS + 1, 2_000_000 * PER_MS]))
    assert (histogram["count"], histogram["buckets"]["0.001"], histogram["buckets"]["0.002"]) == (3, 1, 2)
    assert histogram["buckets"]["1800"] == 2 and histogram["buckets"]["+Inf"] == 3
    assert len(histogram["buckets"]) == len(RESIDENCY_BUCKETS_MS) + 1
    assert histogram["median"] == (PER_MS + 1) / 1e12


def test_nothing_observed_has_no_mean():
    histogram = _histogram(np.zeros(0, dtype=np.int64))
    assert (histogram["count"], histogram["mean"], histogram["median"]) == (0, None, None)
    assert set(histogram["buckets"].values()) == {0}
