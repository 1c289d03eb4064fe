"""The sdist and the wheel: they hold what the repository holds, and the wheel runs where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from paths import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to compare with")


def build(kind: str, tree: Path, target: Path) -> Path:
    """The file of a ``kind`` of distribution, "sdist" or "wheel", built from ``tree`` without a network."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    target.mkdir()
    subprocess.run([sys.executable, "-c", code, target], cwd=tree, check=True, capture_output=True)
    return next(target.iterdir())


def files(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def zipped(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy of the files that git tracks; building leaves files beside them."""
    copy = tmp_path_factory.mktemp("repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def tracked(repository) -> dict[str, bytes]:
    return files(repository)


@pytest.fixture(scope="module")
def unpacked_sdist(repository, tracked, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", repository, folder / "dist")) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("fragmeter-*"))


@pytest.fixture(scope="module")
def wheel(repository, tracked, tmp_path_factory) -> Path:
    return build("wheel", repository, tmp_path_factory.mktemp("wheel") / "dist")


def test_the_sdist_holds_what_the_repository_holds(unpacked_sdist, tracked):
    held = {
        name: content
        for name, content in files(unpacked_sdist).items()
        if name != "PKG-INFO" and not name.startswith("fragmeter.egg-info/")
    }
    assert sorted(held) == sorted(tracked)
    # setuptools adds a section of its own to the sdist's setup.cfg.
    assert {name for name in tracked if held[name] != tracked[name]} <= {"setup.cfg"}


def test_the_wheel_is_the_same_from_the_sdist(unpacked_sdist, wheel, tmp_path):
    from_sdist = build("wheel", unpacked_sdist, tmp_path / "dist")
    assert from_sdist.name == wheel.name
    assert zipped(from_sdist) == zipped(wheel)


def test_the_wheel_runs_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    assert run("-c", "import fragmeter; print(fragmeter.__file__)") == f"{site / 'fragmeter' / '__init__.py'}\n"
    front = "import fragmeter as fm; print(fm.simulate(num_prompts=3).summary['completed'])"
    assert run("-c", front) == "3\n"
    run("-m", "fragmeter", "simulate", "--num-prompts", "20", "--request-rate", "2", "--record-blocks", "--out", "run")
    run("-m", "fragmeter", "report", "run", "--out", "report.html")
    assert "plotly" in (tmp_path / "report.html").read_text("utf-8")
    fig3 = json.loads(run("-m", "fragmeter", "reproduce", "fig3", "--json", "-"))
    assert fig3["figure"] == "fig3"
