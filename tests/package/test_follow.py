"""The tool of ``make follow``: what it says of two releases of a system."""

from __future__ import annotations

from fragmeter.sim.policy import POLICIES
from tools.follow import WATCHED, changed


def test_watched_files_that_changed_are_listed(tmp_path):
    """One line of another text, one file more; and a file that nobody watches."""
    for release, line in (("a", "full = False"), ("b", "full = True")):
        (core := tmp_path / release / "v1" / "core").mkdir(parents=True)
        (core / "block_pool.py").write_text("import os\n")
        (core / "sched.py").write_text(f"first = 1\n{line}\n")
        (tmp_path / release / "envs.py").write_text(line)
    (tmp_path / "b" / "v1" / "core" / "new.py").write_text("x = 1\n")
    diffs = changed("vllm", tmp_path / "a", tmp_path / "b")
    assert list(diffs) == ["v1/core/new.py", "v1/core/sched.py"]
    assert diffs["v1/core/sched.py"][-2:] == ["-full = False\n", "+full = True\n"]


def test_every_policy_that_a_wheel_holds_is_followed():
    held = {kind.source.rules_of.split()[0].lower() for kind in POLICIES.values() if kind.source.held_by == "wheel"}
    assert held == set(WATCHED)
