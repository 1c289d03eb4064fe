"""A fuzzer of all commands: seeded cases, each a command line and the files that it reads, run in this process.

A case follows from its kind and its seed. It fails where the program raises, ends with a status that is not
documented, answers a mistake with anything but one line, warns, takes too long, changes a file that it has no
business with, or leaves a part of a file. The cases are in the modules of ``fuzz_cases``; ``fuzz.py`` runs
them all.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fragmeter.experiments.cli.app import DONE, MISTAKE, status

#: Seconds after which a case counts as one that hangs, on a busy machine.
HANGS_S = 60
#: Memory that a case may take beyond what the process has.
MOST_BYTES = 6 << 30
#: Names in a case's folder that begin so may be written; all else that is there belongs to the user.
OUTPUT = "out"


@dataclass
class Case:
    """What is run in the case's own folder.

    Attributes:
        tokens: The command line.
        statuses: Exit statuses that are right.
        run: Runs it; by default ``run_here``.
    """

    tokens: list[str]
    statuses: tuple[int, ...] = (DONE, MISTAKE)
    run: Callable[[list[str]], Ran] | None = None


@dataclass
class Ran:
    """What a command did: its exit status and what it wrote; ``complaint`` is what cannot be read off these."""

    status: int
    stdout: str = ""
    stderr: str = ""
    complaint: str | None = None


@dataclass
class Found:
    """A case that was run."""

    kind: str
    seed: int
    tokens: list[str]
    ran: Ran
    complaints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        again = f"python tests/fuzz/fuzz.py --again {self.kind} {self.seed}"
        said = self.ran.stderr[:600].encode("utf-8", "backslashreplace").decode()
        return f"{again}\n    {'; '.join(self.complaints)}\n    {ascii(self.tokens)[:600]}\n    {said.strip()}"


Maker = Callable[[random.Random, Path], Case]
#: Kind -> what makes its cases, and how many there are by default.
KINDS: dict[str, tuple[Maker, int]] = {}


def kind(name: str, cases: int) -> Callable[[Maker], Maker]:
    """Register a maker of cases.

    Args:
        cases: How many of them are run by default.
    """

    def register(maker: Maker) -> Maker:
        KINDS[name] = maker, cases
        return maker

    return register


class Hangs(BaseException):
    """A case that takes too long. No program catches it."""


def run_case(name: str, seed: int, place: Path) -> Found:
    """Make a case, run it, and see what is wrong with what it did.

    Args:
        place: A folder for the case's own folder, which is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{seed}-", dir=place))
    before = os.getcwd()
    try:
        os.chdir(folder)
        _users_files()
        case = KINDS[name][0](random.Random(f"{name}-{seed}"), folder)
        held = contents(folder)
        ran = (case.run or run_here)(case.tokens)
        return Found(name, seed, case.tokens, ran, list(_complaints(case, ran, held, folder)))
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def _users_files() -> None:
    """What no command may touch."""
    Path("mine.txt").write_text("mine")
    Path("mine/.git").mkdir(parents=True)
    Path("mine/run.json").write_text('{"name": "x"}')
    Path("mine/.git/config").write_text("[core]")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, link and folder that is not the command's to write, with what it holds."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if not path.relative_to(folder).parts[0].startswith((OUTPUT, ".fragmeter-"))
    }


def _content(path: Path) -> bytes:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return b"link to " + os.fsencode(os.readlink(path))
    return path.read_bytes() if stat.S_ISREG(mode) else str(stat.S_IFMT(mode)).encode()


def _complaints(case: Case, ran: Ran, held: dict[str, bytes], folder: Path) -> Iterator[str]:
    if ran.complaint:
        yield ran.complaint
    if ran.status not in case.statuses:
        yield f"exit status {ran.status}"
    if "Traceback" in ran.stderr:
        yield "a traceback"
    lines = ran.stderr.splitlines()
    if ran.status == DONE and lines and case.run is None:
        yield "says something on standard error"
    if ran.status == MISTAKE and (len(lines) != 1 or not ran.stderr.startswith("fragmeter: ")):
        yield f"a mistake is answered with {len(lines)} lines"
    if ran.status == MISTAKE and any(ord(letter) < 32 or ord(letter) == 127 for letter in ran.stderr[:-1]):
        yield "control characters on standard error"
    left = contents(folder)
    for name, content in held.items():
        if left.get(name) != content:
            yield f"{name} is {'changed' if name in left else 'gone'}"
    if ran.status >= 0:
        yield from (f"left {path}" for path in folder.rglob(".fragmeter-*"))


def run_here(tokens: list[str]) -> Ran:
    """Run a command line in this process: what it writes is caught as a pipe would catch it, and so is what it warns of."""
    with _caught() as (out, error), _bounded(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        complaint = None
        try:
            code = status(tokens)
        except Hangs:
            code, complaint = -signal.SIGALRM, "hangs"
        except BaseException:
            code, complaint = -1, f"raises:\n{traceback.format_exc()}"
        if warned:
            complaint = f"warns: {warned[0].category.__name__}: {warned[0].message}"
    return Ran(code, out(), error(), complaint)


@contextmanager
def _caught() -> Iterator[tuple[Callable[[], str], Callable[[], str]]]:
    """Standard output and error of this process, by their descriptors, into files; standard input is empty."""
    streams, texts = sys.stdout, ["", ""]
    errors = sys.stderr
    for stream in (streams, errors):
        with suppress(ValueError, OSError):
            stream.flush()
    kept = [os.dup(number) for number in range(3)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, open(os.devnull, "rb") as nothing:
        files = (out, error)
        for number, file in enumerate((nothing, *files)):
            os.dup2(file.fileno(), number)
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        try:
            yield (lambda: texts[0]), (lambda: texts[1])
        finally:
            for place, (stream, file) in enumerate(zip((sys.stdout, sys.stderr), files, strict=True)):
                with suppress(OSError):
                    stream.flush()
                file.seek(0)
                texts[place] = file.read().decode("utf-8", "backslashreplace")
            sys.stdout, sys.stderr = streams, errors
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)


@contextmanager
def _bounded() -> Iterator[None]:
    """Time and memory of a case have an end."""

    def hangs(*_: object) -> None:
        # Again, in case the exception is caught on its way.
        signal.alarm(1)
        raise Hangs

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(name: str, cases: int, place: Path, first: int = 0) -> Iterator[Found]:
    """Cases of a kind, with the seeds from ``first`` on."""
    for seed in range(first, first + cases):
        yield run_case(name, seed, place)
