"""Detection of a usable GPU, with the reason if there is none."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Literal

State = Literal["ready", "no-cupy", "no-driver", "no-device", "failed"]
#: cudaErrorInsufficientDriver and cudaErrorNoDevice, by the CUDA runtime's numbers.
_STATES: dict[int, tuple[State, str]] = {
    35: (
        "no-driver",
        "no driver, or one too old for this CuPy: drivers below 580 take CUDA 12, extra gpu12 and torch of cu126",
    ),
    100: ("no-device", "a driver, but no device"),
}


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Result of the detection.

    Attributes:
        state: One word for programs.
        text: One line of text: the devices, or the missing part and its remedy.
        status: The status code of a failed CUDA runtime call.
        devices: Names of the devices, in CUDA's order.
        memory_bytes: Memory of each device.
    """

    state: State
    text: str
    status: int | None = None
    devices: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict, for ``fragmeter doctor --json``."""
        return {**asdict(self), "devices": list(self.devices), "memory_bytes": list(self.memory_bytes)}


def probe() -> GpuReport:
    """Ask CuPy for devices. Never raises: a missing or broken part is reported in the result."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return GpuReport("no-cupy", "CuPy is not installed; the simulator needs none (extra: gpu)")
        return GpuReport("failed", f"CuPy cannot be imported: {error}")
    except Exception as error:
        return GpuReport("failed", f"CuPy cannot be imported: {error}")
    return _query_devices(cupy)


def _query_devices(cupy: ModuleType) -> GpuReport:
    try:
        runtime = cupy.cuda.runtime
        count = runtime.getDeviceCount()
        found = [runtime.getDeviceProperties(device) for device in range(count)]
        names = tuple(properties["name"].decode() for properties in found)
        memory_bytes = tuple(int(properties["totalGlobalMem"]) for properties in found)
    except Exception as error:
        return _refused(cupy, error)
    if not names:
        return GpuReport("no-device", f"CuPy {cupy.__version__}: a driver, but no device")
    return GpuReport("ready", f"CuPy {cupy.__version__}: {', '.join(names)}", devices=names, memory_bytes=memory_bytes)


def _refused(cupy: ModuleType, error: Exception) -> GpuReport:
    status: int | None = getattr(error, "status", None)
    unknown: tuple[State, str] = ("failed", str(error))
    state, meaning = unknown if status is None else _STATES.get(status, unknown)
    code = "" if status is None else f" (CUDA status {status})"
    return GpuReport(state, f"CuPy {cupy.__version__}: {meaning}{code}", status)
