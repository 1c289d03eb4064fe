"""Builds a replica from settings: policy, memory and cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from ..cost import SpeculativeCost, StepCost, cost, default_cost, outside_ticks, read_server
from ..memory import Memory, PageGroups, most_prompt_blocks
from ..memory.accounting.cache_log import CacheLog
from ..policy import SHARING, Limits, Pool, Server, policy
from ..policy.api_times import api_server_us
from ..policy.base import AnyPolicy, PairedPolicy
from ..policy.options import (
    OUTSIDE_MS,
    KvGroupOptions,
    Options,
    VllmServeOptions,
    VllmV0Options,
    VllmV1Options,
    WatermarkOptions,
    attention_backend_of,
    context_parallel_of,
    minor_version,
    option_names,
    speculative_of,
)
from ..policy.registry import allocator
from ..spec import Deployment, GpuSpec, HybridLayout, ModelSpec, gpu, host_blocks, hybrid_layout, model, page_bytes
from ..spec.context_parallel import require_context_parallel
from ..spec.hybrid import formed_layout, require_one_block_size
from ..spec.kv_cache import CacheSettings
from ..spec.model import origin
from ..spec.pool import offloaded_blocks
from ..spec.releases import LAST_ORDERED
from ..spec.startup.launch import checked_block_size, resolved_kv_dtype
from ..spec.weights import weights_format
from ..types import ticks
from ..types.errors import NotSimulated, SettingError
from ..types.plugins import broken, is_plugin
from ..workload.content import PromptSource
from ..workload.dialogue import Dialogue
from .api_server import ApiServer
from .guard import checked_cost, of_plugins, whole_numbers
from .settings import Settings

GIB = 1 << 30
#: What every memory has, for the engine.
MEMORY_METHODS = ("transaction", "admit", "release", "advance", "meter", "capacity_slots")
#: Factor on the paper's step time, fitted on the vLLM value of its Fig 13a (`fragmeter reproduce fig13a`).
FITTED_STEP_SCALE = 1.125


@dataclass(frozen=True)
class Replica:
    """The policy, memory and cost model of one engine.

    Attributes:
        policy, memory, cost: New objects for one run.
        num_blocks, block_size: Size of the pool, in blocks, and of a block, in tokens on all ranks that divide them.
        max_model_len: Longest prompt + output in tokens.
        layout: The KV groups that share the pool; None if all layers keep every token.
        page_bytes: Bytes of a block of one KV group on each rank; 0 without KV groups.
        caches_prefixes: Whether freed blocks keep their contents for prompts with the same prefix.
        enforce_eager: Whether it runs without CUDA graphs.
        outside_ticks: Time of a request outside of the engine.
        api_server: The event loops in front of it; None where they take no time.
        sources: Where each value of ``describe`` comes from.
    """

    policy: PairedPolicy
    memory: Memory
    cost: StepCost
    num_blocks: int
    block_size: int
    max_model_len: int
    layout: HybridLayout | None = None
    page_bytes: int = 0
    caches_prefixes: bool = False
    enforce_eager: bool = True
    outside_ticks: int = 0
    api_server: ApiServer | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def host_blocks(self) -> int:
        """Blocks of the swap space; 0 where the memory has none."""
        return self.memory.host_blocks

    @property
    def cache_log(self) -> CacheLog | None:
        """Log of the memory's prefix cache, if it has one."""
        return self.memory.cache_log

    def describe(self) -> dict[str, object]:
        """The resolved settings, defaults included, for ``run.json``."""
        return {
            "num_gpu_blocks": self.num_blocks,
            "block_size": self.block_size,
            "enable_prefix_caching": self.caches_prefixes,
            "enforce_eager": self.enforce_eager,
            **asdict(self.policy.limits),
            "sources": dict(self.sources),
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
@of_plugins
def build(
    settings: Settings,
    step_cost: StepCost | None = None,
    workload: PromptSource | None = None,
    grouped: bool = False,
    dialogue: Dialogue | None = None,
) -> Replica:
    """Build a replica.

    Args:
        step_cost: Replaces the cost model of the settings.
        workload: The requests; a prefix cache reads the contents of their prompts.
        grouped: Whether sequences share blocks or are copied (``is_grouped``).
        dialogue: Parents of requests, if any, that they share memory with.

    Raises:
        SettingError: An unknown model or GPU, a model with layers that keep a state of fixed size, that leaves no
            room for a pool or is shorter than ``max_model_len``, a cost model that does not fit the model.
    """
    kind, options, ranks = policy(settings.policy), settings.policy_options, settings.tensor_parallel_size
    shape, card = model(settings.model), gpu(settings.gpu)
    deployment = deployment_of(settings, shape, card)
    max_model_len = _max_model_len(settings, shape)
    caches = _caches_prefixes(settings, workload, shape)
    runs = workload.token_runs() if workload is not None and caches else None
    layout: HybridLayout | None = None
    if shape.mixer or not grouped:
        layout = _layout(settings, kind, shape, deployment, max_model_len, caches)
    asked_size = (
        layout.config.block_size if layout and layout.config else checked_block_size(shape, settings.block_size)
    )
    _refuse_speculation(settings, deployment, grouped)
    _refuse_context_parallel(settings, shape)
    kind = SHARING.get(kind, kind) if grouped else kind.variant(options)
    server = Server(
        model=shape,
        gpu=card,
        deployment=deployment,
        tensor_parallel=ranks,
        layout=layout,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    asked = settings.num_gpu_blocks_override, asked_size
    num_blocks, size = whole_numbers(kind, "pool_size", kind.pool_size(server, options, *asked))
    held = num_blocks * size // max_model_len, max_model_len
    given = settings.max_num_seqs, settings.max_num_batched_tokens
    seqs, tokens = whole_numbers(kind, "step_limits", kind.step_limits(server, held, *given))
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        watermark_blocks=int(options.watermark * num_blocks) if isinstance(options, WatermarkOptions) else 0,
    )
    scheduler = kind(limits, options, _page_groups(layout, kind, options, limits, size) if layout else None)
    pool = Pool(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=max_model_len,
        host_blocks=_host_blocks(options, shape, ranks, size, deployment, layout),
        offloaded_blocks=_offloaded_blocks(settings, shape, size, deployment, layout, grouped),
        ids=settings.ids,
        token_runs=runs,
        caches_prefixes=settings.enable_prefix_caching is not False,
        grouped=grouped,
        dialogue=dialogue,
        seed=settings.seed,
    )
    memory = _memory_of(scheduler, pool) if settings.allocator is None else _own_memory(settings, pool, layout)
    found = checked_cost(
        step_cost or _cost(settings, shape, card, size, deployment, scheduler, memory.placement is None)
    )
    return Replica(
        # It made the memory, or the allocator's derives from what it would make.
        policy=cast(PairedPolicy, scheduler),
        memory=memory,
        cost=found,
        outside_ticks=_outside_ticks(found, options),
        api_server=_api_server(settings, options),
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=max_model_len,
        caches_prefixes=memory.cache_log is not None,
        enforce_eager=not deployment.cuda_graphs,
        sources=_sources(settings, kind, shape, layout),
        layout=layout,
        page_bytes=_page_bytes(shape, layout, ranks, size, deployment),
    )


def _outside_ticks(found: StepCost, options: Options) -> int:
    """Time of a request outside of the engine: that of a cost which knows its server, else that of the API server of ``vllm serve``,
    and none under the policies of papers and of other systems, as no measured run has their API servers.

    Raises:
        SettingError: Both are given.
    """
    serve = options if isinstance(options, VllmServeOptions) else None
    known, given = outside_ticks(found), serve.outside_ms if serve else 0.0
    if known is None:
        return round(serve.request_outside_ms * ticks.PER_MS) if serve else 0
    if given not in (0.0, OUTSIDE_MS):
        remedy = f"the server's constants have {known / ticks.PER_MS:g} ms; leave one of them out"
        raise SettingError("outside_ms", given, remedy)
    return known


def _api_server(settings: Settings, options: Options) -> ApiServer | None:
    """The event loops of the API server, where their time is given."""
    if not isinstance(options, VllmServeOptions) or options.api_server is None:
        return None
    if speculative_of(options) is not None:
        given = options.api_server
        raise NotSimulated("api_server", given, "is not simulated with speculative_config", "leave out one of them")
    return ApiServer.of_us(options.api_server_count, api_server_us(options.api_server, options.endpoint))


def _sources(
    settings: Settings, kind: type[AnyPolicy], shape: ModelSpec, layout: HybridLayout | None
) -> dict[str, str]:
    """Where the resolved values come from: the user, the model, or the defaults of the policy."""
    names = {"num_gpu_blocks": "num_gpu_blocks_override"}
    shared = ("block_size", "enable_prefix_caching", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
    found = dict.fromkeys(shared, kind.defaults_source)
    found |= {"num_gpu_blocks": kind.pool_source, "max_model_len": f"model {settings.model}"}
    if shape.mixer:
        found |= {"block_size": "raised until a block is as large as a state"}
    if shape.indexer:
        found |= {"block_size": "blocks of the indexer's kernels"}
    given = [name for name in found if getattr(settings, names.get(name, name)) is not None]
    # An option at its default is not known to be given.
    options = dict.fromkeys(option_names(kind.options_type), kind.defaults_source)
    given += [name for name, _ in settings.options if name in options]
    repository = origin(settings.model)
    about = {} if repository is None else {"model": repository}
    return found | options | dict.fromkeys(given, "given") | about


def _own_memory(settings: Settings, pool: Pool, layout: HybridLayout | None) -> Memory:
    """The memory of another package in place of the policy's."""
    name = settings.allocator
    assert name is not None
    if pool.grouped or layout or pool.token_runs is not None:
        remedy = "serves requests of one sequence, without prefix caching, over layers that keep every token"
        raise SettingError("allocator", name, f"{remedy}; leave it out")
    memory = allocator(name)(pool)
    missing = _missing(memory)
    if missing:
        raise SettingError("allocator", name, f"lacks {missing}; docs/extending.md says what a memory has")
    return cast(Memory, memory)


def _memory_of(scheduler: AnyPolicy, pool: Pool) -> Memory:
    """The memory of a policy."""
    memory = scheduler.memory(pool)
    if is_plugin(scheduler) and (missing := _missing(memory)):
        what = f"memory returns {type(memory).__name__}, which lacks {missing}; return a PagedMemory or another memory"
        raise broken(type(scheduler), "memory", "accounts", what)
    return memory


def _missing(memory: object) -> str:
    """What a memory lacks, for errors; empty if it has all that every memory has."""
    return ", ".join(each for each in MEMORY_METHODS if not hasattr(memory, each))


def _caches_prefixes(settings: Settings, workload: PromptSource | None, shape: ModelSpec) -> bool:
    """Whether prefixes are to be cached: asked for, or possible and the default, or of use for a workload.

    vLLM does not cache prefixes of models without attention by default.
    """
    wanted = settings.enable_prefix_caching
    if wanted is None:
        kind = policy(settings.policy)
        possible = kind.caches_prefixes and bool(shape.attention_layers)
        of_use = workload is not None and workload.may_share_prefixes
        wanted = possible and (kind.caches_by_default or of_use)
    return wanted


def _max_model_len(settings: Settings, shape: ModelSpec) -> int:
    tokens = settings.max_model_len or shape.max_model_len
    if tokens > shape.max_model_len:
        remedy = f"{shape.name} has positions for {shape.max_model_len}; give no more"
        raise SettingError("max_model_len", tokens, remedy)
    return tokens


def _layout(
    settings: Settings,
    kind: type[AnyPolicy],
    shape: ModelSpec,
    deployment: Deployment,
    max_model_len: int,
    caches: bool,
) -> HybridLayout | None:
    """The model's KV groups, if the policy supports them and layers do not all keep the same."""
    options = settings.policy_options
    disabled = isinstance(options, KvGroupOptions) and options.disable_hybrid_kv_cache_manager
    if shape.mixer:
        _require_states(settings, kind, shape, disabled)
    elif disabled or not isinstance(options, KvGroupOptions) or not kind.serves_kv_groups:
        return None
    elif not shape.window_heads:
        return hybrid_layout(shape, max_model_len)
    cache = CacheSettings(
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens or max_model_len,
        block_size=settings.block_size,
        enable_prefix_caching=caches,
    )
    exports = shape.mixer.export_tokens(gpu(settings.gpu).major, _minor(options)) if shape.mixer else 0
    layout = formed_layout(shape, cache, deployment.kv_dtype, settings.tensor_parallel_size, exports)
    require_one_block_size(shape, layout)
    return layout


def _minor(options: Options) -> int:
    """Minor version of vLLM, of a policy that serves states."""
    return minor_version(options.vllm_release) if isinstance(options, VllmV1Options) else LAST_ORDERED


def _require_states(settings: Settings, kind: type[AnyPolicy], shape: ModelSpec, disabled: bool) -> None:
    """Raise SettingError for a policy or an option that does not serve a model with states."""
    if not kind.serves_states:
        remedy = f"has layers with a fixed-size state, which {settings.policy} does not serve; use --policy vllm-v1"
        raise SettingError("model", shape.name, remedy)
    if disabled:
        remedy = f"{shape.name} has layers with a fixed-size state, which are groups of their own; leave it out"
        raise SettingError("disable_hybrid_kv_cache_manager", True, remedy)


def _page_bytes(shape: ModelSpec, layout: HybridLayout | None, ranks: int, size: int, deployment: Deployment) -> int:
    """Bytes of a page of KV groups on each rank; 0 without groups."""
    return 0 if layout is None else page_bytes(shape, layout, ranks, size, deployment)


def _page_groups(
    layout: HybridLayout, kind: type[AnyPolicy], options: Options, limits: Limits, size: int
) -> PageGroups:
    """The KV groups of the pool, in blocks of ``size`` tokens."""
    window = layout.window_tokens
    return PageGroups(
        kinds=tuple(group.span.kind for group in layout.groups),
        window_tokens=window,
        states_by_block=layout.config is not None and layout.config.mamba_cache_mode == "align",
        ahead=isinstance(options, VllmServeOptions) and options.async_scheduling,
        exports_states=layout.config is not None and layout.config.exports_states,
        most_prompt_blocks=window
        and most_prompt_blocks(window, kind.in_flight_tokens(limits, options), limits.max_model_len, size),
    )


def _host_blocks(
    options: Options, shape: ModelSpec, ranks: int, size: int, deployment: Deployment, layout: HybridLayout | None
) -> int:
    """Blocks of the swap space, of a policy that has one."""
    if not isinstance(options, VllmV0Options) or (layout and options.preemption_mode != "swap"):
        return 0
    return host_blocks(shape, ranks, size, int(options.swap_space * GIB), deployment, layout)


def _offloaded_blocks(
    settings: Settings,
    shape: ModelSpec,
    size: int,
    deployment: Deployment,
    layout: HybridLayout | None,
    grouped: bool,
) -> int:
    """Blocks of the host memory of vLLM's native KV offloading, of a policy that has one.

    Raises:
        SettingError: It holds no block.
        NotSimulated: What the run composes it with is not simulated beside it.
    """
    options = settings.policy_options
    if not isinstance(options, VllmV1Options) or not options.kv_offloading_size:
        return 0
    given = options.kv_offloading_size
    refused = {
        "layers that do not all keep every token": layout is not None,
        "pipeline parallelism": deployment.pipeline_parallel > 1,
        "data parallelism": deployment.data_parallel > 1,
        "requests that share memory": grouped,
        "enable_prefix_caching = False": settings.enable_prefix_caching is False,
        "block ids, which recordings need": settings.ids,
    }
    for what, applies in refused.items():
        if applies:
            raise NotSimulated("kv_offloading_size", given, f"is not simulated with {what}", "leave out one of them")
    blocks = offloaded_blocks(shape, settings.tensor_parallel_size, size, int(given * GIB), deployment)
    if not blocks:
        raise SettingError("kv_offloading_size", given, "holds no block; give more GiB")
    return blocks


def _refuse_speculation(settings: Settings, deployment: Deployment, grouped: bool) -> None:
    """Raise NotSimulated where speculative decoding is composed with what is not simulated beside it."""
    if speculative_of(settings.policy_options) is None:
        return
    refused = {
        "pipeline parallelism": deployment.pipeline_parallel > 1,
        "data parallelism": deployment.data_parallel > 1,
        "requests that share memory": grouped,
        "--cost paper": settings.cost == "paper",
        "an allocator": settings.allocator is not None,
        "constants of a server": settings.server is not None,
    }
    for what, applies in refused.items():
        if applies:
            given = settings.value("speculative_config")
            raise NotSimulated("speculative_config", given, f"is not simulated with {what}", "leave out one of them")


def _refuse_context_parallel(settings: Settings, shape: ModelSpec) -> None:
    """Raise SettingError where ranks cannot divide the tokens of a sequence, NotSimulated where that is not simulated."""
    options = settings.policy_options
    ranks = context_parallel_of(options)
    require_context_parallel(shape, settings.tensor_parallel_size, ranks)
    if ranks == 1 or not isinstance(options, VllmV1Options):
        return
    refused = {
        "speculative_config": options.speculative_config is not None,
        "kv_offloading_size": options.kv_offloading_size > 0,
        "constants of a server": settings.server is not None,
    }
    for what, applies in refused.items():
        if applies:
            reason = f"is not simulated with {what}"
            raise NotSimulated("decode_context_parallel_size", ranks, reason, "leave out one of them")


def _eager(settings: Settings) -> bool:
    return policy(settings.policy).default_enforce_eager if settings.enforce_eager is None else settings.enforce_eager


def deployment_of(settings: Settings, shape: ModelSpec, card: GpuSpec) -> Deployment:
    """The deployment that settings describe."""
    return Deployment(
        pipeline_parallel=settings.pipeline_parallel_size,
        kv_dtype=resolved_kv_dtype(shape, card, settings.kv_cache_dtype),
        quantization=weights_format(shape, settings.quantization),
        cuda_graphs=not _eager(settings),
        data_parallel=settings.data_parallel_size,
        expert_parallel=settings.enable_expert_parallel,
        decode_context_parallel=context_parallel_of(settings.policy_options),
        vllm_minor=_minor(settings.policy_options),
        attention_backend=attention_backend_of(settings.policy_options),
    )


def _cost(
    settings: Settings,
    shape: ModelSpec,
    card: GpuSpec,
    size: int,
    deployment: Deployment,
    scheduler: AnyPolicy,
    paged: bool,
) -> StepCost:
    ranks, size = settings.tensor_parallel_size, size // deployment.decode_context_parallel
    server = None if settings.server is None else read_server(settings.server)
    if server is not None:
        server.require(server_settings(settings))
    name = settings.cost or (server.cost if server else default_cost(shape, card, deployment.quantization))
    scale = settings.step_scale or (FITTED_STEP_SCALE if name == "paper" else 1.0)
    ahead, pipelined = scheduler.schedules_ahead, scheduler.pipelines
    found = cost(name, shape, card, ranks, size, scale, deployment, server, ahead, pipelined, paged)
    speculative = speculative_of(settings.policy_options)
    if speculative is None:
        return found
    speculative.require_simulated(shape)
    drafter, drafts_cost = speculative.drafter(shape), None
    if drafter is not None:
        # The host's time is that of the target's step, and a server's constants are those of the whole.
        own = replace(deployment, quantization=speculative.quantization(drafter, deployment))
        covered = name if name == "roofline" else default_cost(drafter, card, own.quantization)
        drafts_cost = cost(covered, drafter, card, ranks, size, scale, own, None, True, False)
    return SpeculativeCost(found, drafts_cost, speculative.num_speculative_tokens)


def server_settings(settings: Settings) -> dict[str, object]:
    """The settings that a server's constants hold for; without a cost that is not given, and options that the policy lacks."""
    shape = model(settings.model)
    found: dict[str, object] = {
        "gpu": settings.gpu,
        "model": shape.name,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
        "quantization": weights_format(shape, settings.quantization),
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enforce_eager": _eager(settings),
    }
    options = option_names(policy(settings.policy).options_type)
    found |= {name: settings.value(name) for name in ("async_scheduling", "vllm_release") if name in options}
    return found | ({"cost": settings.cost} if settings.cost else {})
