"""vLLM's histograms of KV-cache residency, as Prometheus counts them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.metrics.prefix_cache import RESIDENCY_BUCKETS_MS, _histogram
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND


def test_a_bound_belongs_to_its_bucket():
    """Of 1 ms, 1 ms and a tick, and 2,000 s: the first is in all buckets, the last in none but +Inf."""
    histogram = _histogram(np.array([PER_MS, PER_MS + 1, 2_000_000 * PER_MS]), np.ones(3, dtype=np.int64))
    assert (histogram["count"], histogram["buckets"]["0.001"], histogram["buckets"]["0.002"]) == (3, 1, 2)
    assert histogram["buckets"]["1800"] == 2 and histogram["buckets"]["+Inf"] == 3
    assert len(histogram["buckets"]) == len(RESIDENCY_BUCKETS_MS) + 1
    assert histogram["median"] == (PER_MS + 1) / 1e12


@given(observed=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 4)), min_size=1))
def test_values_with_counts_are_as_so_many_values(observed):
    ticks, blocks = np.array(observed).T * [[PER_MS], [1]]
    each = np.repeat(ticks, blocks)
    histogram = _histogram(ticks, blocks)
    assert histogram["count"] == len(each)
    assert histogram["mean"] == int(each.sum()) / PER_SECOND / len(each)
    assert histogram["median"] == float(np.median(each)) / PER_SECOND
    assert [*histogram["buckets"].values()] == [
        *((each <= bound * PER_MS).sum() for bound in RESIDENCY_BUCKETS_MS),
        len(each),
    ]


def test_nothing_observed_has_no_mean():
    histogram = _histogram(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert (histogram["count"], histogram["mean"], histogram["median"]) == (0, None, None)
    assert set(histogram["buckets"].values()) == {0}
