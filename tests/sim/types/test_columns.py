"""Columns that are appended together, in memory and in temporary files."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fragmeter.sim.types import columns
from fragmeter.sim.types.columns import Records


@pytest.mark.parametrize("spilled", [False, True])
def test_records_are_columns_in_the_order_in_which_they_came(spilled, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "_SHORT", 4)
    with columns.spilling(tmp_path if spilled else None):
        records, given = Records(3), np.arange(30).reshape(-1, 3)
        assert [column.tolist() for column in records.arrays()] == [[], [], []]
        assert (len(records), records.last(1)) == (0, None)
        for start, stop in ((0, 0), (0, 2), (2, 3), (3, 10)):
            part = given[start:stop].copy()
            records.extend(part)
            part[:] = -1
        assert_array_equal(np.array(records.arrays()).T, given)
        assert (len(records), records.last(0), records.last(2)) == (10, 27, 29)
