"""Commands that are killed at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def kill_when(folder: Path, finished: int, tokens: list[str]) -> int:
    """Start the program, SIGKILL it with its workers when so many points are finished; how many there are then."""
    program = subprocess.Popen(tokens, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while program.poll() is None and count(folder) < finished:
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    return count(folder)


def count(folder: Path) -> int:
    return len(list(folder.glob("points/*.json")))
