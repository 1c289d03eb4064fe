"""Implementations of decode attention: our kernel, torch over dense caches, FlashInfer. Each returns a call to time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..devices.devices import Device
from ..devices.timing import Work
from ..ops.prepared import Call
from .shapes import BLOCK_SIZE, Caches

WORKSPACE_BYTES = 256 * 2**20
#: torch's kernels that do not materialise the scores in memory.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Unable(Exception):
    """An implementation is not available on this machine; the text gives the reason."""


def ours(device: Device, caches: Caches) -> Work:
    """The device's own implementation: our kernel on a GPU."""
    shape, sizes = caches.shape, (caches.context_lens, BLOCK_SIZE, caches.shape.context)
    layer: tuple[torch.Tensor, ...]
    if shape.latent_dim is None:
        layer, scales = (torch.empty_like(caches.query), caches.query, caches.keys, caches.values), tuple(caches.scales)
        calls = [
            device.prepared(Call("decode_attention", layer, (tables, *sizes), scales)) for tables in caches.block_tables
        ]
        layer = *layer, *scales
    else:
        out, scale = caches.query.new_empty(shape.batch, shape.heads, shape.latent_dim), shape.head_dim**-0.5
        layer = out, caches.query, caches.keys.squeeze(2)
        calls = [
            device.prepared(Call("latent_attention", layer, (tables, *sizes, scale))) for tables in caches.block_tables
        ]

    def work(number: int) -> torch.Tensor:
        calls[number % caches.sets](*layer)
        return layer[0]

    return work


def dense(device: Device, caches: Caches) -> Work:
    """torch's fused attention over dense keys and values, with the query heads of a group as rows."""
    shape = caches.shape
    if shape.fp8:
        raise Unable("torch has no attention over caches of fp8")
    rows = caches.query.view(shape.batch, shape.kv_heads, -1, shape.head_dim)
    keys, values = (caches.dense(cache).transpose(2, 3) for cache in (caches.keys, caches.values))
    # No fused kernel of a CPU has values narrower than keys.
    kernels = FUSED if shape.latent_dim is None else [*FUSED, SDPBackend.MATH]

    def work(number: int) -> torch.Tensor:
        place = number % caches.sets
        with sdpa_kernel(kernels):
            return scaled_dot_product_attention(rows, keys[place], values[place])

    return work


def gathered(device: Device, caches: Caches) -> Work:
    """Cost of gathering keys and values: one copy by block table."""
    if caches.shape.kv_bytes > device.free_bytes():
        raise Unable("no room for a copy")
    first = caches.block_tables[0].flatten()
    separate = (caches.keys, caches.values) if caches.shape.latent_dim is None else (caches.keys,)
    # torch selects bytes on every device, and fp8 not.
    separate = tuple(cache.view(torch.uint8) for cache in separate) if caches.shape.fp8 else separate
    copies = [cache.new_empty(len(first), *cache.shape[1:]) for cache in separate]

    def work(number: int) -> list[torch.Tensor]:
        blocks = caches.block_tables[number % caches.sets].flatten()
        for cache, copy in zip(separate, copies, strict=True):
            torch.index_select(cache, 0, blocks, out=copy)
        return copies

    return work


def flashinfer(device: Device, caches: Caches) -> Work:
    """FlashInfer over the same tables; with tensor cores for groups of at least four, as its users enable them.

    Of its kernels with tensor cores it chooses those of FlashAttention-3 on Hopper, which compute a tile of queries for each head
    of a decode: 2,208 us at 128 x 4k with groups of four on an H200. Those of FlashAttention-2 take the heads of a group together.
    """
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        raise Unable(f"FlashInfer cannot be imported: {error}") from error
    if caches.shape.fp8:
        raise Unable("not compared over caches of fp8: it takes one scale for all heads")
    shape, workspace = caches.shape, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
    if shape.latent_dim is not None:
        return _flashinfer_latent(library, workspace, caches, shape.latent_dim)
    blocks = shape.context // BLOCK_SIZE
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device.torch_device) * blocks
    last = torch.full((shape.batch,), BLOCK_SIZE, dtype=torch.int32, device=device.torch_device)
    planned = []
    for tables in caches.block_tables:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=shape.heads // shape.kv_heads >= 4, backend="fa2"
        )
        wrapper.plan(
            starts,
            tables.flatten(),
            last,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            BLOCK_SIZE,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        planned.append(wrapper)
    return lambda number: planned[number % caches.sets].run(caches.query, (caches.keys, caches.values))


def _flashinfer_latent(library: Any, workspace: torch.Tensor, caches: Caches, latent_dim: int) -> Work:
    """FlashInfer's latent attention, which takes latent and rotary parts of queries and keys apart."""
    shape, held = caches.shape, caches.context_lens
    blocks = shape.context // BLOCK_SIZE
    rows = torch.arange(shape.batch + 1, dtype=torch.int32, device=held.device)
    latent, rotary = caches.keys.squeeze(2).split((latent_dim, shape.head_dim - latent_dim), dim=-1)
    query = caches.query.split((latent_dim, shape.head_dim - latent_dim), dim=-1)
    planned = []
    for tables in caches.block_tables:
        wrapper = library.mla.BatchMLAPagedAttentionWrapper(workspace)
        sizes = (shape.heads, latent_dim, shape.head_dim - latent_dim, BLOCK_SIZE)
        scale, dtypes = shape.head_dim**-0.5, (shape.dtype, shape.dtype)
        wrapper.plan(rows, rows * blocks, tables.flatten(), held, *sizes, False, scale, *dtypes)
        planned.append(wrapper)
    return lambda number: planned[number % caches.sets].run(*query, latent, rotary)


Way = Callable[[Device, Caches], Work]
WAYS: dict[str, Way] = {"fragmeter": ours, "torch": dense, "gather": gathered, "flashinfer": flashinfer}
#: Passes run one after the other, ours first: another library may fail, exhaust the memory, break the CUDA context or, at
#: FlashInfer's first call, compile for minutes.
PASSES = (("fragmeter",), ("torch",), ("gather",), ("flashinfer",))
#: Implementations with the same result as :func:`ours`.
SAME: frozenset[str] = frozenset({"flashinfer"})


def disagreement(way: Callable[[int], Any], reference: Callable[[int], Any]) -> float:
    """Relative L2 error between the results of two calls."""
    found, wanted = way(0).double().clone(), reference(0).double()
    return float((found - wanted).norm() / wanted.norm())
