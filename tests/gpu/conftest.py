"""What every test of this folder gets."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_time_is_judged(small_caches):
    """All measured times of this folder are of fake clocks, or are only there."""
