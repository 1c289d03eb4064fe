"""From settings to a replica that can serve: policy, memory and cost, put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..cost import PaperCost, StepCost, cost
from ..memory import (
    BatchMemory,
    BuddyMemory,
    CachedMemory,
    ChunkedMemory,
    ContiguousMemory,
    DeferredMemory,
    HybridMemory,
    PagedMemory,
    PageGroups,
    RadixMemory,
    ReservedMemory,
    SlotRadixMemory,
    most_prompt_blocks,
)
from ..memory.accounting.cache_log import CacheLog
from ..memory.prefix import BlockNames
from ..policy import CACHING_POLICIES, HYBRID, POLICIES, Limits, Policy
from ..policy.orca import OrcaMax, OrcaPaper
from ..policy.sarathi import Sarathi
from ..policy.sglang import SGLang
from ..policy.static import FasterTransformer, StaticBatching
from ..policy.tgi import Tgi
from ..policy.vattention import VAttention, page_group
from ..policy.vllm_v1 import VllmV1
from ..spec import (
    Deployment,
    GpuSpec,
    HybridLayout,
    ModelSpec,
    gpu,
    host_blocks,
    hybrid_layout,
    model,
    page_bytes,
    paper_num_blocks,
)
from ..types.errors import SettingError
from ..workload.content import TokenRuns
from ..workload.workload import Workload
from .grouping import grouped_memory, grouped_policy
from .settings import Settings

GIB = 1 << 30
#: Factor on the paper's step time, fitted on the vLLM value of its Fig 13a (`fragmeter reproduce fig13a`).
FITTED_STEP_SCALE = 1.125
#: SOSP'23, section 6.1: FasterTransformer's batch size on ShareGPT, as large as its memory allows.
FASTERTRANSFORMER_BATCH = {"opt-13b": 5, "opt-66b": 2, "opt-175b": 24}


@dataclass(frozen=True)
class Replica:
    """What one engine serves with.

    Attributes:
        policy, memory, cost: Fresh for one run.
        num_blocks, block_size: Size of the pool.
        max_model_len: Longest prompt + output in tokens.
        layout: The KV groups that share the pool, where layers with a window keep only what it needs.
        page_bytes: Bytes of a block of one of those groups on each rank; 0 where there are none.
        caches_prefixes: Whether what is freed is kept for prompts that begin alike.
    """

    policy: Policy
    memory: Any
    cost: StepCost
    num_blocks: int
    block_size: int
    max_model_len: int
    layout: HybridLayout | None = None
    page_bytes: int = 0
    caches_prefixes: bool = False

    @property
    def host_blocks(self) -> int:
        """Blocks of the swap space; 0 where the memory has none."""
        return getattr(self.memory, "host_blocks", 0)

    @property
    def cache_log(self) -> CacheLog | None:
        """What the memory tells of its prefix cache, if it has one."""
        return getattr(self.memory, "cache_log", None)

    def describe(self) -> dict[str, Any]:
        """What the settings came to, defaults included, for ``run.json``."""
        return {
            "num_gpu_blocks": self.num_blocks,
            "block_size": self.block_size,
            "enable_prefix_caching": self.caches_prefixes,
            **asdict(self.policy.limits),
        }


# What shapes, pools and costs call their arguments, and what the user calls them.
_SETTINGS_NAMES = {
    "num_gpus": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "scale": "step_scale",
}


@contextmanager
def _under_settings_names() -> Iterator[None]:
    """Errors name the setting that the user gave."""
    try:
        yield
    except SettingError as error:
        if error.field not in _SETTINGS_NAMES:
            raise
        raise SettingError(_SETTINGS_NAMES[error.field], error.value, error.remedy) from None


@_under_settings_names()
def build(
    settings: Settings, step_cost: StepCost | None = None, workload: Workload | None = None, grouped: bool = False
) -> Replica:
    """A fresh replica.

    Args:
        step_cost: Used in place of the settings' own.
        workload: What will be served: a memory that caches prefixes asks what prompts are made of.
        grouped: Whether its sequences share memory, or are copied (``is_grouped``).

    Raises:
        SettingError: An unknown model or GPU, a model that leaves no room for a pool or is shorter than
            ``max_model_len``, a cost model that does not fit the model.
    """
    shape, card, kind = model(settings.model), gpu(settings.gpu), _policy(settings)
    if grouped:
        kind = grouped_policy(kind)
    deployment = _deployment(settings, shape)
    max_model_len = _max_model_len(settings, shape)
    layout = None if grouped else _layout(settings, shape, max_model_len)
    num_blocks, size = _pool(settings, kind, shape, card, deployment, layout)
    runs = None if workload is None else _runs_to_cache(settings, workload, layout)
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs or _default_seqs(kind, shape, num_blocks * size // max_model_len),
        max_num_batched_tokens=settings.max_num_batched_tokens or kind.default_max_num_batched_tokens,
        watermark_blocks=int(settings.watermark * num_blocks),
        preemption_mode=settings.preemption_mode,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_waiting_tokens=settings.max_waiting_tokens,
        output_estimate=settings.output_estimate,
        schedule_policy=settings.schedule_policy,
    )
    if layout:
        policy, memory = _hybrid(settings, layout, limits, num_blocks, size)
    elif issubclass(kind, SGLang):
        radix = SlotRadixMemory if settings.ids else RadixMemory
        policy, memory = kind(limits), radix(num_blocks, runs, settings.enable_prefix_caching is not False)
    else:
        policy = kind(limits)
        host = host_blocks(shape, settings.tensor_parallel_size, size, int(settings.swap_space * GIB), deployment)
        if grouped:
            memory = grouped_memory(settings, kind, num_blocks, size, max_model_len, host, workload)
        else:
            memory = _memory(settings, kind, num_blocks, size, max_model_len, host, runs)
    return Replica(
        policy=policy,
        memory=memory,
        cost=step_cost or _cost(settings, shape, card, size, deployment),
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=max_model_len,
        caches_prefixes=getattr(memory, "cache_log", None) is not None,
        layout=layout,
        page_bytes=page_bytes(shape, layout, settings.tensor_parallel_size, size, deployment) if layout else 0,
    )


def _runs_to_cache(settings: Settings, workload: Workload, layout: HybridLayout | None) -> TokenRuns | None:
    """The tokens of a workload, if prefixes of them are to be cached: asked for, or possible and of use."""
    wanted = settings.enable_prefix_caching
    if wanted and layout:
        remedy = "is not simulated where layers with a window let go of theirs; give --disable-hybrid-kv-cache-manager"
        raise SettingError("enable_prefix_caching", wanted, remedy)
    if wanted is None:
        wanted = workload.may_share_prefixes and settings.policy in CACHING_POLICIES and not layout
    return workload.token_runs() if wanted else None


def _max_model_len(settings: Settings, shape: ModelSpec) -> int:
    tokens = settings.max_model_len or shape.max_model_len
    if tokens > shape.max_model_len:
        remedy = f"{shape.name} has positions for {shape.max_model_len}; give no more"
        raise SettingError("max_model_len", tokens, remedy)
    return tokens


def _layout(settings: Settings, shape: ModelSpec, max_model_len: int) -> HybridLayout | None:
    """The model's KV groups, if it has windows that the policy knows of and that sequences can leave."""
    if settings.disable_hybrid_kv_cache_manager or settings.policy not in HYBRID:
        return None
    layout = hybrid_layout(shape, max_model_len)
    if layout and settings.preemption_mode == "swap" and not issubclass(HYBRID[settings.policy], VllmV1):
        remedy = "is not simulated where layers with a window let go of theirs; give --disable-hybrid-kv-cache-manager"
        raise SettingError("preemption_mode", "swap", remedy)
    return layout


def _hybrid(
    settings: Settings, layout: HybridLayout, limits: Limits, num_blocks: int, size: int
) -> tuple[Policy, HybridMemory]:
    """Policy and memory over KV groups."""
    kind, window = HYBRID[settings.policy], layout.window_tokens
    groups = PageGroups(
        full=len(layout.groups) - layout.num_sliding,
        sliding=layout.num_sliding,
        window_tokens=window,
        most_prompt_blocks=most_prompt_blocks(window, kind.in_flight_tokens(limits), limits.max_model_len, size),
    )
    usable = num_blocks - getattr(kind, "null_blocks", 0)
    return kind(limits, groups), HybridMemory(usable, size, groups, settings.ids)


def _deployment(settings: Settings, shape: ModelSpec) -> Deployment:
    return Deployment(
        pipeline_parallel=settings.pipeline_parallel_size,
        kv_dtype="fp16" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        quantization=settings.quantization or shape.quantization,
        cuda_graphs=not settings.enforce_eager,
    )


def _policy(settings: Settings) -> type:
    """The policy's class, which for an arena that does not round asks no pool of a power of two."""
    kind = POLICIES[settings.policy]
    if settings.arena == "buddy" or not issubclass(kind, OrcaMax):
        return kind
    return type(kind.__name__, (kind,), {"smallest_pool_blocks": OrcaPaper.smallest_pool_blocks})


def _pool(
    settings: Settings,
    kind: type,
    shape: ModelSpec,
    card: GpuSpec,
    deployment: Deployment,
    layout: HybridLayout | None,
) -> tuple[int, int]:
    """Blocks of the pool, and tokens of a block."""
    ranks, stages = settings.tensor_parallel_size, deployment.pipeline_parallel
    if issubclass(kind, SGLang) and settings.block_size not in (None, 1):
        raise SettingError("block_size", settings.block_size, "sglang's tree has pages of one token; leave it out")
    if settings.block_size or not issubclass(kind, VAttention):
        size = settings.block_size or getattr(kind, "default_block_size", 16)
        asked = settings.num_gpu_blocks_override
        return asked or paper_num_blocks(shape, card, ranks, size, deployment, layout), size
    group = page_group(shape, settings.page_size, ranks, deployment.kv_dtype, stages)
    if settings.num_gpu_blocks_override:
        return settings.num_gpu_blocks_override, group.tokens
    slots = paper_num_blocks(shape, card, ranks, 1, deployment)
    # In bytes, as the pages of a group may be no whole number of tokens.
    num_groups = slots * shape.slot_bytes(deployment.kv_dtype, ranks, stages) // group.rank_bytes
    if not num_groups:
        remedy = f"{shape.name} leaves room for {slots} tokens on {ranks} x {card.name}; take smaller pages"
        raise SettingError("page_size", settings.page_size, remedy)
    return num_groups, group.tokens


def _default_seqs(kind: type, shape: ModelSpec, longest_in_pool: int) -> int:
    if issubclass(kind, FasterTransformer) and shape.name in FASTERTRANSFORMER_BATCH:
        return FASTERTRANSFORMER_BATCH[shape.name]
    if kind.default_max_num_seqs is None:
        return max(1, longest_in_pool)
    return kind.default_max_num_seqs


def _memory(
    settings: Settings,
    kind: type,
    num_blocks: int,
    size: int,
    max_model_len: int,
    host: int,
    runs: TokenRuns | None,
) -> Any:
    if issubclass(kind, StaticBatching):
        return BatchMemory(num_blocks, size)
    if issubclass(kind, OrcaMax):
        return BuddyMemory(num_blocks, size, max_model_len, settings.arena)
    if issubclass(kind, OrcaPaper):
        return ContiguousMemory(num_blocks, size)
    if issubclass(kind, Tgi):
        return ReservedMemory(num_blocks, size, settings.ids)
    if issubclass(kind, VllmV1):
        usable = num_blocks - kind.null_blocks
        if runs is not None:
            return CachedMemory(usable, size, BlockNames(runs, size))
        return ChunkedMemory(usable, size, ids=settings.ids, whole_prompts=issubclass(kind, Sarathi))
    if issubclass(kind, VAttention):
        return DeferredMemory(num_blocks, size, settings.ids)
    return PagedMemory(num_blocks, size, host, settings.ids)


def _cost(settings: Settings, shape: ModelSpec, card: GpuSpec, size: int, deployment: Deployment) -> StepCost:
    ranks = settings.tensor_parallel_size
    measured = deployment.is_default and PaperCost.fits(shape, card, ranks)
    name = settings.cost or ("paper" if measured else "roofline")
    scale = settings.step_scale or (FITTED_STEP_SCALE if name == "paper" else 1.0)
    return cost(name, shape, card, ranks, size, scale, deployment)
