"""Counts what was compared, over all workers. Without llama-server (``make test-llama-cpp`` builds it) only the recorded logs
are compared."""

from __future__ import annotations

import os
from collections import Counter

import pytest

collect_ignore_glob = [] if os.environ.get("FRAGMETER_LLAMA_CPP") else ["test_[!r]*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Loads, requests and steps that were compared, and how many loads differ, by kind; and tokens found with and without a host cache."""
    counts: dict[str, Counter[int]] = {}
    found: dict[str, list[int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith("compared/"):
                    counts.setdefault(name.partition("/")[2], Counter()).update(dict(enumerate(value)))
                elif name.startswith("found/"):
                    found[name.partition("/")[2]] = value
    if counts and os.environ.get("FRAGMETER_LLAMA_CPP"):
        terminalreporter.write_line("llama-server: loads, requests, steps, loads that differ")
        for kind, count in sorted(counts.items()):
            terminalreporter.write_line(f"  {kind:<20}{count[0]:>6,}{count[1]:>8,}{count[2]:>10,}{count[3]:>6,}")
        terminalreporter.write_line("prompt tokens, of these found with a prompt cache in host memory, and without")
        for kind, (prompts, more, fewer) in sorted(found.items()):
            terminalreporter.write_line(f"  {kind:<20}{prompts:>10,}{more:>10,}{fewer:>10,}")
