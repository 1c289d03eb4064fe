"""From lengths to a workload: arrivals, declared max_tokens, random streams."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import LengthPairs, Trace, declared_max_tokens, poisson, stream, workload

PAIRS = LengthPairs("four", [3, 1, 4, 1], [1, 2, 5, 16])
TIMED = Trace("timed", [3, 1], [1, 5], arrival_ticks=[0, 7], max_tokens=[2, 9])


def test_poisson_gaps_are_exponential():
    arrivals = poisson(200_000, 4.0, stream(0, "arrivals"))
    gaps_s = np.diff(arrivals) / ticks.PER_SECOND
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.01)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, rel=0.01)
    assert (gaps_s > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.005)
    assert arrivals.dtype == np.int64 and arrivals[0] > 0
    assert not (arrivals % 1000).any()


def test_the_rate_only_stretches_the_same_draw():
    slow, fast = (poisson(1000, rate, stream(5, "arrivals")) for rate in (1.0, 8.0))
    assert np.abs(slow - 8 * fast).max() <= 9 * 1000


def test_at_an_infinite_rate_all_arrive_at_zero():
    assert workload(PAIRS, request_rate=float("inf")).arrival_ticks.tolist() == [0, 0, 0, 0]


def test_a_trace_keeps_its_arrivals_and_its_max_tokens():
    made = workload(TIMED)
    assert (made.name, made.arrival_ticks.tolist(), made.max_tokens.tolist()) == ("timed", [0, 7], [2, 9])
    assert made.prompt_tokens.tolist() == [3, 1] and made.output_tokens.tolist() == [1, 5]


def test_a_request_rate_replaces_them_by_the_seeds_draw():
    made = workload(TIMED, request_rate=2.0, seed=3)
    assert made.arrival_ticks.tolist() == poisson(2, 2.0, stream(3, "arrivals")).tolist()
    assert made.arrival_ticks.tolist() != workload(TIMED, request_rate=2.0, seed=4).arrival_ticks.tolist()


def test_declared_max_tokens():
    declared = [workload(PAIRS, 1.0, max_tokens=rule).max_tokens for rule in ("true", "pow2", 16)]
    assert [column.tolist() for column in declared] == [[1, 2, 5, 16], [1, 2, 8, 16], [16] * 4]
    assert workload(PAIRS, 1.0).max_tokens is None
    assert workload(TIMED, max_tokens="true").max_tokens.tolist() == [1, 5]


def test_pow2_is_the_papers_formula_for_every_output():
    outputs = np.arange(1, 5000)
    assert declared_max_tokens(outputs, "pow2").tolist() == [1 << (out - 1).bit_length() for out in range(1, 5000)]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({}, "request_rate: four has no arrivals; give a request rate"),
        ({"request_rate": 0}, "request_rate = 0: must be positive; inf lets all requests arrive at 0"),
        ({"request_rate": float("nan")}, "request_rate = nan: must be positive; inf lets all requests arrive at 0"),
        ({"request_rate": 1e-9}, "request_rate = 1e-09: spreads 4 requests over more than 8388608 s; raise it"),
        ({"request_rate": 1, "seed": -1}, "seed = -1: must be 0 or more"),
        (
            {"request_rate": 1, "max_tokens": 15},
            "max_tokens = 15: the longest output has 16 tokens; give at least that",
        ),
        ({"request_rate": 1, "max_tokens": "half"}, "max_tokens = 'half': choose true, pow2 or a number of tokens"),
    ],
)
def test_refused_values(arguments, refused):
    with pytest.raises(SettingError) as caught:
        workload(PAIRS, **arguments)
    assert str(caught.value) == refused


def test_streams_are_pinned_for_all_time():
    pinned = [2783778250, 2907668858, 2790660510]
    assert stream(0, "arrivals").integers(2**32, size=3).tolist() == pinned
    assert stream(0, "lengths").integers(2**32, size=3).tolist() != pinned
    assert stream(1, "arrivals").integers(2**32, size=3).tolist() != pinned


def test_pairs_are_capped_with_or_without_the_cap_itself():
    assert PAIRS.capped(9, strict=False).output_tokens.tolist() == [1, 2, 5]
    assert PAIRS.capped(9, strict=True).output_tokens.tolist() == [1, 2]
    assert (len(PAIRS), PAIRS.capped(3, strict=True).name, len(PAIRS.capped(1, strict=False))) == (4, "four", 0)


def test_columns_must_match_and_are_read_only():
    with pytest.raises(SettingError, match="output_tokens = 1: must have 2 values"):
        LengthPairs("odd", [1, 2], [1])
    with pytest.raises(SettingError, match="arrival_ticks = 1: must have 2 values"):
        Trace("odd", [1, 2], [1, 2], arrival_ticks=[0])
    with pytest.raises(ValueError, match="read-only"):
        PAIRS.prompt_tokens[0] = 5
