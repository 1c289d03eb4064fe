"""The defaults of the installed SGLang on cards that are faked: its record of arguments, and the hooks that resolve them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from fragmeter.sim.spec import ModelSpec
from fragmeter.sim.spec.startup.sglang import window_of

from . import stubs
from .cards import CARDS, LINES, POOLS

stubs.install()

from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import is_hybrid_swa_model as is_hybrid_swa_model
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor import cuda_graph_config, pool_configurator
from sglang.srt.server_args import ServerArgs

#: A model without anything that has rules of its own.
_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
_MODEL |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
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
