"""Selects the kernels for an array: those of its GPU, or the CPU build."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...sim.types.errors import SettingError
from .arguments import Argument, Extent
from .arrays import Array
from .cpu_kernels import CpuKernels, Span
from .cuda_kernels import CudaKernels
from .source import Kernel


class Launch(Protocol):
    """A prepared launch of one kernel."""

    def __call__(self, pointers: Sequence[int] = ()) -> None:
        """Start the grid on the caller's stream, with ``pointers`` in place of the first changing arguments."""


class Kernels(Protocol):
    """Launches kernels on one device.

    Attributes:
        multiprocessor_shared_bytes: Shared memory of a multiprocessor.
    """

    @property
    def multiprocessor_shared_bytes(self) -> int: ...

    def places(self, kernel: Kernel, threads: int, shared_bytes: int) -> int:
        """Number of resident blocks of a kernel on the device, given threads and dynamic shared memory of a block."""

    def prepared(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Argument],
        changing: Sequence[int] = (),
        touched: Sequence[Array] = (),
        shared_bytes: int = 0,
    ) -> Launch:
        """A launch, without its start.

        Args:
            kernel: The kernel.
            grid: Blocks, x y z; nothing runs if an extent is zero.
            block: Threads of a block, x y z.
            arguments: In the kernel's order.
            changing: Numbers of the arguments, all of them arrays, that each start may replace.
            touched: Arrays that the kernel reaches by addresses in memory.
            shared_bytes: Dynamic shared memory.
        """

    def copy(self, source: Array, destination: Array, spans: Iterable[Span]) -> None:
        """Copy bytes between two arrays, of which one may be on the host, on the caller's stream.

        Raises:
            SettingError: The arrays are on two GPUs, or host memory is not pinned.
        """


def kernels_for(array: Array) -> Kernels:
    """The kernels of the array's device.

    Raises:
        SettingError: The device is neither the CPU nor a CUDA device.
        MissingExtra: The device is a CUDA device, and CuPy is not installed.
    """
    kind, _, number = array.device.partition(":")
    if kind == "cpu":
        return CpuKernels()
    if kind == "cuda":
        return _cuda(int(number or 0))
    raise SettingError(array.field, array.device, "must be on the CPU or on a CUDA device")


@functools.cache
def _cuda(device: int) -> CudaKernels:
    return CudaKernels(device)
