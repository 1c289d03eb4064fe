"""The lines of a text file, numbered as in an editor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike

import numpy as np

from ...sim.types.errors import TraceError

_BLANK_LINE = re.compile(rb"\n[ \t\v\f]*\n")


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole lines of a text, without the blank ones.

    Attributes:
        data: The lines; each ends in ``\\n`` but for the last.
        lines: int64 [lines], the line number of each, as in an editor.
    """

    data: bytes
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.lines)

    def texts(self) -> list[bytes]:
        """The lines, one string each."""
        return self.data.split(b"\n")

    def part(self, start: int, end: int | None = None) -> Block:
        """The lines from ``start`` up to ``end``."""
        # What comes after them is not split.
        texts = self.data.split(b"\n", start if end is None else end)
        return Block(b"\n".join(texts[start:end]), self.lines[start:end])

    def where(self, keep: np.ndarray) -> Block:
        """The lines for which ``keep`` (bool [lines]) is true."""
        kept = [text for text, well in zip(self.texts(), keep.tolist(), strict=True) if well]
        return Block(b"\n".join(kept), self.lines[keep])

    def check_text(self, path: str | PathLike[str]) -> None:
        """Refuse bytes that are not text.

        Raises:
            TraceError: A line is not UTF-8; names the first one.
        """
        if self.data.isascii():
            return
        try:
            self.data.decode()
        except UnicodeDecodeError as error:
            line = int(self.lines[self.data.count(b"\n", 0, error.start)])
            raise TraceError(path, line, None, None, "is not UTF-8 text; save the file as UTF-8") from None


def filled_lines(data: bytes, first_line: int = 1) -> tuple[Block, int]:
    """``data`` without its blank lines, and the number of the line after it.

    Line ends become ``\\n``, so that rows and lines match in files from any operating system.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    text = data.removesuffix(b"\n")
    if _BLANK_LINE.search(b"\n%b\n" % text) is None:
        lines_before = text.count(b"\n")
        block = Block(text, np.arange(first_line, first_line + lines_before + 1))
        return block, first_line + lines_before + data.endswith(b"\n")
    lines = data.split(b"\n")
    filled = [index for index, line in enumerate(lines) if line.strip()]
    if len(filled) < len(lines):
        data = b"\n".join([lines[index] for index in filled])
    # The text after the last line end is not a line yet.
    return Block(data, np.array(filled, dtype=np.int64) + first_line), first_line + len(lines) - 1
