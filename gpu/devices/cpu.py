"""The CPU as a device of its own: torch gathers by block table and computes in fp32."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from ..ops.prepared import Call, LayerCall
from . import fp8

#: Options of glibc's ``malloc.h``: minimum size of separately mapped arrays, and amount of free memory to give back.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGE = 1 << 30


class CpuDevice:
    """:class:`devices.Device` on one core of the CPU; fast enough for measurement and simulation.

    Opening it sets torch to one thread for the whole process. With several threads each operation waits for the slowest, so
    other load on the machine would distort the times. Freed memory remains with the process, see
    :func:`_keep_freed_memory`.
    """

    name = "cpu"

    def __init__(self, torch: ModuleType) -> None:
        torch.set_num_threads(1)
        _keep_freed_memory()
        self._torch, self.torch_device = torch, torch.device("cpu")

    def describe(self) -> dict[str, Any]:
        """Processor, cores, torch's threads, versions."""
        return {
            "device": self.name,
            "name": _processor(),
            "cores": os.cpu_count(),
            "threads": self._torch.get_num_threads(),
            "driver": None,
            "clocks_mhz": None,
            "versions": {"torch": self._torch.__version__, "cupy": None, "cuda": None},
        }

    def host_empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Pageable memory."""
        return self._torch.empty(tuple(shape), dtype=dtype)

    def free_bytes(self) -> int:
        """Memory that the system can provide without swapping."""
        return psutil.virtual_memory().available

    def synchronize(self) -> None:
        """Does nothing: CPU calls are complete when they return."""

    def run(self, call: Call) -> None:
        """Attention of one sequence after the other, so that the time is proportional to the number of tokens."""
        compute: Callable[[Call], None] = getattr(self, f"_{call.operation}")
        compute(call)

    def prepared(self, call: Call) -> LayerCall:
        """As :meth:`devices.Device.prepared`: torch checks every call anyway."""
        count = len(call.layer)
        return lambda *tensors: self.run(replace(call, layer=tensors[:count], scales=tensors[count:]))

    def _decode_attention(self, call: Call) -> None:
        (out, query, *_), (block_tables, context_lens, block_size, _) = call.layer, call.step
        for sequence, context in enumerate(context_lens.tolist()):
            table = block_tables[sequence, : -(-context // block_size)]
            held = (fp8.numbers(_gathered(cache, table, context), scale) for cache, scale in call.caches())
            out[sequence] = self._decoded(query[sequence], *held)

    def _prefill_attention(self, call: Call) -> None:
        torch, (out, query, *_) = self._torch, call.layer
        block_tables, query_start_loc, context_lens, block_size, *_ = call.step
        starts = query_start_loc.tolist()
        for sequence, context in enumerate(context_lens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            queries = rows.stop - rows.start
            if not queries:
                continue
            table = block_tables[sequence, : -(-context // block_size)]
            held = [fp8.numbers(_gathered(cache, table, context), scale) for cache, scale in call.caches()]
            # Query i of q attends to context - q + i + 1 tokens.
            seen = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
            heads = [one.float().transpose(0, 1)[None] for one in (query[rows], *held)]
            found = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
            out[rows] = found[0].transpose(0, 1).to(out.dtype)

    def _contiguous_attention(self, call: Call) -> None:
        """Contiguous tokens need no gather."""
        (out, query, *_), (slot_starts, context_lens, _) = call.layer, call.step
        for sequence, (start, context) in enumerate(zip(slot_starts.tolist(), context_lens.tolist(), strict=True)):
            held = (fp8.numbers(cache[start : start + context], scale) for cache, scale in call.caches())
            out[sequence] = self._decoded(query[sequence], *held)

    def _latent_attention(self, call: Call) -> None:
        """Vectors of any size, of which the value is as long as a row of ``out``."""
        (out, query, kv_cache), (block_tables, context_lens, block_size, _, softmax_scale) = call.layer, call.step
        for sequence, context in enumerate(context_lens.tolist()):
            vectors = _gathered(kv_cache, block_tables[sequence, : -(-context // block_size)], context).float()
            weights = (query[sequence].float() @ vectors.T * softmax_scale).softmax(-1)
            out[sequence] = weights @ vectors[:, : out.shape[-1]]

    def _reshape_and_cache(self, call: Call) -> None:
        """Write new keys and values into their slots; -1 is skipped."""
        (slot_mapping,) = call.step
        kept = slot_mapping >= 0
        pads = not bool(kept.all())
        slots = slot_mapping[kept] if pads else slot_mapping
        for given, (cache, scale) in zip(call.layer[:2], call.caches(), strict=True):
            new = given[kept] if pads else given
            held = new if scale is None else fp8.rounded(new, scale, cache.dtype)
            fp8.indexed(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots, fp8.indexed(held))

    def copy_blocks(self, key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
        """Copy whole blocks within each cache."""
        sources, destinations = block_mapping.unbind(1)
        for cache in (*key_caches, *value_caches):
            blocks = fp8.indexed(cache)
            blocks.index_copy_(0, destinations, blocks.index_select(0, sources))

    def swap_blocks(self, source: Any, destination: Any, block_mapping: Any) -> None:
        """Copy whole blocks from one cache to another."""
        sources, destinations = block_mapping.unbind(1)
        fp8.indexed(destination).index_copy_(0, destinations, fp8.indexed(source).index_select(0, sources))

    def _decoded(self, query: Any, keys: Any, values: Any) -> Any:
        """Attention of ``query`` ``[heads, head_dim]`` over ``[tokens, kv_heads, head_dim]``; zeros if there are no tokens."""
        tokens, kv_heads, head_dim = keys.shape
        if not tokens:
            return self._torch.zeros_like(query)
        # The query heads that share a KV head become the rows of one product.
        rows = query.float().reshape(kv_heads, -1, head_dim)[None]
        held = (one.float().transpose(0, 1)[None] for one in (keys, values))
        found = self._torch.nn.functional.scaled_dot_product_attention(rows, *held)
        return found.reshape(query.shape).to(query.dtype)


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory, as torch keeps a GPU's memory, so that each page is faulted in only once.

    By default glibc maps and unmaps large arrays, or not, depending on earlier frees: the same decodes over 4 x 2,048
    tokens took 41 ms in one process and 125 ms in the next. With this setting they take 35 ms in all processes.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, _LARGE)


def _gathered(cache: Any, table: Any, context: int) -> Any:
    """Keys or values ``[context, kv_heads, head_dim]``, gathered by a block table."""
    found = fp8.indexed(cache).index_select(0, table).flatten(0, 1)[:context]
    return found if found.dtype == cache.dtype else found.view(cache.dtype)


def _processor() -> str:
    """The processor's name, from the operating system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or platform.machine()
