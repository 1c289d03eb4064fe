"""TGI's queue rule on its published numbers: 1.2 with 12 waiting on 10, 1.3 with 13 and 14 waiting on 10."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import serve
from oracle import Limits, Pool, Request
from schedulers import cases, check
from strategies import Case, LineCost

#: Ten requests that run from the start, for 40 tokens each; their prefill takes 101 + 7 * 10 ticks.
RUNNING = [Request(0, 1, 40, 40)] * 10
PREFILL_TICKS = 171


def step_taken(waiting: int, arrival_ticks: int = 1, **limits) -> int:
    """Decode steps of the ten before decoding pauses for waiting requests, which arrive in the prefill or later."""
    late = [Request(arrival_ticks, 1, 1, 1)] * waiting
    bounds = Limits(100, max_num_seqs=64, max_num_batched_tokens=4096, **limits)
    rows = serve("tgi", Case([*RUNNING, *late], Pool(1000, 1), bounds, LineCost())).log.rows
    pauses = [place for place, steps in enumerate(rows["steps"]) if steps == 0]
    assert len(pauses) == 2 and rows["prefill_tokens"][pauses].tolist() == [10, waiting]
    return int(rows["steps"][: pauses[1]].sum())


def test_twelve_waiting_on_ten_are_worth_a_pause_at_1_2():
    """floor(10 * 1.2) = 12: they are taken at the first look, before the first decode step; or at the next one."""
    assert step_taken(12, waiting_served_ratio=1.2) == 0
    assert step_taken(12, PREFILL_TICKS, waiting_served_ratio=1.2) == 0
    assert step_taken(12, PREFILL_TICKS + 1, waiting_served_ratio=1.2) == 1


@pytest.mark.parametrize(("override", "expected"), [(20, 19), (7, 6), (1, 0)])
def test_eleven_wait_for_the_override(override, expected):
    """One short of the minimum, they are taken when the counter, 1 after a prefill and 1 more a decode step, is there."""
    assert step_taken(11, waiting_served_ratio=1.2, max_waiting_tokens=override) == expected


def test_eleven_wait_for_the_batch_to_end_without_an_override():
    assert step_taken(11, waiting_served_ratio=1.2, max_waiting_tokens=1000) == 39


@pytest.mark.parametrize(("waiting", "expected"), [(12, 19), (13, 0), (14, 0)])
def test_thirteen_are_enough_at_1_3(waiting, expected):
    """TGI asks for at least floor(10 * 1.3) = 13. The popular reading, strictly more, would make 13 wait as 12 do."""
    assert step_taken(waiting, waiting_served_ratio=1.3) == expected


def test_under_the_popular_reading_thirteen_would_wait_and_fourteen_not():
    """Strictly more than 13 is at least 14, which is TGI's rule with a ratio of 1.4."""
    assert [step_taken(waiting, waiting_served_ratio=1.4) for waiting in (13, 14)] == [19, 0]


@pytest.mark.slow
@hypothesis_settings(max_examples=50)
@given(case=cases, ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.2, 2.5]), most=st.sampled_from([1, 2, 3, 20]))
def test_every_look_at_the_queue_is_the_oracles_whatever_the_ratio(case, ratio, most):
    limits = replace(case.limits, waiting_served_ratio=ratio, max_waiting_tokens=most)
    check("tgi", replace(case, limits=limits))
