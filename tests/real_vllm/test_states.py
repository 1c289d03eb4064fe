"""States and parameters of models with layers of fixed-size state, beside the classes of vLLM and transformers.

vLLM's own class of each model says the shapes and number formats of its states,
after vLLM's own rule for its cache; transformers' own class of each model is built without memory, and counted.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from fragmeter.sim import spec
from fragmeter.sim.spec.families import read_config
from fragmeter.sim.spec.model import preset_config
from fragmeter.sim.types.errors import SettingError

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
VLLM_NAMES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Models of which vLLM's class can be imported without a GPU and without packages for images: its module and name.
CLASSES = {
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "zamba2": ("zamba2", "Zamba2ForCausalLM"),
}
_DATA = {name: preset_config(name) for name in spec.model_names()}
PRESETS = {
    # Files of Qwen3.5 leave out the type of their text part.
    name: {"model_type": f"{config['model_type']}_text"} | config["text_config"] if "text_config" in config else config
    for name, config in _DATA.items()
    if spec.model(name).mixer is not None
}


def hf_config(config: dict[str, Any]) -> Any:
    """The configuration as transformers reads it."""
    keys = {key: value for key, value in config.items() if key not in ("model_type", "_name_or_path")}
    # The padding token of some classes lies beyond small vocabularies.
    return AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(keys)), pad_token_id=0)


@cache
def without_imports(path: str, name: str) -> dict[str, Any]:
    """vLLM's own text of the two methods of a class, as functions of (class, config), where its module needs packages for images."""
    tree = ast.parse((Path(vllm.__file__).parent / path).read_text("utf-8"))
    served = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    methods = [
        each for each in served.body if getattr(each, "name", "").endswith(("shape_from_config", "dtype_from_config"))
    ]
    for method in methods:
        assert isinstance(method, ast.FunctionDef)
        method.decorator_list.clear()
    calculators = {each.__name__: each for each in (MambaStateDtypeCalculator, MambaStateShapeCalculator)}
    found: dict[str, Any] = {"torch": torch} | calculators
    exec(compile(ast.Module(list(methods), []), path, "exec"), found)
    return found


def vllm_states(config: dict[str, Any], ranks: int, dtype: torch.dtype, conv: str, state: str) -> list[tuple[Any, str]]:
    """Shapes and number formats of a layer's state that vLLM would allocate."""
    chosen = CacheConfig(mamba_cache_dtype=VLLM_NAMES[conv], mamba_ssm_cache_dtype=VLLM_NAMES[state])
    read = hf_config(config)
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(hf_config=read, hf_text_config=read, dtype=dtype),
        cache_config=chosen,
        speculative_config=None,
        num_speculative_tokens=0,
    )
    kind, calculate = config["model_type"], MambaStateShapeCalculator
    if kind in CLASSES:
        module, name = CLASSES[kind]
        served = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        if kind == "nemotron_h":
            MODELS_CONFIG_MAP[name].verify_and_update_config(vllm_config)
        shapes = served.get_mamba_state_shape_from_config(vllm_config)
        dtypes = served.get_mamba_state_dtype_from_config(vllm_config)
    elif kind == "glm5_next_text":
        served = without_imports("models/glm5next/common/model.py", "Glm5NextForCausalLM")
        shapes = served["get_mamba_state_shape_from_config"](None, vllm_config)
        dtypes = served["get_mamba_state_dtype_from_config"](None, vllm_config)
    elif kind == "kimi_linear":
        # What the class's two methods return.
        linear = config["linear_attn_config"]
        heads = (linear["num_heads"], linear["head_dim"])
        shapes = calculate.kda_state_shape(ranks, *heads, conv_kernel_size=linear.get("short_conv_kernel_size", 4))
        dtypes = MambaStateDtypeCalculator.kda_state_dtype(
            dtype, chosen.mamba_cache_dtype, chosen.mamba_ssm_cache_dtype
        )
    else:
        if kind != "qwen3_next":
            MODELS_CONFIG_MAP["Qwen3_5ForConditionalGeneration"].verify_and_update_config(vllm_config)
        heads = (read.linear_num_key_heads, read.linear_num_value_heads)
        dims = (read.linear_key_head_dim, read.linear_value_head_dim)
        shapes = calculate.gated_delta_net_state_shape(ranks, *heads, *dims, read.linear_conv_kernel_dim)
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            dtype, chosen.mamba_cache_dtype, chosen.mamba_ssm_cache_dtype
        )
    return [(tuple(shape), DTYPES[each]) for shape, each in zip(shapes, dtypes, strict=True)]


def compare(config: dict[str, Any]) -> int:
    """Asserts that both say the same of a model on 1 to 16 ranks; returns in how many cases they were asked."""
    mixer, compared = read_config(config, "m").mixer, 0
    assert mixer is not None
    for ranks in (1, 2, 3, 4, 8, 16):
        if any(number % ranks for number in mixer.divisors.values()):
            with pytest.raises(SettingError):
                read_config(config, "m").state_bytes("bf16", ranks)
            continue
        for dtype, ours in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            for conv, state in (("auto", "auto"), ("fp32", "auto"), ("auto", "fp32"), ("auto", "bf16")):
                theirs = vllm_states(config, ranks, dtype, conv, state)
                found = list(zip(mixer.state_shapes(ranks), mixer.state_dtypes(ours, conv, state), strict=True))
                assert found == theirs
                size = sum(torch.Size(shape).numel() * (4 if name == "fp32" else 2) for shape, name in theirs)
                assert mixer.state_bytes(ranks, ours, conv, state) == size
                compared += 1
    return compared


@pytest.mark.parametrize("name", PRESETS)
def test_states_of_presets_are_vllms(name):
    assert compare(PRESETS[name]) > 8


def drawn(seed: int) -> dict[str, Any]:
    """A small configuration of any family, by a seed."""
    draw = random.Random(seed)
    kind = draw.choice([*CLASSES, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"])
    layers, heads = draw.randint(2, 6), draw.choice([4, 8, 16])
    hidden = heads * draw.choice([16, 32])
    config: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // draw.choice([1, 2, 4]),
        "intermediate_size": 64 * draw.randint(1, 4),
        "vocab_size": 640,
        "max_position_embeddings": 512,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    mamba_heads = draw.choice([4, 8, 16])
    if kind.startswith("qwen"):
        keys = draw.choice([2, 4, 16])
        config |= {"head_dim": 32, "full_attention_interval": draw.choice([2, 4]), "linear_num_key_heads": keys}
        config |= {"linear_num_value_heads": keys * draw.choice([1, 2]), "linear_key_head_dim": draw.choice([16, 32])}
        config |= {"linear_value_head_dim": draw.choice([16, 64]), "linear_conv_kernel_dim": draw.choice([3, 4])}
        if kind != "qwen3_5_text":
            config |= experts | {"num_experts": 4, "shared_expert_intermediate_size": 80}
        if kind != "qwen3_next":
            config["mamba_ssm_dtype"] = draw.choice(["float32", "bfloat16"])
    elif kind == "nemotron_h":
        config |= {"hybrid_override_pattern": "".join(draw.choice("M*-E") for _ in range(layers - 1)) + "M"}
        config |= {"head_dim": 32, "mamba_num_heads": mamba_heads, "mamba_head_dim": draw.choice([16, 64])}
        config |= {"n_groups": draw.choice([1, 2, 4]), "ssm_state_size": 32, "use_bias": draw.random() < 0.5}
        config |= experts | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 96, "n_shared_experts": 1}
        config |= {"mlp_bias": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
        if draw.random() < 0.5:
            config["mamba_ssm_cache_dtype"] = draw.choice(["float32", "float16"])
    elif kind == "granitemoehybrid":
        config |= {"layer_types": [draw.choice(["mamba", "attention"]) for _ in range(layers - 1)] + ["mamba"]}
        config |= {"mamba_n_heads": heads, "mamba_d_head": 2 * hidden // heads, "mamba_n_groups": draw.choice([1, 2])}
        config |= {"mamba_d_state": 32, "num_local_experts": draw.choice([0, 4]), "num_experts_per_tok": 2}
        config |= {"shared_intermediate_size": 96, "mamba_conv_bias": draw.random() < 0.5}
    elif kind == "jamba":
        config |= {"attn_layer_period": draw.choice([2, 3]), "attn_layer_offset": draw.choice([0, 1])}
        config |= {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": draw.choice([1, 4])}
        config |= {"mamba_d_state": draw.choice([8, 16]), "mamba_proj_bias": draw.random() < 0.5}
        config |= {"num_experts_per_tok": 1} if config["num_experts"] == 1 else {"num_experts_per_tok": 2}
    elif kind == "zamba2":
        kinds = [draw.choice(["mamba", "hybrid"]) for _ in range(layers - 1)] + ["hybrid"]
        config |= {"layers_block_type": kinds, "num_mem_blocks": draw.randint(1, kinds.count("hybrid"))}
        config |= {"n_mamba_heads": heads, "mamba_ngroups": draw.choice([1, 2]), "adapter_rank": draw.choice([8, 16])}
        config |= {"use_shared_attention_adapter": draw.random() < 0.5, "add_bias_linear": draw.random() < 0.5}
        config |= {"mamba_d_state": 32, "num_key_value_heads": None, "tie_word_embeddings": True}
    elif kind == "mamba2":
        config |= {"num_heads": mamba_heads, "head_dim": 2 * hidden // mamba_heads, "state_size": 32}
        config |= {
            "n_groups": draw.choice([1, 2, 4]),
            "use_bias": draw.random() < 0.5,
            "use_conv_bias": draw.random() < 0.5,
        }
    else:
        full = sorted(draw.sample(range(1, layers + 1), layers // 2))
        linear = {"full_attn_layers": full, "kda_layers": [n for n in range(1, layers + 1) if n not in full]}
        config |= {"linear_attn_config": linear | {"num_heads": heads, "head_dim": draw.choice([16, 32])}}
        config |= {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        config |= {"q_lora_rank": draw.choice([None, 40]), "num_experts": 4, "num_experts_per_token": 2}
        config |= {"num_shared_experts": draw.choice([1, 2]), "moe_intermediate_size": 48}
        config |= {"first_k_dense_replace": draw.choice([0, 1]), "num_key_value_heads": heads}
    return config


@pytest.mark.parametrize("seed", range(100))
def test_states_of_drawn_models_are_vllms(seed):
    compare(drawn(seed))


def num_params(config: dict[str, Any]) -> int:
    """Parameters of transformers' class, with the router's corrections, which it keeps as buffers."""
    read = hf_config(config)
    with torch.device("meta"):
        if config["model_type"] == "glm5_next_text":
            # The text part has no class with a head of its own, which that with images has.
            body = AutoModel.from_config(read)
            head = torch.nn.Linear(read.hidden_size, read.vocab_size, bias=False)
            built = torch.nn.ModuleList([body, head])
        else:
            built = AutoModelForCausalLM.from_config(read)
    corrections = [each.numel() for name, each in built.named_buffers() if "correction_bias" in name]
    return sum(each.numel() for each in built.parameters()) + sum(corrections)


# transformers has no class for Kimi K3.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "kimi-k3"])
def test_parameters_of_presets_are_those_of_transformers(name):
    assert read_config(PRESETS[name], name).num_params == num_params(PRESETS[name])


@pytest.mark.parametrize("seed", range(100))
def test_parameters_of_drawn_models_are_those_of_transformers(seed):
    config = drawn(seed)
    assert read_config(config, "m").num_params == num_params(config)
