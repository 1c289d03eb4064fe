"""Our engine with policy ``vllm-v1`` over a case, written down step by step through the public observer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fragmeter.sim import Settings, Workload, settings, simulate
from fragmeter.sim.engine import run as engine_run
from fragmeter.sim.metrics.summary import summary as summary_of
from fragmeter.sim.policy.server import CONSUMER
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.source import OpenLoop
from tools.live.step_log import Served, StepLog

from .shapes import Layer
from .workloads import Case


@dataclass(frozen=True)
class ConstantCost:
    """Every step takes as long."""

    ticks: int
    name: str = "constant"

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return self.ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return self.ticks, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        return 0

    def swap_in_ticks(self, blocks: int) -> int:
        return 0

    def copy_ticks(self, slots: int) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="models-")


@cache
def _model_of(layers: tuple[Layer, ...]) -> str:
    """Path of a ``config.json`` with such layers."""
    windows = {layer.tokens for layer in layers if layer.kind == "sliding"}
    config = {
        "model_type": "llama",
        "num_hidden_layers": len(layers),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
    }
    alike = len({layer.kv_heads for layer in layers}) == 1
    if windows and alike:
        (config["sliding_window"],) = windows
        config["layer_types"] = [f"{layer.kind}_attention" for layer in layers]
    states = [layer for layer in layers if layer.kind == "state"]
    if states:
        _, (heads, values, keys) = states[0].state_shapes
    if not alike:
        full, local = (next(layer for layer in layers if layer.kind == kind) for kind in ("full", "sliding"))
        config |= {
            "model_type": "mimo_v2_flash",
            "num_attention_heads": 12,
            "swa_num_attention_heads": 12,
            "num_key_value_heads": full.kv_heads,
            "swa_num_key_value_heads": local.kv_heads,
            "head_dim": full.head_size,
            "swa_head_dim": local.head_size,
            "sliding_window_size": local.tokens,
            "hybrid_layer_pattern": [int(layer.kind == "sliding") for layer in layers],
            "moe_layer_freq": [0] * len(layers),
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
        }
    elif any(layer.kind == "keys" for layer in layers):
        config |= _compressed(layers)
    elif any(layer.kind == "ring" for layer in layers):
        kinds = [layer.kind for layer in layers if layer.kind in ("state", "rows")]
        rows, key = (next(layer for layer in layers if layer.kind == kind) for kind in ("rows", "key"))
        config |= {
            "model_type": "glm5_next_text",
            "num_hidden_layers": len(kinds),
            "layer_types": ["linear_attention" if kind == "state" else "deepseek_sparse_attention" for kind in kinds],
            "linear_attn_config": {"num_heads": heads, "head_dim": keys}
            | ({"gate_lower_bound": -5.0} if states[0].export_tokens else {}),
            "q_lora_rank": 16,
            "kv_lora_rank": rows.head_size,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 0,
            "v_head_dim": 16,
            "index_n_heads": 1,
            "index_head_dim": key.head_size - 4,
            "index_topk": 64,
            "index_kpool": key.tokens,
        }
    elif states and states[0].export_tokens:
        config |= {
            "model_type": "nemotron_h",
            "head_dim": 16,
            "hybrid_override_pattern": "".join("M" if layer in states else "*" for layer in layers),
            "mamba_num_heads": 1,
            "mamba_head_dim": values,
            "n_groups": 1,
            "ssm_state_size": keys,
        }
    elif states:
        config |= {
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "layer_types": ["linear_attention" if layer in states else "full_attention" for layer in layers],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": keys,
            "linear_value_head_dim": values,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
        }
    path = Path(_folder().name) / str(len(list(Path(_folder().name).iterdir()))) / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path)


def _compressed(layers: tuple[Layer, ...]) -> dict[str, object]:
    """The keys of DeepSeek V4 with such caches: a layer begins with its window, or with the keys of its indexer."""
    starts = [place for place, layer in enumerate(layers) if layer.kind == "window"]
    after = [layers[place + 1 : place + 2] for place in starts]
    ratios = [each[0].tokens if each and each[0].kind == "vectors" else 0 for each in after]
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "sliding_window": layers[starts[0]].tokens,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    }


def serve(case: Case, asynchronous: bool = False, **others: Any) -> Served:
    """What our engine does with a case, with ``others`` of the settings; see ``server.serve``."""
    log = StepLog()
    chosen = settings_of(case, asynchronous, ids=True, **others)
    run = simulate(chosen, case.workload, ConstantCost(case.step_ticks), observers=[log])
    return log.served(run)


class _Arrived(OpenLoop):
    """Sequences that come with all but the last token of their prompts."""

    def _load(self, rows: np.ndarray) -> Iterator[tuple[int, Sequence]]:
        for arrival, sequence in super()._load(rows):
            sequence.computed_tokens = sequence.prompt_tokens - 1
            yield arrival, sequence


@contextmanager
def side(kv_role: str) -> Iterator[None]:
    """Runs in Python are those of a replica that prefills, or of one that decodes what comes with its prompt."""
    source = _Arrived if kv_role == CONSUMER else OpenLoop
    with (
        mock.patch.object(engine_run, "OpenLoop", source),
        mock.patch.object(engine_run, "build", partial(engine_run.build, kv_role=kv_role)),
    ):
        yield


def summary(case: Case, asynchronous: bool, leap: bool, ids: bool) -> dict[str, Any]:
    """Summary of a run without observers."""
    chosen = settings_of(case, asynchronous, leap=leap, ids=ids)
    return summary_of(simulate(chosen, case.workload, ConstantCost(case.step_ticks)))


def settings_of(case: Case, asynchronous: bool = False, **others: Any) -> Settings:
    """The settings that serve a case.

    Args:
        asynchronous: See ``server.serve``.
        others: Further settings, and other values of these.
    """
    stages = case.parallel.get("pipeline_parallel_size", 1)
    chosen = (
        dict(
            policy="vllm-v1",
            model=_model_of(case.layers * stages),
            pipeline_parallel_size=stages,
            block_size=case.block_size,
            num_gpu_blocks_override=case.num_blocks,
            max_model_len=case.max_model_len,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            enable_prefix_caching=case.prefix_caching,
            async_scheduling=asynchronous,
            # vLLM's engine alone.
            outside_ms=0,
        )
        # Its kernels export states of Kimi delta attention.
        | ({"gpu": "h100-80gb"} if any(layer.kind == "ring" for layer in case.layers) else {})
        | dict(case.options)
        | others
    )
    return settings(**chosen)


def scaled(work: Workload, ticks: int) -> Workload:
    """The same requests on a clock of so many ticks."""
    return replace(work, arrival_ticks=work.arrival_ticks * ticks)
