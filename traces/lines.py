"""The lines of a text file, as an editor counts them."""

from __future__ import annotations

from os import PathLike

import numpy as np

from ..sim.errors import TraceError

def filled_lines(path: str | PathLike[str], data: bytes) -> tuple[bytes, np.ndarray]:
    """``data`` without its blank lines, and the number of each line that is left (int64 [lines], from 1).

    Line ends become ``\\n``, so that rows and lines match whoever wrote the file.

    Raises:
        TraceError: the file is no UTF-8 text.
    """
    _check_text(path, data)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = data.split(b"\n")
    filled = [index for index, line in enumerate(lines) if line.strip()]
    return b"\n".join([lines[index] for index in filled]), np.array(filled, dtype=np.int64) + 1


def _check_text(path: str | PathLike[str], data: bytes) -> None:
    if data.isascii():
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(path, line, None, None, "is no UTF-8 text; save the file as UTF-8") from None
