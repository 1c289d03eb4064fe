"""DeepSeek V4: its caches, the blocks that vLLM forms of them, and its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.spec import CacheSettings, cache_layers, form_kv_cache, gpu, model
from fragmeter.sim.spec.compressed import KEY_BYTES
from fragmeter.sim.spec.startup.launch import checked_block_size, resolved_kv_dtype
from fragmeter.sim.spec.weights import num_params, stage_bytes
from fragmeter.sim.types.errors import SettingError, UserError

FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"
#: Of vLLM 0.33.0, as ``real_vllm/test_compressed.py`` compares them: tokens of a block, window, layers and bytes of each group.
GROUPS = {
    FLASH: [
        (64, 128, 22, 823_680), (64, 128, 21, 786_240), (256, 0, 62, 1_002_240), (4, 8, 42, 870_912), (8, 128, 20, 656_640),
    ],
    PRO: [
        (64, 128, 31, 1_160_640), (64, 128, 30, 1_123_200), (256, 0, 91, 1_435_968), (8, 128, 31, 1_017_792),
        (4, 8, 60, 1_244_160),
    ],
}  # fmt: skip
DRAFTS = json.dumps(
    {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "synthetic_acceptance_length": 2,
        "rejection_sample_method": "synthetic",
    }
)
OF_A_MODEL = json.dumps(json.loads(DRAFTS) | {"method": "draft_model", "model": "llama-3.2-1b"})
SERVER = CacheSettings(max_model_len=131_072, max_num_batched_tokens=8192, block_size=256)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_those_of_vllm_on_any_number_of_ranks(name: str, ranks: int):
    config = form_kv_cache(cache_layers(model(name), "fp8_ds_mla", ranks), SERVER)
    found = [(group.block_size, group.span.tokens, len(group.layers), group.page_size_bytes) for group in config.groups]
    assert found == GROUPS[name]
    assert (config.scheduler_block_size, config.hash_block_size) == (256, 4)
    assert config.bytes_per_block == max(group[3] for group in GROUPS[name])


def test_blocks_of_a_published_start_up():
    """vllm-project/vllm#48993: DeepSeek-V4-Pro with keys in MXFP4, of 68 bytes, has blocks of 1,315,008 bytes in a server's log on GB200."""
    layers = [
        replace(layer, cache=layer.cache._replace(vector_bytes=68)) if layer.cache.vector_bytes == KEY_BYTES else layer
        for layer in cache_layers(model(PRO))
    ]
    config = form_kv_cache(layers, SERVER)
    assert config.bytes_per_block == 1_315_008
    # 26.09 GiB there had 21,306 blocks; the last digit of the GiB is 8 blocks.
    assert int(26.09 * 2**30) // config.bytes_per_block == pytest.approx(21_306, abs=4)


def test_the_longest_sequence_needs_windows_of_the_steps_in_flight():
    """Two steps of 8,192 tokens: windows of 128, 8 and 128 tokens in blocks of 64, 4 and 8, each with one block more."""
    config = form_kv_cache(cache_layers(model(FLASH)), SERVER)
    held = 2 * (-(-(127 + 16_384) // 64) + 1) + (-(-(7 + 16_384) // 4) + 1) + (-(-(127 + 16_384) // 8) + 1)
    assert config.sequence_blocks(131_072) == 131_072 // 256 + held
    # Once it decodes: of each window those that it may lie in.
    assert config.decode_blocks(131_072) == 512 + 2 * 3 + 3 + 17


def test_the_refusal_of_a_published_start_up():
    """A comment in vllm-project/vllm#44376: 30,000 tokens needed 6.66 GiB under 0.22, had 5.44, and 13,528 would have fitted. A block of
    that release has 22 pages of each of the three sizes, as many as the largest group has of one."""
    block = 22 * (37_440 + 8_640 + 1_728)
    config = form_kv_cache(
        cache_layers(model(FLASH)), CacheSettings(max_model_len=30_000, max_num_batched_tokens=8192, block_size=256)
    )
    assert config.sequence_blocks(30_000) * block / 2**30 == pytest.approx(6.66, abs=0.005)
    assert config.sequence_blocks(13_528) * block / 2**30 == pytest.approx(5.44, abs=0.005)


@pytest.mark.parametrize(("name", "whole", "active"), [(FLASH, 284, 13), (PRO, 1573, 49)])
def test_parameters_are_the_published_ones(name: str, whole: int, active: int):
    """The model cards say 284B of which 13B are active, and 1.6T of which 49B are."""
    shape = model(name)
    assert shape.num_params / 1e9 == pytest.approx(whole, rel=0.002)
    assert num_params(shape, used=True) / 1e9 == pytest.approx(active, rel=0.07)


def test_weights_are_those_of_the_files():
    """148.66 GiB of safetensors on the hub, the layer of multi-token prediction among them, of which there are 43 others."""
    shape = model(FLASH)
    assert shape.quantization == "fp8[mixer,shared]+mxfp4[expert]"
    (found,) = stage_bytes(shape, quantization=shape.quantization)
    assert found * 44 / 43 / 2**30 == pytest.approx(148.66, rel=0.01)
    assert model("nvidia/DeepSeek-V4-Pro-NVFP4").quantization == "fp8[mixer,shared]+nvfp4[expert]"


def _changed(tmp_path: Path, **changes: object) -> str:
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "hidden_size": 256,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
        "index_n_heads": 4, "index_topk": 64, "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "vocab_size": 1000, "max_position_embeddings": 4096,
        "sliding_window": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compress_ratios": [0, 2, 4]}, "compress_ratios = [0, 2, 4]: must be 0, 4 or 128 for each of the 3 layers"),
        ({"compress_ratios": [4, 4, 0, 4]}, "compress_ratios = [4, 4, 0, 4]: must be"),
        ({"compress_ratios": None}, "compress_ratios = []: must be"),
        ({"head_dim": 256}, "head_dim = 256: must be 512"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}: is not"),
        ({"expert_dtype": "int4", "quantization_config": {"quant_method": "fp8"}}, "expert_dtype = 'int4': is not"),
    ],
)
def test_what_is_no_deepseek_v4_is_refused(changes: dict[str, object], text: str, tmp_path: Path):
    with pytest.raises(SettingError) as error:
        model(_changed(tmp_path, **changes))
    assert str(error.value).startswith(text)


def test_experts_in_fp8(tmp_path: Path):
    name = _changed(tmp_path, expert_dtype="fp8", quantization_config={"quant_method": "fp8"})
    assert model(name).quantization == "fp8"


def test_what_the_kernels_do_not_run_is_refused():
    assert checked_block_size(model(FLASH), None) == 256
    with pytest.raises(SettingError, match="must be 256 tokens"):
        checked_block_size(model(FLASH), 128)
    assert resolved_kv_dtype(model(FLASH), gpu("b200"), "auto") == "fp8_ds_mla"
    with pytest.raises(SettingError, match="must be fp8 or auto"):
        resolved_kv_dtype(model(FLASH), gpu("h200"), "bf16")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policy": "vllm-v0"}, "has compressed attention, which vllm-v0 does not serve; use --policy vllm-v1"),
        ({"policy": "sglang"}, "does not serve"),
        ({"disable_hybrid_kv_cache_manager": True}, "vLLM cannot keep the windows"),
        (
            {"speculative_config": OF_A_MODEL},
            "vectors in a number format of their own, beside which draft models and EAGLE are not simulated",
        ),
    ],
)
def test_what_is_not_served_with_it_is_refused_in_one_line(changes: dict[str, object], text: str, tmp_path: Path):
    chosen = {"policy": "vllm-v1", "model": _changed(tmp_path), "gpu": "h200"} | changes
    with pytest.raises(UserError, match=text) as error:
        simulate(
            settings(**chosen),
            Workload("few", arrival_ticks=np.zeros(3, int), prompt_tokens=np.full(3, 300), output_tokens=np.full(3, 9)),
        )
    assert "\n" not in str(error.value)
