"""The KV pool of a skeleton: caches of every layer on its device, and host blocks for swaps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError

if TYPE_CHECKING:
    from ..devices.devices import Device


class KvPool:
    """A KV pool with random keys and values in every slot, so that reads of unwritten slots take the usual time.

    Attributes:
        keys, values: One cache per layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``. A contiguous layout
            uses a view of them without the block dimension.
        host_keys, host_values: The same for host blocks, in pinned memory if the device is a GPU.

    Raises:
        SettingError: The device has no room for the blocks.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        host_blocks: int = 0,
    ) -> None:
        self.device, self.block_size = device, block_size
        self.num_blocks, self.host_blocks = num_blocks, host_blocks
        slots, layers = (block_size, model.num_kv_heads, model.head_dim), range(model.num_layers)
        needed = 2 * model.num_layers * num_blocks * math.prod(slots) * dtype.itemsize
        remedy = f"KV blocks of {block_size} tokens of {model.name}; take fewer, or a smaller model"
        require_room(device, needed, "num_blocks", num_blocks, remedy)

        def on_device() -> list[Tensor]:
            shape = (num_blocks, *slots)
            return [torch.randn(shape, device=device.torch_device, dtype=dtype) for _ in layers]

        def on_host() -> list[Tensor]:
            # All blocks have the same values: one core draws gigabytes of them in minutes.
            drawn = torch.randn(slots, dtype=dtype)
            return [device.host_empty((host_blocks, *slots), dtype).copy_(drawn) for _ in layers]

        self.keys, self.values = on_device(), on_device()
        self.host_keys, self.host_values = on_host(), on_host()

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks in all layers; ``pairs`` is int64 ``[pairs, 2]``, source and destination."""
        mapping = torch.from_numpy(pairs).to(self.device.torch_device)
        self.device.copy_blocks(self.keys, self.values, mapping)

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy device blocks to host blocks in all layers; ``pairs`` as for :meth:`copy`."""
        self._swap(self.keys + self.values, self.host_keys + self.host_values, pairs)

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy host blocks to device blocks in all layers; ``pairs`` as for :meth:`copy`."""
        self._swap(self.host_keys + self.host_values, self.keys + self.values, pairs)

    def _swap(self, sources: list[Tensor], destinations: list[Tensor], pairs: np.ndarray) -> None:
        mapping = torch.from_numpy(pairs)
        for source, destination in zip(sources, destinations, strict=True):
            self.device.swap_blocks(source, destination, mapping)


def require_room(device: Device, needed_bytes: int, field: str, value: object, remedy: str) -> None:
    """Refuse an allocation that would make the operating system kill this process or another one.

    Args:
        field, value: The setting that needs the memory.
        remedy: The purpose of the memory, and the remedy.

    Raises:
        SettingError: The device has fewer bytes free.
    """
    free = device.free_bytes()
    if needed_bytes > free:
        sizes = f"{needed_bytes / 1e9:.1f} GB, and {device.name} has {free / 1e9:.1f} GB free"
        raise SettingError(field, value, f"needs {sizes}, for {remedy}")
