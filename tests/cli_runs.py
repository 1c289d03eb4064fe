"""The program as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def command(*tokens: object) -> list[str]:
    """The command line of ``fragmeter``."""
    return [sys.executable, "-m", "fragmeter", *map(str, tokens)]


def run(*tokens: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``fragmeter`` to its end, in a pipe."""
    return subprocess.run(command(*tokens), capture_output=True, text=True, cwd=cwd, timeout=600)


def data(*tokens: object) -> Any:
    """What ``fragmeter ... --json -`` writes, which must be one document and nothing else."""
    done = run(*tokens, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)
