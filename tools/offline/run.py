"""Install from the wheels beside this file, without a network and without root, and run the GPU runbook: ``run.py --out DIR``.

``collect.py`` copies this file, as ``run.py``, into a folder with the wheels. They are installed into a folder of their own
(``--site``), once; nothing of the machine's Python changes. All further arguments are the runbook's. This program uses
nothing but Python and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Modules that a run cannot do without, and that the machine or the folder has.
NEEDED = (
    "fragmeter",
    "torch",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "simpy",
    "cyclopts",
    "pydantic",
    "plotly",
    "jinja2",
)
_DONE = "installed-wheels.txt"
#: As setup.cfg has it.
LEAST_PYTHON = (3, 11)


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program; 2 if something is missing, else the runbook's exit status."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--wheels", type=Path, default=Path(__file__).resolve().parent, help="default: this folder")
    parser.add_argument("--site", type=Path, help="folder to install into; default: one in the temporary folder")
    given, of_runbook = parser.parse_known_args(tokens)
    if sys.version_info < LEAST_PYTHON:
        least, this = (".".join(map(str, version[:2])) for version in (LEAST_PYTHON, sys.version_info))
        print(
            f"fragmeter needs Python {least} or later, and this is {this}: run it with another python3, such as that of"
            " `uv venv --python 3.12` or of the package python3.11-venv",
            file=sys.stderr,
        )
        return 2
    wheels = sorted(given.wheels.glob("*.whl"))
    if not wheels:
        print(f"{given.wheels}: has no wheels; fill it with collect.py", file=sys.stderr)
        return 2
    named = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    site = given.site or Path(tempfile.gettempdir(), f"fragmeter-{hashlib.sha256(named.encode()).hexdigest()[:12]}")
    if not install(wheels, site, named):
        return 2
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
    if missing := missing_modules(environment):
        print(f"missing on this machine: {', '.join(missing)}; collect.py --large has the large ones", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "fragmeter.gpu.runbook", *of_runbook], env=environment).returncode


def install(wheels: list[Path], site: Path, named: str) -> bool:
    """Install the wheels, unless ``site`` has the same ones; whether it succeeded."""
    done = site / _DONE
    if done.exists() and done.read_text() == named:
        return True
    shutil.rmtree(site, ignore_errors=True)
    flags = [
        "--no-index",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--quiet",
        "--target",
        str(site),
    ]
    pip = [sys.executable, "-m", "pip", "install", *flags, *map(str, wheels)]
    if subprocess.run(pip).returncode:
        print(
            f"pip cannot install the wheels on Python {sys.version.split()[0]}; collect.py has --python",
            file=sys.stderr,
        )
        return False
    done.write_text(named)
    return True


def missing_modules(environment: dict[str, str]) -> list[str]:
    """Modules that do not exist, looked up without importing them."""
    code = f"from importlib.util import find_spec; print(*[name for name in {NEEDED} if find_spec(name) is None])"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return found.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
