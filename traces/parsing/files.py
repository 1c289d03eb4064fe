"""Bytes of a trace file, a piece at a time, whatever it is compressed with.

A compressed file is read through a limit on what it inflates to, and a line through a limit of its own, so that a
small file cannot ask for all of the memory.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa

from ...sim.output.files import as_utf8, is_stream
from ...sim.types.errors import TraceError
from .lines import Block, filled_lines

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP_MAGIC, _ZSTD_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ENDINGS = (".gz", ".zst")
#: Bytes that are parsed at a time, and the longest line.
PIECE_BYTES, LONGEST_LINE_BYTES = 2**22, 2**26


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file that is there.

    Attributes:
        path: Where.
        max_inflated_bytes: Of a compressed file, the most that is read.
    """

    path: str | PathLike[str]
    max_inflated_bytes: int

    @property
    def bare_name(self) -> str:
        """Its name without the ending of the compression."""
        name = Path(as_utf8(self.path)).name
        return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)

    def is_compressed(self) -> bool:
        """Whether it is inflated as it is read."""
        with self._opened() as raw:
            return raw.read(4).startswith((_GZIP_MAGIC, _ZSTD_MAGIC))

    def head(self) -> bytes:
        """The first bytes, inflated, without a byte order mark: enough to see what it is.

        Raises:
            TraceError: It is missing, cannot be read, or is empty.
        """
        head = next(self.pieces(), b"")
        if not head.strip():
            raise TraceError(self.path, None, None, None, "is empty; give a header and one request a line")
        return head

    def whole(self) -> bytes:
        """Everything, inflated."""
        return b"".join(self.pieces())

    def stream(self) -> BinaryIO:
        """Everything, inflated, as a file."""
        return io.BufferedReader(_Pieces(self.pieces()))

    def pieces(self) -> Iterator[bytes]:
        """The inflated bytes in pieces of at most ``PIECE_BYTES``, without a byte order mark.

        Raises:
            TraceError: It cannot be read, is damaged, or inflates to more than it may.
        """
        try:
            with self._opened() as raw:
                magic = raw.read(4)
                raw.seek(0)
                start = _BYTE_ORDER_MARK
                for piece in self._inflated(raw, magic):
                    yield piece.removeprefix(start)
                    start = b""
        except FileNotFoundError:
            raise TraceError(self.path, None, None, None, "no such file; check the path") from None
        except OSError as error:
            remedy = f"cannot be read ({error.strerror}); give a trace file"
            raise TraceError(self.path, None, None, None, remedy) from None

    def _opened(self) -> BinaryIO:
        # Checked first: opening a pipe without a writer would hang.
        if is_stream(self.path):
            remedy = "is a pipe or a device, and a trace is read more than once; save it to a file and give that"
            raise TraceError(self.path, None, None, None, remedy)
        return open(self.path, "rb")

    def _inflated(self, raw: BinaryIO, magic: bytes) -> Iterator[bytes]:
        if magic.startswith(_ZIP_MAGIC):
            raise TraceError(self.path, None, None, None, "is a zip archive; unpack it and give the trace in it")
        if magic.startswith(_GZIP_MAGIC):
            return self._limited(gzip.GzipFile(fileobj=raw), "gzip")
        if magic.startswith(_ZSTD_MAGIC):
            return self._limited(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"), "zstd")
        return iter(lambda: raw.read(PIECE_BYTES), b"")

    def _limited(self, inflating: gzip.GzipFile | pa.CompressedInputStream, kind: str) -> Iterator[bytes]:
        left = self.max_inflated_bytes
        while True:
            try:
                piece = inflating.read(PIECE_BYTES)
            except (OSError, EOFError, zlib.error):
                raise TraceError(self.path, None, None, None, f"is a damaged {kind} file; fetch it again") from None
            if not piece:
                return
            left -= len(piece)
            if left < 0:
                raise self.too_large()
            yield piece

    def too_large(self) -> TraceError:
        """The error of a file that inflates to more than it may."""
        limit = f"{self.max_inflated_bytes:,} bytes"
        remedy = f"inflates to more than {limit}; raise max_inflated_bytes if it should"
        return TraceError(self.path, None, None, None, remedy)

    def blocks(self) -> Iterator[Block]:
        """The lines, a few megabytes at a time.

        Raises:
            TraceError: As ``pieces``; or names a line that is too long.
        """
        rest, first_line = b"", 1
        for piece in self.pieces():
            data = rest + piece
            end = data.rfind(b"\n") + 1
            if not end and len(data) > LONGEST_LINE_BYTES:
                remedy = f"is longer than {LONGEST_LINE_BYTES:,} bytes; give one request a line"
                raise TraceError(self.path, first_line, None, None, remedy)
            if end:
                block, first_line = filled_lines(data[:end], first_line)
                if len(block):
                    yield block
            rest = data[end:]
        if rest:
            block, _ = filled_lines(rest, first_line)
            if len(block):
                yield block


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a raw file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See ``io.RawIOBase``; 0 when there are no more pieces."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        view = memoryview(buffer)
        size = min(len(view), len(self._rest))
        view[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
