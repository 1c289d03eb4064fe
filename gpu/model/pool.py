"""The KV pool of a skeleton: caches of every layer on its device, and host blocks for swaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from ..ops.source import FP8_HEAD_DIMS

if TYPE_CHECKING:
    from ..devices.devices import Device


#: Number formats of a KV cache, as vLLM's ``--kv-cache-dtype`` names them: that of queries and weights, or fp8 (e4m3).
KV_CACHE_DTYPES = ("auto", "fp8")


def cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, model: ModelSpec, device: Device) -> torch.dtype:
    """The dtype of caches for queries of ``dtype``.

    Args:
        kv_cache_dtype: One of :data:`KV_CACHE_DTYPES`.

    Raises:
        SettingError: The name is unknown; or the device's kernels have no such cache.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise SettingError("kv_cache_dtype", kv_cache_dtype, f"one of {', '.join(KV_CACHE_DTYPES)}")
    if kv_cache_dtype == "auto":
        return dtype
    # The CPU as a device of its own computes in fp32.
    if device.name != "cpu" and dtype == torch.float32:
        raise SettingError(
            "kv_cache_dtype", kv_cache_dtype, "the kernels take it with dtype fp16 or bf16, not with fp32"
        )
    if device.name != "cpu" and model.head_dim not in FP8_HEAD_DIMS:
        known = ", ".join(map(str, FP8_HEAD_DIMS))
        remedy = f"the kernels take it with a head_dim of {known}, and that of {model.name} is {model.head_dim}"
        raise SettingError("kv_cache_dtype", kv_cache_dtype, remedy)
    return torch.float8_e4m3fn


class KvPool:
    """A KV pool with random keys and values in every slot, so that reads of unwritten slots take the usual time.

    Attributes:
        keys, values: One cache per layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``. A contiguous layout
            uses a view of them without the block dimension.
        host_keys, host_values: The same for host blocks, in pinned memory if the device is a GPU.
        scales: Of keys and values of each layer in fp8, float32 ``[num_kv_heads]`` each, random; else empty.

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
            return [_drawn(shape, dtype, device.torch_device) for _ in layers]

        def on_host() -> list[Tensor]:
            # All blocks have the same values: one core draws gigabytes of them in minutes.
            drawn = _drawn(slots, dtype)
            return [device.host_empty((host_blocks, *slots), dtype).copy_(drawn) for _ in layers]

        self.keys, self.values = on_device(), on_device()
        self.host_keys, self.host_values = on_host(), on_host()
        heads = (2, model.num_kv_heads)
        of_layer = (tuple(0.5 + torch.rand(heads, device=device.torch_device)) for _ in layers)
        self.scales: list[tuple[Tensor, ...]] = list(of_layer) if dtype.itemsize == 1 else [() for _ in layers]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def layer(self, number: int) -> tuple[Tensor, ...]:
        """What calls of a layer take: its keys and values, and in fp8 their scales."""
        return (self.keys[number], self.values[number], *self.scales[number])

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


def _drawn(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Normal numbers; those of fp8 are rounded from 16 bits."""
    wide = torch.float16 if dtype.itemsize == 1 else dtype
    return torch.randn(shape, device=device, dtype=wide).to(dtype)


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
