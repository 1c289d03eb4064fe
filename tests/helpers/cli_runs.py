"""The program as its users run it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fragmeter.experiments.cli.app import status


def command(*tokens: object) -> list[str]:
    """The command line of ``fragmeter``."""
    return [sys.executable, "-m", "fragmeter", *map(str, tokens)]


def run(*tokens: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``fragmeter`` to its end, in a pipe."""
    return subprocess.run(command(*tokens), capture_output=True, text=True, cwd=cwd, timeout=600)


def run_here(*tokens: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded the libraries; for fixtures of modules, which cannot take capsys."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        code = status([*map(str, tokens)])
    return subprocess.CompletedProcess(command(*tokens), code, out.getvalue(), error.getvalue())


def data(*tokens: object) -> Any:
    """What ``fragmeter ... --json -`` writes, which must be one document and nothing else."""
    done = run(*tokens, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)
