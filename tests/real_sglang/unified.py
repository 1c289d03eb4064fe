"""The pools of ``--enable-unified-memory`` on the CPU: SGLang's buffer and allocators, over KV caches that are stand-ins.

Kernels that look for pages are SGLang's own references in PyTorch; a move of pages copies nothing.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from . import stubs
from .workloads import SLOT_BYTES

stubs.install()

import torch
from sglang.srt.mem_cache import unified_memory_pool
from sglang.srt.mem_cache.allocator import unified_sub_pool
from sglang.srt.mem_cache.allocator.paged import alloc_decode_naive, alloc_extend_naive
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import UnifiedSWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_memory_pool import (
    MambaSubPoolSpec,
    MHASubPoolSpec,
    UnifiedHybridReqToTokenPool,
    UnifiedKVPool,
)


class _Launched:
    """A kernel by its reference."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run


def _extend(prefixes: Any, lengths: Any, last: Any, free: Any, out: Any, batch: int, page: int) -> None:
    alloc_extend_naive(prefixes, lengths, last, free, out, page, "cpu")


def _decode(lengths: Any, last: Any, free: Any, out: Any, batch: int, page: int) -> None:
    alloc_decode_naive(lengths, last, free, out, page, int((lengths % page == 1).sum()) if page > 1 else len(lengths))


unified_sub_pool.alloc_extend_kernel = _Launched(_extend)
unified_sub_pool.alloc_decode_kernel = _Launched(_decode)


def window_pool(slots: int, window_slots: int, window_bytes: int, page: int) -> UnifiedSWATokenToKVPoolAllocator:
    """As ``init_unified_swa_pools`` with ``--max-total-tokens``; a slot of windows has so many bytes, a multiple of 32."""
    dim = window_bytes // 4
    windows = replace(_full_spec(), name="swa", head_dim=dim, v_head_dim=dim, grow_direction="up")
    buffer = UnifiedKVPool(
        total_bytes=slots * SLOT_BYTES + window_slots * window_bytes,
        sub_pool_specs=[_full_spec(), windows],
        device="cpu",
        enable_memory_saver=False,
        page_size=page,
    )
    full, swa = (SimpleNamespace(move_physical_pages=lambda *args: None) for _ in range(2))
    kept = SimpleNamespace(full_kv_pool=full, swa_kv_pool=swa, attach_allocators=lambda **ends: None)
    return UnifiedSWATokenToKVPoolAllocator(
        unified_buffer=buffer, kvcache=kept, device="cpu", page_size=page, lazy_compaction=True
    )


class Pools(NamedTuple):
    """Of a model with states in one buffer."""

    rows: UnifiedHybridReqToTokenPool
    allocator: UnifiedMambaTokenToKVPoolAllocator


def _full_spec() -> MHASubPoolSpec:
    kind = torch.float16
    return MHASubPoolSpec(name="full", layer_num=1, head_num=1, head_dim=8, store_dtype=kind, grow_direction="down")


def _state_spec(size: int) -> MambaSubPoolSpec:
    """A state of so many bytes, a multiple of four."""
    kind = torch.float32
    return MambaSubPoolSpec(
        name="mamba",
        layer_num=1,
        conv_state_shapes=((1, size // 4 - 1),),
        conv_dtype=kind,
        temporal_state_shape=(1, 1, 1),
        temporal_dtype=kind,
        grow_direction="up",
    )


def state_pools(
    rows: int, longest: int, slots: int, states: int, state_bytes: int, page: int, extra_buffer: bool, overlap: bool
) -> Pools:
    """As ``init_unified_mamba_pools`` with ``--max-total-tokens``."""
    buffer = UnifiedKVPool(
        total_bytes=slots * SLOT_BYTES + states * state_bytes,
        sub_pool_specs=[_full_spec(), _state_spec(state_bytes)],
        device="cpu",
        enable_memory_saver=False,
        page_size=page,
    )
    requests = UnifiedHybridReqToTokenPool(
        unified_buffer=buffer,
        mamba_sub_pool_name="mamba",
        size=rows,
        mamba_spec_state_size=rows,
        max_context_len=longest,
        device="cpu",
        enable_memory_saver=False,
        cache_params=SimpleNamespace(layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=extra_buffer,
        enable_mamba_extra_buffer_lazy=False,
        enable_overlap_schedule=overlap,
    )
    requests.mamba_pool.move_physical_pages = lambda *args: None
    full = SimpleNamespace(move_physical_pages=lambda *args: None)
    allocator = UnifiedMambaTokenToKVPoolAllocator(
        unified_buffer=buffer,
        kvcache=SimpleNamespace(full_kv_pool=full, mamba_pool=requests.mamba_pool),
        device="cpu",
        page_size=page,
        lazy_compaction=True,
    )
    unified_memory_pool._wire_mamba_slot_allocator(
        mamba_end=allocator.mamba_allocator, req_to_token_pool=requests, device="cpu"
    )
    return Pools(requests, allocator)
