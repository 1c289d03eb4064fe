"""The sdist and the wheel: they hold what the repository holds, and the wheel runs where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from paths import ROOT
from release_check import (
    CORE,
    copy_files,
    differences,
    expected_in_wheel,
    main,
    sdist_names,
    tracked_files,
    wheel_contents,
    without_metadata,
)

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to compare with")


def build(kind: str, tree: Path, target: Path) -> Path:
    """The file of a ``kind`` of distribution, "sdist" or "wheel", built from ``tree`` without a network."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    target.mkdir()
    subprocess.run([sys.executable, "-c", code, target], cwd=tree, check=True, capture_output=True)
    return next(target.iterdir())


def files(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy of the files that git tracks; building leaves files beside them."""
    copy = tmp_path_factory.mktemp("repository")
    copy_files(tracked_files(), copy)
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


@pytest.mark.slow
def test_the_sdist_holds_what_the_repository_holds(unpacked_sdist, tracked):
    held = {
        name: content
        for name, content in files(unpacked_sdist).items()
        if name != "PKG-INFO" and not name.startswith("fragmeter.egg-info/")
    }
    assert sorted(held) == sorted(tracked)
    # setuptools adds a section of its own to the sdist's setup.cfg.
    assert {name for name in tracked if held[name] != tracked[name]} <= {"setup.cfg"}


@pytest.mark.slow
def test_the_wheel_is_the_same_from_the_sdist(unpacked_sdist, wheel, tmp_path):
    from_sdist = build("wheel", unpacked_sdist, tmp_path / "dist")
    assert from_sdist.name == wheel.name
    assert wheel_contents(from_sdist) == wheel_contents(wheel)


def test_the_wheel_holds_the_package_and_nothing_else(wheel, tracked):
    held = without_metadata(wheel_contents(wheel))
    assert differences(expected_in_wheel(tracked), held - {CORE}) == []
    # One wheel serves every Python from the lowest on.
    assert "-cp311-abi3-" in wheel.name
    assert (CORE in held) == compiles()


def compiles() -> bool:
    """Whether this machine can build the core: a C compiler and Python's headers."""
    return shutil.which("cc") is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


@pytest.mark.slow
def test_a_wheel_without_a_compiler_runs_in_python(repository, tracked, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    tree = tmp_path / "tree"
    shutil.copytree(repository, tree, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    found = build("wheel", tree, tmp_path / "dist")
    assert CORE not in wheel_contents(found)
    with zipfile.ZipFile(found) as archive:
        archive.extractall(tmp_path / "site")
    code = "import fragmeter as fm; from fragmeter.sim.engine.core import compiled; print(fm.simulate(num_prompts=3).summary['completed'], compiled()[1])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    assert done.stdout.decode() == "3 not built\n"


def test_only_the_rooms_are_expected_in_a_wheel():
    tracked = ["README.md", "fragmeter/__init__.py", "setup.cfg", "sim/spec/data/models.json", "sim/__init__.py"]
    unshipped = [
        "tests/conftest.py",
        "gpu/results/h200/run.json",
        "docs/files.py",
        "tools/live/page.py",
        "simulated.py",
    ]
    assert expected_in_wheel([*tracked, *unshipped]) == {
        "fragmeter/__init__.py",
        "fragmeter/sim/__init__.py",
        "fragmeter/sim/spec/data/models.json",
    }


def test_a_missing_and_a_stray_file_are_named():
    assert differences(["a", "b"], ["b", "a"]) == []
    assert differences(["a", "b"], ["b", "tests/c"]) == ["missing: a", "not expected: tests/c"]


def test_metadata_is_no_file_of_the_package(tmp_path):
    archive = tmp_path / "fragmeter-1.tar.gz"
    for name in ("PKG-INFO", "fragmeter.egg-info/SOURCES.txt", "sim/PKG-INFO", "Makefile"):
        (tmp_path / "fragmeter-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fragmeter-1" / name).touch()
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "fragmeter-1", "fragmeter-1")
    assert without_metadata(sdist_names(archive)) == {"sim/PKG-INFO", "Makefile"}
    assert without_metadata(["fragmeter-1.dist-info/METADATA", "fragmeter/a.py"]) == {"fragmeter/a.py"}


@pytest.mark.slow
def test_both_distributions_install_and_run_in_a_clean_environment(tmp_path, capfd):
    """``make release-check``, which needs an index of packages."""
    pytest.importorskip("build", reason="build is not installed")
    main(tmp_path / "dist")
    assert sorted(path.suffix for path in (tmp_path / "dist").iterdir()) == [".gz", ".whl"]
    assert capfd.readouterr().out.count("fragmeter reproduce fig3") == 2


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
    core = "from fragmeter.sim.engine.core import compiled; print(compiled()[0] is not None)"
    assert run("-c", core) == f"{compiles()}\n"
    run("-m", "fragmeter", "simulate", "--num-prompts", "20", "--request-rate", "2", "--record-blocks", "--out", "run")
    run("-m", "fragmeter", "report", "run", "--out", "report.html")
    assert "plotly" in (tmp_path / "report.html").read_text("utf-8")
    fig3 = json.loads(run("-m", "fragmeter", "reproduce", "fig3", "--json", "-"))
    assert fig3["figure"] == "fig3"
