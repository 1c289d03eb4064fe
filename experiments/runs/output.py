"""Output of the program: text for the terminal, JSON for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter
from rich.console import Console

from ...reports.page.table import filled
from ...sim.output.files import STDOUT, as_json, is_stdout, is_stream, require_writable_file, write_whole
from ...sim.types.errors import SettingError, user_paths
from ...sim.types.notes import notes

Item = TypeVar("Item")
_RESULTS = Group("Results", sort_key=9)
#: For flags that name output files.
RESULTS = Parameter(group=_RESULTS)
#: A flag that names a file; a lone hyphen is standard output. Report refuses values that look like flags.
RESULT_FILE = Parameter(group=_RESULTS, allow_leading_hyphen=True)
#: The flag of every verb.
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


def printable(text: str) -> str:
    """The text with escapes for characters that would break its line or control the terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def print_beside(text: str) -> None:
    """Print one line on standard error, with escapes as in ``printable``."""
    print(printable(text), file=sys.stderr)


@contextmanager
def no_bars() -> Iterator[None]:
    """``track`` draws nothing in this block, because its items are part of another bar."""
    before = _no_bars.set(True)
    try:
        yield
    finally:
        _no_bars.reset(before)


class Count:
    """A progress bar on standard error, if that is a terminal, that lets other code print.

    Args:
        subject: Its text.
        total: Number of advances to the end.
    """

    def __init__(self, subject: str, total: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.progress import Progress, TimeElapsedColumn

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
        """Count one item as done."""
        if self._bar:
            self._bar.advance(self._task)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar while this block prints."""
        self._stop()
        yield
        self._start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the bar in this block."""
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
    """Yield the items; on a terminal a bar on standard error shows the progress."""
    if _no_bars.get() or not sys.stderr.isatty():
        return items
    from rich.progress import track as rich_track

    return rich_track(items, subject, total=total, console=Console(stderr=True), transient=True)


class Terminal(Console):
    """Rich's console, which raises the error when the reader of the output has closed it, and prints notes before the text that rests on them."""

    _said = 0

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, after the notes that are not printed yet."""
        said, self._said = self._said, len(notes())
        for text in notes()[said:]:
            super().print(text, markup=False)
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise


def make_folder_of(path: Path | None) -> None:
    """Make the missing folders of a file that a command is about to write.

    Raises:
        UserError: They cannot be made.
    """
    if path is not None and path != Path(STDOUT):
        with user_paths(path):
            path.parent.mkdir(parents=True, exist_ok=True)


class Report:
    """The output of one command: text for the terminal, data for programs, or both.

    Args:
        json_target: File for the data; ``-`` prints the data on standard output and suppresses the text.
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
        self._markdown_target = STDOUT if "markdown" in on_stdout else targets.get("markdown")
        # Names may contain characters that rich reads as markup.
        self.console = Terminal(quiet=bool(on_stdout), highlight=False, markup=False, emoji=False)

    @property
    def has_data(self) -> bool:
        """Whether the command's data are written."""
        return self._json_target is not None

    def print_line(self, text: str = "", style: str | None = None) -> None:
        """Print a paragraph, wrapped to the terminal."""
        self.console.print(text, style=style, markup=False)

    def line(self, text: str) -> None:
        """Print a line without wrapping."""
        self.console.print(text, markup=False, soft_wrap=True)

    def point_to(self, label: str, path: str | os.PathLike[str]) -> None:
        """Print the path of an output, on one line."""
        self.line(f"{label}: {os.fspath(path)}")

    def data(self, document: Any) -> None:
        """Write the command's data at its end."""
        if self._json_target is not None:
            write_whole(self._json_target, as_json({"notes": notes(), **document} if notes() else document))

    def markdown(self, text: Callable[[], str]) -> None:
        """Write the command's Markdown, if it is asked for."""
        if self._markdown_target is not None:
            write_whole(self._markdown_target, text())

    def markdown_parts(self, title: str, parts: Callable[[], Mapping[str, str]]) -> None:
        """Write parts into their places of a page that is there (``reports.page.table.filled``), else the parts alone."""
        target = self._markdown_target
        if target is None:
            return
        found = parts()
        page = "" if is_stream(target) or not Path(target).is_file() else Path(target).read_text("utf-8", "replace")
        if f"<!-- {next(iter(found))} -->" in page:
            write_whole(target, filled(page, found))
        else:
            write_whole(
                target, "\n\n".join((f"# {title}", *(f"{name}:\n\n{text}" for name, text in found.items()), ""))
            )

    def data_so_far(self, document: Any) -> None:
        """Write the data of finished items to the file. A pipe or a device gets one document, at the end."""
        if self._json_target is not None and not is_stream(self._json_target):
            self.data(document)
