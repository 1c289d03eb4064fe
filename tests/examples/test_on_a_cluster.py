"""The sweep of ``examples/on_a_cluster.py`` on two local workers of Dask: the bytes of a sweep here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

EXAMPLE = ROOT / "examples" / "on_a_cluster.py"


@pytest.mark.slow
def test_two_workers_write_the_bytes_of_one_process(tmp_path: Path):
    pytest.importorskip("distributed")
    done = subprocess.run([sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same bytes as --jobs 1" in done.stdout
    points = {folder.name: len(list(folder.glob("points/*.json"))) for folder in tmp_path.iterdir()}
    assert points == {"dask": 6, "here": 6}
