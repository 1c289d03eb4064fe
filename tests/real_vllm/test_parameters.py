"""Parameters of presets, vision encoders included, beside those of transformers' own classes, built without memory.

Presets with states are compared in ``test_states``. transformers has no class for ``nemotron-nas``, ``mimo`` and ``kimi_k3``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fragmeter.sim import spec
from fragmeter.sim.spec import model
from fragmeter.sim.spec.model import preset_config
from fragmeter.sim.spec.stored import stored

_DATA = {name: preset_config(name) for name in spec.model_names()}
#: With encoders, latent attention that an indexer makes sparse, or heads that differ from layer to layer.
_NAMES = [
    name
    for name, config in _DATA.items()
    if ("vision_config" in config or "index_topk" in config or "swa_head_dim" in config)
    and name != "kimi-k3"
    # The encoder of Gemma 3 is not counted.
    and not ((encoder := model(name).encoder) and not encoder.is_known)
]


def _num_params(config: dict[str, Any]) -> int:
    """Parameters of transformers' class, with the router's corrections, which it keeps as buffers."""
    given = {key: value for key, value in config.items() if key not in ("model_type", "_name_or_path")}
    for part in (given, given.get("text_config", {})):
        # Of rotary positions only what decides the longest sequence is stored; they have no parameters.
        for key in ("quantization_config", "rope_scaling", "rope_parameters"):
            part.pop(key, None)
    read = AutoConfig.for_model(config["model_type"], **given)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(read)
    corrections = [each.numel() for name, each in built.named_buffers() if "correction_bias" in name]
    return sum(each.numel() for each in built.parameters()) + sum(corrections)


def test_there_are_such_presets():
    assert len(_NAMES) >= 17


@pytest.mark.parametrize("name", _NAMES)
def test_parameters_are_those_of_transformers(name: str):
    assert model(name).num_params == _num_params(json.loads(json.dumps(_DATA[name])))


@pytest.mark.parametrize(
    "name",
    [
        "ByteDance-Seed/Seed-OSS-36B-Instruct", "HuggingFaceTB/SmolLM3-3B", "LGAI-EXAONE/EXAONE-4.0-32B", "LiquidAI/LFM2-1.2B",
        "ibm-granite/granite-3.3-8b-instruct", "mistralai/Devstral-2-123B-Instruct-2512", "google/gemma-2-9b",
    ],
)  # fmt: skip
def test_parameters_of_families_without_a_preset(name: str):
    facts = stored(name)
    assert facts is not None
    assert model(name).num_params == _num_params(json.loads(json.dumps(facts.config)))
