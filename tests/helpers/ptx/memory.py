"""Memory of the machine: shared memory of a block, and the arrays of a launch.

Shared memory holds NaNs at first. A copy by cp.async reads its source when it is issued and arrives when the thread waits for it.
Until then its 16 bytes are in flight, and an access to them is a fault.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from fragmeter.gpu.ops.arrays import Array

from .order import Orders

#: First address of the block's dynamic shared memory in the shared window: 0 would hide a null pointer.
SHARED_BASE = 1024
#: Generic address of the shared window; the low half is not 0, so that a generic address is no shared address.
SHARED_WINDOW = 0x7F5C_3000_0000
_CHUNK = 16


class Fault(Exception):
    """What a GPU traps, or leaves undefined.

    Attributes:
        why: The reason.
        place: Number of the first access among those that were made together.
    """

    def __init__(self, why: str, place: int = 0) -> None:
        super().__init__(why)
        self.why, self.place = why, place


def _require(allowed: np.ndarray, why: str) -> None:
    if not allowed.all():
        raise Fault(why, int(np.argmin(allowed)))


class Shared:
    """Dynamic shared memory of a block.

    Args:
        size: In bytes.
    """

    def __init__(self, size: int) -> None:
        self._bytes = np.full(-(-size // _CHUNK) * _CHUNK, 0xFF, np.uint8)
        self._size = size
        self._in_flight = np.zeros(len(self._bytes) // _CHUNK, np.bool_)

    def load(
        self, addresses: np.ndarray, count: int, item: type[np.generic], threads: np.ndarray | None = None
    ) -> np.ndarray:
        """``[accesses, count]`` items at addresses of the shared window."""
        return self._items(item)[self._indices(addresses, count, item)]

    def store(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """Write ``[accesses, count]`` items, one access of each of the threads."""
        item = values.dtype.type
        self._items(item)[self._indices(addresses, values.shape[1], item)] = values

    def issue(self, addresses: np.ndarray) -> np.ndarray:
        """Begin copies of 16 bytes; returns the numbers of their chunks, for :meth:`arrive`."""
        chunks = self._indices(addresses, 1, _Chunk)[:, 0]
        self._in_flight[chunks] = True
        return chunks

    def arrive(self, chunks: np.ndarray, data: np.ndarray) -> None:
        """End copies of ``[copies, 4]`` words."""
        self._items(np.uint32).reshape(-1, 4)[chunks] = data
        self._in_flight[chunks] = False

    def _items(self, item: type[np.generic]) -> np.ndarray:
        return self._bytes.view(item)

    def _indices(self, addresses: np.ndarray, count: int, item: type[np.generic]) -> np.ndarray:
        size = np.dtype(item).itemsize
        offsets = addresses.astype(np.int64) - SHARED_BASE
        _require((offsets >= 0) & (offsets + size * count <= self._size), "an access outside the block's shared memory")
        _require(offsets % (size * count) == 0, f"an access at an address that is no multiple of {size * count}")
        _require(~self._in_flight[offsets // _CHUNK], "an access to bytes that cp.async has in flight")
        return (offsets // size)[:, None] + np.arange(count)


_Chunk = np.dtype((np.void, _CHUNK))


class Global:
    """The arrays of a launch, at their own addresses."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._ranges = [(one.pointer, one.nbytes) for one in arrays if one.nbytes]
        self._bytes = [
            np.frombuffer((ctypes.c_uint8 * nbytes).from_address(first), np.uint8) for first, nbytes in self._ranges
        ]

    def begin(self, threads: int) -> Orders:
        """A launch of blocks of so many threads begins; the result follows which writes are visible to which block."""
        self._orders = Orders(lambda place: self._bytes[place], threads)
        return self._orders

    def load(
        self, addresses: np.ndarray, count: int, item: type[np.generic], threads: np.ndarray | None = None
    ) -> np.ndarray:
        """``[accesses, count]`` items; with ``threads``, each may only read what is visible to it."""
        found = np.empty((len(addresses), count), item)
        for place, some in self._split(addresses, count, item):
            indices = self._indices(place, addresses[some], count, item)
            if threads is not None:
                allowed = self._orders.allows(place, _bytes_of(indices, item), threads[some])
                _require(allowed, "a load of what another block has written, without a fence before it")
            found[some] = self._items(place, item)[indices]
        return found

    def store(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """Write ``[accesses, count]`` items, one access of each of the threads."""
        count, item = values.shape[1], values.dtype.type
        for place, some in self._split(addresses, count, item):
            indices = self._indices(place, addresses[some], count, item)
            self._orders.note(place, _bytes_of(indices, item), threads[some])
            self._items(place, item)[indices] = values[some]

    def fence(self, threads: np.ndarray) -> None:
        """``membar.gl`` of these threads."""
        self._orders.fence(threads)

    def increment(self, addresses: np.ndarray, highest: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Words before their increments by these threads, one after the other; from ``highest`` on a word becomes 0."""
        self._orders.count(threads)
        found = np.empty(len(addresses), np.uint32)
        for number, limit in enumerate(highest):
            ((place, _),) = self._split(addresses[number : number + 1], 1, np.uint32)
            index = self._indices(place, addresses[number : number + 1], 1, np.uint32)
            found[number] = before = self._items(place, np.uint32)[index][0, 0]
            self._items(place, np.uint32)[index] = 0 if before >= limit else before + 1
        return found

    def _split(self, addresses: np.ndarray, count: int, item: type[np.generic]) -> list[tuple[int, slice | np.ndarray]]:
        """Number of an array and the accesses to it."""
        size = np.dtype(item).itemsize * count
        if not len(addresses):
            return []
        _require(addresses % np.uint64(size) == 0, f"an access at an address that is no multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for place, (first, nbytes) in enumerate(self._ranges):
            if first <= low and high <= first + nbytes:
                return [(place, slice(None))]
        owners = np.full(len(addresses), -1)
        for place, (first, nbytes) in enumerate(self._ranges):
            inside = (addresses >= np.uint64(first)) & (addresses + np.uint64(size) <= np.uint64(first + nbytes))
            owners[inside] = place
        _require(owners >= 0, f"an access of {size} bytes outside every array of the launch")
        return [(int(place), np.flatnonzero(owners == place)) for place in np.unique(owners)]

    def _items(self, place: int, item: type[np.generic]) -> np.ndarray:
        size = np.dtype(item).itemsize
        return self._bytes[place][: self._ranges[place][1] // size * size].view(item)

    def _indices(self, place: int, addresses: np.ndarray, count: int, item: type[np.generic]) -> np.ndarray:
        offsets = (addresses - np.uint64(self._ranges[place][0])).astype(np.int64)
        return (offsets // np.dtype(item).itemsize)[:, None] + np.arange(count)


def _bytes_of(indices: np.ndarray, item: type[np.generic]) -> np.ndarray:
    """Numbers of the bytes of ``[accesses, count]`` items: ``[accesses, bytes]``."""
    size = np.dtype(item).itemsize
    return (indices[..., None] * size + np.arange(size)).reshape(len(indices), -1)
