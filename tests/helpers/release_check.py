"""Build the wheel and the sdist, and try both in clean virtual environments outside the checkout.

Usage: python tests/helpers/release_check.py [FOLDER]

The two files are left in FOLDER (default: dist) with their SHA-256. The program exits with status 1 and names the
files or the command when

- the wheel lacks a file of the package, or has any other file than those and the compiled core;
- the core was not compiled: a release is built where there is a compiler;
- the sdist lacks a file that git tracks, or has any other file;
- the wheel built from the sdist differs in a byte from the wheel built from the checkout;
- a distribution does not install, or one of ``TRIALS`` fails in the environment that has nothing else.

It needs the ``build`` package and pip's index: builds are isolated, and dependencies are installed anew.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from paths import ROOT

#: Folders of the repository that are installed within ``fragmeter``; links in that folder lead to them.
ROOMS = ("sim", "traces", "gpu", "experiments", "reports")
#: What setup.py builds, where there is a compiler.
CORE = "fragmeter/sim/engine/_core.abi3.so"

#: What a user runs first, in this order, in an empty folder.
TRIALS = (
    "fragmeter --help",
    "fragmeter list policies",
    "fragmeter simulate --num-prompts 20 --request-rate 2 --record-blocks --out run",
    "fragmeter report run --out report.html",
    "fragmeter reproduce fig3 --json fig3.json",
)


class ReleaseError(Exception):
    """What is wrong with a distribution, in lines for the terminal."""


def expected_in_wheel(tracked: Iterable[str]) -> set[str]:
    """Files of the wheel, but for its metadata: every tracked file of the rooms, measured results left out, and the module of one name more.

    This does not read setup.cfg: a pattern that is missing there is a file that is missing in the wheel.
    """
    rooms = tuple(f"{room}/" for room in ROOMS)
    own = {name for name in tracked if name.startswith("fragmeter/") or name == "paged_attention.py"}
    return own | {
        f"fragmeter/{name}" for name in tracked if name.startswith(rooms) and not name.startswith("gpu/results/")
    }


def differences(expected: Iterable[str], found: Iterable[str]) -> list[str]:
    """A line for each name that is missing or not expected; empty when both have the same names."""
    wanted, there = set(expected), set(found)
    return [
        *(f"missing: {name}" for name in sorted(wanted - there)),
        *(f"not expected: {name}" for name in sorted(there - wanted)),
    ]


def without_metadata(names: Iterable[str]) -> set[str]:
    """Names of a wheel or an sdist less those that setuptools writes itself."""
    return {
        name
        for name in names
        if not name.split("/")[0].endswith((".dist-info", ".egg-info")) and name not in ("PKG-INFO", "")
    }


def tracked_files() -> list[str]:
    """Files that git tracks, relative to the repository, without links: no distribution has those."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and not (ROOT / name).is_symlink()]


def copy_files(names: Iterable[str], target: Path) -> None:
    """Copies tracked files: what an earlier build left in the checkout gets into no distribution."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def wheel_contents(wheel: Path) -> dict[str, bytes]:
    """Names of a wheel's files, and their bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_names(sdist: Path) -> set[str]:
    """Files of an sdist, relative to the one folder that it holds."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def check(command: list[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command. Raises ReleaseError with both streams where it fails."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}status {done.returncode}")
    return done.stdout


def build(tree: Path, kind: str, target: Path) -> Path:
    """The "sdist" or the "wheel" of a tree, built in an environment of its own."""
    # The time of the commit, for the wheel's bytes to follow from the commit alone.
    time = check(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(target), str(tree)]
    check(command, tree, {**os.environ, "SOURCE_DATE_EPOCH": time})
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def build_both(target: Path, scratch: Path) -> tuple[Path, Path]:
    """The wheel and the sdist in ``target``. Raises ReleaseError where they hold the wrong files."""
    tracked = tracked_files()
    copy_files(tracked, scratch / "tree")
    sdist = build(scratch / "tree", "sdist", target)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    wheel = build(next((scratch / "unpacked").iterdir()), "wheel", target)
    contents = wheel_contents(wheel)
    from_checkout = wheel_contents(build(scratch / "tree", "wheel", scratch / "direct"))
    problems = {
        f"the sdist {sdist.name}": differences(tracked, without_metadata(sdist_names(sdist))),
        f"the wheel {wheel.name}": differences({*expected_in_wheel(tracked), CORE}, without_metadata(contents)),
        "the wheel from the sdist beside the wheel from the checkout": [
            *differences(from_checkout, contents),
            *(
                f"other bytes: {name}"
                for name, content in contents.items()
                if from_checkout.get(name, content) != content
            ),
        ],
    }
    lines = [f"{name}: {line}" for name, found in problems.items() for line in found]
    if lines:
        raise ReleaseError("\n".join(lines))
    return wheel, sdist


def try_out(distribution: Path, folder: Path) -> None:
    """Installs a distribution in a clean environment, and runs ``TRIALS`` there. Raises ReleaseError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    programs = folder / "venv" / "bin"
    work = folder / "work"
    work.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    python = str(programs / "python")
    check([python, "-m", "pip", "install", "--quiet", str(distribution)], work, environment)
    check([python, "-m", "pip", "check"], work, environment)
    place = check([python, "-c", "import fragmeter; print(fragmeter.__file__)"], work, environment).strip()
    if not Path(place).is_relative_to(folder / "venv"):
        raise ReleaseError(f"{distribution.name}: the package is imported from {place}, not from the new environment")
    for trial in TRIALS:
        program, *arguments = shlex.split(trial)
        printed = check([str(programs / program), *arguments], work, environment)
        if not printed.strip() and "--json" not in arguments:
            raise ReleaseError(f"{distribution.name}: {trial} printed nothing")
        print(f"  {trial}")
    for name in ("run/run.json", "report.html", "fig3.json"):
        if not (work / name).is_file() or not (work / name).stat().st_size:
            raise ReleaseError(f"{distribution.name}: {name} was not written")


def main(target: Path) -> None:
    """Builds, checks and tries both distributions. Raises ReleaseError."""
    with tempfile.TemporaryDirectory(prefix="fragmeter-release-") as name:
        scratch = Path(name)
        both = build_both(scratch / "dist", scratch)
        for distribution in both:
            print(f"{distribution.name}: installed in a clean environment")
            try_out(distribution, scratch / distribution.suffix.lstrip("."))
        target.mkdir(parents=True, exist_ok=True)
        for distribution in both:
            shutil.copy(distribution, target)
            digest = hashlib.sha256(distribution.read_bytes()).hexdigest()
            print(f"{digest}  {target / distribution.name}  {distribution.stat().st_size:,} bytes")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
    except ReleaseError as error:
        sys.exit(str(error))
