"""What models weigh: published counts, tensors written down one by one, and quantised checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fragmeter.sim.spec import Deployment, gpu, model, stage_bytes
from fragmeter.sim.spec.deployment import ExpertRanks
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.spec.startup.loading import loaded_bytes
from fragmeter.sim.spec.weights import num_params
from fragmeter.sim.types.errors import SettingError

# Parameters of the checkpoints (safetensors metadata on huggingface.co), and active ones as the model cards
# round them: Mixtral 12.9 B, Qwen3 3.3 B, DeepSeek-V3 37 B. Falcon's checkpoint also stores its tied head.
PUBLISHED = {
    "mistral-7b-v0.1": (7_241_732_096, 7.24),
    "falcon-7b": (7_217_189_760 - 65_024 * 4544, 6.92),
    "mixtral-8x7b": (46_702_792_704, 12.9),
    "qwen3-30b-a3b": (30_532_122_624, 3.35),
    # With the vision tower (416,866,032) and its projection (1152 * 5376 + 1152).
    "gemma-3-27b": (27_432_406_640, 27.0),
    "deepseek-v3": (671_026_419_200, 37.6),
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def spec_of(tmp_path):
    """The spec of a tiny configuration with changed keys."""

    def read(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(TINY | changes))
        return model(path)

    return read


@pytest.mark.parametrize(("name", "params", "active_billions"), [(name, *rest) for name, rest in PUBLISHED.items()])
def test_parameters_are_the_published_ones(name, params, active_billions):
    assert model(name).num_params == params
    assert num_params(model(name), used=True) / 1e9 == pytest.approx(active_billions, rel=5e-3)


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        # arXiv 2508.10925, table 1: active ones count the output head and not the embedding.
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128, "hidden_size": 2880},
            116.83,
            5.13,
        ),
        ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "hidden_size": 2880}, 20.91, 3.61),
    ],
)
def test_gpt_oss_has_its_published_sizes(spec_of, config, billions, active_billions):
    rest = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880}
    spec = spec_of(**config, **rest, num_experts_per_tok=4, vocab_size=201_088, sliding_window=128)
    assert spec.num_params / 1e9 == pytest.approx(billions, abs=5e-3)
    assert (num_params(spec, used=True) - spec.head_params()) / 1e9 == pytest.approx(active_billions, abs=5e-3)


def test_starcoder_and_deepseek_v2_lite_have_their_published_sizes(spec_of, tmp_path):
    """bigcode/starcoder and deepseek-ai/DeepSeek-V2-Lite: 15,517,456,384 and 15,706,484,224 parameters."""
    shape = {"n_embd": 6144, "n_layer": 40, "n_head": 48, "n_positions": 8192, "n_inner": 24_576, "vocab_size": 49_152}
    path = tmp_path / "starcoder.json"
    path.write_text(json.dumps({"model_type": "gpt_bigcode", "multi_query": True} | shape))
    assert model(path).num_params == 15_517_456_384
    assert model(path).slot_bytes("fp16", 16) == model(path).slot_bytes("fp16") == 40 * 2 * 128 * 2
    lite = spec_of(
        model_type="deepseek_v2", num_hidden_layers=27, hidden_size=2048, num_attention_heads=16, vocab_size=102_400,
        q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        intermediate_size=10_944, first_k_dense_replace=1, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, topk_method="greedy",
    )  # fmt: skip
    assert lite.num_params == 15_706_484_224
    assert lite.slot_bytes() == 27 * 576 * 2


def test_ranks_of_deepseek_share_experts_and_repeat_the_way_down():
    """Every rank holds the queries' and the latent way down, the router with its bias, and the norms."""
    spec = model("deepseek-v3")
    down = 61 * 7168 * (1536 + 512 + 64)
    router = 58 * 256 * (7168 + 1)
    norms = 61 * (1536 + 512 + 2 * 7168) + 7168
    repeated = down + router + norms
    for ranks in (1, 4, 16):
        assert ranks * spec.weight_bytes("bf16", ranks) == 2 * (spec.num_params + (ranks - 1) * repeated)


def test_ranks_of_mixtral_divide_every_expert():
    spec = model("mixtral-8x7b")
    repeated = 32 * (8 * 4096 + 2 * 4096) + 4096
    assert 8 * spec.weight_bytes("bf16", 8) == 2 * (spec.num_params + 7 * repeated)


def test_experts_stand_where_the_config_puts_them(spec_of):
    one, router = 3 * 256 * 64, 256 * 8
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    dense = spec_of(model_type="qwen3").num_params
    for changes, layers in (
        ({}, (0, 1)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [1]}, (0,)),
    ):
        spec = spec_of(**moe, **changes)
        assert spec.experts.layers == layers
        assert spec.num_params - dense == len(layers) * (8 * one + router - 3 * 256 * 512)
        assert spec.num_params - num_params(spec, used=True) == len(layers) * 6 * one
    assert spec_of(**moe, mlp_only_layers=[0, 1]).experts is None


def test_llama_4_puts_an_mlp_between_experts(spec_of):
    spec = spec_of(
        model_type="llama4_text", num_local_experts=4, intermediate_size_mlp=1024, interleave_moe_layer_step=2
    )
    attention, norms = 2 * 256 * (8 + 2) * 32, 2 * 256
    first = attention + norms + 3 * 256 * 1024
    second = attention + norms + 256 * 4 + (4 + 1) * 3 * 256 * 512
    assert spec.num_params == first + second + 2 * 1000 * 256 + 256
    assert [group.layers for group in spec.kv_groups()] == [(0, 1)]
    assert spec.kv_groups()[0].span.tokens == 8192


class TestQuantised:
    """A layer of TINY on one rank: 256 x 256 (Q, O), 2 of 256 x 64 (K, V), 2 of 256 x 512, one of 512 x 256."""

    ELEMENTS = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512
    OUTPUTS = 256 + 64 + 64 + 256 + 512 + 512 + 256
    SIXTEEN_BIT = 2 * (2 * 2 * 256 + 256 + 2 * 1000 * 256)

    def test_by_hand(self, spec_of):
        """Groups of 128: 2 for each output of 256 inputs, 4 of 512. A group has 16 bits of scale, 4 of zero."""
        spec = spec_of(model_type="llama")
        groups = 2 * (self.OUTPUTS - 256) + 4 * 256
        four_bits = self.ELEMENTS // 2 + groups * 20 // 8
        eight_bits = self.ELEMENTS + 4 * self.OUTPUTS
        assert stage_bytes(spec) == [2 * 2 * self.ELEMENTS + self.SIXTEEN_BIT] == [spec.weight_bytes()]
        for name, layer in (("awq", four_bits), ("gptq", four_bits), ("int8", eight_bits), ("fp8", eight_bits)):
            assert stage_bytes(spec, quantization=name) == [2 * layer + self.SIXTEEN_BIT]
        # A byte of scale for 16 elements.
        blackwell = self.ELEMENTS // 2 + self.ELEMENTS // 16
        assert stage_bytes(spec, quantization="nvfp4") == [2 * blackwell + self.SIXTEEN_BIT]

    def test_on_two_ranks(self, spec_of):
        """Outputs are halved but for O and down, which have halved inputs; every rank has all vectors."""
        spec = spec_of(model_type="llama")
        outputs = (256 + 64 + 64 + 512 + 512) // 2 + 256 + 256
        vectors = 2 * (2 * 2 * 256 + 256)
        layer = self.ELEMENTS // 2 + 4 * outputs
        assert stage_bytes(spec, 2, quantization="fp8") == [2 * layer + vectors + 2 * 1000 * 256]

    def test_llama_2_7b_is_as_large_as_its_awq_checkpoint(self):
        """TheBloke/Llama-2-7B-AWQ: 3.89 GB."""
        assert stage_bytes(model("llama-2-7b"), quantization="awq")[0] / 1e9 == pytest.approx(3.89, abs=0.01)

    def test_gpt_oss_is_as_large_as_its_checkpoint(self):
        """arXiv 2508.10925, table 1: 60.8 GiB, experts in mxfp4 and the rest in 16 bits."""
        spec = model("gpt-oss-120b")
        assert spec.quantization == "mxfp4"
        assert stage_bytes(spec, quantization="mxfp4")[0] / 2**30 == pytest.approx(60.8, abs=0.05)

    def test_routers_remain_16_bit(self, spec_of):
        spec = spec_of(model_type="mixtral", num_local_experts=4, num_experts_per_tok=1)
        expert_bytes = 4 * (3 * 256 * 512 + 4 * (512 + 512 + 256))
        attention_bytes = 2 * 256 * 256 + 2 * 256 * 64 + 4 * (256 + 64 + 64 + 256)
        router_bytes = 2 * 256 * 4
        assert stage_bytes(spec, quantization="int8") == [
            2 * (expert_bytes + attention_bytes + router_bytes) + self.SIXTEEN_BIT
        ]

    def test_the_checkpoints_format_is_read(self, spec_of):
        for config, read in (
            (None, None),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ):
            assert spec_of(model_type="llama", quantization_config=config).quantization == read

    def test_an_unknown_format_is_refused(self):
        with pytest.raises(
            SettingError, match="quantization = 'nf4': one of awq, gptq, w4a16, w4a16-g32, int8, fp8, mxfp4"
        ):
            stage_bytes(model("opt-13b"), quantization="nf4")


class TestExperts:
    """The experts of a layer are divided among the GPUs of all engines; everything else is on each engine."""

    @pytest.mark.parametrize(("engines", "ranks"), [(8, 1), (4, 2), (1, 8), (2, 4)])
    @pytest.mark.parametrize("whole", [False, True])
    def test_each_gpu_holds_its_part_of_them(self, engines, ranks, whole):
        spec = model("qwen3-30b-a3b")
        experts = 48 * 128 * 3 * 2048 * 768
        divided = Deployment(data_parallel=engines, expert_parallel=whole).expert_ranks(ranks)
        held = stage_bytes(spec, ranks, expert_ranks=divided)[0]
        assert held == stage_bytes(spec, ranks)[0] - 2 * (experts // ranks - experts // (engines * ranks))
        assert divided.holders * divided.slices == engines * ranks and divided.engines == engines

    def test_the_fullest_gpu_counts_where_they_do_not_divide(self, spec_of):
        spec = spec_of(model_type="mixtral", num_local_experts=10, num_experts_per_tok=2)
        experts = spec.num_params - stage_bytes(spec, expert_ranks=ExpertRanks(10**6))[0] // 2
        one = experts // 9
        of_four = stage_bytes(spec, expert_ranks=Deployment(data_parallel=4, expert_parallel=True).expert_ranks())
        assert of_four[0] == spec.weight_bytes() - 2 * 7 * one

    def test_deepseek_v3_on_eight_engines_fits_where_one_does_not(self):
        """671 billion parameters in 8 bits: 37 billion of them are everything but routed experts, of which 8 GPUs hold an
        eighth each."""
        spec = model("deepseek-v3")
        eight = Deployment(data_parallel=8, expert_parallel=True)
        routed = 58 * 256 * 3 * 7168 * 2048
        alone, shared = (
            stage_bytes(spec, quantization="fp8")[0],
            stage_bytes(spec, quantization="fp8", expert_ranks=eight.expert_ranks())[0],
        )
        assert alone > 600 * 10**9 and shared < 102 * 10**9
        # And the scales of the experts, one for each of their outputs.
        assert (alone - shared) == pytest.approx(routed * 7 / 8, rel=3e-3)


class TestStages:
    def test_hold_their_layers_the_embedding_and_the_head(self, spec_of):
        layer = 2 * (TestQuantised.ELEMENTS + 2 * 256)
        embedding, norm = 2 * 1000 * 256, 2 * 256
        spec = spec_of(model_type="llama", num_hidden_layers=5)
        assert stage_bytes(spec, 1, 3) == [2 * layer + embedding, 2 * layer, layer + embedding + norm]
        assert sum(stage_bytes(spec, 1, 3)) == spec.weight_bytes()

    def test_of_tied_embeddings_hold_two_copies(self, spec_of):
        spec = spec_of(model_type="llama", tie_word_embeddings=True)
        assert sum(stage_bytes(spec, 1, 2)) == spec.weight_bytes() + 2 * 1000 * 256

    def test_positions_lie_on_the_first(self):
        spec = model("opt-66b")
        first, *middle, last = stage_bytes(spec, 2, 4)
        assert len(set(middle)) == 1
        assert first - middle[0] == 2 * (50_272 * 9216 // 2 + 2050 * 9216)
        assert last - middle[0] == 2 * (50_272 * 9216 // 2 + 2 * 9216)


def test_the_index_of_a_checkpoint_s_files_says_what_it_weighs(tmp_path):
    """A checkpoint in NVFP4 that keeps more in 16 bits than its configuration says."""
    config = {
        "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 6144, "vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = _loaded(tmp_path)
    plain = sum(stage_bytes(model(tmp_path), 1, 1, "fp8"))
    names = {"model.layers.3.mlp.down_proj.weight": "a", "vision_tower.encoder.layers.9.weight": "a"}
    index = {"metadata": {"total_size": plain + 100_000_000}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weighed = _loaded(tmp_path)
    assert weighed.likely - alone.likely == pytest.approx(100_000_000, rel=0.001)
    assert (weighed.high - weighed.low) / weighed.likely < (alone.high - alone.low) / alone.likely
    # Ranks have their share of what is more, and another format than that of the files is computed.
    halves = [
        _loaded(tmp_path, tensor_parallel=2).likely,
        _loaded(tmp_path, file_weights=None, tensor_parallel=2).likely,
    ]
    assert halves[0] - halves[1] == pytest.approx(50_000_000, rel=0.02)
    assert _loaded(tmp_path, quantization=None) == _loaded(tmp_path, quantization=None, file_weights=None)
    # A drafter's tensors are in the files and not loaded.
    for drafter in ("model.layers.4.mlp.down_proj.weight", "mtp.layers.0.mlp.down_proj.weight"):
        index["weight_map"] = {**names, drafter: "a"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        layer = stage_bytes(model(tmp_path), 1, 1, "fp8")[0] - _of_layers(tmp_path, 3)
        assert weighed.likely - _loaded(tmp_path).likely == pytest.approx(layer + 4 * 2048**2, rel=0.01)


def _loaded(folder, tensor_parallel=1, **changed):
    shape = model(folder)
    quantization = changed.pop("quantization", shape.quantization)
    launch = Launch(
        model=replace(shape, **changed), gpu=gpu("h100-80gb"), max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192,
        tensor_parallel=tensor_parallel, deployment=Deployment(1, "bf16", quantization, True),
    )  # fmt: skip
    return loaded_bytes(launch)[0]


def _of_layers(folder, number):
    return stage_bytes(replace(model(folder), num_layers=number, spans=()), 1, 1, "fp8")[0]
