"""``tools.paged_path``: lines of the functions that a run calls, and of no others."""

from __future__ import annotations

import pytest

from tools import paged_path

MODULE = '''"""A module."""


@cached
def called(x):
    """What it is."""
    # Why.

    return x


def not_called():
    return 1
'''


def test_lines_are_those_of_the_called_functions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert paged_path.lines_of(path, {4}) == (13, 6, 3)
    assert paged_path.lines_of(path, {12}) == (13, 2, 2)
    assert paged_path.lines_of(path, {4, 12}) == (13, 8, 5)


@pytest.mark.slow
def test_the_path_of_a_policy_has_its_modules_and_no_other_policy(capsys):
    names = {name for name, _ in paged_path.path_lines("vllm-v1", 20.0)}
    assert {"engine/engine.py", "policy/vllm_v1.py", "memory/accounting/ledger.py", "runs/run_log.py"} <= names
    assert not {"policy/vllm_sosp23.py", "policy/sglang.py", "memory/contiguous/contiguous.py"} & names
    paged_path.main(["--duration", "20"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("vllm-sosp23: ")
