"""Paletted PNG pictures, small enough to lie inside a page.

Eight bits a pixel, rows as they are (filter 0): long runs of one index, which deflate makes short. Source: the
PNG specification, third edition (W3C, 2025), sections 5 and 11.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EIGHT_BITS, _PALETTED = 8, 3


def paletted_png(indices: np.ndarray, palette: Sequence[str]) -> bytes:
    """A picture of uint8 [height, width] indices into a palette of ``#rrggbb``."""
    height, width = indices.shape
    head = struct.pack(">IIBBBBB", width, height, _EIGHT_BITS, _PALETTED, 0, 0, 0)
    colours = b"".join(bytes.fromhex(colour[1:]) for colour in palette)
    # Every row begins with the number of its filter.
    rows = np.zeros((height, width + 1), dtype=np.uint8)
    rows[:, 1:] = indices
    chunks = ((b"IHDR", head), (b"PLTE", colours), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def data_uri(png: bytes) -> str:
    """The picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
