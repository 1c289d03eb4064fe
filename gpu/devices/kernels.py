"""Devices that run our own kernels: a GPU through CuPy, and the kernels' CPU build."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..ops import cache, contiguous, paged_attention, prefill
from .cpu import CpuDevice

#: What nvidia-smi is asked for.
_CLOCKS = {"sm": "clocks.sm", "max_sm": "clocks.max.sm", "memory": "clocks.mem", "max_memory": "clocks.max.mem"}


class _KernelDevice:
    """The calls that lead to kernels; which build runs is decided by where the tensors lie."""

    decode_attention = staticmethod(paged_attention.paged_attention_cuda_forward)
    prefill_attention = staticmethod(prefill.forward_into)
    contiguous_attention = staticmethod(contiguous.forward_into)
    reshape_and_cache = staticmethod(cache.reshape_and_cache)
    copy_blocks = staticmethod(cache.copy_blocks)
    swap_blocks = staticmethod(cache.swap_blocks)


class ShimDevice(_KernelDevice, CpuDevice):
    """:class:`devices.Device`: the kernels' CPU build. For small checks; its times mean nothing."""

    name = "shim"


class CudaDevice(_KernelDevice):
    """:class:`devices.Device`: a GPU, on torch's current stream. No GPU has run this class yet."""

    def __init__(self, torch: ModuleType, number: int) -> None:
        self._torch, self._number = torch, number
        self.name = f"cuda:{number}"
        self.torch_device = torch.device("cuda", number)

    def describe(self) -> dict[str, Any]:
        """Device, memory, driver, clocks in MHz now and at most, versions."""
        cupy = importlib.import_module("cupy")
        found = self._torch.cuda.get_device_properties(self._number)
        return {
            "device": self.name,
            "name": found.name,
            "compute_capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "l2_bytes": found.L2_cache_size,
            "driver": _from_driver(self._number, "driver_version"),
            "clocks_mhz": {name: _from_driver(self._number, query) for name, query in _CLOCKS.items()},
            "versions": {
                "torch": self._torch.__version__,
                "cupy": cupy.__version__,
                "cuda": self._torch.version.cuda,
                "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
                "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
            },
        }

    def host_empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Pinned memory."""
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        """Free memory of the GPU, and memory that torch has reserved and does not use."""
        cuda = self._torch.cuda
        held = cuda.memory_reserved(self._number) - cuda.memory_allocated(self._number)
        return cuda.mem_get_info(self._number)[0] + held

    def synchronize(self) -> None:
        """Wait for everything on the GPU."""
        self._torch.cuda.synchronize(self._number)


def _from_driver(number: int, query: str) -> str | None:
    """What nvidia-smi answers; None where there is none."""
    command = ["nvidia-smi", f"--id={number}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
