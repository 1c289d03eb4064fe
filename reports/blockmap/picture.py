"""The picture of a block map within a budget of bytes: selection of the columns, and of shades for requests.

Noise compresses badly. With 100,000 requests over 983 blocks and 2,000 columns a request holds a block for 1.1 columns,
so no pixel predicts the next one:

    twelve shades                  992 kB      deflated at level 7; at 9: 989, by columns 978, filtered 895 and more
    six, three, two shades         787, 588, 475 kB (at level 9)
    one colour a kind, 8 bits      316 kB      at 9: 290, in 7.4 s of CPU time
    one colour a kind, 4 bits      290 kB      in 0.4 s

Shades are therefore dropped before columns, unless a request's band stays visible in fewer columns. The choices, in order:

    1. everything
    2. shades, in half the columns, a quarter, ...    while a request holds a block for _LEAST_COLUMNS of them
    3. one colour a kind, in all columns, in half of them, ...

The first choice that fits is drawn. Every drawn column is a recorded one: nothing is averaged.

Pixels of the PNG have eight bits, or four if the palette allows it. Rows are not filtered (filter 0), because deflate compresses
long runs of one index well. Source: the PNG specification, third edition (W3C, 2025), sections 5 and 11.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...sim.recording.blocks import NO_SEQUENCE, BlockMap
from .palette import indices, palette, plain_palette

#: Bytes of the picture. On a page it is in base64, a third longer.
MOST_BYTES = 300_000
#: Of 2,000 columns on a map 700 pixels wide, fewer than 4 are hardly more than one pixel.
_LEAST_COLUMNS = 4


class Picture(NamedTuple):
    """A drawn block map.

    Attributes:
        png: The picture; its rows are the map's, its columns are ``columns`` of the map.
        columns: int64, ascending and evenly spaced.
        is_shaded: Whether each request has its own shade.
        residency_columns: Columns of the map for which a request holds a block, on average.
    """

    png: bytes
    columns: np.ndarray
    is_shaded: bool
    residency_columns: float


def picture(found: BlockMap, requests: np.ndarray, most_bytes: int = MOST_BYTES) -> Picture:
    """The finest picture of a map within a number of bytes.

    Args:
        requests: int64 [columns, rows], the request that holds each block, or ``NO_SEQUENCE``.
    """
    residency = mean_residency(requests)
    for parts, is_shaded in _choices(found.num_columns, residency):
        columns = middles(found.num_columns, parts)
        kind, request = found.bucket[columns].T, requests[columns].T
        png = paletted_png(indices(kind, request), palette()) if is_shaded else paletted_png(kind, plain_palette())
        if len(png) <= most_bytes:
            break
    return Picture(png, columns, is_shaded, residency)


def mean_residency(requests: np.ndarray) -> float:
    """Consecutive columns in which the same request holds a block, on average; 0 if no block is held."""
    held = requests != NO_SEQUENCE
    begins = held.copy()
    begins[1:] &= requests[1:] != requests[:-1]
    return float(held.sum() / max(begins.sum(), 1))


def middles(columns: int, parts: int) -> np.ndarray:
    """The column at the middle of each of a number of equal parts of the time."""
    return (2 * np.arange(parts) + 1) * columns // (2 * parts)


def _choices(columns: int, residency: float) -> Iterator[tuple[int, bool]]:
    """Choices of (columns, shades), the best first; the last one is a single column."""
    yield columns, True
    halves = [columns >> power for power in range(columns.bit_length())]
    yield from ((parts, True) for parts in halves[1:] if residency * parts >= _LEAST_COLUMNS * columns)
    yield from ((parts, False) for parts in halves)


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
