"""Paletted PNG pictures, small enough to embed in a page.

Pixels have eight bits, or four if the palette allows it. Rows are not filtered (filter 0), because deflate compresses
long runs of one index well. Source: the PNG specification, third edition (W3C, 2025), sections 5 and 11.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTED = 3
#: On noise, level 9 saves another 5 % in up to fifteen times the time.
_DEFLATE_LEVEL = 7


def paletted_png(indices: np.ndarray, palette: Sequence[str]) -> bytes:
    """A picture of uint8 [height, width] indices into a palette of ``#rrggbb``."""
    height, width = indices.shape
    bits = 4 if len(palette) <= 16 else 8
    head = struct.pack(">IIBBBBB", width, height, bits, _PALETTED, 0, 0, 0)
    colours = b"".join(bytes.fromhex(colour[1:]) for colour in palette)
    # Every row starts with the number of its filter.
    rows = np.pad(indices if bits == 8 else _pairs(indices), ((0, 0), (1, 0)))
    content = zlib.compress(rows.tobytes(), _DEFLATE_LEVEL)
    chunks = ((b"IHDR", head), (b"PLTE", colours), (b"IDAT", content), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _pairs(indices: np.ndarray) -> np.ndarray:
    """Two pixels per byte, the left one in the upper half."""
    even = np.pad(indices, ((0, 0), (0, indices.shape[1] % 2)))
    return even[:, ::2] << 4 | even[:, 1::2]


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def data_uri(png: bytes) -> str:
    """The picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
