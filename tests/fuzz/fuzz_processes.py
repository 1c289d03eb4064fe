"""What the fuzzer runs in processes of their own: commands that are interrupted, killed, or lose their reader."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from cli_runs import command
from fragmeter.experiments.cli.app import DONE, NO_READER
from fragmeter.reports.data.results import read_result
from fragmeter.sim.output.interrupts import INTERRUPTED, TERMINATED
from fuzz_stock import stock
from fuzzing import HANGS_S, Case, Ran, kind

Rng = random.Random
#: What takes a second or more, and leaves something.
_LONG = [
    ["simulate", "--num-prompts", "2000", "--request-rate", "20", "--out", "out", "--json", "out.json"],
    ["simulate", "--num-prompts", "300", "--request-rate", "20", "--record-plan", "out.npz"],
    ["sweep", "--num-prompts", "500", "--grid", "request_rate=2:9", "--jobs", "2", "--out", "out"],
    ["reproduce", "fig11", "--jobs", "1", "--out", "out"],
    ["report", "run", "--out", "out.html"],
    ["traces", "synth", "trace.csv", "--out", "out.json"],
    [
        "plan",
        "--model",
        "opt-13b",
        "--gpu",
        "a100-80gb",
        "--goodput",
        "ttft:900",
        "--num-prompts",
        "100",
        "--jobs",
        "1",
        "--out",
        "out",
    ],
]
#: What a signal ends the program with; by the signal itself, of which a shell makes the same number, while it loads.
_STATUSES = {
    signal.SIGINT: (INTERRUPTED, -signal.SIGINT), signal.SIGTERM: (TERMINATED, -signal.SIGTERM),
    signal.SIGKILL: (-signal.SIGKILL,),
}  # fmt: skip


@kind("interrupted", 40)
def interrupted(rng: Rng, folder: Path) -> Case:
    """A signal at any time: from before the program has begun to after its end."""
    tokens = rng.choice(_LONG)
    for name in ("run", "trace.csv"):
        (folder / name).symlink_to(stock() / name)
    number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    after_s = rng.uniform(0, 3)
    return Case(tokens, (DONE, *_STATUSES[number]), partial(_signalled, number=number, after_s=after_s))


def _signalled(tokens: list[str], number: signal.Signals, after_s: float) -> Ran:
    """Run a command and send it a signal when it has taken so much time of a core, however busy the machine is."""
    with _started(tokens) as program:
        process = psutil.Process(program.pid)
        # It is not waited for before the signal is sent: its number may then be that of another process.
        while process.status() != psutil.STATUS_ZOMBIE and process.cpu_times().user < after_s:
            time.sleep(0.01)
        # As a terminal does: to the workers, too.
        os.killpg(program.pid, number)
        out, error = program.communicate()
    if program.returncode == -signal.SIGINT and "fragmeter" not in error:
        # Python itself was still starting.
        error = ""
    lines = len(error.splitlines())
    wordy = f"{lines} lines on standard error" if lines > 1 else None
    return Ran(program.returncode, out, error, wordy or _half_written(Path()))


@contextmanager
def _started(tokens: list[str]) -> Iterator[subprocess.Popen]:
    """The program, which is killed when it takes too long."""
    program = subprocess.Popen(
        command(*tokens), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    hangs = threading.Timer(HANGS_S, program.kill)
    hangs.start()
    try:
        yield program
    finally:
        hangs.cancel()


def _half_written(folder: Path) -> str | None:
    """What is there under its name can be read."""
    readers: dict[str, Callable[[Path], object]] = {
        "out/run.json": lambda path: read_result(path.parent),
        "out.html": lambda path: path.read_text().rindex("</html>"),
    }
    paths = [*folder.glob("out*.json"), *folder.glob("out*/**/*.json"), *folder.glob("out*.html")]
    for path in paths:
        if not path.name.startswith(".fragmeter-"):
            try:
                readers.get(str(path), lambda path: json.loads(path.read_bytes()))(path)
            except Exception as error:
                return f"{path} is half written ({error})"
    return None


@kind("pipe", 16)
def pipe(rng: Rng, folder: Path) -> Case:
    """A reader that goes after so many bytes, as ``head`` does, or before it has read any."""
    for name in ("run", "trace.csv"):
        (folder / name).symlink_to(stock() / name)
    tokens = rng.choice([
        ["traces", "list"], ["traces", "list", "--json", "-"], ["simulate", "--num-prompts", "50", "--request-rate", "9"],
        ["simulate", "--num-prompts", "50", "--request-rate", "9", "--json", "-"], ["simulate", "--help"], ["report", "run", "--out", "-"],
        ["reproduce", "table1", "--json", "-"], ["traces", "stats", "trace.csv", "--json", "/dev/stdout"],
    ])  # fmt: skip
    return Case(tokens, (DONE, NO_READER), partial(_head, count=rng.choice([0, 1, 100, 5000])))


def _head(tokens: list[str], count: int) -> Ran:
    with _started(tokens) as program:
        out = os.read(program.stdout.fileno(), count) if count else b""
        program.stdout.close()
        program.stdout = None
        _, error = program.communicate()
    return Ran(program.returncode, out.decode("utf-8", "replace"), error, "says something" if error else None)
