"""Shapes of decode attention for the benchmark, and KV caches so large that each call reads data outside the device's caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..devices.devices import Device

BLOCK_SIZE = 16
#: Share of free memory that KV caches may use; the rest is for queries, partial results and torch.
SHARE_OF_FREE = 0.9


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, each with one new token.

    Attributes:
        batch: Number of sequences.
        context: Tokens of each sequence, including the new one; a multiple of :data:`BLOCK_SIZE`.
        heads, kv_heads: Query heads and KV heads.
        head_dim: Head dimension of the caches.
        dtype: torch dtype of queries and caches.
        latent_dim: The first dimensions of a key that are its value, too, in latent attention (MLA); None if keys and
            values are separate.
        fp8: Whether the caches are of fp8 (e4m3) instead, with a scale per KV head.
    """

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    latent_dim: int | None = None
    fp8: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        """torch dtype of the caches."""
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes that a call must read: the keys and values of all tokens."""
        caches = 2 if self.latent_dim is None else 1
        return caches * self.batch * self.context * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    def as_dict(self) -> dict[str, Any]:
        """The shape as a JSON-serialisable dict."""
        return {
            "batch": self.batch,
            "context": self.context,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "latent_dim": self.latent_dim,
            "block_size": BLOCK_SIZE,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "kv_bytes": self.kv_bytes,
        }


class Caches:
    """Random keys, values and queries of a shape, in as many sets as are needed to exceed ``cold_bytes``.

    Attributes:
        sets: Number of caches; they share one pool.
        keys, values: ``[num_blocks, block_size, kv_heads, head_dim]``; latent values are part of the keys.
        scales: Of keys and values in fp8, float32 ``[kv_heads]`` each; else empty.
        query: ``[batch, heads, head_dim]``.
        context_lens: int32 ``[batch]``.
        block_tables: int32 ``[sets, batch, blocks]``, in random order over the whole pool.
    """

    def __init__(self, shape: Shape, device: Device, cold_bytes: int) -> None:
        self.shape, self.sets = shape, sets_of(shape, cold_bytes)
        how = {"dtype": shape.dtype, "device": device.torch_device}
        blocks = shape.context // BLOCK_SIZE
        pool = self.sets * shape.batch * blocks
        size = (pool, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.keys = torch.empty(size, **how).normal_().to(shape.kv_dtype)
        latent = shape.latent_dim
        self.values = (
            torch.empty(size, **how).normal_().to(shape.kv_dtype) if latent is None else self.keys[..., :latent]
        )
        self.scales = tuple(0.5 + torch.rand(2, shape.kv_heads, device=device.torch_device)) if shape.fp8 else ()
        self.query = torch.randn(shape.batch, shape.heads, shape.head_dim, **how)
        self.context_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device.torch_device)
        order = torch.randperm(pool, device=device.torch_device, dtype=torch.int32)
        self.block_tables = order.view(self.sets, shape.batch, blocks)

    def dense(self, cache: torch.Tensor) -> torch.Tensor:
        """One of the caches viewed as contiguous memory: ``[sets, batch, context, kv_heads, head_dim]``."""
        return cache.unflatten(0, (self.sets, self.shape.batch, -1)).flatten(2, 3)


def sets_of(shape: Shape, cold_bytes: int) -> int:
    """Number of caches of a shape that together hold ``cold_bytes``."""
    return max(1, -(-cold_bytes // shape.kv_bytes))


def lacking(shape: Shape, device: Device, cold_bytes: int) -> str | None:
    """The reason why the shape's caches do not fit into the device's memory; None if they fit."""
    needed = sets_of(shape, cold_bytes) * shape.kv_bytes
    room = SHARE_OF_FREE * device.free_bytes()
    return None if needed <= room else f"{needed / 1e9:.1f} GB of caches, room for {room / 1e9:.1f} GB"
