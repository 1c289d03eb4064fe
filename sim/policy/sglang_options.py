"""Options of ``--policy sglang``, by the names of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..cost.shares import LINK_SHARE
from ..memory.prefix.tiers import Offloaded
from ..spec import HybridLayout, ModelSpec, model
from ..spec.pool import MOST_HOST_BLOCKS
from ..spec.startup.sglang import window_of
from ..spec.startup.sglang_states import StatePool, copies_states, turns_overlap_off
from ..spec.tiers import TierSpec
from ..types.bounds import Tried
from ..types.errors import NotSimulated
from ..workload.workload import Workload
from .options import LEAVE_OUT, Options, Replica
from .server import Server, WindowPool

#: Options of SGLang for models with states; the first two say how the radix cache gets them.
_OF_STATES = (
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "mamba_full_memory_ratio",
    "max_mamba_cache_size",
    "mamba_ssm_dtype",
)


@dataclass(frozen=True, kw_only=True)
class SGLangOptions(Options):
    """Options of SGLang."""

    disable_overlap_schedule: Annotated[
        bool, Field(description="Decide a step when the step before it is over, not while it runs.")
    ] = False

    schedule_policy: Annotated[
        Literal["lpm", "fcfs", "lof"],
        Field(
            description='Order of the queue: "lpm" is longest cached prefix first, "fcfs" is order of arrival, "lof" is longest'
            " declared output first."
        ),
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool,
        Field(
            description="Order of the queue by the priority of requests first, higher first; a request may preempt running ones of"
            " lower priority."
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Field(description="With enable_priority_scheduling, lower priorities come first.")
    ] = False
    disable_priority_preemption: Annotated[
        bool, Field(description="With enable_priority_scheduling, no running request is preempted for a waiting one.")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Field(ge=0, le=2**31, description="Difference of priorities above which a running request is preempted."),
        Tried(0),
    ] = 10
    retraction_policy: Annotated[
        Literal["length", "priority"],
        Field(
            description='Which requests are retracted when the KV cache is full: "length" is those with the shortest output, then the'
            ' longest prompt, "priority" is those of the lowest priority first.'
        ),
    ] = "length"
    mem_fraction_static: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Share of the GPU memory for weights and KV cache, from which the pool is computed as SGLang does at its start;"
            " by default its rule by card and chunk.",
        ),
        Tried(0.9),
    ] = None

    swa_full_tokens_ratio: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Slots in the pool of layers with a window for each slot of the others, in models where SGLang gives windows a pool.",
        ),
        Tried(0.5),
    ] = 0.8
    disable_hybrid_swa_memory: Annotated[
        bool, Field(description="Keep every token in all layers, also in those with a sliding window.")
    ] = False

    mamba_radix_cache_strategy: Annotated[
        Literal["auto", "no_buffer", "extra_buffer"],
        Field(
            description='How the radix cache gets states (Mamba, linear attention): "no_buffer" is the one at the end of a prefill or an'
            ' output, "extra_buffer" is a copy made on the way; "auto" is SGLang\'s rule.'
        ),
    ] = "auto"
    mamba_track_interval: Annotated[
        int,
        Field(
            ge=1,
            le=2**31,
            description="Tokens of an output from one state that is copied for the radix cache to the next.",
        ),
        Tried(128),
    ] = 256
    mamba_full_memory_ratio: Annotated[
        float,
        Field(gt=0, le=2**31, description="Bytes of the pool of states for each byte of KV cache."),
        Tried(0.5),
    ] = 0.9
    max_mamba_cache_size: Annotated[
        int | None,
        Field(ge=1, le=2**31, description="States of their pool; by default from mamba_full_memory_ratio."),
        Tried(20),
    ] = None
    mamba_ssm_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        Field(description="Number format of a state's matrices; by default that of the checkpoint, or fp32."),
    ] = None
    enable_unified_memory: Annotated[
        bool,
        Field(
            description="One buffer for the KV cache and windows or states, in which either takes what the other leaves."
        ),
    ] = False
    enable_hierarchical_cache: Annotated[
        bool, Field(description="HiCache: copy KV of the radix tree to host memory, and load it from there.")
    ] = False
    hicache_ratio: Annotated[
        float,
        Field(
            gt=0,
            le=1000,
            description="Slots of HiCache's host pool for each slot of the device; the host is taken to have the memory.",
        ),
        Tried(0.5),
    ] = 2.0
    hicache_size: Annotated[
        int,
        Field(
            ge=0,
            le=2**20,
            description="Host memory of HiCache in GB (10^9 bytes) on each rank, in place of hicache_ratio; 0 is by ratio.",
        ),
        Tried(1),
    ] = 0
    hicache_write_policy: Annotated[
        Literal["write_through", "write_through_selective"],
        Field(
            description='When HiCache copies a node of the tree to the host: "write_through" when it is cached, "write_through_selective" when a'
            " second request caches it."
        ),
    ] = "write_through"

    def for_server(self, server: Server) -> Self:
        """See ``Options``; without the overlap schedule where SGLang disables it.

        Source: ``_pipeline_parallel_overlap_disable`` and ``_mamba_radix_cache_resolution`` of SGLang 0.5.23, ``arg_groups/overrides.py``.
        """
        by_stages = server.deployment.pipeline_parallel > 1
        by_states = server.caches_prefixes and turns_overlap_off(server.model, self.mamba_radix_cache_strategy)
        return replace(self, disable_overlap_schedule=True) if by_stages or by_states else self

    @property
    def schedules_ahead(self) -> bool:
        return not self.disable_overlap_schedule

    def offloaded(
        self, server: Server, num_blocks: int, block_size: int, beside: WindowPool | StatePool | None
    ) -> Offloaded | None:
        """See ``Options``; those of HiCache (``HostKVCache`` and ``MambaPoolHost`` of SGLang 0.5.23, ``mem_cache/pool_host``).

        Raises:
            NotSimulated: They are too many.
        """
        if not self.enable_hierarchical_cache:
            return None
        shape, ranks = server.model, server.tensor_parallel
        # Slots of each pool of the device, bytes of a slot, and slots of a page.
        pools = [(num_blocks * block_size, shape.slot_bytes(server.deployment.kv_dtype, ranks), block_size)]
        if beside is not None:
            of_slot, of_component = beside.slot_bytes
            slots, page = (
                (beside.blocks * block_size, block_size) if isinstance(beside, WindowPool) else (beside.slots, 1)
            )
            pools = [(pools[0][0], of_slot, block_size), (slots, of_component, page)]
        (pages, of_page), *others = self._host_pools(pools)
        if pages > MOST_HOST_BLOCKS:
            name = "hicache_size" if self.hicache_size else "hicache_ratio"
            reason = f"comes to {pages:,} pages on the host, more than {MOST_HOST_BLOCKS:,}"
            raise NotSimulated(name, getattr(self, name), reason, "lower it")
        rate = int(server.gpu.pcie_bytes_per_s * LINK_SHARE)
        link = TierSpec("host", None, rate, rate, 0)
        layers = len(shape.attention_layers) + len(shape.state_layers)
        components, of_unit = others[0] if others else (0, 0)
        return Offloaded(pages, of_page, link=link, layers=layers, num_components=components, component_bytes=of_unit)

    def _host_pools(self, pools: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Pages of each pool on the host, and bytes of a page; ``hicache_size`` is divided by the bytes of the pools, with the page more
        that each has (``_split_hicache_size``)."""
        held = [(slots + page) * slot_bytes for slots, slot_bytes, page in pools]
        found = []
        for (slots, slot_bytes, page), size in zip(pools, held, strict=True):
            on_host = int(slots * self.hicache_ratio)
            if self.hicache_size:
                on_host = int(self.hicache_size * size / sum(held) * 1e9 // slot_bytes)
            found.append((on_host // page + 1, slot_bytes * page))
        return found

    def refused_combinations(
        self, replica: Replica, grouped: bool, layout: HybridLayout | None
    ) -> dict[str, dict[str, bool]]:
        found: dict[str, dict[str, bool]] = {}
        if self.enable_unified_memory:
            found["enable_unified_memory"] = {
                "windows and enable_prefix_caching = False": self.window_of(model(replica.model)) is not None
                and replica.enable_prefix_caching is False,
                "enable_hierarchical_cache": self.enable_hierarchical_cache,
                "pipeline parallelism": replica.pipeline_parallel_size > 1,
                "block ids, which recordings need": replica.ids,
            }
        if self.enable_hierarchical_cache:
            found["enable_hierarchical_cache"] = {
                "enable_prefix_caching = False": replica.enable_prefix_caching is False,
                "hicache_size over an indexer (use hicache_ratio)": bool(self.hicache_size)
                and model(replica.model).indexer is not None,
                "pipeline parallelism": replica.pipeline_parallel_size > 1,
                "block ids, which recordings need": replica.ids,
            }
        return found

    def window_of(self, shape: ModelSpec) -> int | None:
        """The window of layers with a pool of their own, see ``spec.startup.sglang``; None without such a pool."""
        if self.disable_hybrid_swa_memory or self._drops_windows(shape):
            return None
        return window_of(shape)

    def _drops_windows(self, shape: ModelSpec) -> bool:
        """Whether SGLang keeps every token of a model beside HiCache (``_step3p_overrides`` of 0.5.23)."""
        return self.enable_hierarchical_cache and shape.model_type in ("step3p5", "step3p7")

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        """See ``Options``; windows without a pool, priorities, and what these decide without the switch."""
        if name in ("swa_full_tokens_ratio", "disable_hybrid_swa_memory") and window_of(model(replica.model)) is None:
            return f"SGLang gives the windows of {replica.model} no pool of their own; {LEAVE_OUT}"
        if name in ("swa_full_tokens_ratio", "disable_hybrid_swa_memory") and self._drops_windows(model(replica.model)):
            return f"SGLang gives the windows of {replica.model} no pool of their own beside HiCache; {LEAVE_OUT}"
        if name == "swa_full_tokens_ratio" and self.disable_hybrid_swa_memory:
            return f"windows have no pool of their own with disable_hybrid_swa_memory; {LEAVE_OUT}"
        if name in _OF_STATES and model(replica.model).mixer is None:
            return f"{replica.model} has no layers with a state; {LEAVE_OUT}"
        if name in _OF_STATES[:2] and replica.enable_prefix_caching is False:
            return f"there is no radix cache without prefix caching; {LEAVE_OUT}"
        if name == "mamba_track_interval" and (
            self.mamba_radix_cache_strategy == "no_buffer" or not copies_states(model(replica.model))
        ):
            return f"no states are copied with no_buffer; {LEAVE_OUT}"
        if name == "mamba_full_memory_ratio" and self.max_mamba_cache_size is not None:
            return f"max_mamba_cache_size is the number of states; {LEAVE_OUT}"
        if name.startswith("hicache_") and not self.enable_hierarchical_cache:
            return f"nothing is copied to the host; use enable_hierarchical_cache, {LEAVE_OUT}"
        if name == "hicache_ratio" and self.hicache_size:
            return f"hicache_size says how large the host pool is; {LEAVE_OUT}"
        ordered = workload is None or workload.priority is not None
        # A scheduler that preempts looks at its queue in each step, also among equals.
        if name == "enable_priority_scheduling" and self.disable_priority_preemption and not ordered:
            return f"no request has a priority; use a trace with a column priority, {LEAVE_OUT}"
        by_priority = ("schedule_low_priority_values_first", "disable_priority_preemption")
        if name in (*by_priority, "priority_scheduling_preemption_threshold", "retraction_policy"):
            if not self.enable_priority_scheduling:
                return f"requests are not served by priority; use enable_priority_scheduling, {LEAVE_OUT}"
            if self.disable_priority_preemption and name == "priority_scheduling_preemption_threshold":
                return f"nothing is preempted with disable_priority_preemption; {LEAVE_OUT}"
        return super().why_unread(name, replica, workload)
