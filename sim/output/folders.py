"""Output folders: the folders that a command may write into, and the replacement of a former result.

A command writes into a folder that is missing, empty, or its own. A folder is the command's own if it has the marker
file and only files that the command writes. All other files belong to the user, and a folder with such a file is
refused before the work starts. The current folder, the folders above it and mount points cannot be replaced, and are
refused as well. Symbolic links are followed.

A result is replaced completely (``replace_folder``):

    1. write all files into a new folder next to the target, and lock it
    2. exchange the two names with one system call (Linux: renameat2 with RENAME_EXCHANGE)
       without it: rename the target to ``.fragmeter-...-old``, then the new folder to the target
    3. delete the files of the former result by name, and then its folder

Either the old or the new result is complete at every instant. Without the exchange, the old result has the name
``-old`` between the two renames; if the command is killed there, the next command that reads or writes the target renames
it back (``restore``). The next command that writes the target deletes the new folder of a killed process; the lock
protects the folder of a living process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ..types.errors import SettingError, user_paths
from ..types.user_files import json_value
from .files import (
    LEFTOVER,
    AnyPath,
    as_json,
    hold,
    is_part_file,
    leftover_name,
    remove_if_left,
    require_writable,
    write_whole,
)

#: The marker of a folder with files that are replaced one by one.
MARKER = "fragmeter.json"
_MARKER_VERSION = 1
_NEW, _OLD = "new", "old"
#: The locked file of the process that writes into a folder; a part file, so that a killed command leaves nothing that stays.
_WRITER = f"{LEFTOVER}writer-part"
# Linux: <linux/fcntl.h>, <linux/fs.h>.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: Errors of renameat2 if the kernel or the file system does not support the exchange.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM)


@dataclass(frozen=True)
class FolderKind:
    """The output folder of one command.

    Attributes:
        name: Name of the folder in messages, for example "sweep".
        files: Patterns of the paths of its files, relative to the folder (``fnmatch``).
        marker: The JSON file that identifies the folder.
        recognises: Whether the content of the marker is of this kind; None for ``MARKER``, which has the name of the
            kind.
    """

    name: str
    files: tuple[str, ...]
    marker: str = MARKER
    recognises: Callable[[Any], bool] | None = None

    def owns(self, relative: str) -> bool:
        """Whether the command writes a file with that path."""
        name = relative.rpartition("/")[2]
        patterns = (self.marker, *self.files)
        return is_part_file(name) or any(
            pattern.count("/") == relative.count("/") and fnmatchcase(relative, pattern) for pattern in patterns
        )

    def owns_folder(self, relative: str) -> bool:
        """Whether the command creates a folder with that path."""
        return any(fnmatchcase(relative, pattern.rpartition("/")[0]) for pattern in self.files if "/" in pattern)

    def marks(self, folder: Path) -> bool:
        """Whether the folder has the marker of this kind."""
        try:
            content = json_value((folder / self.marker).read_bytes())
            return self.recognises(content) if self.recognises else content == self._marker_content
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write_marker(self, path: Path) -> None:
        """Write ``MARKER`` for a kind without its own marker file."""
        write_whole(path, as_json(self._marker_content))

    @property
    def _marker_content(self) -> dict[str, Any]:
        return {"schema_version": _MARKER_VERSION, "kind": self.name}


class Claim:
    """A locked file with the number of the process that writes a folder; gone with the object, or the process.

    Raises:
        SettingError: Another process writes there.
    """

    def __init__(self, path: Path, field: str, shown: str) -> None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if not hold(descriptor, without_locks=True):
                writer = os.read(descriptor, 20).decode(errors="replace")
                os.close(descriptor)
                if writer == str(os.getpid()):
                    return
                remedy = f"is written by process {writer or 'of another command'}; wait for its end, or choose another folder"
                raise SettingError(field, shown, remedy)
            if _is_same(descriptor, path):
                break
            # Its writer removed it after it was opened here.
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        weakref.finalize(self, _give_up, path, descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _give_up(path: Path, descriptor: int) -> None:
    """Remove the file of a claim; before it is unlocked, so that no other process has locked a file without a name."""
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


class OutputFolder:
    """A folder with files that are replaced one by one. The first file creates the folder and its marker.

    Args:
        field: The flag that names the folder, for errors.

    Raises:
        UserError: The folder has other files, or files cannot be created in it.
    """

    def __init__(self, path: AnyPath, kind: FolderKind, field: str = "out") -> None:
        self.path = Path(path)
        self._kind, self._field = kind, field
        self._target = check_folder(path, kind, field)
        self._claim: Claim | None = None
        if self._target.is_dir():
            self._take()

    def _take(self) -> None:
        """Refuse a folder that another process writes, and tell others that this one does."""
        if self._claim is None:
            with user_paths(self.path):
                self._claim = Claim(self._target / _WRITER, self._field, os.fspath(self.path))

    def write(self, relative: str, content: str | bytes) -> Path:
        """Write a file completely or not at all, and return its path.

        Raises:
            UserError: The file cannot be written.
        """
        self.make()
        target = self._target / relative
        with user_paths(self.path):
            target.parent.mkdir(exist_ok=True)
        write_whole(target, content)
        return self.path / relative

    def read(self, relative: str) -> bytes:
        """Content of a file.

        Raises:
            OSError: The file is missing or cannot be read.
        """
        return (self._target / relative).read_bytes()

    def make(self) -> None:
        """Create the folder and its marker if they are missing.

        Raises:
            UserError: They cannot be written.
        """
        with user_paths(self.path):
            self._target.mkdir(parents=True, exist_ok=True)
        self._take()
        if not self._kind.marks(self._target):
            self._kind.write_marker(self._target / MARKER)


def claim_beside(path: AnyPath, field: str = "out") -> Claim | None:
    """Claim a folder that is replaced as a whole, by a file next to it; None where nothing is next to it yet.

    Raises:
        SettingError: Another process is about to replace it.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        return None
    with user_paths(path):
        return Claim(target.parent / leftover_name(target, "writer-part"), field, os.fspath(path))


def check_folder(path: AnyPath, kind: FolderKind, field: str = "out") -> Path:
    """Refuse a folder that the command may not write into, and clean up after killed commands.

    Returns:
        The folder with symbolic links resolved.

    Raises:
        SettingError: The path is a file, the current folder or one above it, or a mount point; or the folder has files
            that no command of this kind writes.
        UserError: The folder cannot be written.
    """
    shown = os.fspath(path)
    with user_paths(path):
        target = Path(os.path.realpath(path))
        _refuse_place(target, shown, field)
        restore(target)
        if os.path.lexists(target):
            if target.is_symlink():
                raise SettingError(field, shown, "is a link that leads back to itself; name a folder")
            if not target.is_dir():
                raise SettingError(field, shown, "is a file; name a folder")
            _refuse_strangers(target, kind, shown, field)
            require_writable(target, path)
        _clean_up(target, kind)
    require_writable(target.parent, path, create=True)
    return target


def replace_folder(path: AnyPath, kind: FolderKind, writers: Mapping[str, Callable[[Path], object]]) -> Path:
    """Write a folder completely or not at all, and replace a former one of its kind.

    Args:
        writers: A function for each file, by its name, that writes the file to a path.

    Raises:
        UserError: See ``check_folder``; or the folder cannot be written.
    """
    target = check_folder(path, kind)
    with user_paths(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _new_folder(target, kind) as new:
            if kind.recognises is None:
                kind.write_marker(new / MARKER)
            for name, write in writers.items():
                write(new / name)
            _put(new, target, kind, os.fspath(path))
    return Path(path)


def restore(path: AnyPath) -> None:
    """Rename a result back after a command was killed between two renames (on a system without the exchange)."""
    target = Path(os.path.realpath(path))
    old = target.parent / leftover_name(target, _OLD)
    if os.path.lexists(target) or not old.is_dir():
        return
    with suppress(OSError), _held(old, without_locks=True) as is_held:
        if is_held:
            os.rename(old, target)


def _refuse_place(target: Path, shown: str, field: str) -> None:
    inside = os.path.join(shown, "result")
    with suppress(FileNotFoundError):
        current = Path(os.path.realpath(os.getcwd()))
        if target == current or target in current.parents:
            remedy = f"is the current folder, or one above it; name a folder inside it, such as {inside}"
            raise SettingError(field, shown, remedy)
    if os.path.ismount(target) or os.fspath(target) in _mount_points():
        raise SettingError(field, shown, f"is a mount point; name a folder inside it, such as {inside}")


def _mount_points() -> set[str]:
    """Mount points of file systems, including bind mounts; empty if the system does not list them."""
    try:
        rows = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return set()
    # The kernel writes blanks and backslashes as octal numbers.
    return {re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), row.split(" ")[4]) for row in rows}


def _refuse_strangers(folder: Path, kind: FolderKind, shown: str, field: str) -> None:
    """Refuse a folder unless it is empty or of the kind."""
    stranger = _stranger(folder, kind)
    if stranger is not None:
        remedy = (
            f"holds {stranger}, which is not a file of a {kind.name}; choose another folder, or move that file away"
        )
        raise SettingError(field, shown, remedy)
    holds_files = any(not is_part_file(name) for name in os.listdir(folder))
    if holds_files and not kind.marks(folder):
        remedy = f"holds files, but no {kind.marker} of a {kind.name}; choose another folder"
        raise SettingError(field, shown, remedy)


def _stranger(folder: Path, kind: FolderKind) -> str | None:
    """The first path in a folder that no command of the kind writes, relative to the folder; None without one."""
    for path in _contents(folder):
        relative = path.relative_to(folder).as_posix()
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            # The part file of another command in this folder has been renamed.
            continue
        is_ours = kind.owns_folder(relative) if stat.S_ISDIR(mode) else kind.owns(relative) and stat.S_ISREG(mode)
        if not is_ours:
            return relative
    return None


def _contents(folder: Path) -> Iterator[Path]:
    """All paths in a folder, sorted by name, each folder before its contents. Links are not followed."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _contents(path)


def _clean_up(target: Path, kind: FolderKind) -> None:
    """Remove the files and folders that killed commands left next to a target and in it."""
    for suffix in (_OLD, f"{_NEW}-*"):
        for leftover in target.parent.glob(leftover_name(target, suffix)):
            with suppress(OSError), _held(leftover) as is_held:
                if is_held:
                    _remove(leftover, kind)
    if target.is_dir():
        for path in _contents(target):
            if is_part_file(path.name):
                remove_if_left(path)


@contextmanager
def _held(folder: Path, without_locks: bool = False) -> Iterator[bool]:
    """A context with the lock of a folder; yields False if a living process has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        # Windows cannot open folders.
        yield without_locks
        return
    try:
        yield hold(descriptor, without_locks)
    finally:
        os.close(descriptor)


@contextmanager
def _new_folder(target: Path, kind: FolderKind) -> Iterator[Path]:
    """A context with an empty folder next to the target; a folder with that name is removed when the block ends."""
    new = target.parent / leftover_name(target, f"{_NEW}-{secrets.token_hex(4)}")
    new.mkdir()
    with _held(new):
        if target.exists():
            shutil.copymode(target, new)
        try:
            yield new
        finally:
            if new.exists():
                _remove(new, kind)


def _put(new: Path, target: Path, kind: FolderKind, shown: str) -> None:
    """Rename the new folder to the target, and a former result to the new folder's name."""
    if not target.exists() or not os.listdir(target):
        os.rename(new, target)
    elif _exchange(new, target):
        try:
            # Another process may have created a file there since the check. No process uses the new name.
            _refuse_strangers(new, kind, shown, "out")
        except SettingError:
            _exchange(new, target)
            raise
    else:
        _swap(new, target, kind, shown)


def _swap(new: Path, target: Path, kind: FolderKind, shown: str) -> None:
    """Exchange the two names by two renames; in between, the former result has the name ``-old``."""
    old = target.parent / leftover_name(target, _OLD)
    with _held(target):
        os.rename(target, old)
        try:
            _refuse_strangers(old, kind, shown, "out")
            os.rename(new, target)
        except BaseException:
            os.rename(old, target)
            raise
        os.rename(old, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False if the system does not support it."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code))


@cache
def _renameat2() -> Callable[..., int] | None:
    """The function ``renameat2`` of the C library; None if the library does not have it."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None


def _remove(folder: Path, kind: FolderKind) -> None:
    """Delete the files of a kind by name, and the folder if it is then empty; other files are never deleted."""
    for path in reversed(list(_contents(folder))):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif kind.owns(path.relative_to(folder).as_posix()):
            path.unlink()
    folder.rmdir()
