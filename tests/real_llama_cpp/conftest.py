"""Counts what was compared, over all workers. Without llama-server (``make test-llama-cpp`` builds it) only the recorded logs
are compared."""

from __future__ import annotations

import os
from collections import Counter

import pytest

collect_ignore_glob = [] if os.environ.get("FRAGMETER_LLAMA_CPP") else ["test_[!r]*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Loads, requests and steps that were compared, and how many loads differ, by kind."""
    counts: dict[str, Counter[int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith("compared/"):
                    counts.setdefault(name.partition("/")[2], Counter()).update(dict(enumerate(value)))
    if counts and os.environ.get("FRAGMETER_LLAMA_CPP"):
        terminalreporter.write_line("llama-server: loads, requests, steps, loads that differ")
        for kind, found in sorted(counts.items()):
            terminalreporter.write_line(f"  {kind:<20}{found[0]:>6,}{found[1]:>8,}{found[2]:>10,}{found[3]:>6,}")
