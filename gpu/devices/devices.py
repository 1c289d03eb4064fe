"""Devices that run recorded plans and model skeletons: the CPU by torch, the kernels' CPU build, or a GPU.

All devices take torch tensors on ``torch_device`` and share one set of calls. This module imports torch only when a
device is opened: the simulator runs without torch.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from ...sim.types.errors import MissingExtra, SettingError, UserError, install
from ..ops import cache, contiguous, latent_attention, paged_attention, prefill
from ..ops.prepared import Call, LayerCall, Operation, Prepared
from .cpu import CpuDevice
from .probe import probe

#: Fields of nvidia-smi queries, none of which needs root.
_CLOCKS = {"sm": "clocks.sm", "max_sm": "clocks.max.sm", "memory": "clocks.mem", "max_memory": "clocks.max.mem"}
_LIMITS = {
    "power_limit_w": "power.limit",
    "default_power_limit_w": "power.default_limit",
    "temperature_c": "temperature.gpu",
    "throttling": "clocks_event_reasons.active",
    "persistence": "persistence_mode",
    "ecc": "ecc.mode.current",
}


_PREPARE: dict[Operation, Callable[..., Prepared]] = {
    "decode_attention": paged_attention.prepare,
    "prefill_attention": prefill.prepare,
    "contiguous_attention": contiguous.prepare,
    "latent_attention": latent_attention.prepare,
    "reshape_and_cache": cache.prepare_reshape_and_cache,
}


class _KernelDevice:
    """The calls that run kernels; the location of the tensors selects the build."""

    copy_blocks = staticmethod(cache.copy_blocks)
    swap_blocks = staticmethod(cache.swap_blocks)

    def run(self, call: Call) -> None:
        """As :meth:`Device.run`."""
        self.prepared(call).launch()

    def prepared(self, call: Call) -> Prepared:
        """As :meth:`Device.prepared`."""
        return _PREPARE[call.operation](*call.layer, *call.step, **call.named_scales)


class ShimDevice(_KernelDevice, CpuDevice):
    """:class:`devices.Device`: the kernels' CPU build. For small checks; its times are not meaningful."""

    name = "shim"


class CudaDevice(_KernelDevice):
    """:class:`devices.Device`: a GPU, on torch's current stream."""

    def __init__(self, torch: ModuleType, number: int) -> None:
        self._torch, self._number = torch, number
        self.name = f"cuda:{number}"
        self.torch_device = torch.device("cuda", number)

    def describe(self) -> dict[str, Any]:
        """Device, memory, driver, current and maximum clocks in MHz, what limits them, versions."""
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
            "limits": {name: _from_driver(self._number, query) for name, query in _LIMITS.items()},
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
        """Free memory of the GPU plus unused memory that torch has reserved."""
        cuda = self._torch.cuda
        held = cuda.memory_reserved(self._number) - cuda.memory_allocated(self._number)
        return cuda.mem_get_info(self._number)[0] + held

    def synchronize(self) -> None:
        """Wait for all work on the GPU."""
        self._torch.cuda.synchronize(self._number)


def _from_driver(number: int, query: str) -> str | None:
    """The output of nvidia-smi; None if it is not available."""
    command = ["nvidia-smi", f"--id={number}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Device(Protocol):
    """One device. Shapes and dtypes are those of the kernels' own functions, which each method names.

    Attributes:
        name: The name that the device was opened with.
        torch_device: Location of its tensors, a ``torch.device``.
    """

    name: str
    torch_device: Any

    def describe(self) -> dict[str, Any]:
        """Description for a report, JSON-serialisable: device, driver, clocks, versions."""

    def host_empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Host memory for swaps; pinned on a GPU."""

    def free_bytes(self) -> int:
        """Memory available for tensors."""

    def synchronize(self) -> None:
        """Wait until all submitted work is complete."""

    def run(self, call: Call) -> None:
        """Compute into ``out`` of the call, or into the caches."""

    def prepared(self, call: Call) -> LayerCall:
        """A call that is checked once for all layers of a step.

        The result takes the tensors of a layer, and after them the scales. The rest is the call's, so it is valid for one step.
        """

    def copy_blocks(self, key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
        """Copy whole blocks within the caches, each pair of ``block_mapping`` from source to target; see :func:`cache.copy_blocks`."""

    def swap_blocks(self, source: Any, destination: Any, block_mapping: Any) -> None:
        """Copy whole blocks between a device cache and a host cache; see :func:`cache.swap_blocks`."""


def open(name: str) -> Device:
    """The device with this name: ``cpu``, ``shim`` (the kernels' CPU build; slow), ``cuda`` or ``cuda:`` and a number.

    A GPU becomes torch's current device.

    Raises:
        MissingExtra: torch or CuPy is not installed.
        UserError: No GPU is usable; the text gives the reason.
        SettingError: The name is unknown, or there is no GPU with this number.
    """
    torch, kind, number = _found(name)
    if kind == "cuda":
        # Streams, events and captures use torch's current device.
        torch.cuda.set_device(number)
        return CudaDevice(torch, number)
    if kind == "shim":
        return ShimDevice(torch)
    return CpuDevice(torch)


def open_timed(name: str) -> Device:
    """The device with this name, if its times are meaningful.

    Raises:
        UserError: As :func:`open`, or the device is the kernels' CPU build.
    """
    if name == "shim":
        raise SettingError("device", name, "shows that kernels are right, not how long they take; take cpu or cuda")
    return open(name)


def require(name: str) -> int:
    """Check that other processes can open a GPU, without allocating its memory in this one; returns the bytes it has.

    Raises:
        UserError: As :func:`open`.
    """
    _, _, number = _found(name)
    return probe().memory_bytes[number]


#: Models to calibrate and validate, by the least memory of a card: their weights take a fifth of it, so that there is room for as much KV as
#: weights, and a validation reads enough of it.
_USUAL_MODELS = {60 * 10**9: "llama-3.1-8b", 30 * 10**9: "llama-3.2-3b", 0: "llama-3.2-1b"}


def usual_model(memory_bytes: int | None) -> str:
    """Default model to calibrate and validate on a GPU with this memory; None for a CPU."""
    if memory_bytes is None:
        return "toy-llama"
    return next(name for least, name in _USUAL_MODELS.items() if memory_bytes >= least)


def memory_bytes(device: Device) -> int | None:
    """Memory of a GPU; None for a CPU."""
    return int(device.describe()["memory_bytes"]) if device.torch_device.type == "cuda" else None


def usual_dtype(device: Device) -> str:
    """Default dtype of a device: fp16 on a GPU, fp32 elsewhere."""
    return "fp16" if device.torch_device.type == "cuda" else "fp32"


def _found(name: str) -> tuple[ModuleType, str, int]:
    """torch, the kind of the device, and its number."""
    kind = re.fullmatch(r"(?P<kind>cpu|shim|cuda)(:(?P<number>\d+))?", name)
    if kind is None or (kind["number"] and kind["kind"] != "cuda"):
        raise SettingError("device", name, "must be cpu, shim, cuda, or cuda: and a number")
    torch, number = _torch(), int(kind["number"] or 0)
    return torch, kind["kind"], _gpu(torch, name, number) if kind["kind"] == "cuda" else number


def _torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise MissingExtra(f"running on a device needs torch: {install('torch')}") from error


def _gpu(torch: ModuleType, name: str, number: int) -> int:
    """The number of an existing GPU that CuPy and torch can use."""
    report = probe()
    if report.state == "no-cupy":
        raise MissingExtra(report.text)
    if torch.version.cuda is None:
        raise UserError(f"torch {torch.__version__} is built for the CPU only: install a build of it for CUDA")
    if report.state != "ready":
        raise UserError(f"no GPU to work with: {report.text}")
    if not torch.cuda.is_available():
        text = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, does not see the GPU"
        raise UserError(f"{text}: install its build for the driver's CUDA")
    if number >= len(report.devices):
        raise SettingError("device", name, f"there are {len(report.devices)}, numbered from 0")
    return number
