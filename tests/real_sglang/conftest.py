"""Counts what was compared, over all workers. Without SGLang (``make test-sglang`` installs it) only the recorded logs are
compared."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_[!r]*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Workloads and steps that were compared, and how many workloads differ, by kind."""
    counts: dict[str, list[int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith("sglang/"):
                    total = counts.setdefault(name.partition("/")[2], [0, 0, 0])
                    total[:] = map(sum, zip(total, value, strict=True))
    if counts:
        terminalreporter.write_line(f"SGLang {version('sglang')}: workloads, steps, workloads that differ")
    for kind, (workloads, steps, differing) in sorted(counts.items()):
        terminalreporter.write_line(f"  {kind:<20}{workloads:>6,}{steps:>10,}{differing:>6,}")
