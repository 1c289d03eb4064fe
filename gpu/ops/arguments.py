"""Arguments of a kernel in memory, in the form that CUDA's driver and the CPU build take them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from .arrays import Array

#: A kernel argument: an array, or a numpy scalar of the parameter's size.
Argument = Array | np.generic
Extent = tuple[int, int, int]
_CELL_BYTES = 8


class Arguments:
    """Values of a kernel's parameters, 8 bytes each, and an array of their addresses.

    A launch copies the values, so they may change after it.

    Attributes:
        address: Address of the array of addresses: ``kernelParams`` of ``cuLaunchKernel``.
    """

    def __init__(self, values: Sequence[Argument]) -> None:
        self._cells = (ctypes.c_uint64 * len(values))()
        first = ctypes.addressof(self._cells)
        addresses = range(first, first + _CELL_BYTES * len(values), _CELL_BYTES)
        for number, value in enumerate(values):
            if isinstance(value, Array):
                self._cells[number] = value.pointer
            else:
                ctypes.memmove(addresses[number], value.tobytes(), value.itemsize)
        self._addresses = (ctypes.c_void_p * len(values))(*addresses)
        self.address = ctypes.addressof(self._addresses)

    def place(self, number: int, pointer: int) -> None:
        """Replace the value of a parameter that is a pointer; ``number`` counts from 0."""
        self._cells[number] = pointer
