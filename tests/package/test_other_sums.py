"""Results have the same bytes whatever the builtin ``sum`` of floats does: Python 3.12 changed its last digit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from other_sums import COMMANDS, KINDS, unlike
from paths import ROOT


def written(kind: str, folder: Path) -> dict[str, bytes]:
    """Every file that the commands write."""
    script = ROOT / "tests" / "helpers" / "other_sums.py"
    subprocess.run([sys.executable, str(script), kind, str(folder)], check=True, capture_output=True)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_no_byte_depends_on_the_last_digit_of_a_sum(tmp_path):
    as_before, other = (written(kind, tmp_path / kind) for kind in ("left_to_right", "unlike"))
    assert {name.partition("/")[0] for name in as_before} == COMMANDS.keys()
    assert as_before.keys() == other.keys()
    assert not [name for name, content in as_before.items() if content != other[name]]


def test_the_other_sum_differs_for_floats_alone():
    floats = [0.1] * 10
    assert unlike(floats) not in (KINDS["left_to_right"](floats), sum(floats))
    assert unlike([1, 2, 3]) == 6 and unlike([0.5]) == 0.5 and unlike([[1], [2]], start=[]) == [1, 2]
