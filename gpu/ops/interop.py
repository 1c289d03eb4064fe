"""Arrays of other libraries as arrays of numpy or CuPy over the same memory, without a copy.

DLPack carries arrays of JAX, TensorFlow and others; ``__cuda_array_interface__`` those of Numba. Numpy and CuPy read both. CuPy
makes its current stream wait for what the other library has still to write: by the stream of an interface, or by the stream that it
passes to ``__dlpack__``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from ...sim.types.errors import MissingExtra, SettingError, install

#: DLPack's kinds of devices (``DLDeviceType``): memory that a CPU reads, and memory of a CUDA device.
_ON_HOST, _ON_CUDA = (1, 3), (2, 13)


def is_of_torch(array: Any) -> bool:
    """Whether an array is a torch tensor, of any subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_of_cupy(array: Any) -> bool:
    """Whether an array is CuPy's."""
    return type(array).__module__.partition(".")[0] == "cupy"


def cupy() -> ModuleType:
    """CuPy.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        raise MissingExtra(f"arrays on a GPU need CuPy: {install('gpu')}") from error


def adopted(field: str, array: Any, written: bool) -> Any:
    """An array of another library as one of numpy (on the host) or CuPy (on a CUDA device).

    Args:
        field: The caller's name of the array, for errors.
        array: An object with ``__cuda_array_interface__``, or ``__dlpack__`` and ``__dlpack_device__``.
        written: Whether a kernel writes to it.

    Raises:
        SettingError: It has none of these, is on another kind of device, has a dtype that numpy lacks, or is written and is
            not known to be writable.
        MissingExtra: It is on a CUDA device, and CuPy is not installed.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        if written and interface["data"][1]:
            raise SettingError(field, "read-only memory", "is written: must be writable")
        return cupy().asarray(array)
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        remedy = "must be an array of numpy, torch or CuPy, or export __dlpack__ or __cuda_array_interface__"
        raise SettingError(field, type(array).__name__, remedy)
    kind, number = (int(part) for part in array.__dlpack_device__())
    if kind in _ON_CUDA:
        if written:
            # DLPack of a device does not say whether the memory may be written; arrays of JAX may not.
            remedy = "is written: must be an array of torch or CuPy, or export __cuda_array_interface__"
            raise SettingError(field, type(array).__name__, remedy)
        return cupy().from_dlpack(array)
    if kind not in _ON_HOST:
        raise SettingError(field, f"DLPack device ({kind}, {number})", "must be on the CPU or on a CUDA device")
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        remedy = f"numpy cannot take it by DLPack ({error}); pass a torch tensor: torch.from_dlpack(array)"
        raise SettingError(field, type(array).__name__, remedy) from error
