"""Matrix instructions of a warp. The layouts are written from the tables of the PTX ISA 9.0, not from the kernels' own twins.

An element number i counts the 16-bit scalars of a lane's registers, the low half of a register first, or its 32-bit sums.
Arrays are ``[warps, ...]``; a lane's registers are ``[warps, 32, registers]``.
"""

from __future__ import annotations

import numpy as np

_LANE = np.arange(32)[:, None]
#: groupID and threadID_in_group of "Matrix Fragments for mma.m16n8k16 with floating point type".
_GROUP, _IN_GROUP = _LANE >> 2, _LANE % 4

_I = np.arange(8)[None, :]
#: "row = groupID for ai where 0 <= i < 2 || 4 <= i < 6, groupID + 8 otherwise"
A_ROW = np.where((_I < 2) | ((4 <= _I) & (_I < 6)), _GROUP, _GROUP + 8)
#: "col = (threadID_in_group * 2) + (i & 0x1) for ai where i < 4, + 8 for ai where i >= 4"
A_COLUMN = _IN_GROUP * 2 + (_I & 1) + np.where(_I < 4, 0, 8)

_I = np.arange(4)[None, :]
#: "row = (threadID_in_group * 2) + (i & 0x1) for bi where i < 2, + 8 for bi where i >= 2"
B_ROW = _IN_GROUP * 2 + (_I & 1) + np.where(_I < 2, 0, 8)
#: "col = groupID"
B_COLUMN = _GROUP + 0 * _I

#: "row = groupID for ci where i < 2, groupID + 8 for ci where i >= 2"
C_ROW = np.where(_I < 2, _GROUP, _GROUP + 8)
#: "col = (threadID_in_group * 2) + (i & 0x1) for ci where i = {0, ..., 3}"
C_COLUMN = _IN_GROUP * 2 + (_I & 1)

#: ldmatrix and movmatrix, "m8n8 with 16-bit elements": thread 0 has the first two elements of row 0, threads 4 to 7 have row 1.
M8N8_ROW = _GROUP + 0 * np.arange(2)[None, :]
M8N8_COLUMN = _IN_GROUP * 2 + np.arange(2)[None, :]


def decoded(bits: np.ndarray, scalar: str) -> np.ndarray:
    """float32 of 16-bit scalars, ``f16`` or ``bf16``."""
    if scalar == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def scalars(registers: np.ndarray) -> np.ndarray:
    """The 16-bit halves of ``[warps, 32, registers]`` words, low ones first."""
    return np.ascontiguousarray(registers).view("<u2")


def mma_m16n8k16(a: np.ndarray, b: np.ndarray, c: np.ndarray, scalar: str) -> np.ndarray:
    """The sums d of each lane, ``[warps, 32, 4]`` of float32, for d = a * b + c.

    Args:
        a: Four words of each lane.
        b: Two words of each lane.
        c: Four float32 of each lane.
        scalar: Type of a and b, ``f16`` or ``bf16``.
    """
    warps = len(a)
    left, right, sums = (np.zeros((warps, *shape)) for shape in ((16, 16), (16, 8), (16, 8)))
    left[:, A_ROW, A_COLUMN] = decoded(scalars(a), scalar)
    right[:, B_ROW, B_COLUMN] = decoded(scalars(b), scalar)
    sums[:, C_ROW, C_COLUMN] = c
    # The hardware's order and rounding of the sum are not specified: here it is rounded once.
    return (left @ right + sums).astype(np.float32)[:, C_ROW, C_COLUMN]


def m8n8(matrices: np.ndarray) -> np.ndarray:
    """The word of each lane, of ``[..., 8, 8]`` matrices of 16-bit scalars: ``[..., 32]``."""
    return np.ascontiguousarray(matrices[..., M8N8_ROW, M8N8_COLUMN]).view("<u4")[..., 0]


def matrix_of(words: np.ndarray) -> np.ndarray:
    """The ``[warps, 8, 8]`` matrix of 16-bit scalars of which each lane has one word of ``[warps, 32]``."""
    matrix = np.zeros((len(words), 8, 8), np.uint16)
    matrix[:, M8N8_ROW, M8N8_COLUMN] = scalars(words[..., None])
    return matrix


def ldmatrix(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """The four words of each lane, ``[warps, 32, 4]``: "threads 0-7 have the addresses of the rows of the first matrix", and so on.

    Args:
        rows: ``[warps, 32, 8]`` of 16-bit scalars, those at the address of each lane.
        transposed: ``.trans``: the matrix is loaded in column-major format.
    """
    matrices = rows.reshape(len(rows), 4, 8, 8)
    return np.moveaxis(m8n8(matrices.swapaxes(-1, -2) if transposed else matrices), 1, -1)
