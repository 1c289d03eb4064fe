"""SGLang's HiCache without a device: ``attach`` joins it to a ``UnifiedRadixCache``.

SGLang's own: the tree, ``HybridCacheController`` with its queues, merged operations and acks, ``LayerDoneCounter``, and the host pool's
slots. Ours are the pool's bytes, of which there are none, and in place of streams and events a clock: ``Link`` ends each copy after so
many ticks a page of each pool, one after the other each way, and not before the forward stream has done what it had.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from types import SimpleNamespace
from typing import Any

from . import stubs

stubs.install()

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    _evict_mamba_for_device_alloc,
    _evict_swa_for_device_alloc,
    _split_hicache_size,
)
from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.unified_cache.components import ComponentType

#: ``init_hicache``.
LOAD_BACK_THRESHOLD = 10


class _Event:
    """Of a copy; has happened once the clock is there."""

    def __init__(self, link: Link, ticks: int = 0) -> None:
        self._link, self.ticks = link, ticks

    def query(self) -> bool:
        return self.ticks <= self._link.now

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


class Link:
    """In place of ``L2TransferEngine``.

    Attributes:
        now: The clock.
        forward_end: When the forward stream has done all that it has.
        ends: Ends of all copies.
        layer_ends: When each layer of the last load is there.
    """

    def __init__(self, layers: int) -> None:
        self.now = self.forward_end = 0
        self._layers = layers
        self._free_from = [0, 0]
        self.ends: list[int] = []
        self.layer_ends: list[Fraction] = []
        # Both wait for the forward stream.
        self.device_to_host_stream = self.host_to_device_stream = SimpleNamespace(wait_stream=lambda stream: None)

    @property
    def next_end(self) -> int | None:
        """When the next copy ends."""
        return min((end for end in self.ends if end > self.now), default=None)

    def _copy(self, transfers: list[Any], loads: bool) -> TransferCompletion:
        ticks = sum(
            len(each.host_indices) // each.host_pool.page_size * each.host_pool.page_ticks for each in transfers
        )
        start = max(self.now, self.forward_end, self._free_from[loads])
        end = self._free_from[loads] = start + ticks
        self.ends.append(end)
        if loads:
            self.layer_ends = [
                start + Fraction((end - start) * layer, self._layers) for layer in range(1, self._layers + 1)
            ]
        return TransferCompletion(_Event(self, start), _Event(self, end), False)

    def submit_device_to_host(self, transfers: list[Any]) -> TransferCompletion:
        return self._copy(transfers, False)

    def submit_host_to_device(self, transfers: list[Any], **ignored: Any) -> TransferCompletion:
        return self._copy(transfers, True)

    def step_end(self, start: int, ticks: int) -> int:
        """When a step that waits for the last load layer by layer ends."""
        end = Fraction(start)
        for layer_end in self.layer_ends:
            end = max(end, layer_end) + Fraction(ticks, self._layers)
        return ceil(end)


class _Layers:
    """In place of ``LayerLoadingEvent``, whose events ``Link`` knows."""

    def __init__(self, layers: int) -> None:
        self.start_event = self.finish_event = SimpleNamespace(record=lambda: None, query=lambda: True)

    def complete(self, layer: int) -> None:
        pass


cache_controller.LayerLoadingEvent = _Layers


class _HostPool(HostKVCache):
    """Slots without bytes.

    Attributes:
        page_ticks: Duration of the copy of a page.
    """

    page_ticks = 0


_HostPool.__abstractmethods__ = frozenset()


class Controller(HybridCacheController):
    """With ``Link`` for its streams."""

    def __init__(self, allocator: Any, group: HostPoolGroup, page: int, policy: str, link: Link, layers: int) -> None:
        self.mem_pool_device_allocator, self.mem_pool_host = allocator, group
        self.page_size, self.write_policy, self.io_backend = page, policy, "kernel"
        self.device, self.enable_storage, self.is_kv_sharded = "cpu", False, False
        self.write_queue, self.load_queue, self.ack_write_queue, self.ack_load_queue = [], [], [], []
        self.extra_host_mem_release_queues: dict[Any, Any] = {}
        self.transfer_layer_id_max = layers
        self.layer_done_counter = cache_controller.LayerDoneCounter(layers)
        self.load_fence_stream = self.write_fence_stream = object()
        self.l2_transfer_engine, self.pp_prefetch_command_group = link, None

    def move_hybrid_indices(self, operation: Any, **ignored: Any) -> tuple[Any, ...]:
        """Nothing is moved."""
        return operation.host_indices, operation.device_indices, operation.pool_transfers


def host_pool(slots: int, page: int, ratio: float, gigabytes: float = 0, slot_bytes: int = 1) -> HostKVCache:
    """The host pool that SGLang makes for a device pool, by ratio or by size."""
    return _HostPool(
        dtype=torch.float16,
        device_capacity_tokens=slots,
        size_per_token=slot_bytes,
        start_layer=0,
        end_layer=1,
        host_to_device_ratio=ratio,
        host_size=gigabytes,
        page_size=page,
        layout="page_first",
        pin_memory=False,
        device="cpu",
        is_dummy=True,
    )


def shares(gigabytes: int, slots: tuple[int, ...], page: int) -> tuple[float, ...]:
    """``--hicache-size`` divided among device pools of 12 layers of gpt-oss, by SGLang."""
    kind = torch.float16
    pools = [MHATokenToKVPool(each, page, kind, 8, 64, 12, "cpu", enable_memory_saver=False) for each in slots]
    return _split_hicache_size(gigabytes, tuple(pools))


def attach(
    tree: Any, host: HostKVCache, policy: str, link: Link, layers: int = 1, beside: HostKVCache | None = None
) -> None:
    """What ``init_hicache`` does, without a device and a storage.

    Args:
        beside: The host pool of windows or states.
    """
    entries = [PoolEntry(PoolName.KV, host, None, None, is_primary_index_anchor=True)]
    pool, rows = tree.token_to_kv_pool_allocator, tree.req_to_token_pool
    if tree.supports_swa():
        # As ``build_hybrid_swa_group`` and ``build_hybrid_mamba_stack``.
        tree.components[ComponentType.SWA]._swa_kv_pool_host = beside
        tree.tree_core.has_swa_host_pool = True
        entries.append(
            _entry(PoolName.SWA, beside, tree, ComponentType.SWA, _evict_swa_for_device_alloc, pool.swa_attn_allocator)
        )
    if tree.supports_mamba():
        tree.components[ComponentType.MAMBA]._mamba_pool_host = beside
        states = rows.mamba_allocator
        entries.append(_entry(PoolName.MAMBA, beside, tree, ComponentType.MAMBA, _evict_mamba_for_device_alloc, states))
    tree.host_pool_group = HostPoolGroup(entries)
    tree.host_memory_mode = "cache"
    tree.cache_controller = Controller(pool, tree.host_pool_group, host.page_size, policy, link, layers)
    tree.components[ComponentType.FULL]._full_kv_pool_host = host
    tree.tree_core.set_hicache_enabled()
    tree.write_through_threshold = 1 if policy == "write_through" else 2
    tree.is_write_back = policy == "write_back"
    tree.load_back_threshold = LOAD_BACK_THRESHOLD


def _entry(
    name: PoolName, host: HostKVCache | None, tree: Any, kind: ComponentType, evict: Callable[..., None], allocator: Any
) -> PoolEntry:
    return PoolEntry(
        name,
        host,
        None,
        None,
        host_evict_fn=lambda number: tree.evict_host(number, kind),
        device_evict_fn=lambda number: evict(tree, number),
        device_alloc_fn=allocator.alloc,
        device_free_fn=allocator.free,
    )
