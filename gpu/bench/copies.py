"""Timed large copies: within a device, to the host and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...sim.spec.gpu import GIB, GpuSpec, gpu
from ..devices import timing
from ..devices.devices import Device

MIB = 2**20
#: Bytes of a copy: larger than any cache, and large enough that launch time does not matter.
COPY_BYTES = {"cpu": 64 * MIB, "cuda": 2 * GIB}
ROUNDS = 9
#: GPU presets by device name; the bandwidth comes from their data sheets.
DATA_SHEETS = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200",
}


@dataclass(frozen=True, slots=True)
class Copy:
    """A measured copy.

    Attributes:
        kind: ``device``, ``to_host`` or ``from_host``.
        copied_bytes: Size of the source.
        moved_bytes: Bytes that the device's memory reads and writes.
        us: Time of the copy in microseconds.
        iqr_us: Interquartile range of the time.
    """

    kind: str
    copied_bytes: int
    moved_bytes: int
    us: float
    iqr_us: float

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes/s. A copy within the device counts reads and writes; a copy to or from the host counts once."""
        return self.moved_bytes / self.us * 1e6

    def as_dict(self) -> dict[str, Any]:
        """The copy as a JSON-serialisable dict."""
        return {
            "kind": self.kind,
            "copied_bytes": self.copied_bytes,
            "moved_bytes": self.moved_bytes,
            "us": self.us,
            "iqr_us": self.iqr_us,
            "bytes_per_s": self.bytes_per_s,
        }


def data_sheet(description: dict[str, Any]) -> GpuSpec | None:
    """The data sheet of a described device; None if no preset matches."""
    preset = DATA_SHEETS.get(description["name"])
    return gpu(preset) if preset else None


def device_copy(device: Device, copy_bytes: int | None = None) -> Copy:
    """Time one large copy within the device's memory.

    On a GPU a kernel copies, with the signs changed: in a graph the driver's own copies reach 2.8 TB/s on an H200, where
    attention reads 4.4 TB/s.
    """
    source = _random(device, copy_bytes or COPY_BYTES[device.torch_device.type])
    target = torch.empty_like(source)
    if device.torch_device.type == "cuda":
        return _measured(device, "device", source, 2, lambda _: torch.neg(source, out=target))
    return _measured(device, "device", source, 2, lambda _: target.copy_(source))


def host_copies(device: Device, copy_bytes: int) -> list[Copy]:
    """Time one large copy to pinned host memory and one back."""
    there = _random(device, copy_bytes)
    here = device.host_empty(there.shape, there.dtype)
    return [
        _measured(device, "to_host", there, 1, lambda _: here.copy_(there, non_blocking=True)),
        _measured(device, "from_host", there, 1, lambda _: there.copy_(here, non_blocking=True)),
    ]


def _random(device: Device, wanted_bytes: int) -> torch.Tensor:
    """Random bytes: memory may move zeros faster."""
    return torch.randn(wanted_bytes // 4, device=device.torch_device)


def _measured(device: Device, kind: str, source: torch.Tensor, ways: int, work: Callable[[int], Any]) -> Copy:
    stopwatch = timing.stopwatch(device)
    sampler = stopwatch.sampler(work, captured=kind == "device")
    found = timing.timing([sampler() for _ in range(ROUNDS)], stopwatch.quantile)
    copied = source.numel() * source.element_size()
    return Copy(kind, copied, ways * copied, found.us, found.iqr_us)
