"""What tests of pages share."""

from __future__ import annotations

import pytest

from browser import offline_browser


@pytest.fixture(scope="session")
def chromium():
    """One browser for all modules: a start takes longer than most of their tests. Each takes it ``as_new``."""
    with offline_browser() as driver:
        yield driver
