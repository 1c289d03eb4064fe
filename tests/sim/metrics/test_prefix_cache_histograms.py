"""vLLM's histograms of KV-cache residency, as Prometheus counts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.metrics.prefix_cache import RESIDENCY_BUCKETS_MS, _histograms
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND


def histogram_of(ticks: np.ndarray, blocks: np.ndarray, cut: int = 1) -> dict[str, Any]:
    """The histogram of values that are read in two parts."""
    parts = [{"it": (ticks[:cut], blocks[:cut])}, {"it": (ticks[cut:], blocks[cut:])}]
    return _histograms(lambda: parts)["it"]


def test_a_bound_belongs_to_its_bucket():
    """Of 1 ms, 1 ms and a tick, and 2,000 s: the first is in all buckets, the last in none but +Inf."""
    histogram = histogram_of(np.array([PER_MS, PER_MS + 1, 2_000_000 * PER_MS]), np.ones(3, dtype=np.int64))
    assert (histogram["count"], histogram["buckets"]["0.001"], histogram["buckets"]["0.002"]) == (3, 1, 2)
    assert histogram["buckets"]["1800"] == 2 and histogram["buckets"]["+Inf"] == 3
    assert len(histogram["buckets"]) == len(RESIDENCY_BUCKETS_MS) + 1
    assert histogram["median"] == (PER_MS + 1) / 1e12


@pytest.mark.slow
@given(
    observed=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 4)), min_size=1),
    unit=st.sampled_from([1, PER_MS]),
    cut=st.integers(0, 20),
)
def test_values_with_counts_are_as_so_many_values(observed, unit, cut):
    ticks, blocks = np.array(observed).T * [[unit], [1]]
    each = np.repeat(ticks, blocks)
    histogram = histogram_of(ticks, blocks, cut)
    assert histogram["count"] == len(each)
    assert histogram["mean"] == int(each.sum()) / PER_SECOND / len(each)
    assert histogram["median"] == float(np.median(each)) / PER_SECOND
    assert [*histogram["buckets"].values()] == [
        *((each <= bound * PER_MS).sum() for bound in RESIDENCY_BUCKETS_MS),
        len(each),
    ]


def test_nothing_observed_has_no_mean():
    histogram = histogram_of(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert (histogram["count"], histogram["mean"], histogram["median"]) == (0, None, None)
    assert set(histogram["buckets"].values()) == {0}
