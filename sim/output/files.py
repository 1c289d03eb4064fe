"""Output files, each written completely or not at all.

    a regular or a new file       written under another name in its folder, then renamed
    a symbolic link               its target is replaced, the link stays
    a device, a pipe              written directly
    ``-``                         standard output

A killed process leaves a part file, ``.fragmeter-...-part``. The next command that writes the same file removes the
part file, unless a living process holds its lock.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from ..types.errors import SettingError, UserError, user_paths

AnyPath = str | os.PathLike[str]
#: The name of standard output.
STDOUT = "-"
#: Prefix of the names of files and folders that only an interrupted command leaves behind.
LEFTOVER = ".fragmeter-"
_PART = "-part"


def as_json(document: Any) -> str:
    """A document as strict JSON text, without NaN and infinity."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_utf8(text: AnyPath) -> str:
    """A path as valid UTF-8 text. Bytes that are not UTF-8 become escapes, which JSON reads back."""
    return os.fspath(text).encode("utf-8", "backslashreplace").decode()


def write_whole(path: AnyPath, content: str | bytes) -> None:
    """Write a file, text as UTF-8; the module docstring has the rules.

    Raises:
        UserError: The file cannot be written.
    """
    with whole_file(path) as file:
        file.write(as_utf8(content).encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: AnyPath) -> Iterator[BinaryIO]:
    """A context with a file to write to; the file is renamed to ``path`` when the block ends without an error.

    Raises:
        UserError: The file cannot be written.
    """
    with user_paths(path), _stream(path) if is_stream(path) else _replaced(Path(os.path.realpath(path))) as file:
        yield file


def is_stream(path: AnyPath) -> bool:
    """Whether a path is written directly instead of replaced: standard output, a device, a pipe."""
    return os.fspath(path) == STDOUT or _is_special(path)


def is_stdout(path: AnyPath) -> bool:
    """Whether a path is standard output: ``-``, or the device, pipe or file of standard output."""
    if os.fspath(path) == STDOUT:
        return True
    with suppress(OSError, ValueError, AttributeError):
        return os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    return False


def require_writable_file(path: AnyPath) -> None:
    """Refuse a path that cannot be written, before the work starts. An existing file may be replaced.

    Raises:
        UserError: The path is a folder, or it cannot be written.
    """
    if os.fspath(path) == STDOUT:
        return
    with user_paths(path):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise UserError(f"{os.fspath(path)}: is a folder; name a file")
        # This also fails if the name is too long for the file system.
        if _exists(target) and not os.access(target, os.W_OK):
            raise UserError(f"{os.fspath(path)}: is write-protected; choose another place")
    if not _is_special(path):
        require_writable(target.parent, path)
        for part in target.parent.glob(leftover_name(target, f"*{_PART}")):
            remove_if_left(part)


def require_writable(folder: AnyPath, wanted: AnyPath, create: bool = False) -> None:
    """Refuse a folder that takes no files, before the work starts.

    Args:
        wanted: The path that the user gave, for the message.
        create: Whether missing folders will be created.

    Raises:
        UserError: The folder is missing, or files cannot be created in it.
    """
    place = Path(folder)
    with user_paths(wanted):
        while create and not _exists(place) and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass


def require_apart(outputs: dict[str, AnyPath | None], inputs: Mapping[str, Sequence[AnyPath]] | None = None) -> None:
    """Refuse outputs that would overwrite each other or an input.

    Args:
        outputs: Files and folders to write, by flag.
        inputs: Files to read, by flag.

    Raises:
        SettingError: Two outputs are the same, or one lies in the other; an input is an output, or lies in one.
    """
    written = {flag: Path(os.path.realpath(path)) for flag, path in outputs.items() if path and not is_stream(path)}
    read = [(flag, Path(os.path.realpath(path))) for flag, paths in (inputs or {}).items() for path in paths]
    for flag, path in written.items():
        others = [*read, *((other, place) for other, place in written.items() if other != flag)]
        for other, place in others:
            if place == path or path in place.parents:
                remedy = f"is {'also' if place == path else 'the folder of'} {other} = {os.fspath(place)!r}"
                raise SettingError(flag, os.fspath(path), f"{remedy}; choose another place")


def leftover_name(target: Path, suffix: str) -> str:
    """A name in the folder of ``target`` for its replacement under construction; its length is limited."""
    return f"{LEFTOVER}{sha256(os.fsencode(target.name)).hexdigest()[:12]}-{suffix}"


def hold(descriptor: int, without_locks: bool = False) -> bool:
    """Lock an open file or folder until this process closes it or ends.

    Args:
        without_locks: Return value on systems without these locks.

    Returns:
        False if another process has the lock.
    """
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError):
        return without_locks
    return True


def remove_if_left(part: Path) -> None:
    """Remove a part file, unless a living process writes it."""
    with suppress(OSError), part.open("rb") as file:
        if hold(file.fileno()):
            part.unlink()


def is_part_file(name: str) -> bool:
    """Whether a name is that of a part file, which a killed process may have left."""
    return name.startswith(LEFTOVER) and name.endswith(_PART)


def _exists(path: AnyPath) -> bool:
    """As ``os.path.exists``, but raises an error if the path cannot be accessed."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _is_special(path: AnyPath) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def _stream(path: AnyPath) -> Iterator[BinaryIO]:
    if os.fspath(path) == STDOUT:
        with BytesIO() as content:
            yield content
            # The standard output of a notebook accepts only text.
            sys.stdout.write(content.getvalue().decode())
        sys.stdout.flush()
        return
    # A pipe without a reader is an error; opening it would wait for a reader, possibly forever.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        yield file


@contextmanager
def _replaced(target: Path) -> Iterator[BinaryIO]:
    part = target.with_name(leftover_name(target, f"{os.getpid()}{_PART}"))
    try:
        with part.open("wb") as file:
            hold(file.fileno())
            yield file
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
