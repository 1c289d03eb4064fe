"""Arrays of any library in the form that a kernel needs: address, shape, dtype and device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ...sim.types.errors import SettingError
from .interop import adopted, is_of_cupy, is_of_torch


class Array(NamedTuple):
    """A contiguous array.

    Attributes:
        field: The caller's name of the array, for errors.
        pointer: Its address.
        shape: Its shape.
        dtype: Its element type by the name that all three libraries use: ``float16``, ``bfloat16``, ``int32``, ...
        nbytes: Its size in bytes.
        device: ``cpu``, or ``cuda:`` and a number.
        owner: The array itself, of numpy, torch or CuPy, which keeps the memory alive.
        written: Whether kernels write to it.
    """

    field: str
    pointer: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    owner: Any
    written: bool = False

    def expect(self, shape: tuple[int | None, ...], *dtypes: str) -> None:
        """Check shape (``None`` matches any extent) and dtype.

        Raises:
            SettingError: The shape or dtype differs; names the field, its value and the expected one.
        """
        matches = [wanted in (None, extent) for wanted, extent in zip(shape, self.shape, strict=False)]
        if len(shape) != len(self.shape) or not all(matches):
            wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
            raise SettingError(f"{self.field}.shape", self.shape, f"must be ({wanted})")
        if self.dtype not in dtypes:
            raise SettingError(f"{self.field}.dtype", self.dtype, f"must be {' or '.join(dtypes)}")


def view(field: str, array: Any, written: bool = False) -> Array:
    """The array's address, shape, dtype and device, without a copy.

    Args:
        field: The caller's name of the array, for errors.
        array: An array of numpy, torch or CuPy, or of a library with an interface of :mod:`interop`.
        written: Whether kernels write to it.

    Raises:
        SettingError: ``array`` is not an array, is not contiguous, or is read-only and written.
    """
    if isinstance(array, np.ndarray):
        place = array.ctypes.data, array.shape, array.dtype.name, array.nbytes
        found = Array(field, *place, "cpu", array, written)
        contiguous = array.flags.c_contiguous
        if written and not array.flags.writeable:
            raise SettingError(field, "read-only memory", "is written: must be writable")
    elif is_of_torch(array):
        place = array.data_ptr(), tuple(array.shape), _dtype_of_torch(array.dtype), array.nbytes
        found = Array(field, *place, _device_of_torch(array.device), array, written)
        contiguous = array.is_contiguous()
    elif is_of_cupy(array):
        place = array.data.ptr, array.shape, array.dtype.name, array.nbytes
        found = Array(field, *place, f"cuda:{array.device.id}", array, written)
        contiguous = array.flags.c_contiguous
    else:
        return view(field, adopted(field, array, written), written)
    if not contiguous:
        raise SettingError(field, f"strides of {found.shape}", "must be contiguous (C order)")
    return found


@functools.cache
def _dtype_of_torch(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _device_of_torch(device: Any) -> str:
    return str(device)


def recognise(like: Array) -> Callable[[Any], int | None]:
    """A cheap function that gives the address of an array with the type, shape, dtype, device and layout of ``like``.

    The function returns None for any other array.
    """
    owner, written = like.owner, like.written
    kind, shape, dtype = type(owner), owner.shape, owner.dtype

    def of_numpy(array: Any) -> int | None:
        same = type(array) is kind and array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
        return array.ctypes.data if same and (array.flags.writeable or not written) else None

    def of_torch(array: Any) -> int | None:
        same = type(array) is kind and array.shape == shape and array.dtype is dtype and array.device == device
        return array.data_ptr() if same and array.is_contiguous() else None

    def of_cupy(array: Any) -> int | None:
        same = type(array) is kind and array.shape == shape and array.dtype == dtype and array.device.id == device.id
        return array.data.ptr if same and array.flags.c_contiguous else None

    if isinstance(owner, np.ndarray):
        return of_numpy
    device = owner.device
    return of_torch if is_of_torch(owner) else of_cupy


def views(*written: str, **arrays: Any) -> tuple[Array, ...]:
    """:func:`view` of each array, of which kernels write to those named in ``written``; all must be on one device.

    Raises:
        SettingError: As :func:`view`; or the devices differ.
    """
    found = tuple(view(field, array, field in written) for field, array in arrays.items())
    for other in found[1:]:
        if other.device != found[0].device:
            raise SettingError(other.field, other.device, f"must be on {found[0].device}, as {found[0].field} is")
    return found


def empty(field: str, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
    """A new array of the library and on the device of ``like``."""
    if isinstance(like.owner, np.ndarray):
        made = np.empty(shape, like.owner.dtype if dtype == like.dtype else dtype)
    elif is_of_torch(like.owner):
        torch = importlib.import_module("torch")
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=like.owner.device)
    else:
        with like.owner.device:
            made = importlib.import_module("cupy").empty(shape, like.owner.dtype if dtype == like.dtype else dtype)
    return view(field, made)


def zeros(field: str, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
    """:func:`empty` filled with zeros, on the current stream of its library."""
    made = empty(field, shape, dtype, like)
    if isinstance(made.owner, np.ndarray):
        made.owner.fill(0)
    elif is_of_torch(made.owner):
        made.owner.zero_()
    else:
        with made.owner.device:
            made.owner.fill(0)
    return made


def of_stream(like: Array, others: Iterable[Array]) -> Array:
    """The array of a call that decides on which library's current stream its kernels run: one of torch, or else ``like``."""
    return next((array for array in others if is_of_torch(array.owner)), like)


def from_host(field: str, values: np.ndarray, like: Array) -> Array:
    """``values`` in a new array of the library and on the device of ``like``."""
    if isinstance(like.owner, np.ndarray):
        made = values
    elif is_of_torch(like.owner):
        made = importlib.import_module("torch").from_numpy(values).to(like.owner.device)
    else:
        with like.owner.device:
            made = importlib.import_module("cupy").asarray(values)
    return view(field, made)


def on_host(array: Array) -> np.ndarray:
    """The values of an integer array; waits for the device."""
    if hasattr(array.owner, "get"):
        return array.owner.get()
    return np.asarray(array.owner.cpu() if hasattr(array.owner, "cpu") else array.owner)
