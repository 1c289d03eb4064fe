"""Bytes of a trace file in pieces, for any compression.

A limit on the decompressed size and a limit on the length of a line keep a small file from using all memory.
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

from ...sim.output.files import as_utf8, is_stream
from ...sim.types.errors import TraceError
from ...sim.types.file_head import FileHead
from ...sim.types.signatures import recognised
from . import arrow as pa
from .lines import Block, filled_lines

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ENDINGS = (".gz", ".zst")
#: Size of the pieces that are parsed at a time, and maximum length of a line, in bytes.
PIECE_BYTES, LONGEST_LINE_BYTES = 2**22, 2**26
#: Least number of bytes of a head, if the file has them.
_HEAD_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class TraceFile:
    """An existing trace file.

    Attributes:
        path: Path of the file.
        max_inflated_bytes: Maximum number of bytes that are read from a compressed file.
    """

    path: str | PathLike[str]
    max_inflated_bytes: int

    @property
    def bare_name(self) -> str:
        """The file name without the suffix of the compression."""
        name = Path(as_utf8(self.path)).name
        return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)

    def is_compressed(self) -> bool:
        """Whether the file is decompressed while it is read."""
        with self._opened() as raw:
            return raw.read(4).startswith((_GZIP_MAGIC, _ZSTD_MAGIC))

    def head(self, content: str = "a header and one request a line") -> bytes:
        """The first decompressed bytes, without a byte order mark, for the recognition of the format.

        Args:
            content: What an empty file should have, for the message.

        Raises:
            TraceError: The file is missing, cannot be read, or is empty.
        """
        head = b""
        for piece in self.pieces():
            head += piece
            if len(head) >= _HEAD_BYTES:
                break
        if not head.strip():
            raise TraceError(self.path, None, None, None, f"is empty; give {content}")
        return head

    def form(self, place: str, head: bytes) -> str:
        """The title of the form that a file is recognised to have; empty if it is not recognised.

        Args:
            place: Where the file is given, a key of ``sim.types.signatures.EXPECTED``.
            head: Result of ``head``.

        Raises:
            TraceError: It is a known kind that this place does not read; says what it is and what to run.
        """
        found = recognised(FileHead(head, self.bare_name), place)
        if found is not None and place not in found.read_as:
            raise TraceError(self.path, None, None, None, found.remedy(place))
        return "" if found is None else found.form

    def whole(self) -> bytes:
        """All decompressed bytes."""
        return b"".join(self.pieces())

    def stream(self) -> BinaryIO:
        """All decompressed bytes, as a file object."""
        return io.BufferedReader(_Pieces(self.pieces()))

    def pieces(self) -> Iterator[bytes]:
        """The decompressed bytes in pieces of at most ``PIECE_BYTES``, without a byte order mark.

        Raises:
            TraceError: The file cannot be read, is damaged, or exceeds ``max_inflated_bytes``.
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
        """The error for a file that exceeds ``max_inflated_bytes``."""
        limit = f"{self.max_inflated_bytes:,} bytes"
        remedy = f"inflates to more than {limit}; raise max_inflated_bytes if it should"
        return TraceError(self.path, None, None, None, remedy)

    def blocks(self) -> Iterator[Block]:
        """The lines in blocks of a few megabytes.

        Raises:
            TraceError: As ``pieces``; or a line is too long, and the error names it.
        """
        rest, first_line, pieces = b"", 1, self.pieces()
        following = next(pieces, b"")
        while following:
            data, following = rest + following, next(pieces, b"")
            end = data.rfind(b"\n") + 1
            if not end and len(data) > LONGEST_LINE_BYTES:
                remedy = f"is longer than {LONGEST_LINE_BYTES:,} bytes; give one request a line"
                raise TraceError(self.path, first_line, None, None, remedy)
            # The last line may have no end; it stays with the lines before it.
            end = end if following else len(data)
            if end:
                block, first_line = filled_lines(data[:end], first_line)
                if len(block):
                    yield block
            rest = data[end:]


class _Pieces(io.RawIOBase):
    """An iterator over byte pieces as a raw file."""

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
