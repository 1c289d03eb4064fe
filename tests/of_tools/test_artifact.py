"""``make artifact``: what is in the archive, and the table of differences of its script."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile

import pytest

from paths import ROOT
from tools.artifact import __main__ as artifact
from tools.artifact import differences

PAGE = """# Figures

## Fig 1

| series | at | simulated | error | exact pairs | error |
|---|---|---|---|---|---|
| vLLM | 4 | 146.1 | -0.6% | 145.0 | -0.1% |
| vLLM | 8 | 275.3 | +2.3% | 275.0 | +2.2% |

## Only on the exact pairs

| figure | worst |
|---|---|
| fig2 | 0.3 |
"""
#: The same without the paper's own pairs, as a clean machine makes it.
MADE_AGAIN = """# Figures

## Fig 1

| series | at | simulated | error |
|---|---|---|---|
| vLLM | 4 | 146.1 | -0.6% |
| vLLM | 8 | 275.3 | +2.3% |
"""


def test_equal_cells_do_not_differ_and_other_columns_do_not_count():
    assert differences.differing(PAGE, MADE_AGAIN) == ({"Fig 1": 8}, [])


def test_a_planted_difference_is_named_by_section_row_and_column():
    counts, found = differences.differing(PAGE, MADE_AGAIN.replace("275.3", "275.4"))
    assert counts == {"Fig 1": 8} and found == [(("Fig 1", 2, "simulated"), "275.3", "275.4")]


def test_a_missing_row_differs_in_every_cell():
    _, found = differences.differing(PAGE, MADE_AGAIN.replace("| vLLM | 8 | 275.3 | +2.3% |\n", ""))
    assert {(old, new) for _, old, new in found} == {(cell, "(none)") for cell in ("vLLM", "8", "275.3", "+2.3%")}


def test_a_missing_figure_is_a_difference(tmp_path, monkeypatch):
    """Otherwise the script would call a page without figures equal."""
    monkeypatch.setattr(differences, "EXPECTED", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    (tmp_path / "page.md").write_text("# Figures\n")
    assert differences.main(str(tmp_path / "page.md")) == 1
    (tmp_path / "page.md").write_text(MADE_AGAIN)
    assert differences.main(str(tmp_path / "page.md")) == 0


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to archive")
def test_the_archive_has_the_committed_files_and_exact_versions(tmp_path):
    artifact.main(str(tmp_path))
    with tarfile.open(tmp_path / f"{artifact.NAME}.tar.gz") as archive:
        names = {item.name.removeprefix(f"{artifact.NAME}/") for item in archive.getmembers() if item.isfile()}
        archive.extractall(tmp_path, filter="data")
    committed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert names <= {*committed.splitlines(), "requirements.lock"}
    tree = tmp_path / artifact.NAME
    lock = (tree / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.+!]+", line) for line in lock)
    assert {"numpy", "pandas", "simpy", "setuptools"} <= {line.partition("==")[0] for line in lock}
    assert (tree / "docs" / "results" / "reproduction.md").exists() and (
        tree / "tools" / "artifact" / "run.sh"
    ).exists()
    # No trace of others, and no result of a run here.
    assert not any(name.startswith(("out/", ".venv", "shared/")) for name in names)
    subprocess.run(["sh", "-n", "tools/artifact/run.sh"], cwd=tree, check=True, env=os.environ)
