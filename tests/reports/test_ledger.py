"""The ledger over time: layers that are the table's values, and honest thinning."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.reports.figures.figures import data_of, ledger_over_time
from fragmeter.reports.figures.ledger import MOST_POINTS, thin
from fragmeter.reports.style.palette import BUCKETS


def ledger_table(rows: int) -> pd.DataFrame:
    """A pool of 100 slots that fills one slot a row and starts over; only two buckets are ever in use."""
    live = np.arange(rows) % 100
    table = pd.DataFrame({"start_s": 0.5 * np.arange(rows), **{bucket: np.zeros(rows, int) for bucket in BUCKETS}})
    return table.assign(live=live, free=100 - live)


def test_layers_are_the_buckets_in_order_as_steps_and_add_up_to_the_capacity():
    table = ledger_table(40).assign(stranded=3, free=lambda t: t["free"] - 3)
    *layers, capacity = ledger_over_time(table, "made up").data
    assert [layer.name for layer in layers] == ["live", "stranded", "free"]
    assert {layer.line.shape for layer in (*layers, capacity)} == {"hv"}
    assert len({layer.stackgroup for layer in layers}) == 1 and layers[0].stackgroup is not None
    for layer in layers:
        assert list(layer.y) == list(table[layer.name]) and list(layer.x) == list(table["start_s"])
    assert list(sum(layer.y for layer in layers)) == list(capacity.y) == [100] * 40
    assert capacity.stackgroup is None
    assert [layer.fillpattern.shape for layer in layers] == [None, "x", None]


def test_buckets_that_hold_nothing_are_named():
    subtitle = ledger_over_time(ledger_table(40), "made up").layout.title.subtitle.text
    assert "Empty at all times: reserved, over estimate" in subtitle and "live" not in subtitle


def test_the_last_row_is_drawn_to_the_end_and_is_no_row_more():
    figure = ledger_over_time(ledger_table(40), "made up", 8, end_s=33.0)
    for line in figure.data:
        assert line.x[-1] == 33.0 and line.y[-1] == line.y[-2 if len(line.y) > 2 else 0]
    assert len(data_of(figure)) == 40


def test_a_long_table_is_thinned_and_says_so():
    table = ledger_table(50_001)
    figure = ledger_over_time(table, "made up")
    live = figure.data[0]
    assert MOST_POINTS * 0.9 < len(live.x) <= MOST_POINTS
    assert (live.x[0], live.x[-1]) == (0.0, 25_000.0)
    at = table.set_index("start_s")["live"]
    assert list(live.y) == list(at.loc[live.x])
    assert f"Drawn: {len(live.x):,} of 50,001 rows" in figure.layout.title.subtitle.text


def test_thinning_takes_the_row_in_force_not_the_nearest():
    assert thin(np.array([0.0, 4.9, 5.1, 5.2, 10.0]), 3).tolist() == [0, 1, 4]


@pytest.mark.slow
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.integers(2, 50))
def test_thinning_keeps_first_and_last_and_never_more_than_asked(starts, most):
    starts = np.sort(starts)
    kept = thin(starts, most)
    assert kept[0] == 0 and kept[-1] == len(starts) - 1
    assert len(kept) <= most or len(kept) == 1
    assert (np.diff(kept) > 0).all()
    if len(starts) <= most:
        assert len(kept) == len(starts)
