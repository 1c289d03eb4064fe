"""Shapes, bytes and pools against published numbers."""

from __future__ import annotations

import json

import pytest

from fragmeter.sim.spec import ModelSpec, block_bytes, gpu, gpu_names, host_blocks, model, model_names, paper_num_blocks
from fragmeter.sim.spec.weights import layer_vector_params
from fragmeter.sim.types.errors import SettingError

# Parameters as the checkpoints hold them; OPT-175B has none to count, its paper says 175 billion.
PUBLISHED_PARAMS = {
    "opt-13b": 12_853_473_280,
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 700,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(write_config):
    """Writes a ``config.json`` with changed keys; returns its path."""
    return lambda **changes: write_config(LLAMA | changes)


@pytest.mark.parametrize(("name", "params"), PUBLISHED_PARAMS.items())
def test_parameters_are_those_of_the_checkpoints(name, params):
    assert model(name).num_params == params
    assert model(name).weight_bytes("fp16") == 2 * params


def test_large_opts_are_near_their_names():
    assert model("opt-66b").num_params == pytest.approx(66e9, rel=0.01)
    assert model("opt-175b").num_params == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "expected"),
    [
        ("opt-13b", "fp16", 1, 2 * 40 * 40 * 128 * 2),
        ("opt-66b", "fp16", 4, 2 * 64 * 18 * 128 * 2),
        ("llama-3.1-8b", "bf16", 1, 131_072),
        ("llama-3.1-8b", "fp32", 1, 262_144),
        ("llama-3.1-8b", "fp8", 1, 65_536),
        ("llama-3.1-8b", "int4", 2, 16_384),
        # Eight KV heads on sixteen ranks: each rank still holds one.
        ("llama-3.1-70b", "fp16", 16, 2 * 80 * 128 * 2),
    ],
)
def test_slot_bytes(name, dtype, ranks, expected):
    assert model(name).slot_bytes(dtype, ranks) == expected


def test_ranks_share_matrices_and_repeat_vectors():
    spec = model("opt-66b")
    vectors = spec.num_layers * layer_vector_params(spec, 0) + (spec.learned_positions + 2) * spec.hidden_size
    assert 4 * spec.weight_bytes("fp16", 4) == spec.weight_bytes("fp16") + 3 * 2 * vectors


@pytest.mark.parametrize(
    ("name", "card", "num_gpus", "blocks"),
    [
        ("opt-13b", "a100-40gb", 1, 983),
        ("opt-66b", "a100-40gb", 4, 603),
        ("opt-175b", "a100-80gb", 8, 3754),
        ("llama-13b", "a100-40gb", 1, 984),
    ],
)
def test_the_pools_of_the_paper(name, card, num_gpus, blocks):
    assert paper_num_blocks(model(name), gpu(card), num_gpus) == blocks


def test_table_1_of_the_paper():
    """KV gigabytes and thousands of slots, as printed: 12 / 21 / 264 GB and 15.7 / 9.7 / 60.1 K."""
    for name, card, num_gpus, kv_gib, slots_k in (
        ("opt-13b", "a100-40gb", 1, 12, 15.7),
        ("opt-66b", "a100-40gb", 4, 21, 9.7),
        ("opt-175b", "a100-80gb", 8, 264, 60.1),
    ):
        blocks = paper_num_blocks(model(name), gpu(card), num_gpus)
        assert 16 * blocks / 1000 == pytest.approx(slots_k, abs=0.06)
        assert blocks * num_gpus * block_bytes(model(name), num_gpus) / 2**30 == pytest.approx(kv_gib, abs=0.5)


def test_smaller_blocks_fill_the_same_bytes():
    spec, card = model("opt-13b"), gpu("a100-40gb")
    blocks = [paper_num_blocks(spec, card, 1, size) for size in (1, 2, 4, 8, 16, 32, 256)]
    slots = [size * n for size, n in zip((1, 2, 4, 8, 16, 32, 256), blocks, strict=True)]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] - slots[-1] < 256
    assert blocks[4] == 983


def test_swap_space_is_20_gib_a_gpu():
    assert host_blocks(model("opt-13b")) == 20 * 2**30 // 13_107_200 == 1638
    assert host_blocks(model("opt-66b"), 4) == 20 * 2**30 // 9_437_184
    assert host_blocks(model("opt-13b"), swap_bytes_per_gpu=13_107_199) == 0


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(SettingError) as error:
        paper_num_blocks(model("opt-175b"), gpu("a100-80gb"), 4)
    assert str(error.value) == "num_gpus = 4: opt-175b leaves no KV blocks on a100-80gb; use more or larger GPUs"


def test_a_block_larger_than_the_pool_is_not_blamed_on_the_gpus():
    spec, card = model("opt-13b"), gpu("a100-40gb")
    slots = paper_num_blocks(spec, card, 1, 1)
    assert paper_num_blocks(spec, card, 1, slots) == 1
    with pytest.raises(SettingError) as error:
        paper_num_blocks(spec, card, 1, slots + 1)
    assert str(error.value) == (
        f"block_size = {slots + 1}: opt-13b leaves room for {slots} slots on 1 x a100-40gb; take smaller blocks"
    )


def test_a_swap_space_of_too_many_blocks_is_refused():
    spec = model("llama-3.1-8b")
    most_bytes = spec.slot_bytes() * 2**26
    assert host_blocks(spec, block_size=1, swap_bytes_per_gpu=most_bytes) == 2**26
    with pytest.raises(SettingError, match=r"swap_space = .*: comes to 67,108,865 blocks, more than 67,108,864"):
        host_blocks(spec, block_size=1, swap_bytes_per_gpu=most_bytes + spec.slot_bytes())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: gpu("v100"),
            f"gpu = 'v100': one of {', '.join(gpu_names())}, or a JSON file of a GPU",
        ),
        (
            lambda: model("opt-14b"),
            f"model = 'opt-14b': one of {', '.join(model_names())}, or a path to a config.json",
        ),
        (
            lambda: model("opt-13b").slot_bytes("fp17"),
            "dtype = 'fp17': one of fp32, fp16, bf16, fp8, int8, int4, fp8_ds_mla, nvfp4",
        ),
        (
            lambda: model("opt-13b").weight_bytes(tensor_parallel=3),
            "tensor_parallel = 3: must divide the 40 heads of opt-13b",
        ),
        (
            lambda: model("opt-13b").slot_bytes(tensor_parallel=0),
            "tensor_parallel = 0: must divide the 40 heads of opt-13b",
        ),
        (
            lambda: block_bytes(model("opt-13b"), block_size=0),
            "block_size = 0: must be at least 1 slot",
        ),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(call, text):
    with pytest.raises(SettingError) as error:
        call()
    assert str(error.value) == text


def test_kv_heads_that_do_not_divide_are_refused(config):
    spec = model(config(num_attention_heads=12, num_key_value_heads=6, head_dim=32))
    with pytest.raises(SettingError, match="^tensor_parallel = 4: must divide the 6 KV heads of tiny"):
        spec.slot_bytes(tensor_parallel=4)


def test_presets_are_marked_as_data_sheets():
    assert all("data sheet, not measured" in gpu(name).source for name in gpu_names())
    assert gpu("a100-40gb").memory_bytes == 42_298_834_944
    # What decides kernels and workspaces is known of every card of NVIDIA's.
    of_nvidia = [gpu(name) for name in gpu_names() if not name.startswith("mi")]
    assert len(of_nvidia) >= 40
    assert all(card.major and card.multiprocessors for card in of_nvidia)
    assert not any(gpu(name).compute_capability for name in gpu_names() if name.startswith("mi"))


def test_cards_cut_down_for_export_keep_what_was_not_cut():
    for cut, whole in (("a800-80gb", "a100-80gb"), ("h800-80gb", "h100-80gb")):
        assert gpu(cut).nvlink_bytes_per_s == 200 * 10**9 < gpu(whole).nvlink_bytes_per_s
        kept = ("memory_bytes_per_s", "fp16_flops_per_s", "int8_flops_per_s", "multiprocessors", "architecture")
        assert all(getattr(gpu(cut), name) == getattr(gpu(whole), name) for name in kept)
    large, small, h200 = gpu("h20-141gb"), gpu("h20-96gb"), gpu("h200")
    assert large.memory_bytes == h200.memory_bytes > small.memory_bytes
    assert large.nvlink_bytes_per_s == small.nvlink_bytes_per_s == h200.nvlink_bytes_per_s
    assert large.fp16_flops_per_s == small.fp16_flops_per_s < h200.fp16_flops_per_s / 6


def test_formats_and_links_of_a_preset_are_those_of_its_generation():
    for card in map(gpu, gpu_names()):
        capability = card.compute_capability
        if capability is None:
            continue
        assert (card.fp8_flops_per_s is not None) == (capability >= 89), card.name
        assert (card.fp4_flops_per_s is not None) == (capability >= 100), card.name
        # Data sheets have twice the rate of fp16 for fp8; the L40S's is rounded.
        assert card.fp8_flops_per_s in (None, pytest.approx(2 * card.fp16_flops_per_s, rel=0.02)), card.name
        # Cards with a bridge, which few servers have, are without it, but for those of Hopper, which are sold in pairs.
        linked = capability in (70, 80, 90, 100, 103) and card.name not in ("a30", "gh200-96gb")
        assert (card.nvlink_bytes_per_s > card.pcie_bytes_per_s) == linked, card.name


def test_a_config_json_is_read(config):
    expected = ModelSpec("tiny", 4, 256, 8, 2, 32, 700, 1000, 512, gated_mlp=True, model_type="llama")
    assert model(config()) == expected
    assert model(config().parent) == expected
    assert model(config(head_dim=64)).slot_bytes() == 2 * 4 * 2 * 64 * 2
    assert model(config(num_key_value_heads=None)).num_kv_heads == 8
    assert model(config(sliding_window=4096, use_sliding_window=False)) == expected


def test_tied_embeddings_and_biases_are_counted(config):
    plain = model(config()).num_params
    assert plain - model(config(tie_word_embeddings=True)).num_params == 1000 * 256
    assert model(config(attention_bias=True)).num_params - plain == 4 * ((8 + 2 + 2) * 32 + 256)
    assert model(config(mlp_bias=True)).num_params - plain == 4 * (2 * 700 + 256)
    assert model(config(model_type="qwen2")).num_params - plain == 4 * (8 + 2 + 2) * 32
    assert model(config(model_type="qwen3")).num_params - plain == 4 * 2 * 32


def test_gpt2_has_its_published_size(tmp_path):
    shape = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None, "vocab_size": 50257}
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps({"model_type": "gpt2"} | shape))
    assert model(path).num_params == 124_439_808
    assert model(path).max_model_len == 1024


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int8"),
    ],
)
def test_formats_that_one_method_has_several_of(config, given, form):
    assert model(config(quantization_config=given)).quantization == form


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"kv_lora_rank": 512},
            "kv_lora_rank = 512: multi-head latent attention is not understood in tiny with model_type 'llama'; "
            "give a model of a family that has it",
        ),
        (
            {"num_local_experts": 8},
            "num_local_experts = 8: a mixture of experts is not understood in tiny with model_type 'llama'; "
            "give a model of a family that has it",
        ),
        (
            {"model_type": "opt", "sliding_window": 4096},
            "sliding_window = 4096: a sliding window is not understood in tiny with model_type 'opt'; "
            "give a model of a family that has it",
        ),
        (
            {"model_type": "falcon_mamba", "state_size": 16},
            "state_size = 16: a state-space layer of tiny keeps a state that is not a KV cache; "
            "give a model with K and V in all layers",
        ),
        (
            {"linear_num_key_heads": 16, "num_experts": 512},
            "linear_num_key_heads = 16: linear attention of tiny keeps a state that is not a KV cache; "
            "give a model with K and V in all layers",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]},
            "layer_types = 'linear_attention': is not understood in tiny; "
            "layers of full, sliding or chunked attention keep a KV cache, others do not",
        ),
        (
            {"layer_types": ["full_attention", "full_attention"]},
            "layer_types = ['full_attention', 'full_attention']: must name the kind of each of the 4 layers of tiny",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
            "sliding_window = None: must say how long the sliding_attention of tiny is",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": "0"},
            "mlp_only_layers = '0': must be a list of whole numbers in tiny",
        ),
        (
            {"model_type": "llama4_text", "num_local_experts": 8, "no_rope_layers": [1, 0]},
            "no_rope_layers = [1, 0]: must have one number for each of the 4 layers of tiny",
        ),
        ({"sliding_window": 0}, "sliding_window = 0: must be a whole number of at least 1 in tiny"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "num_experts_per_tok = 4: must be at most the 2 experts of tiny",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}},
            "quantization_config = {'quant_method': 'gptq', 'bits': 8, 'group_size': 128}: is not understood in tiny; "
            "one of awq, gptq and auto-round with 4 bits in groups of 128, w4a16, fp8, int8, mxfp4, mxfp8, nvfp4, or null for 16 bit",
        ),
        (
            {"model_type": "rwkv"},
            "model_type = 'rwkv': keeps a recurrent state in place of K and V, which is not understood in tiny; take another model",
        ),
        ({"hidden_size": None}, "hidden_size = None: must be a whole number of at least 1 in tiny"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1: must be a whole number of at least 1 in tiny"),
        ({"vocab_size": 1e3}, "vocab_size = 1000.0: must be a whole number of at least 1 in tiny"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000: must be at most 16,384 in tiny; no model has more",
        ),
        ({"vocab_size": 2**41}, f"vocab_size = {2**41}: must be at most {2**40:,} in tiny; no model has more"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide the 8 heads of tiny"),
        ({"hidden_size": 250}, "hidden_size = 250: must be a multiple of the 8 heads of tiny, or give head_dim"),
        (
            {"model_type": "opt", "ffn_dim": 1024, "word_embed_proj_dim": 128},
            "word_embed_proj_dim = 128: a projected embedding is not understood in tiny; "
            "give an OPT with an embedding as wide as its layers",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config, changes, text):
    path = config(**changes)
    with pytest.raises(SettingError) as error:
        model(path)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ("[1, 2]", "is not a model's configuration"),
        ("{", "is not readable as JSON"),
        ("[" * 100_000, "is not readable as JSON"),
        ("9" * 5000, "is not readable as JSON"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, content, remedy):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(SettingError) as error:
        model(path)
    assert str(error.value).startswith(f"model = {str(path)!r}: {remedy}")
    assert "\n" not in str(error.value)
