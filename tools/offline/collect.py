"""Collect what the runbook needs into one folder, on a machine with an index of packages: ``collect.py FOLDER``.

The folder gets the wheels of ``wheels.txt`` for another Python and machine, a wheel of this checkout, and ``run.py``, which
installs and runs them without a network. Copy the folder to the machine with the card. This program uses nothing but pip.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
#: Platforms of wheels that run on any Linux of the last years; pip takes no newer one for an older one.
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)) + (
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
LARGE = "# large:"


def requirements(text: str, large: bool) -> list[str]:
    """The names in the text of ``wheels.txt``, with those of large wheels if ``large``."""
    lines = [line.strip() for line in text.splitlines()]
    small = [line for line in lines if line and not line.startswith("#")]
    return small + ([line.removeprefix(LARGE).strip() for line in lines if line.startswith(LARGE)] if large else [])


def download(names: list[str], python: str, folder: Path) -> list[str]:
    """Arguments of pip that download wheels for another Python, with the versions of each other that they need."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", python, "--implementation", "cp", *platforms]
    return ["download", "--only-binary=:all:", *target, "--dest", str(folder), *names]


def collect(folder: Path, python: str, large: bool) -> None:
    """Fill the folder.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.whl"):
        stale.unlink()
    _pip(download(requirements((HERE / "wheels.txt").read_text(), large), python, folder))
    with tempfile.TemporaryDirectory() as copy:
        # A build leaves files behind, so it does not run in the checkout.
        source = Path(copy, "fragmeter")
        ignored = shutil.ignore_patterns(".*", "out", "build", "dist", "*.egg-info", "__pycache__")
        shutil.copytree(CHECKOUT, source, ignore=ignored)
        _pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(source)])
    shutil.copyfile(HERE / "run.py", folder / "run.py")


def _pip(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=True)


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(prog="collect.py", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, help="folder to copy to the machine with the card")
    parser.add_argument("--python", default="3.12", help="Python of that machine (default: 3.12)")
    parser.add_argument("--large", action="store_true", help="also numpy, pandas, pyarrow and scipy")
    given = parser.parse_args(tokens)
    try:
        collect(given.folder, given.python, given.large)
    except subprocess.CalledProcessError as error:
        print(f"pip failed with status {error.returncode}; its output says why", file=sys.stderr)
        return 1
    wheels = sorted(given.folder.glob("*.whl"))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(
        f"{len(wheels)} wheels, {megabytes:.1f} MB. On the machine with the card: python3 {given.folder.name}/run.py --out results"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
