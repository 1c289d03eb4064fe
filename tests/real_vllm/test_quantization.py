"""The KV cache that a checkpoint asks for, by vLLM's own functions: in ``config.json`` and in ModelOpt's file of its own."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config  # noqa: F401  (first, as the module below imports it in a circle)
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

from fragmeter.sim.spec import model

_MODELS_FORMAT = {None: None, "auto": None, "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}
_SCHEMES = [
    None, "FP8", "fp8", "NVFP4", "INT8",
    {"dynamic": False, "num_bits": 8, "type": "float"}, {"dynamic": True, "num_bits": 8, "type": "float"},
    {"num_bits": 4, "type": "float"}, {"num_bits": 8, "type": "int"},
]  # fmt: skip
_TINY = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip


def _theirs(quantization: dict[str, Any]) -> str | None:
    """As vLLM reads it when it starts: what it fills in first, then the format."""
    config = SimpleNamespace(quantization_config=deepcopy(quantization))
    normalised = ModelArchConfigConvertorBase._normalize_quantization_config(None, config)
    return _MODELS_FORMAT[get_kv_cache_quant_algo_string(normalised)]


def _checkpoints() -> list[tuple[bool, dict[str, Any]]]:
    found: list[tuple[bool, dict[str, Any]]] = []
    for key, scheme in itertools.product(("kv_cache_scheme", "kv_cache_quant_algo"), _SCHEMES):
        keys = {"quant_algo": "FP8", "exclude_modules": [], key: scheme}
        found.append((False, {"quant_method": "modelopt", **keys}))
        found.append((False, {"producer": {"name": "modelopt"}, **keys}))
        found.append((True, {"producer": {"name": "modelopt"}, "quantization": keys}))
    return found


@pytest.mark.parametrize(("beside", "quantization"), _checkpoints())
def test_the_format_of_the_kv_cache_is_vllms(beside, quantization, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_TINY | ({} if beside else {"quantization_config": quantization})))
    if beside:
        path.with_name("hf_quant_config.json").write_text(json.dumps(quantization))
    assert model(path).kv_dtype == _theirs(quantization)
