"""Columns of long runs in temporary files: what a run has recorded, and what follows from it, need not stay in memory.

Within ``spilling(folder)`` a long column is written to a file of that folder and read back as a read-only array over the
file:

    with spilling(folder):
        column = column_of(parts)        parts of any length, one after the other
        for part in slices(len(column)):
            ... column[part] ...         the pages of the parts before have left the memory of the process

The file has no name where the system allows that, and else is removed when it is closed, so nothing is left behind, however
the process ends. Its pages are in the system's page cache as long as there is room for them. Without ``spilling``, and for
short columns, all is in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from weakref import WeakSet

import numpy as np

from .errors import user_paths

_folder: ContextVar[Path | None] = ContextVar("folder of spilled columns", default=None)
#: Values of a column that stay in memory.
_SHORT = 1 << 17
#: Values that are computed or read at a time.
CHUNK = 1 << 18
#: All mapped files.
_maps: WeakSet[mmap.mmap] = WeakSet()


@contextmanager
def spilling(folder: Path | None) -> Iterator[None]:
    """Keep long columns that are made in this context in temporary files of a folder, or of the nearest one above it that
    exists; in memory for None."""
    while folder is not None and not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class Column:
    """Values of one type, appended in parts and read as one array.

    Args:
        dtype: Their type.

    Raises:
        UserError: The folder of ``spilling`` has no room.
    """

    def __init__(self, dtype: np.dtype | type = np.int64) -> None:
        self._dtype = np.dtype(dtype)
        self._folder = _folder.get()
        #: Parts in memory, none of them empty; once there is a file it has all values, and the last one is kept beside it.
        self._parts: list[np.ndarray] = []
        self._length = 0
        self._last: int | None = None
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return self._length

    def append(self, values: np.ndarray) -> None:
        """Append a copy of values."""
        if not len(values):
            return
        self._length += len(values)
        if self._file is None and (self._folder is None or self._length <= _SHORT):
            self._parts.append(np.array(values, dtype=self._dtype))
            return
        self._last = int(values[-1])
        with user_paths(self._folder or Path()):
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115
            for part in (*self._parts, values):
                self._file.write(np.ascontiguousarray(part, dtype=self._dtype).data)
        self._parts = []

    def last(self) -> int | None:
        """The last value; None without values."""
        return int(self._parts[-1][-1]) if self._parts else self._last

    def array(self) -> np.ndarray:
        """All values so far; to be read only."""
        if self._file is not None:
            with user_paths(self._folder or Path()):
                self._file.flush()
                mapped = mmap.mmap(self._file.fileno(), self._length * self._dtype.itemsize, access=mmap.ACCESS_READ)
            _maps.add(mapped)
            return np.frombuffer(mapped, dtype=self._dtype)
        if len(self._parts) != 1:
            self._parts = [np.concatenate([np.zeros(0, dtype=self._dtype), *self._parts])]
        return self._parts[0]

    def parts(self) -> Iterator[np.ndarray]:
        """All values so far in parts, without a copy; to be read only."""
        if self._file is None:
            yield from self._parts
        else:
            values = self.array()
            yield from (values[part] for part in slices(len(values)))


class Records:
    """Int64 columns that are appended together, a number for each record.

    Args:
        fields: How many columns.
    """

    def __init__(self, fields: int) -> None:
        self._fields = fields
        # Made with the first records: most tables of most runs have none.
        self._columns: list[Column] = []

    def __len__(self) -> int:
        return len(self._columns[0]) if self._columns else 0

    def parts(self) -> Iterator[tuple[np.ndarray, ...]]:
        """All records so far in parts, a column for each field, without a copy; to be read only."""
        return zip(*(column.parts() for column in self._columns), strict=True)

    def extend(self, records: np.ndarray) -> None:
        """Append copies of records, int64 [n, fields]."""
        if not len(records):
            return
        self._columns = self._columns or [Column() for _ in range(self._fields)]
        for column, values in zip(self._columns, records.T, strict=True):
            column.append(values)

    def arrays(self) -> list[np.ndarray]:
        """Each column as ``Column.array``."""
        return [column.array() for column in self._columns] or [np.zeros(0, dtype=np.int64)] * self._fields

    def last(self, field: int) -> int | None:
        """The value of a column in the last record; None without records."""
        return self._columns[field].last() if self._columns else None


def columns_of(types: Iterable[np.dtype | type], parts: Iterable[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Columns of these types from parts of all of them."""
    columns = [Column(dtype) for dtype in types]
    for part in parts:
        for column, values in zip(columns, part, strict=True):
            column.append(values)
    return [column.array() for column in columns]


def column_of(parts: Iterable[np.ndarray], dtype: np.dtype | type = np.int64) -> np.ndarray:
    """A column from its parts."""
    return columns_of([dtype], ((part,) for part in parts))[0]


def column_by_slices(length: int, compute: Callable[[slice], np.ndarray]) -> np.ndarray:
    """An int64 column from what ``compute`` returns for each of its slices."""
    if 0 < length <= _SHORT:
        # One slice, in memory: most columns are short where there are many replicas.
        return np.array(compute(slice(0, length)), dtype=np.int64)
    return column_of(compute(part) for part in slices(length))


def slices(length: int, size: int | None = None) -> Iterator[slice]:
    """Slices of ``size`` (``CHUNK``) values of a long column, one after the other; what was read of files before each leaves
    the memory of the process."""
    size = size or CHUNK
    for start in range(0, length, size):
        release()
        yield slice(start, min(length, start + size))
    release()


def release() -> None:
    """Let go of the pages of all files that the process has read; they are read again when they are needed."""
    if _maps and hasattr(mmap, "MADV_DONTNEED"):
        for mapped in list(_maps):
            mapped.madvise(mmap.MADV_DONTNEED)
