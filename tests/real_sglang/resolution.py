"""The defaults of the installed SGLang on cards that are faked: its record of arguments, and the hooks that resolve them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fragmeter.sim.spec import ModelSpec, gpu
from fragmeter.sim.spec.model import preset_config
from fragmeter.sim.spec.startup.sglang import window_of

from . import stubs
from .cards import CARDS, GENERATIONS, LINES, MODELS, POOLS

stubs.install()

import torch
from sglang.srt import configs, runtime_context
from sglang.srt.arg_groups import cuda_graph_hook, memory_hook, overrides
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import is_hybrid_swa_model as is_hybrid_swa_model
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import UnifiedSWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_memory_pool import MambaSubPoolSpec, MHASubPoolSpec, MLASubPoolSpec, UnifiedKVPool
from sglang.srt.model_executor import cuda_graph_config, pool_configurator
from sglang.srt.server_args import ServerArgs
from transformers.models.auto import modeling_auto

#: Models with states, by SGLang's classes of their configuration.
WITH_STATES = {
    "qwen3-next-80b-a3b": configs.Qwen3NextConfig,
    "qwen3.5-27b": configs.Qwen3_5Config,
    "qwen3.5-35b-a3b": configs.Qwen3_5MoeConfig,
    "nemotron-h-8b": configs.NemotronHConfig,
    "nemotron-3-nano-30b-a3b": configs.NemotronHConfig,
    "granite-4.0-h-small": configs.GraniteMoeHybridConfig,
    "kimi-linear-48b-a3b": configs.KimiLinearConfig,
}
#: A model without anything that has rules of its own.
_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
_MODEL |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
#: Architectures by ``model_type``, where transformers has none or another one.
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "nemotron_h": "NemotronHForCausalLM",
}
#: Facts of a card by its compute capability.
_FACTS = {
    8: {},
    9: {"is_sm90": True, "is_hopper_with_cuda_12_3": True},
    10: {"is_sm100": True, "is_blackwell": True},
    12: {"is_sm120": True, "is_blackwell": True},
}
_NONE = dict.fromkeys(
    ("is_hip", "is_npu", "is_xpu", "is_sm90", "is_sm100", "is_sm120", "is_blackwell", "is_hopper_with_cuda_12_3"), False
)
_NAMES = {"tensor_parallel": "tp_size", "pipeline_parallel": "pp_size"}


def _resolved(folder: str, mib: int, latent: bool = False, cuda_graphs: bool = True, **line: int) -> list[float]:
    fields = {_NAMES.get(name, name): value for name, value in line.items()}
    args = ServerArgs(
        model_path=folder, device="cuda", skip_tokenizer_init=True, disable_cuda_graph=not cuda_graphs, **fields
    )
    # As the beginning of ``run_resolution_pipeline``.
    args._raw_input = {field.name: getattr(args, field.name) for field in record_fields(type(args))}
    args._resolved_overrides = []
    breakable = cuda_graph_config.Backend.BREAKABLE
    with (
        mock.patch.object(memory_hook, "get_device_memory_capacity", lambda device: mib),
        mock.patch.object(memory_hook, "use_mla_backend", lambda args: latent),
        mock.patch.object(cuda_graph_config, "default_prefill_backend", lambda: breakable),
    ):
        cuda_graph_hook.handle_cuda_graph_config(args)
        memory_hook.handle_gpu_memory_settings(args)
    view = resolving_view(args)
    return [view.chunked_prefill_size, view.cuda_graph_config.decode.max_bs, view.mem_fraction_static]


def defaults() -> dict[str, list[float]]:
    """See ``cards.ours``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        return {
            f"{card}, {said}": _resolved(folder, mib, **line)
            for card, mib in CARDS.items()
            for said, line in LINES.items()
        }


def of_models() -> dict[str, list[float]]:
    """See ``cards.ours_of_models``."""
    return {f"{card}, {name}": of_model(name, card) for name in MODELS for card in GENERATIONS}


def of_model(name: str, card: str, **line: object) -> list[float]:
    """What the whole resolution makes of a line, on a faked card: see ``cards.of_model``.

    Args:
        line: Fields of ``ServerArgs``.
    """
    view = resolved(name, card, **line)
    graphs = view.cuda_graph_config.decode.max_bs
    return [view.page_size, view.chunked_prefill_size, graphs, view.mem_fraction_static]


def resolved(name: str, card: str, **line: object) -> Any:
    """The arguments after the whole resolution; see ``of_model``."""
    config = json.loads(json.dumps(preset_config(name)))
    # Not stored whole; and formats for which the wheel needs a package that is a stub here.
    for part in (config, config.get("text_config") or {}):
        for key in ("rope_scaling", "rope_parameters", "quantization_config"):
            part.pop(key, None)
    config["architectures"] = [_architecture(config["model_type"])]
    mib, capability = CARDS[GENERATIONS[card]], (gpu(card).major, 0)
    facts = _NONE | {"is_cuda": True, "has_flashinfer": True, "device_capability": capability}
    facts |= {"device_sm": 10 * capability[0]} | _FACTS[capability[0]]
    with (
        tempfile.TemporaryDirectory() as folder,
        runtime_context.override_platform(**facts),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(memory_hook, "get_device_memory_capacity", lambda device: mib),
        mock.patch.object(cuda_graph_config, "default_prefill_backend", lambda: cuda_graph_config.Backend.BREAKABLE),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        args = ServerArgs(model_path=folder, device="cuda", skip_tokenizer_init=True, **line)
        args.resolve_once()
        return resolving_view(args)


def _architecture(model_type: str) -> str:
    known = (
        _ARCHITECTURES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    return next(names[model_type] for names in known if model_type in names)


def running_requests() -> list[int]:
    """``max_running_requests`` of each of ``POOLS``."""
    found = []
    for slots, length, given in POOLS:
        configurator = SimpleNamespace(
            model_config=SimpleNamespace(context_len=length), attn_dp_size=1, mambaish_config=None
        )
        schedule = SimpleNamespace(max_running_requests=given)
        with mock.patch.object(kv_cache_configurator, "get_schedule", lambda schedule=schedule: schedule):
            resolve = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
            found.append(resolve(configurator, slots))
    return found


def window_pool(model: ModelSpec, available: int, ratio: float, page: int) -> tuple[int, int]:
    """Slots of a model's pools, full and of windows, by SGLang's own rule."""
    groups = {group.span.kind == "full": group for group in model.kv_groups()}
    sizes = {full: model.group_slot_bytes(group) // group.num_layers for full, group in groups.items()}
    configurator = object.__new__(pool_configurator.HybridSWAPoolConfigurator)
    vars(configurator).update(
        _full_layers_num=groups[True].num_layers,
        _swa_layers_num=groups[False].num_layers,
        _full_per_token=sizes[True],
        _swa_per_token=sizes[False],
        _swa_full_tokens_ratio=ratio,
        _sliding_window_size=window_of(model),
        _page_size=page,
        _enable_unified_memory=False,
        _draft_full_layers_num=0,
        _draft_swa_layers_num=0,
        _draft_swa_full_layers_num=0,
        _draft_cell_size=0,
        _fused_full_entry=None,
        _fused_swa_entry=None,
    )
    configurator._recompute_cell_size()
    found = configurator.calculate_pool_sizes(available, page)
    return found.full_max_total_num_tokens, found.swa_max_total_num_tokens


def window_buffer(model: ModelSpec, available: int, ratio: float, page: int, most: int | None) -> list[int]:
    """Of one buffer of slots and windows: bytes of a page of each, pages that an empty one has of each, and the slots of the longest request."""
    groups = {group.span.kind == "full": group for group in model.kv_groups()}
    with runtime_context.get_context().override_server_args(enable_unified_memory=True, page_size=page):
        slots, windows = window_pool(model, available, ratio, page)
        total = _budget(slots, available, most)
        if total is None:
            slots = min(slots, most or slots)
            windows = int(slots * ratio) // page * page
            total = sum(n * model.group_slot_bytes(groups[full]) for n, full in ((slots, True), (windows, False)))
        specs = [
            MHASubPoolSpec(
                name="full" if full else "swa",
                layer_num=1,
                head_num=1,
                head_dim=model.group_slot_bytes(groups[full]) // 4,
                store_dtype=torch.bfloat16,
                grow_direction="down" if full else "up",
            )
            for full in (True, False)
        ]
        buffer = UnifiedKVPool(
            total_bytes=total, sub_pool_specs=specs, device="meta", enable_memory_saver=False, page_size=page
        )
        kept = SimpleNamespace(
            full_kv_pool=SimpleNamespace(), swa_kv_pool=SimpleNamespace(), attach_allocators=lambda **ends: None
        )
        allocator = UnifiedSWATokenToKVPoolAllocator(
            unified_buffer=buffer, kvcache=kept, device="cpu", page_size=page, lazy_compaction=True
        )
        capacity = kv_cache_configurator.KVCacheConfigurator.hybrid_swa_token_capacity
        most_slots = capacity(None, allocator=allocator, full_capacity=None, swa_capacity=None)
        return [
            *(end.entry_bytes_per_page for end in (allocator.full_attn_allocator, allocator.swa_attn_allocator)),
            allocator.size_full // page,
            allocator.size_swa // page,
            min(most_slots, most or most_slots),
        ]


def bytes_of_state(name: str, ranks: int) -> int:
    """Bytes of a state on each rank."""
    config = WITH_STATES[name](**preset_config(name)).get_text_config()
    parallel = type(runtime_context.get_parallel())
    with (
        runtime_context.get_context().override_server_args(tp_size=ranks),
        mock.patch.object(parallel, "attn_tp_size", ranks, create=True),
    ):
        return int(config.mamba2_cache_params.mamba_cache_per_req)


def state_pool(bytes_each: int, left: int, **line: object) -> tuple[int, int, int]:
    """States of the pool where weights leave so many bytes, bytes left for the KV cache, and requests that may run."""
    params = SimpleNamespace(layers=[0], mamba_cache_per_req=bytes_each)
    configurator = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        pp_size=1,
        attn_dp_size=1,
        fused_entry_bytes=lambda name: None,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        hybrid_gdn_config=None,
        hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=0,
        model_config=SimpleNamespace(context_len=2048),
    )
    kind = kv_cache_configurator.KVCacheConfigurator
    configurator._calculate_mamba_ratio = lambda: kind._calculate_mamba_ratio(configurator)
    with runtime_context.get_context().override_server_args(**line):
        rest = kind._handle_max_mamba_cache(configurator, left / (1 << 30))
        states = runtime_context.get_schedule().max_mamba_cache_size
        return states, int(rest * (1 << 30)), kind.resolve_max_num_reqs(configurator, 1 << 40)


def _budget(slots: int, budget: int, most: int | None) -> int | None:
    """Bytes of the buffer beside the states where so many fit into the budget; None where the slots are bounded."""
    sizes = SimpleNamespace(calculate_pool_sizes=lambda *args: SimpleNamespace(max_total_num_tokens=slots))
    sizes.calculate_pool_sizes_from_max_tokens = lambda slots, page: SimpleNamespace(unified_total_bytes=None)
    configurator = SimpleNamespace(_apply_token_constraints=lambda slots: min(slots, most or slots))
    with mock.patch.object(pool_configurator, "create_memory_pool_configurator", lambda configurator: sizes):
        config = kv_cache_configurator.KVCacheConfigurator.config_from_budget(configurator, budget)
    found: int | None = config.unified_total_bytes
    return found


def _specs(name: str) -> tuple[Any, Any]:
    """Of the KV cache and of the states, as ``init_unified_mamba_pools`` makes them."""
    config = WITH_STATES[name](**preset_config(name)).get_text_config()
    with mock.patch.object(type(runtime_context.get_parallel()), "attn_tp_size", 1, create=True):
        params = config.mamba2_cache_params
    full = {"name": "full", "layer_num": len(config.full_attention_layer_ids), "grow_direction": "down"}
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        rope = config.qk_rope_head_dim
        kept = MLASubPoolSpec(kv_lora_rank=rank, qk_rope_head_dim=rope, store_dtype=torch.bfloat16, **full)
    else:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kept = MHASubPoolSpec(head_num=config.num_key_value_heads, head_dim=dim, store_dtype=torch.bfloat16, **full)
    states = MambaSubPoolSpec(
        name="mamba",
        layer_num=len(params.layers),
        conv_state_shapes=tuple(tuple(map(int, shape)) for shape in params.shape.conv),
        conv_dtype=params.dtype.conv,
        temporal_state_shape=tuple(map(int, params.shape.temporal)),
        temporal_dtype=params.dtype.temporal,
        grow_direction="up",
    )
    return kept, states


def unified_buffer(name: str, slots: int, states: int, budget: int, page: int, most: int | None) -> list[int]:
    """Of the buffer of a model with so many slots and states: bytes of a slot and of a state; pages and states that an empty one has; names of
    states; and slots that a state counts as.

    Args:
        budget: Bytes that states leave.
        most: ``--max-total-tokens``.
    """
    with runtime_context.get_context().override_server_args(enable_unified_memory=True, page_size=page):
        full, state = _specs(name)
        bytes_beside = _budget(slots, budget, most)
        if bytes_beside is None:
            bytes_beside = min(slots, most or slots) * full.entry_bytes()
        buffer = UnifiedKVPool(
            total_bytes=bytes_beside + states * state.entry_bytes(),
            sub_pool_specs=[full, state],
            device="meta",
            enable_memory_saver=False,
            page_size=page,
        )
        stand_in = SimpleNamespace(full_kv_pool=SimpleNamespace(), mamba_pool=None)
        allocator = UnifiedMambaTokenToKVPoolAllocator(
            unified_buffer=buffer, kvcache=stand_in, device="cpu", page_size=page, lazy_compaction=True
        )
        return [
            full.entry_bytes(),
            state.entry_bytes(),
            allocator.available_size() // page,
            allocator.mamba_allocator.schedulable_available_size(),
            buffer.max_slots("mamba") - 1,
            allocator.mamba_slot_full_token_cost(),
        ]


def _resolved_states(architecture: str, page: int, strategy: str, overlaps: bool) -> tuple[str, bool]:
    """The strategy, and whether there is the overlap schedule."""
    view = SimpleNamespace(
        disable_radix_cache=False,
        disable_overlap_schedule=not overlaps,
        page_size=page,
        mamba_radix_cache_strategy=strategy,
        linear_attn_backend="triton",
    )
    config = SimpleNamespace(architectures=[architecture], layer_types=["mamba"])
    config.get_text_config = lambda: config
    with mock.patch.object(overrides, "model_config_of", lambda view: SimpleNamespace(hf_config=config)):
        resolved = overrides._mamba_radix_cache_resolution(view)
    found = resolved.get("mamba_radix_cache_strategy", strategy)
    return found, not resolved.get("disable_overlap_schedule", not overlaps)


def overlaps(architecture: str) -> bool:
    """Whether there is the overlap schedule where the line says nothing of it."""
    return _resolved_states(architecture, 1, "auto", True)[1]


def state_rules(architecture: str, chunk: int, page: int, strategy: str, overlaps: bool) -> tuple[int, ...]:
    """Copies of a request's state, tokens of the grid, tokens between decodes that are copied, and states for each request."""
    strategy, overlaps = _resolved_states(architecture, page, strategy, overlaps)
    line = {"mamba_radix_cache_strategy": strategy, "disable_overlap_schedule": not overlaps}
    with runtime_context.get_context().override_server_args(page_size=page, **line) as args:
        args._mamba_cache_chunk_size = max(chunk, page)
        copied = runtime_context.get_exec().mamba.enable_mamba_extra_buffer
        tracked = kv_cache_configurator.get_mamba_tracking_slots(extra_buffer=copied, overlap=overlaps)
        each = kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio(None)
        if not copied:
            return 0, 1, 1, each
        return tracked, runtime_context.mamba_checkpoint_grid(page), runtime_context.mamba_track_grid(page), each
