"""Builds a replica from settings: policy, memory and cost model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from ..config.settings import Settings
from ..cost import SpeculativeCost, StepCost, cost, default_cost, outside_ticks, read_server
from ..memory import GroupSize, Memory, PageGroups, most_prompt_blocks
from ..memory.prefix.tiers import FleetTiers
from ..policy import Limits, Pool, Server
from ..policy.base import AnyPolicy, PairedPolicy
from ..policy.options import Options, either, option_names
from ..policy.registry import POLICIES, allocator, serving
from ..runs.api_server import ApiServer
from ..runs.replica import Replica
from ..spec import Deployment, GpuSpec, HybridLayout, ModelSpec, gpu, hybrid_layout, model
from ..spec.context_parallel import require_context_parallel
from ..spec.hybrid import formed_layout, require_block_sizes
from ..spec.kernels import refuse_experts
from ..spec.kv_cache import CacheSettings
from ..spec.model import origin
from ..spec.releases import LAST_ORDERED
from ..spec.startup.launch import checked_block_size, no_single_group
from ..spec.weights import weights_format
from ..types.errors import NotSimulated, SettingError
from ..types.plugins import broken, is_plugin
from ..workload.content import PromptSource
from ..workload.dialogue import Dialogue
from .guard import checked_cost, of_plugins, whole_numbers

#: What every memory has, for the engine.
MEMORY_METHODS = ("transaction", "admit", "release", "advance", "meter", "capacity_slots")
#: Factor on the paper's step time, fitted on the vLLM value of its Fig 13a (`fragmeter reproduce fig13a`).
FITTED_STEP_SCALE = 1.125


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
    kv_role: str | None = None,
    fleet: FleetTiers | None = None,
) -> Replica:
    """Build a replica: server -> pool size -> limits -> policy -> memory -> cost.

    Args:
        step_cost: Replaces the cost model of the settings.
        workload: The requests; a prefix cache reads the contents of their prompts.
        grouped: Whether sequences of a request share blocks (``is_grouped``); False copies the tokens that they would
            share.
        dialogue: For each request, the earlier request that it continues and shares memory with; None without any.
        kv_role: See ``Limits``.
        fleet: What the replicas of a fleet have together, where one of their tiers is shared.

    Raises:
        SettingError: The model or GPU is unknown; the model has states that the policy does not serve, leaves no room
            for a pool, or is shorter than ``max_model_len``; or the cost model does not cover it.
    """
    caches = _caches_prefixes(settings, workload)
    server = _server(settings, caches, grouped)
    options = settings.policy_options.for_server(server)
    _refuse_beside(settings, grouped, server.layout)
    kind = serving(settings.kind, options, grouped)
    num_blocks, size = _pool_size(settings, kind, server, options)
    limits = replace(_limits(kind, server, options, num_blocks, size), kv_role=kv_role)
    states = kind.state_pool(server, options, size, num_blocks)
    if states is not None:
        limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, states.most_requests))
    scheduler = kind(limits, options, _page_groups(server, kind, options, limits, size))
    windows = kind.window_pool(server, options, num_blocks, size)
    offloaded = options.offloaded(server, num_blocks, size, windows or states)
    if offloaded is not None and fleet is not None:
        offloaded = replace(offloaded, fleet=fleet)
    pool = Pool(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=server.max_model_len,
        host_blocks=options.host_blocks(server, size),
        offloaded=offloaded,
        ids=settings.ids,
        token_runs=workload.token_runs() if workload is not None and caches else None,
        caches_prefixes=settings.enable_prefix_caching is not False,
        grouped=grouped,
        dialogue=dialogue,
        seed=settings.seed,
        windows=windows,
        states=states,
    )
    memory = _memory(settings, scheduler, pool, server.layout)
    found = checked_cost(step_cost or _cost(settings, server, size, scheduler, memory.placement is None))
    loops = options.event_loops
    return Replica(
        # It made the memory, or the allocator's derives from what it would make.
        policy=cast(PairedPolicy, scheduler),
        memory=memory,
        cost=found,
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=server.max_model_len,
        layout=server.layout,
        page_bytes=server.page_bytes(size),
        caches_prefixes=memory.cache_log is not None,
        enforce_eager=not server.deployment.cuda_graphs,
        outside_ticks=options.outside_ticks(outside_ticks(found)),
        api_server=None if loops is None else ApiServer.of_us(*loops),
        sources=_sources(settings, kind, server),
    )


def _server(settings: Settings, caches: bool, grouped: bool) -> Server:
    """The model and the GPUs of the settings, and the KV groups of the model.

    Args:
        caches: Whether prefixes are cached.
        grouped: See ``build``.

    Raises:
        SettingError: They do not go together.
    """
    shape, card, ranks = model(settings.model), gpu(settings.gpu), settings.tensor_parallel_size
    deployment, most = deployment_of(settings, shape, card), _max_model_len(settings, shape)
    layout = _layout(settings, shape, deployment, most, caches, grouped)
    one_group = not settings.policy_options.groups_layers
    require_context_parallel(shape, ranks, deployment.decode_context_parallel, one_group)
    return Server(
        model=shape,
        gpu=card,
        deployment=deployment,
        tensor_parallel=ranks,
        layout=layout,
        max_model_len=most,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        caches_prefixes=settings.enable_prefix_caching is not False,
    )


def _refuse_beside(settings: Settings, grouped: bool, layout: HybridLayout | None) -> None:
    """Raise NotSimulated for an option beside what is not simulated with it."""
    for option, others in settings.policy_options.refused_combinations(settings, grouped, layout).items():
        for what, applies in others.items():
            if applies:
                reason = f"is not simulated with {what}"
                raise NotSimulated(option, settings.value(option), reason, "leave out one of them")


def _pool_size(settings: Settings, kind: type[AnyPolicy], server: Server, options: Options) -> tuple[int, int]:
    """Blocks of the pool, and tokens of a block."""
    config = server.layout.config if server.layout else None
    size = config.block_size if config else checked_block_size(server.model, settings.block_size)
    found = kind.pool_size(server, options, settings.num_gpu_blocks_override, size)
    num_blocks, size = whole_numbers(kind, "pool_size", found)
    if config and server.layout and server.layout.has_block_sizes:
        size = config.scheduler_block_size
    return num_blocks, size


def _limits(kind: type[AnyPolicy], server: Server, options: Options, num_blocks: int, size: int) -> Limits:
    """The limits of a step."""
    most = server.max_model_len
    found = kind.step_limits(server, (num_blocks * size, most), server.max_num_seqs, server.max_num_batched_tokens)
    seqs, tokens = whole_numbers(kind, "step_limits", found)
    return Limits(
        max_model_len=most,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        watermark_blocks=int(options.free_share * num_blocks),
        stages=server.deployment.pipeline_parallel if kind.pipelines else 1,
    )


def _sources(settings: Settings, kind: type[AnyPolicy], server: Server) -> dict[str, str]:
    """Where the resolved values come from: the user, the model, or the defaults of the policy."""
    names = {"num_gpu_blocks": "num_gpu_blocks_override"}
    shared = ("block_size", "enable_prefix_caching", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
    found = dict.fromkeys(shared, kind.defaults_source)
    found |= {"num_gpu_blocks": kind.pool_source, "max_model_len": f"model {settings.model}"}
    if server.model.mixer and server.layout:
        found |= {"block_size": "raised until a block is as large as a state"}
    if server.model.indexer or server.model.compressed:
        found |= {"block_size": "blocks of the indexer's kernels"}
    given = [name for name in found if getattr(settings, names.get(name, name)) is not None]
    # An option at its default is not known to be given.
    options = dict.fromkeys(option_names(kind.options_type), kind.defaults_source)
    given += [name for name, _ in settings.options if name in options]
    repository = origin(settings.model)
    about = {} if repository is None else {"model": repository}
    return found | options | dict.fromkeys(given, "given") | about


def _memory(settings: Settings, scheduler: AnyPolicy, pool: Pool, layout: HybridLayout | None) -> Memory:
    """The memory of a policy, or that of another package in its place."""
    name = settings.allocator
    if name is None:
        memory = scheduler.memory(pool)
        if is_plugin(scheduler) and (missing := _missing(memory)):
            kind = type(memory).__name__
            what = f"memory returns {kind}, which lacks {missing}; return a PagedMemory or another memory"
            raise broken(type(scheduler), "memory", "accounts", what)
        return memory
    if pool.grouped or layout or pool.token_runs is not None:
        remedy = "serves requests of one sequence, without prefix caching, over layers that keep every token"
        raise SettingError("allocator", name, f"{remedy}; leave it out")
    own = allocator(name)(pool)
    if missing := _missing(own):
        raise SettingError("allocator", name, f"lacks {missing}; docs/extending.md says what a memory has")
    return cast(Memory, own)


def _missing(memory: object) -> str:
    """What a memory lacks, for errors; empty if it has all that every memory has."""
    return ", ".join(each for each in MEMORY_METHODS if not hasattr(memory, each))


def _caches_prefixes(settings: Settings, workload: PromptSource | None) -> bool:
    """Whether prefixes are to be cached: asked for, or possible and the default, or of use for a workload.

    vLLM does not cache prefixes of models without attention by default.
    """
    if settings.enable_prefix_caching is not None:
        return settings.enable_prefix_caching
    kind = settings.kind
    of_use = workload is not None and workload.may_share_prefixes
    return kind.caches_prefixes and bool(model(settings.model).attention_layers) and (kind.caches_by_default or of_use)


def _max_model_len(settings: Settings, shape: ModelSpec) -> int:
    tokens = settings.max_model_len or shape.max_model_len
    if tokens > shape.max_model_len:
        remedy = f"{shape.name} has positions for {shape.max_model_len}; give no more"
        raise SettingError("max_model_len", tokens, remedy)
    return tokens


def _layout(
    settings: Settings, shape: ModelSpec, deployment: Deployment, max_model_len: int, caches: bool, grouped: bool
) -> HybridLayout | None:
    """The model's KV groups, if the policy supports them and layers do not all keep the same.

    Args:
        grouped: See ``build``; where sequences share blocks all layers keep every token.
    """
    speculative = settings.policy_options.speculative
    drafter = None if speculative is None else speculative.drafter(shape)
    if shape.mixer:
        _require_states(settings, shape)
        if not settings.kind.serves_kv_groups:
            return None
    elif shape.compressed:
        _require_compressed(settings, shape)
    elif grouped or not (settings.kind.serves_kv_groups and settings.policy_options.groups_layers):
        return None
    elif not shape.has_page_sizes:
        layout = hybrid_layout(shape, max_model_len)
        if layout is None or drafter is None:
            return layout
    cache = CacheSettings(
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens or max_model_len,
        block_size=settings.block_size,
        enable_prefix_caching=caches,
        num_speculative_blocks=0 if speculative is None else speculative.num_speculative_tokens,
    )
    exports = 0
    if shape.mixer:
        exports = shape.mixer.export_tokens(gpu(settings.gpu).major, deployment.vllm_minor or LAST_ORDERED)
    layout = formed_layout(shape, cache, deployment.kv_dtype, settings.tensor_parallel_size, exports, drafter)
    require_block_sizes(shape, layout, settings.kind.serves_block_sizes)
    return layout


def _require_states(settings: Settings, shape: ModelSpec) -> None:
    """Raise SettingError for a policy or an option that does not serve a model with states."""
    if not settings.kind.serves_states:
        able = either(kind.name for kind in POLICIES.values() if kind.serves_states_of(shape))
        remedy = f"has layers with a fixed-size state, which {settings.policy} does not serve; use --policy {able}"
        raise SettingError("model", shape.name, remedy)
    if settings.kind.serves_kv_groups and not settings.policy_options.groups_layers:
        remedy = f"vLLM cannot keep the states of {shape.name} in one group with its attention; leave it out"
        raise SettingError("disable_hybrid_kv_cache_manager", True, remedy)


def _require_compressed(settings: Settings, shape: ModelSpec) -> None:
    """Raise SettingError for a policy or an option that does not serve compressed attention."""
    if not settings.kind.serves_block_sizes:
        remedy = f"has compressed attention, which {settings.policy} does not serve; use --policy vllm-v1"
        raise SettingError("model", shape.name, remedy)
    if not settings.policy_options.groups_layers:
        raise no_single_group(shape)


def _page_groups(
    server: Server, kind: type[AnyPolicy], options: Options, limits: Limits, size: int
) -> PageGroups | None:
    """The KV groups of the pool, in blocks of ``size`` tokens; None if all layers keep every token."""
    layout = server.layout
    if layout is None:
        return None
    window, config = layout.window_tokens, layout.config
    in_flight, longest = kind.in_flight_tokens(limits, options), limits.max_model_len
    sizes: tuple[GroupSize, ...] = ()
    if config and layout.has_block_sizes:
        sizes = tuple(
            GroupSize(tokens, each, each and most_prompt_blocks(each, in_flight, longest, tokens))
            for tokens, each in ((group.block_size, group.span.tokens) for group in config.groups)
        )
    return PageGroups(
        kinds=tuple(group.span.kind for group in layout.groups),
        window_tokens=window,
        states_by_block=config is not None and config.mamba_cache_mode == "align",
        ahead=options.schedules_ahead,
        exports_states=config is not None and config.exports_states,
        most_prompt_blocks=window and most_prompt_blocks(window, in_flight, longest, size),
        sizes=sizes,
        drafter=0 if config is None else config.last_group,
    )


def _eager(settings: Settings) -> bool:
    return settings.kind.default_enforce_eager if settings.enforce_eager is None else settings.enforce_eager


def deployment_of(settings: Settings, shape: ModelSpec, card: GpuSpec) -> Deployment:
    """Pipeline stages, number formats and CUDA graphs of the settings, as one ``Deployment``."""
    deployment = Deployment(
        pipeline_parallel=settings.pipeline_parallel_size,
        kv_dtype=settings.kind.kv_dtype(shape, card, settings.kv_cache_dtype),
        quantization=weights_format(shape, settings.quantization),
        cuda_graphs=not _eager(settings),
        # Engines of a model without experts share nothing.
        data_parallel=settings.data_parallel_size if shape.experts else 1,
        expert_parallel=settings.enable_expert_parallel,
        vllm_minor=LAST_ORDERED,
    )
    settings.policy_options.require_kv_dtype(shape, card, deployment.kv_dtype)
    found = settings.policy_options.deployed(deployment)
    refuse_experts(shape, card, found, settings.tensor_parallel_size)
    return found


def _cost(settings: Settings, server: Server, size: int, scheduler: AnyPolicy, paged: bool) -> StepCost:
    """The cost model of the settings, and of the drafter where drafts are verified."""
    shape, card, deployment, ranks = server.model, server.gpu, server.deployment, server.tensor_parallel
    size //= deployment.decode_context_parallel
    measured = None if settings.server is None else read_server(settings.server)
    if measured is not None:
        measured.require(server_settings(settings))
    name = settings.cost or (measured.cost if measured else default_cost(shape, card, deployment.quantization))
    scale = settings.step_scale or (FITTED_STEP_SCALE if name == "paper" else 1.0)
    ahead = scheduler.schedules_ahead
    page_bytes = server.page_bytes(size)
    found = cost(name, shape, card, ranks, size, scale, deployment, measured, ahead, paged, page_bytes)
    speculative = settings.policy_options.speculative
    if speculative is None:
        return found
    drafter, drafts_cost = speculative.drafter(shape), None
    if drafter is not None:
        # The host's time is that of the target's step, and a server's constants are those of the whole; the last stage has the drafter.
        own = replace(deployment, pipeline_parallel=1, quantization=speculative.quantization(drafter, deployment))
        covered = name if name == "roofline" else default_cost(drafter, card, own.quantization)
        drafts_cost = cost(covered, drafter, card, ranks, size, scale, own, None, True)
    return SpeculativeCost(found, drafts_cost, speculative.num_speculative_tokens)


def server_settings(settings: Settings) -> dict[str, object]:
    """The settings that must match for a server's measured constants to apply, by name.

    ``cost`` is included only if it is set, and options only if the policy has them.
    """
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
    options = option_names(settings.kind.options_type)
    found |= {name: settings.value(name) for name in ("async_scheduling", "vllm_release") if name in options}
    return found | ({"cost": settings.cost} if settings.cost else {})
