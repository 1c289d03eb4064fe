"""Output of the program: text for people, JSON for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.progress import track as rich_track

from ...sim.output.files import STDOUT, as_json, is_stdout, is_stream, require_writable_file, write_whole
from ...sim.types.errors import SettingError

Item = TypeVar("Item")
_RESULTS = Group("Results", sort_key=9)
#: For flags that say where results go.
RESULTS = Parameter(group=_RESULTS)
#: For a flag that names a file, which may be standard output: a lone hyphen. Report refuses what looks like a flag.
RESULT_FILE = Parameter(group=_RESULTS, allow_leading_hyphen=True)
#: The flag that every verb has.
JsonTarget = Annotated[
    str | None,
    Parameter(
        name="--json",
        allow_leading_hyphen=True,
        help="JSON file with the printed values; - for standard output.",
        group=_RESULTS,
    ),
]

_no_bars: ContextVar[bool] = ContextVar("no_bars", default=False)


@contextmanager
def no_bars() -> Iterator[None]:
    """``track`` draws nothing in this block: what it would count is a part of what is counted elsewhere."""
    before = _no_bars.set(True)
    try:
        yield
    finally:
        _no_bars.reset(before)


class Count:
    """A bar on standard error, if that is a terminal, that lets others print.

    Args:
        subject: What it says.
        total: How often it advances.
    """

    def __init__(self, subject: str, total: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            self._bar = Progress(
                *Progress.get_default_columns(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                # Standard output may be a file.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(subject, total=total)

    def advance(self) -> None:
        """One more is done."""
        if self._bar:
            self._bar.advance(self._task)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Room for what is printed in this block."""
        self._stop()
        yield
        self._start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draws the bar in this block."""
        self._start()
        try:
            with no_bars():
                yield
        finally:
            self._stop()

    def _start(self) -> None:
        if self._bar:
            self._bar.start()

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()


def track(items: Iterable[Item], subject: str, total: int) -> Iterable[Item]:
    """The items; on a terminal a bar on standard error shows how many have come."""
    if _no_bars.get() or not sys.stderr.isatty():
        return items
    return rich_track(items, subject, total=total, console=Console(stderr=True), transient=True)


class Terminal(Console):
    """Rich's console, which lets the program know that its reader has gone."""

    def on_broken_pipe(self) -> None:
        """Called from within the handler of the error."""
        raise


class Report:
    """Where one command reports to: text for people, or data for programs, or both.

    Args:
        json_target: A file that takes the data; ``-`` puts it on standard output, and the text nowhere.
        files: The other files that the command writes, by flag; one of them may be standard output instead.

    Raises:
        UserError: A file cannot be written.
    """

    def __init__(self, json_target: str | None, **files: str | os.PathLike[str] | None) -> None:
        given = {"json": json_target, **files}
        targets = {flag: os.fspath(path) for flag, path in given.items() if path is not None}
        for flag, path in targets.items():
            if path.startswith("-") and path != STDOUT:
                raise SettingError(flag, path, "is a flag; name a file, or - for standard output")
            require_writable_file(path)
        on_stdout = [flag for flag, path in targets.items() if is_stdout(path)]
        if len(on_stdout) > 1:
            raise SettingError(on_stdout[1], STDOUT, f"standard output has {on_stdout[0]} already; name a file")
        self._json_target = STDOUT if "json" in on_stdout else json_target
        # Names may hold what looks like markup.
        self.console = Terminal(quiet=bool(on_stdout), highlight=False, markup=False, emoji=False)

    def say(self, text: str = "", style: str | None = None) -> None:
        """A paragraph of text, wrapped to the terminal."""
        self.console.print(text, style=style, markup=False)

    def line(self, text: str) -> None:
        """A line that is not wrapped, however long."""
        self.console.print(text, markup=False, soft_wrap=True)

    def point_to(self, label: str, path: str | os.PathLike[str]) -> None:
        """Where something lies, on one line however long."""
        self.line(f"{label}: {os.fspath(path)}")

    def data(self, document: Any) -> None:
        """The command's data, when it is done."""
        if self._json_target is not None:
            write_whole(self._json_target, as_json(document))

    def data_so_far(self, document: Any) -> None:
        """The data of what is finished: into the file. A pipe or a device takes one document, at the end."""
        if self._json_target is not None and not is_stream(self._json_target):
            self.data(document)
