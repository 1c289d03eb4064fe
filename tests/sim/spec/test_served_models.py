"""Models that are served in 2026: parameters, what they keep, and number formats of parts of their checkpoints.

Parameters are those of transformers' own classes on the presets' configurations, built without memory, with the router's
corrections, which it keeps as buffers (``tests/real_vllm/test_parameters.py`` counts them again). Of ``nemotron-nas`` and ``mimo``,
which transformers does not have, they are the counts of the model cards, rounded there to 49.9 and 7.6 billions.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.cost import CalibratedCost, RooflineCost, default_cost, profile
from fragmeter.sim.cost.shares import speedup
from fragmeter.sim.spec import CacheSettings, cache_layers, form_kv_cache, gpu, model, stage_bytes
from fragmeter.sim.spec.model import origin
from fragmeter.sim.spec.startup.launch import resolved_kv_dtype
from fragmeter.sim.spec.weights import layer_matrices, num_params
from fragmeter.sim.types.errors import SettingError

PARAMETERS = {
    "deepseek-v3.2": 671_877_929_216 + 58 * 256,
    "glm-5": 743_911_199_232 + 75 * 256,
    "glm-5.2": 743_377_000_704 + 75 * 256,
    "kimi-k2.5": 1_026_879_353_328 + 60 * 384,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-27b": 27_356_728_560,
    "qwen3.6-27b": 27_356_728_560,
    "gemma-4-26b-a4b": 25_805_933_872,
    "gemma-4-31b": 31_273_086_512,
    "nemotron-3-super": 120_668_687_360 + 40 * 512,
    "nemotron-3-ultra": 549_308_968_960 + 48 * 512,
    "mimo-v2-flash": 308_778_768_832 + 47 * 256,
    "minimax-m3": 427_040_132_864 + 57 * 128,
    "step-3.7-flash": 198_937_133_056 + 42 * 288,
    "glm-5.3-flash": 313_890_426_878 + 42 * 288,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_transformers(name):
    assert model(name).num_params == PARAMETERS[name]


@pytest.mark.parametrize(("name", "billions"), [("nemotron-super-49b", 49.9), ("mimo-7b", 7.6), ("llama-65b", 65.3)])
def test_parameters_are_those_of_the_model_cards(name, billions):
    assert model(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


TINY = {
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
    return lambda **changes: write_config(TINY | changes)


class TestSparseAttention:
    def test_a_token_is_a_latent_vector_and_a_key_of_the_indexer(self):
        """576 elements; 128 bytes of fp8 and a scale of 4. FlashMLA's own format has 656 bytes in place of 576."""
        spec = model("deepseek-v3.2")
        for dtype, latent in (("bf16", 2 * 576), ("fp8", 576), ("fp8_ds_mla", 656)):
            assert spec.slot_bytes(dtype) == spec.slot_bytes(dtype, 8) == 61 * (latent + 132)

    def test_glm_5_2_has_an_indexer_in_every_fourth_layer(self):
        spec = model("glm-5.2")
        assert spec.indexer.layers == (0, 1, *range(2, 78, 4))
        assert spec.slot_bytes("bf16") == 78 * 1152 + 21 * 132
        assert model("glm-5").slot_bytes("bf16") == 78 * (1152 + 132)

    def test_keys_share_the_blocks_of_latent_vectors(self):
        """One group: blocks of 64 tokens have a page for each latent vector and each key."""
        layers = cache_layers(model("deepseek-v3.2"), "bf16", 8)
        settings = CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, block_size=64)
        config = form_kv_cache(layers, settings)
        (group,) = config.groups
        assert [spec.page_size_bytes for spec in group.specs[:2]] == [64 * 1152, 64 * 132]
        assert (len(group.layers), config.bytes_per_block) == (122, 64 * 61 * 1284)

    def test_every_rank_holds_the_indexer(self):
        """Queries from the latent vector of queries, and key and weights of 64 heads."""
        sparse, dense = (layer_matrices(model(name), 0, 8) for name in ("deepseek-v3.2", "deepseek-v3"))
        more = [matrix for matrix in sparse if matrix not in dense]
        assert [(each.inputs, each.outputs, each.ranks) for each in more] == [(1536, 64 * 128, 1), (7168, 128 + 64, 1)]
        spec = model("deepseek-v3.2")
        assert spec.num_params - model("deepseek-v3").num_params == 61 * (1536 * 8192 + 7168 * 192 + 2 * 128)

    @pytest.mark.parametrize(
        ("name", "card", "given", "found"),
        [
            ("deepseek-v3.2", "h200", "auto", "bf16"),
            ("deepseek-v3.2", "h200", "fp8", "fp8_ds_mla"),
            ("deepseek-v3.2", "b200", "auto", "bf16"),
            ("deepseek-v3.2", "b200", "fp8", "fp8"),
            ("deepseek-v3.2", "rtx-pro-6000", "auto", "fp8_ds_mla"),
            ("glm-5", "h200", "auto", "bf16"),
            ("glm-5", "b200", "auto", "fp8"),
            ("glm-5", "b200", "bf16", "bf16"),
            ("glm-5.3-flash", "h200", "auto", "bf16"),
            ("glm-5.3-flash", "h200", "fp8", "fp8_ds_mla"),
            ("glm-5.3-flash", "b200", "auto", "fp8"),
            ("deepseek-v3", "h200", "fp8", "fp8"),
            ("nvidia/Qwen3.6-27B-NVFP4", "b200", "auto", "fp8"),
            ("nvidia/Qwen3.6-35B-A3B-NVFP4", "b200", "auto", "bf16"),
        ],
    )
    def test_formats_of_the_kv_cache(self, name, card, given, found):
        assert resolved_kv_dtype(model(name), gpu(card), given, "bf16") == found

    def test_a_decode_reads_all_keys_and_at_most_top_k_latent_vectors(self):
        """Past 2,048 tokens a sequence adds 132 bytes of key and 8 of logits a layer, before it adds a latent vector."""
        step = RooflineCost(model("deepseek-v3.2"), gpu("h200"), 8)
        below, above = (step.decode_line(64, 64 * tokens) for tokens in (2000, 10_000))
        assert below[2] == 64 * 2048 and above[2] is None
        assert below[1] / above[1] == pytest.approx((1152 + 140) / 140, rel=1e-3)
        dense = RooflineCost(model("deepseek-v3"), gpu("h200"), 8)
        assert step.decode_attention_ticks(64, 64 * 100_000) < dense.decode_attention_ticks(64, 64 * 100_000) / 5

    def test_prompts_attend_to_at_most_top_k_tokens(self):
        step = RooflineCost(model("deepseek-v3.2"), gpu("h200"), 8)
        tokens, long = 4096, 4096 * 100_000
        dense = RooflineCost(model("deepseek-v3"), gpu("h200"), 8)
        assert step.prefill_attention_ticks(tokens, long) < dense.prefill_attention_ticks(tokens, long)
        grown = step.prefill_attention_ticks(tokens, 2 * long) - step.prefill_attention_ticks(tokens, long)
        assert 0 < grown < step.prefill_attention_ticks(tokens, long)

    @pytest.mark.parametrize(
        "line",
        [
            ["simulate", "--model", "glm-5", "--policy", "vllm-v1", "--block-size", "16", "--num-prompts", "2"],
            ["plan", "--gpu", "h200", "--serve", "vllm serve glm-5 -tp 8 --block-size 16"],
        ],
    )
    def test_blocks_of_other_sizes_are_refused(self, line, capsys):
        assert status(line) == MISTAKE
        said = capsys.readouterr().err
        assert said == "fragmeter: block_size = 16: must be a multiple of 64 tokens for the indexer of glm-5\n"

    def test_old_cards_have_no_kernels(self, capsys):
        assert status(["plan", "--gpu", "a100-80gb", "--serve", "vllm serve glm-5 -tp 8"]) == DONE
        assert "It does not start: glm-5 on 8 x a100-80gb. No valid attention backend found" in capsys.readouterr().out

    def test_a_profile_covers_it_where_tables_have_its_widths(self):
        """The tables of DeepSeek-V3's attention have the same widths, and attend to every token."""
        spec = model("deepseek-v3.2")
        assert default_cost(spec, gpu("h200")) == default_cost(model("glm-5"), gpu("b200")) == "fitted"
        assert default_cost(model("deepseek-v3"), gpu("l40s")) == "fitted"
        assert "attends to the tokens that an indexer chooses" in CalibratedCost.refusal(spec, profile("l40s"), "fp8")
        assert default_cost(spec, gpu("l40s")) == "roofline"
        # Other widths, and an indexer in some layers alone.
        other = replace(spec, hidden_size=6144)
        some = replace(spec, indexer=replace(spec.indexer, layers=spec.indexer.layers[::2]))
        assert all(CalibratedCost.refusal(each, profile("h200"), "fp8") for each in (other, some))


class TestSparseBlocks:
    """MiniMax M3: 57 of 60 layers attend to 16 blocks of 128 tokens, chosen by 4 heads of 128 over a key a token."""

    def test_a_token_is_keys_and_values_and_a_key_of_the_indexer(self):
        """The key has 16 bits whatever the format of the cache, and every rank holds it."""
        spec = model("minimax-m3")
        for dtype, width in (("bf16", 2), ("fp8", 1)):
            assert spec.slot_bytes(dtype) == 60 * 2 * 4 * 128 * width + 57 * 128 * 2
            assert spec.slot_bytes(dtype, 4) == spec.slot_bytes(dtype, 8) == 60 * 2 * 128 * width + 57 * 128 * 2

    def test_keys_share_the_blocks_of_keys_and_values(self):
        layers = cache_layers(model("minimax-m3"), "bf16", 4)
        (group,) = form_kv_cache(
            layers, CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, block_size=128)
        ).groups
        assert [spec.page_size_bytes for spec in group.specs[2:5]] == [128 * 512, 128 * 512, 128 * 256]
        assert len(group.layers) == 60 + 57

    def test_ranks_divide_the_heads_of_the_indexer_as_those_of_keys_and_values(self):
        spec = model("minimax-m3")
        shapes = {
            ranks: [(each.inputs, each.outputs) for each in layer_matrices(spec, 3, ranks)[3:5]] for ranks in (1, 2, 8)
        }
        assert shapes == {1: [(6144, 512), (6144, 128)], 2: [(6144, 256), (6144, 128)], 8: [(6144, 128), (6144, 128)]}
        assert len(layer_matrices(spec, 2, 1)) == 5

    def test_a_decode_reads_all_keys_and_at_most_16_blocks(self):
        """Past 2,048 tokens a sequence adds K and V of 3 layers, and of 57 a key and 4 scores of 8 bytes for a block."""
        spec = model("minimax-m3")
        step = RooflineCost(spec, gpu("h200"), 8)
        below, above = (step.decode_line(64, 64 * tokens) for tokens in (2000, 10_000))
        assert below[2] == 64 * 2048 and above[2] is None
        keys = 57 * (256 + 8 / 128)
        assert below[1] / above[1] == pytest.approx((60 * 512 + keys) / (3 * 512 + keys), rel=1e-3)
        dense = RooflineCost(replace(spec, indexer=None), gpu("h200"), 8)
        assert step.prefill_attention_ticks(4096, 4096 * 100_000) < dense.prefill_attention_ticks(4096, 4096 * 100_000)

    def test_a_profile_without_its_attention_refuses_it(self):
        spec = model("minimax-m3")
        assert "an indexer chooses" in CalibratedCost.refusal(spec, profile("a100-80gb"))
        assert default_cost(spec, gpu("a100-80gb")) == "roofline"
        assert CalibratedCost.refusal(spec, profile("h200")) is None

    def test_it_starts_in_blocks_of_128(self, capsys):
        line = "plan --gpu b200 --serve"
        serve = "vllm serve MiniMaxAI/MiniMax-M3 -tp 8 --max-model-len 128K"
        assert status([*line.split(), serve]) == DONE
        assert "--block-size 128" in capsys.readouterr().out
        assert status([*line.split(), f"{serve} --block-size 64"]) == MISTAKE
        said = capsys.readouterr().err
        assert (
            said
            == "fragmeter: block_size = 64: must be a multiple of 128 tokens for the indexer of MiniMaxAI/MiniMax-M3\n"
        )


class TestHeadsThatDiffer:
    def test_gemma_4_keeps_wide_heads_of_all_tokens(self):
        """26B: 25 layers of 8 heads of 256 with a window, 5 of 2 heads of 512."""
        spec = model("gemma-4-26b-a4b")
        sliding, full = spec.kv_groups()
        assert [(group.num_layers, group.span.tokens) for group in (sliding, full)] == [(25, 1024), (5, 0)]
        assert spec.group_slot_bytes(sliding, "bf16") == 25 * 2 * 8 * 256 * 2
        assert spec.group_slot_bytes(full, "bf16") == 5 * 2 * 2 * 512 * 2
        # K of the full layers is also their V: one matrix of the checkpoint is loaded twice.
        assert stage_bytes(spec)[0] - 2 * spec.num_params == 2 * 5 * 2816 * 1024

    @pytest.mark.parametrize(("ranks", "full", "sliding"), [(1, 32, 16), (4, 16, 16), (8, 16, 32)])
    def test_blocks_hold_more_tokens_of_narrower_layers(self, ranks, full, sliding):
        """From 4 ranks on, each holds one of the 2 heads of 512; from 8 on, one of the 8 heads of 256."""
        layers = cache_layers(model("gemma-4-26b-a4b"), "bf16", ranks)
        config = form_kv_cache(layers, CacheSettings(max_model_len=8192, max_num_batched_tokens=8192))
        assert {group.kind: group.block_size for group in config.groups} == {"full": full, "sliding": sliding}
        assert len(config.groups) == 6

    def test_mimo_v2_has_narrower_values(self):
        """9 layers with 4 KV heads of all tokens, 39 with 8 of a window; K has 192 elements, V 128."""
        spec = model("mimo-v2-flash")
        kept = {group.span.kind: spec.group_slot_bytes(group, "bf16") for group in spec.kv_groups()}
        assert kept == {"full": 9 * 4 * 320 * 2, "sliding": 39 * 8 * 320 * 2}

    def test_step_has_more_query_heads_in_layers_with_a_window(self):
        """64 heads in 12 layers, 96 in 33, 8 of K and V in all; a gate for each head. Pages of all layers are alike."""
        spec = model("step-3.7-flash")
        full, sliding = (layer_matrices(spec, layer, 4)[:4] for layer in (0, 1))
        assert [matrix.outputs for matrix in full] == [16 * 128, 2 * 128, 4096, 16]
        assert [matrix.outputs for matrix in sliding] == [24 * 128, 2 * 128, 4096, 24]
        layers = cache_layers(spec, "bf16", 4)
        config = form_kv_cache(layers, CacheSettings(max_model_len=8192, max_num_batched_tokens=8192))
        assert [(group.kind, len(group.layers)) for group in config.groups] == [("full", 12)] + [("sliding", 11)] * 3
        assert {spec.page_size_bytes for group in config.groups for spec in group.specs} == {16 * 2 * 2 * 128 * 2}

    def test_nemotron_nas_has_layers_without_attention(self):
        spec = model("nemotron-super-49b")
        assert (len(spec.attention_layers), spec.slot_bytes("bf16")) == (49, 49 * 2 * 8 * 128 * 2)
        assert {spec.mlp_size(layer) for layer in range(80)} == {2816, 5632, 7168, 14336, 17920, 28672}

    def test_experts_compute_a_latent_vector(self):
        """Nemotron 3 Super: 512 experts of 2 matrices of 1,024 x 2,688; every rank projects to 1,024 and back."""
        spec = model("nemotron-3-super")
        matrices = layer_matrices(spec, spec.experts.layers[0], 4)
        routed = sum(matrix.params for matrix in matrices if matrix.part == "expert")
        assert 4 * routed == 512 * 2 * 1024 * 2688
        shapes = [(each.inputs, each.outputs, each.ranks) for each in matrices if each.part == "router"]
        assert shapes == [(4096, 512, 1), (4096, 1024, 1), (1024, 4096, 1)]


class TestEncoders:
    def test_the_encoder_is_loaded_on_the_first_stage(self):
        spec = model("qwen3-vl-8b")
        bare = replace(spec, encoder=None)
        assert spec.num_params - bare.num_params == spec.encoder.params() == 576_388_336
        assert num_params(spec, used=True) == num_params(bare, used=True)
        first, last = (with_ - without for with_, without in zip(stage_bytes(spec, 2, 2), stage_bytes(bare, 2, 2)))
        assert (first, last) == (2 * spec.encoder.params(2), 0)
        assert spec.encoder.params(2) < 0.51 * spec.encoder.params()

    def test_an_unknown_encoder_is_marked(self, config):
        assert model(config(vision_config={"model_type": "siglip_vision_model"})).encoder.is_known is False
        assert model(config()).encoder is None


KIMI_IGNORES = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def _packed(bits: int, group: int) -> dict[str, object]:
    weights = {"type": "int", "num_bits": bits, "group_size": group, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


class TestFormatsOfParts:
    MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

    @pytest.mark.parametrize(
        ("given", "weights", "kv"),
        [
            (_packed(4, 128), "w4a16", None),
            (_packed(4, 32) | {"ignore": KIMI_IGNORES}, "w4a16-g32[expert]", None),
            ({"quant_algo": "FP8", "producer": {"name": "modelopt"}, "kv_cache_scheme": "FP8"}, "fp8", None),
            (
                {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                    "ignore": ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(4)), "mtp.layers.0*"],
                    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                },
                "nvfp4[expert]",
                "fp8",
            ),
            (
                {
                    "quant_method": "modelopt",
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {
                        "lm_head": {"quant_algo": "W4A16_NVFP4"},
                        **{f"model.layers.{layer}.self_attn.o_proj": {"quant_algo": "FP8"} for layer in range(4)},
                        **{f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(4)},
                    },
                },
                "fp8[mixer]+nvfp4[expert,head]",
                None,
            ),
        ],
    )
    def test_formats_are_read(self, config, given, weights, kv):
        spec = model(config(**self.MOE, quantization_config=given))
        assert (spec.quantization, spec.kv_dtype) == (weights, kv)

    def test_mxfp8_has_an_exponent_for_32_values(self):
        """NVIDIA's MiniMax M3: 33 bits for 4 values of attention, MLPs and shared experts; faster than 16 bits on Blackwell alone."""
        spec = model("nvidia/MiniMax-M3-NVFP4")
        attention = 60 * 6144 * (2 * 8192 + 2 * 512) + 57 * 6144 * (512 + 128)
        eight = attention + 3 * 3 * 6144 * 12_288 + 57 * 3 * 6144 * 3072
        experts = 57 * 128 * 3 * 6144 * 3072
        saved = eight * 2 - eight * 33 // 32 + experts * 2 - experts * 9 // 16
        assert stage_bytes(spec)[0] - stage_bytes(spec, quantization=spec.quantization)[0] == saved
        assert [speedup(gpu(name), "mxfp8") > 1 for name in ("h200", "b200")] == [False, True]

    LEGACY = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}

    @pytest.mark.parametrize(
        ("changes", "weights", "kv"),
        [
            ({}, "fp8", None),
            ({"kv_cache_quant_algo": "FP8"}, "fp8", "fp8"),
            ({"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}, "nvfp4", "fp8"),
            ({"kv_cache_quant_algo": "NVFP4"}, "fp8", "nvfp4"),
            ({"exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}, "fp8[expert]", None),
        ],
    )
    def test_the_file_of_modelopt_is_read_beside_the_configuration(self, config, changes, weights, kv):
        """An fp8 KV cache only where the file asks for one, whatever the weights."""
        path = config(**self.MOE)
        written = {"producer": {"name": "modelopt"}, "quantization": self.LEGACY | changes}
        path.with_name("hf_quant_config.json").write_text(json.dumps(written))
        spec = model(path)
        assert (spec.quantization, spec.kv_dtype) == (weights, kv)
        assert "hf_quant_config.json with SHA-256" in origin(str(path))

    def test_the_configuration_comes_before_the_file(self, config):
        """But for the modules of a mixed checkpoint, where it does not list them."""
        path = config(**self.MOE, quantization_config={"quant_method": "fp8"})
        modules = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(4)}
        written = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": modules}
        path.with_name("hf_quant_config.json").write_text(json.dumps({"quantization": written}))
        assert (model(path).quantization, model(path).kv_dtype) == ("fp8", None)
        assert "hf_quant_config.json" not in origin(str(path))
        config(**self.MOE, quantization_config={"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"})
        assert (model(path).quantization, model(path).kv_dtype) == ("nvfp4[expert]", None)

    def test_a_file_without_what_vllm_requires_is_taken_for_all_layers(self, config):
        """The answer says so."""
        path = config(**self.MOE)
        written = {"producer": {"name": "modelopt"}, "quantization": self.LEGACY | {"quant_algo": "NVFP4"}}
        path.with_name("hf_quant_config.json").write_text(json.dumps(written))
        assert model(path).quantization == "nvfp4" and "group_size" in model(path).assumed
        written["quantization"]["group_size"] = 16
        path.with_name("hf_quant_config.json").write_text(json.dumps(written))
        assert model(path).assumed is None

    @pytest.mark.parametrize(
        "given",
        [
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn", "model.layers.2.self_attn"]},
            {
                "quant_method": "modelopt",
                "quantized_layers": {
                    f"model.layers.{layer}.{part}": {"quant_algo": "FP8"}
                    for layer in range(4)
                    for part in ("self_attn.o_proj", "mlp.experts")
                    if part != "self_attn.o_proj" or layer in (1, 3)
                },
            },
        ],
        ids=["left out", "listed"],
    )
    def test_a_part_of_some_layers_has_sixteen_bits(self, config, given):
        """Attention of two layers of four: 8 heads of 32, 2 KV heads, each output with a scale of 32 bits."""
        found, whole = model(config(**self.MOE, quantization_config=given)), model(config(**self.MOE))
        assert found.quantization == "fp8"
        attention, outputs = 256 * (256 + 2 * 64) + 256 * 256, 256 + 2 * 64 + 256
        more = stage_bytes(found, quantization="fp8")[0] - stage_bytes(whole, quantization="fp8")[0]
        assert more == 2 * (attention - 4 * outputs)

    def test_a_kv_cache_has_the_format_of_the_checkpoint(self):
        spec = replace(model("qwen3-8b"), kv_dtype="nvfp4")
        assert [resolved_kv_dtype(spec, gpu("b200"), given) for given in ("auto", "fp8")] == ["nvfp4", "fp8"]
        other = replace(spec, kv_dtype="int8_per_token_head")
        with pytest.raises(
            SettingError, match="^kv_cache_dtype = 'int8_per_token_head': which the checkpoint of qwen3-8b"
        ):
            resolved_kv_dtype(other, gpu("b200"), "auto")

    def test_bytes_by_hand(self, config):
        """Only the experts have 4 bits, in groups of 32 with scales of 16 bits; attention and head stay as they are."""
        spec = model(config(**self.MOE))
        experts = 4 * 8 * 3 * 256 * 64
        saved = experts * 16 // 8 - (experts * 4 // 8 + experts // 32 * 16 // 8)
        assert stage_bytes(spec)[0] - stage_bytes(spec, quantization="w4a16-g32[expert]")[0] == saved
        head = 1000 * 256
        found = stage_bytes(spec)[0] - stage_bytes(spec, quantization="nvfp4[head]")[0]
        assert found == 2 * head - head // 2 - head // 16

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (_packed(4, 64), "is not understood in tiny"),
            (_packed(8, 128), "is not understood in tiny"),
            (
                {
                    "quant_method": "modelopt",
                    "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "MXFP6"}},
                },
                "quantization_config.quantized_layers = 'MXFP6': of expert of tiny is not understood; one of FP8, NVFP4, "
                "W4A16_NVFP4, MXFP8 for all layers",
            ),
        ],
    )
    def test_other_formats_are_refused(self, config, given, text):
        with pytest.raises(SettingError) as error:
            model(config(**self.MOE, quantization_config=given))
        assert text in str(error.value)

    def test_kimi_k2_5_has_experts_in_four_bits_and_all_else_in_sixteen(self):
        """384 experts of 3 * 7,168 * 2,048 in 60 layers, with a scale of 16 bits for 32 weights; 12.2 billion others."""
        spec = model("kimi-k2.5")
        experts, others = 60 * 384 * 3 * 7168 * 2048, 12_193_352_688
        assert stage_bytes(spec, quantization=spec.quantization)[0] == pytest.approx(
            experts * (4 + 16 / 32) / 8 + others * 2, rel=1e-4
        )


#: Keys that change the cache or the weights, in a family that does not read them.
UNREAD = {
    "index_topk": 2048, "moe_latent_size": 64, "hybrid_layer_pattern": [0, 1, 1, 1], "block_configs": [{}],
    "sparse_attention_config": {"sparse_block_size": 128}, "compress_ratios": [0, 4, 128, 4], "global_head_dim": 512,
    "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256,
}  # fmt: skip


@pytest.mark.parametrize("key", UNREAD)
def test_a_key_that_changes_the_cache_is_refused_by_its_name(config, key):
    with pytest.raises(SettingError, match=f"^{key} = .* is not understood in tiny with model_type 'llama'"):
        model(config(**{key: UNREAD[key]}))


STEP = {"model_type": "step3p5", "num_sliding_attention_heads": 8, "moe_num_experts": 4}
MINIMAX_M3 = {
    "model_type": "minimax_m3", "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": 2, "sparse_block_size": 128},
}  # fmt: skip
GEMMA_4 = {"model_type": "gemma4_text", "sliding_window": 64, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({**GEMMA_4, "num_kv_shared_layers": 2}, "num_kv_shared_layers = 2: a KV cache that layers share"),
        (GEMMA_4, None),
        (
            {"model_type": "gemma4_text", "sliding_window": 64},
            "hidden_size_per_layer_input = 256: an embedding for each layer",
        ),
        ({"model_type": "minimax_m3"}, "sparse_attention_config = None: must describe the indexer of tiny"),
        (
            MINIMAX_M3 | {"shared_intermediate_size": 80},
            "shared_intermediate_size = 80: is not understood in tiny; MiniMax M3 has 64",
        ),
        (MINIMAX_M3 | {"moe_layer_freq": [0, 1]}, "moe_layer_freq = [0, 1]: must have one number for each of the 4"),
        ({"model_type": "deepseek_ref"}, "model_type = 'deepseek_ref': is DeepSeek V4 under a name that vLLM does not"),
        (
            {"model_type": "deepseek_v4", "compress_ratios": [0, 128, 128, 0]},
            "compress_ratios = [0, 128, 128, 0]: must be",
        ),
        (STEP | {"moe_layers_enum": "1,b"}, "moe_layers_enum = '1,b': must list the layers with experts of tiny"),
    ],
)
def test_what_is_not_simulated_is_refused_by_its_key(config, changes, text):
    if text is None:
        assert model(config(**changes)).window_heads.head_dim == 256
        return
    with pytest.raises(SettingError) as error:
        model(config(**changes))
    assert str(error.value).startswith(text)


def test_blocks_of_two_sizes_are_refused_by_policies_that_do_not_serve_them(capsys):
    line = "simulate --model gemma-4-26b-a4b --gpu h200 --policy vllm-v0 --num-prompts 2 --max-model-len 4096"
    assert status(line.split()) == MISTAKE
    said = capsys.readouterr().err
    assert (
        "needs blocks of 32 tokens beside those of 16, which is not simulated under this policy; --policy vllm-v1"
        in said
    )
    assert said.count("\n") == 1
    remedy = re.search(r"--disable\S+", said)[0]
    assert status([*line.split(), remedy]) == DONE
    assert status(line.replace("vllm-v0", "vllm-v1").split()) == DONE


def test_drafts_beside_blocks_of_two_sizes_are_served():
    line = "simulate --model gemma-4-26b-a4b --gpu h200 --policy vllm-v1 --num-prompts 2 --max-model-len 4096"
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"})
    asked = [*line.split(), "--speculative-config", drafts[:-1] + ', "synthetic_acceptance_length": 2}']
    assert status(asked) == DONE


def test_presets_have_sources():
    presets = json.loads(resources.files("fragmeter.sim.spec").joinpath("data/models.json").read_text("utf-8"))
    assert all("/" in presets[name]["_name_or_path"] for name in PARAMETERS)
