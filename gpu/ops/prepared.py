"""Calls that are checked and prepared once a step, and launched with the tensors of every layer.

All layers of a step have the same block tables, lengths, shapes and dtypes. Most of the host's time of a call goes into
checks, the choice of the split, the kernel and its grid, and buffers of partial results. :class:`Prepared` holds them. The
first arguments of an operation are the tensors of a layer: a launch compares their shape, dtype, device and layout with
those that were checked, and writes their addresses into the kernels' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...sim.types.errors import SettingError
from .arrays import Array, recognise, view
from .launching import Launch

#: Operations that a step runs in every layer.
Operation = Literal[
    "decode_attention", "prefill_attention", "contiguous_attention", "latent_attention", "reshape_and_cache"
]
#: A checked call of an operation, which takes the tensors of any layer, and over caches of fp8 their scales after them.
LayerCall = Callable[..., None]
#: Bytes of the kernels' loads; the address of each of the first tensors of a layer is a multiple. Scales may follow them.
ALIGNMENT, LOADED_TENSORS = 16, 4


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation.

    Attributes:
        operation: Its function is that of :mod:`paged_attention`, :mod:`prefill`, :mod:`contiguous`, :mod:`latent_attention` or
            :mod:`cache`; shapes and dtypes are its.
        layer: The tensors of a layer: ``out``, ``query`` and the caches, or ``key``, ``value`` and the caches.
        step: The arguments of the function that follow them, in its order; all layers of a step have the same.
        scales: ``k_scale`` and ``v_scale`` of caches of fp8; none without.
    """

    operation: Operation
    layer: tuple[Any, ...]
    step: tuple[Any, ...]
    scales: tuple[Any, ...] = ()

    @property
    def named_scales(self) -> dict[str, Any]:
        """The scales by name."""
        return dict(zip(("k_scale", "v_scale"), self.scales, strict=False))

    def caches(self) -> Iterator[tuple[Any, Any]]:
        """The caches of keys and values, each with its scale, None without."""
        return zip(self.layer[2:], self.scales or (None, None), strict=True)


class Prepared:
    """A call of one operation with its checks done. Calling it with the tensors of a layer launches the kernels.

    It is valid for the step that it was prepared for: block tables, lengths, slots and sizes are its own. It must be launched
    by the thread that prepared it, on one stream at a time, since all launches share the buffers of partial results.

    Args:
        arrays: The tensors of a layer that it was prepared with, in the order in which a call takes them.
        launches: One per kernel; each takes the addresses of ``arrays``.
        held: Arrays that the kernels read or write besides, kept alive.
    """

    __slots__ = ("_arrays", "_held", "_launches", "_pointers_of")

    def __init__(self, arrays: Sequence[Array], launches: Sequence[Launch], held: Sequence[Array]) -> None:
        self._arrays, self._launches, self._held = tuple(arrays), tuple(launches), tuple(held)
        self._pointers_of: tuple[Callable[[Any], int | None], ...] = ()

    def launch(self) -> None:
        """Launch with the tensors that it was prepared with; only before any other launch."""
        for launch in self._launches:
            launch()

    def __call__(self, *arrays: Any) -> None:
        """Launch with the tensors of a layer.

        Raises:
            SettingError: A tensor has another shape, dtype, device or layout than the one that the call was prepared with.
        """
        if not self._pointers_of:
            self._pointers_of = tuple(recognise(array) for array in self._arrays)
        found = [pointer_of(array) for pointer_of, array in zip(self._pointers_of, arrays, strict=True)]
        pointers = [pointer for pointer in found if pointer is not None]
        if len(pointers) < len(found) or any(pointer % ALIGNMENT for pointer in pointers[:LOADED_TENSORS]):
            pointers = [_checked(wanted, array) for wanted, array in zip(self._arrays, arrays, strict=True)]
            for tensor, pointer in zip(self._arrays[:LOADED_TENSORS], pointers, strict=False):
                require_aligned(tensor._replace(pointer=pointer))
        for launch in self._launches:
            launch(pointers)


def _checked(wanted: Array, array: Any) -> int:
    """The address of an array that must be as ``wanted``.

    Raises:
        SettingError: It is not; names the field, its value and the expected one.
    """
    found = view(wanted.field, array, wanted.written)
    for attribute in ("shape", "dtype", "device"):
        value, expected = getattr(found, attribute), getattr(wanted, attribute)
        if value != expected:
            remedy = f"must be {expected}, for which the call was prepared; prepare one for this step"
            raise SettingError(f"{wanted.field}.{attribute}", value, remedy)
    return found.pointer


def require_aligned(array: Array) -> None:
    """Check that an array begins where the kernels can load it.

    Raises:
        SettingError: Its address is not a multiple of :data:`ALIGNMENT` bytes.
    """
    if array.pointer % ALIGNMENT:
        raise SettingError(array.field, "misaligned memory", f"must begin at a multiple of {ALIGNMENT} bytes")
