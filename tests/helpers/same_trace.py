"""Equality of two traces."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from fragmeter.traces import Trace

#: Fields that say where the file begins and how it was read; contents are compared apart.
_APART = ("start", "content", "dialogue", "rows", "remarks")


def assert_same(one: Trace, other: Trace, lines: bool = True) -> None:
    """All but the start and the remarks is the same; ``lines``: the lines of the file too."""
    for field in (each.name for each in fields(Trace) if each.name not in _APART):
        left, right = getattr(one, field), getattr(other, field)
        assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right, field
    assert not lines or np.array_equal(one.rows.lines, other.rows.lines)
    if one.content is None:
        assert other.content is None
    else:
        for field in ("offsets", "ids", "tokens", "session_id"):
            assert np.array_equal(getattr(one.content, field), getattr(other.content, field)), field
