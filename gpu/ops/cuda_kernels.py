"""The kernels on a GPU, through CuPy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...sim.types.errors import SettingError
from .arguments import Argument, Arguments, Extent
from .arrays import Array
from .cpu_kernels import Span
from .interop import cupy, is_of_torch
from .source import Kernel

#: Dynamic shared memory that a kernel may use without an opt-in (CUDA's cudaFuncAttributeMaxDynamicSharedMemorySize).
DEFAULT_SHARED_BYTES = 48 * 1024


class CudaKernels:
    """Launches kernels on one CUDA device, on the stream that is current at the launch.

    Raises:
        MissingExtra: CuPy is not installed.
    """

    def __init__(self, device: int) -> None:
        self._cupy = cupy()
        self._device = device
        attributes = self._cupy.cuda.Device(device).attributes
        self._multiprocessors: int = attributes["MultiProcessorCount"]
        self.multiprocessor_shared_bytes: int = attributes["MaxSharedMemoryPerMultiprocessor"]
        self._function = functools.cache(self._compiled)
        self.places = functools.cache(self._places)

    def prepared(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Argument],
        changing: Sequence[int] = (),
        touched: Sequence[Array] = (),
        shared_bytes: int = 0,
    ) -> Callable[..., None]:
        """A launch. The first one of a kernel compiles it, so prepare it once before a graph capture."""
        if 0 in grid:
            return lambda pointers=(): None
        cuda, number = self._cupy.cuda, self._device
        with cuda.Device(number):
            # Makes the device's context current to this thread, which the driver's launch needs.
            cuda.runtime.setDevice(number)
            function = self._function(kernel, shared_bytes).kernel.ptr
        packed, stream = Arguments(arguments), self._current_stream(arguments)
        fixed, start, place = (function, *grid, *block, shared_bytes), cuda.driver.launchKernel, packed.place

        def launch(pointers: Sequence[int] = ()) -> None:
            for argument, pointer in zip(changing, pointers, strict=False):
                place(argument, pointer)
            with cuda.Device(number):
                start(*fixed, stream(), packed.address, 0)

        return launch

    def load(self, kernel: Kernel) -> Any:
        """The kernel as CuPy's function, compiled if needed."""
        with self._cupy.cuda.Device(self._device):
            return self._function(kernel, 0)

    def copy(self, source: Array, destination: Array, spans: Iterable[Span]) -> None:
        """Copy bytes between two arrays; one may be in pinned host memory.

        Raises:
            SettingError: The arrays are on two GPUs, or host memory is not pinned.
        """
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._device):
            for array in (source, destination):
                self._check_reach(array)
            stream = self._current_stream((source, destination))()
            for origin, target, nbytes in spans:
                addresses = destination.pointer + target, source.pointer + origin
                runtime.memcpyAsync(*addresses, nbytes, runtime.memcpyDefault, stream)

    def _check_reach(self, array: Array) -> None:
        if array.device not in ("cpu", f"cuda:{self._device}"):
            raise SettingError(array.field, array.device, f"must be on the host or on cuda:{self._device}")
        if not array.nbytes:
            return
        runtime = self._cupy.cuda.runtime
        # A copy from pageable memory would block the host.
        if runtime.pointerGetAttributes(array.pointer).type == runtime.memoryTypeUnregistered:
            remedy = "must be pinned (torch: pin_memory=True; numpy: cupyx.empty_pinned)"
            raise SettingError(array.field, "pageable memory", remedy)

    def _compiled(self, kernel: Kernel, shared_bytes: int) -> Any:
        module = self._cupy.RawModule(code=kernel.text, options=("-std=c++17",), name_expressions=(kernel.expression,))
        function = module.get_function(kernel.expression)
        if shared_bytes > DEFAULT_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        if shared_bytes:
            # Maximises the number of resident blocks at the cost of the L1 cache, which cp.async bypasses.
            function.preferred_shared_memory_carveout = 100
        return function

    def _places(self, kernel: Kernel, threads: int, shared_bytes: int) -> int:
        """Number of resident blocks that CUDA computes, which includes the limit by registers."""
        with self._cupy.cuda.Device(self._device):
            function = self._function(kernel, shared_bytes).kernel.ptr
            occupancy = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
            return self._multiprocessors * occupancy(function, threads, shared_bytes)

    def _current_stream(self, arguments: Iterable[Argument]) -> Callable[[], int]:
        """Gives the handle of the stream that is current when it is called: torch's for torch arrays, else CuPy's."""
        if any(is_of_torch(argument.owner) for argument in arguments if isinstance(argument, Array)):
            of_torch = sys.modules["torch"].cuda.current_stream
            return lambda: of_torch(self._device).cuda_stream
        return lambda: self._cupy.cuda.get_current_stream().ptr
