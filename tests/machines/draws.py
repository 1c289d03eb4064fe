"""Draws, few and cheap: they are what the time of a machine goes into."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from hypothesis import strategies as st

EITHER = (False, True)
#: A number that chooses among a few things, whatever their count.
picks = st.integers(0, 63)


def combined(*choices: Iterable[Any]) -> st.SearchStrategy[tuple]:
    """One draw for several choices: a tuple with one of each."""
    return st.sampled_from([*product(*choices)])
