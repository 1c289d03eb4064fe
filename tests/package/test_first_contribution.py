"""docs/first-contribution.md, as a reader follows it: its patches on a copy of the checkout, its commands, a test that fails and then passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

PAGE = ROOT / "docs" / "first-contribution.md"
SECTIONS = ("A policy option", "An allocator", "A metric", "A trace format")


def blocks(section: str, language: str) -> list[str]:
    text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "fragmeter-copy"
    ignored = shutil.ignore_patterns(".*", "out", "build", "__pycache__", "results", "images")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    return folder


def apply(checkout: Path, patch: str) -> None:
    command = ["git", "apply", "--recount", "--unidiff-zero", "-"]
    subprocess.run(command, input=patch, cwd=checkout, text=True, check=True)


def run(checkout: Path, line: str) -> subprocess.CompletedProcess[str]:
    command = line.replace(".venv/bin/python", sys.executable)
    # The environment has this checkout installed, and the reader's has theirs.
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(command, shell=True, cwd=checkout, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("section", SECTIONS)
def test_none_changes_more_than_three_files(section):
    changed = {
        path for patch in blocks(section, "diff") for path in re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE)
    }
    assert 2 <= len(changed) <= 3
    assert len([path for path in changed if path.startswith("tests/")]) == 1


def test_each_test_fails_before_and_passes_after(checkout):
    patches = {section: blocks(section, "diff") for section in SECTIONS}
    shells = {section: blocks(section, "sh") for section in SECTIONS}
    tests = [re.findall(r"tests/\S+\.py$", shells[section][0].strip()) for section in SECTIONS]
    [pytest_line] = {shells[section][0].strip().rpartition(" ")[0] for section in SECTIONS}
    for section in SECTIONS:
        apply(checkout, patches[section][0])
    together = f"{pytest_line} -q {' '.join(path for [path] in tests)}"
    before = run(checkout, together)
    failed = set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py)", before.stdout, re.MULTILINE))
    assert failed == {path for [path] in tests}, before.stdout + before.stderr
    for section in SECTIONS:
        for patch in patches[section][1:]:
            apply(checkout, patch)
    after = run(checkout, together)
    assert after.returncode == 0, after.stdout + after.stderr
    for line in shells["A trace format"][1].splitlines():
        done = run(checkout, line)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "gateway: 2 requests" in done.stdout
    written = (checkout / "docs" / "files.md").read_text("utf-8")
    assert "| a gateway's log | `sent_at`, `tokens_up`, `tokens_down` |" in written
