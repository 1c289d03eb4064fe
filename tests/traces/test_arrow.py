"""Columns of pyarrow as arrays of numpy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from fragmeter.traces.parsing.arrow import as_numpy

WHOLE = pa.array([3, 1, 2, 7])
COLUMNS = {
    "int64": WHOLE,
    "uint8": WHOLE.cast(pa.uint8()),
    "float64": pa.array([0.5, float("nan"), float("inf"), -1.0]),
    "bool": pa.array([True, False, False, True]),
    "int64 with nulls": pa.array([3, None, 2, 7]),
    "bool with nulls": pa.array([True, None, False, True]),
    "text": pa.array(["a", None, "", "b"]),
    "null": pa.nulls(4),
    "date": WHOLE.cast(pa.timestamp("ns")),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_are_what_numpy_makes_of_them(column):
    chunks = pa.chunked_array([column[:1], column[1:]])
    for each in (column, column[1:], column[:0], chunks, chunks[2:], chunks[:0]):
        found, expected = as_numpy(each), np.asarray(each)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
