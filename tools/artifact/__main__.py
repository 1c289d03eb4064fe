"""Write the archive: the committed files of HEAD, and the exact versions of the packages of this environment.

python -m tools.artifact [FOLDER]

The archive has no trace of others. The figures draw their lengths from the summaries in the package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import fragmeter

ROOT = Path(__file__).resolve().parents[2]
NAME = f"fragmeter-{fragmeter.__version__}-artifact"
#: Packages that build the compiled core; the script of the archive builds without network.
_BUILD = ("setuptools", "wheel")


def main(folder: str = "dist") -> None:
    """Write the archive into a folder, which is made if it is missing."""
    target = Path(folder).resolve() / f"{NAME}.tar.gz"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        lock = Path(made) / "requirements.lock"
        lock.write_text("".join(f"{line}\n" for line in locked()), "utf-8")
        added = [f"--prefix={NAME}/", f"--add-file={lock}"]
        subprocess.run(["git", "archive", "-o", str(target), *added, "HEAD"], cwd=ROOT, check=True)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB; unpack it and run sh tools/artifact/run.sh")


def locked() -> list[str]:
    """Exact versions of the packages that the simulator needs, and of those that build it, as pip reads them."""
    found: dict[str, str] = {}
    names = [*_needed("fragmeter"), *_BUILD]
    while names:
        name = names.pop()
        if name not in found:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                # A package of another platform or Python.
                continue
            names += _needed(name)
    return [f"{name}=={found[name]}" for name in sorted(found)]


def _needed(package: str) -> Iterator[str]:
    """Names of the packages that a package requires without extras."""
    for line in requires(package) or []:
        if "extra ==" not in line:
            yield re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", default="dist", metavar="FOLDER", help="where the archive is written; dist"
    )
    main(parser.parse_args().folder)
