"""The sweep of ``examples/on_a_cluster.py`` on two local workers of Dask and of Ray: the bytes of a sweep here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

EXAMPLE = ROOT / "examples" / "on_a_cluster.py"


def run_example(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_two_workers_write_the_bytes_of_one_process(engine: str, module: str, tmp_path: Path):
    pytest.importorskip(module)
    done = run_example(engine, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{engine}: the same bytes as --jobs 1" in done.stdout
    points = {folder.name: len(list(folder.glob("points/*.json"))) for folder in tmp_path.iterdir()}
    assert points == {engine: 6, "here": 6}


def test_an_unknown_cluster_is_refused_with_the_two_that_there_are():
    done = run_example("slurm")
    assert (done.returncode, done.stderr) == (2, "engine = 'slurm': must be dask or ray\n")
