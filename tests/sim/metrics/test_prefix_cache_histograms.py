"""vLLM's histograms of KV-cache residency, as Prometheus counts them."""

from __future__ import annotations

import numpy as np

from fragmeter.sim.metrics.prefix_cache import RESIDENCY_BUCKETS_MS, _histogram
from fragmeter.sim.types.ticks import PER_MS


def test_a_bound_belongs_to_its_bucket():
    """Of 1 ms, 1 ms and a tick, and 2,000 s: the first is in all buckets, the last in none but +Inf."""
    told = _histogram(np.array([PER_MS, PER_MS + 1, 2_000_000 * PER_MS]))
    assert (told["count"], told["buckets"]["0.001"], told["buckets"]["0.002"]) == (3, 1, 2)
    assert told["buckets"]["1800"] == 2 and told["buckets"]["+Inf"] == 3
    assert len(told["buckets"]) == len(RESIDENCY_BUCKETS_MS) + 1
    assert told["median"] == (PER_MS + 1) / 1e12


def test_nothing_observed_has_no_mean():
    told = _histogram(np.zeros(0, dtype=np.int64))
    assert (told["count"], told["mean"], told["median"]) == (0, None, None)
    assert set(told["buckets"].values()) == {0}
