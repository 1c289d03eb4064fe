"""Stored facts of repositories: a name and its file answer alike; what is doubted or assumed is the first line of an answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.spec import model
from fragmeter.sim.spec.stored import Stored, stored, stored_names
from fragmeter.sim.types.errors import SettingError

#: Parameters in billions as published, or as counted by transformers' own classes on the same files, without vision encoders that are not counted.
PARAMETERS = {
    "meta-llama/Llama-3.3-70B-Instruct": 70.554, "Qwen/Qwen3-4B-Instruct-2507": 4.022, "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.532,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.532, "Qwen/Qwen3-235B-A22B-Thinking-2507": 235.094, "Qwen/QwQ-32B": 32.764,
    "Qwen/Qwen2.5-VL-7B-Instruct": 7.616, "Qwen/Qwen2.5-Coder-32B-Instruct": 32.764, "google/gemma-2-9b": 9.2417,
    "google/gemma-3-4b-it": 4.3001, "microsoft/Phi-4-mini-instruct": 3.836, "mistralai/Mistral-Large-Instruct-2411": 122.61,
    "mistralai/Devstral-2-123B-Instruct-2512": 125.026, "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.1511, "HuggingFaceTB/SmolLM3-3B": 3.0751,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.0032, "LGAI-EXAONE/EXAONE-4.5-33B": 32.5275, "allenai/Olmo-3.1-32B-Instruct": 32.2335,
    "ibm-granite/granite-3.3-8b-instruct": 8.17086, "tencent/Hunyuan-A13B-Instruct": 80.39318, "zai-org/GLM-4.1V-9B-Thinking": 9.40028,
    "zai-org/glm-4-9b": 9.400, "LiquidAI/LFM2-1.2B": 1.17034, "deepseek-ai/DeepSeek-V2-Lite": 15.70648,
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": 12.31000, "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70.554, "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1.544,
    "microsoft/Phi-3.5-mini-instruct": 3.821,
}  # fmt: skip
#: Format of the weights, of the KV cache, and the longest sequence, as the checkpoints' files have them.
FORMATS = {
    "nvidia/Qwen3-235B-A22B-NVFP4": ("nvfp4", "fp8", 40_960),
    "nvidia/DeepSeek-V3.1-NVFP4": ("nvfp4", "fp8", 163_840),
    "nvidia/DeepSeek-V3.2-NVFP4": ("nvfp4", "fp8", 163_840),
    "nvidia/GLM-5-NVFP4": ("nvfp4[mlp,shared,expert]", "fp8", 202_752),
    "nvidia/Llama-3.1-70B-Instruct-FP8": ("fp8", "fp8", 131_072),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": ("fp8[mixer]+nvfp4[shared,expert,head]", "fp8", 1_048_576),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": ("fp8", "fp8", 262_144),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": ("fp8[mixer]+nvfp4[shared,expert,head]", None, 262_144),
    "moonshotai/Kimi-K2.6": ("w4a16-g32[expert]", None, 262_144),
    "Qwen/Qwen3-32B-FP8": ("fp8", None, 40_960),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (None, None, 262_144),
    "mistralai/Devstral-2-123B-Instruct-2512": ("fp8", None, 262_144),
    "openai/gpt-oss-20b": ("mxfp4", None, 131_072),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("fp8", None, 163_840),
    "zai-org/GLM-4.7-Flash": (None, None, 202_752),
}


def written(facts: Stored, folder: Path) -> Path:
    """The files of a checkpoint, in a folder of its name."""
    found = folder / facts.name
    found.mkdir(parents=True)
    (found / "config.json").write_text(json.dumps(facts.config))
    if facts.quantization_file is not None:
        (found / "hf_quant_config.json").write_text(json.dumps(facts.quantization_file))
    return found


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """``docs/models.py``, which writes the stored facts."""
    source = importlib.util.spec_from_file_location("models_page", Path(__file__).parents[3] / "docs" / "models.py")
    found = importlib.util.module_from_spec(source)
    source.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_a_name_and_its_files_answer_alike(maker, tmp_path):
    names = stored_names()
    assert len(names) > 200
    for name in names:
        facts = stored(name)
        assert maker.answer(model(name)) == maker.answer(model(written(facts, tmp_path))), name


@pytest.mark.parametrize(
    ("name", "other"),
    [("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-ai/DeepSeek-V3.2"), ("zai-org/GLM-4.7", "glm-4.6")],
)
def test_releases_of_one_architecture_have_its_figures(name, other):
    """By their publishers they differ in training alone; a copy of single keys agrees but for the biases of its attention."""
    one, two = model(name), model(other)
    assert (one.slot_bytes("bf16"), one.max_model_len) == (two.slot_bytes("bf16"), two.max_model_len)
    assert one.num_params == pytest.approx(two.num_params, rel=1e-5)


def test_every_fact_has_a_source_and_a_day():
    found = [stored(name) for name in stored_names()]
    assert all(len(facts.source) > 10 and facts.read.count("-") == 2 for facts in found)
    # 87 of the 89 models of aiconfigurator 0.12.0; the others are DeepSeek V4 under a name that vLLM does not know.
    own = [facts for facts in found if "the same repository" not in facts.source]
    assert sum(facts.source.startswith("aiconfigurator-core") for facts in own) == 87


@pytest.mark.slow
def test_the_page_lists_what_is_stored(maker):
    assert maker.PAGE.read_text("utf-8") == maker.page()


def test_only_what_decides_an_answer_is_stored(maker):
    """Of the modules that are left in 16 bits, those by which a part is looked up; of other keys, those that a reader names."""
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 700, "vocab_size": 1000,
        "max_position_embeddings": 512, "rope_theta": 1e6, "bos_token_id": 1, "sliding_window": None, "auto_map": {"AutoModel": "x"},
    }  # fmt: skip
    left = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkvo"]
    beside = {
        "producer": {"name": "modelopt", "version": "0.29"},
        "quantization": {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": [*left, "lm_head"],
        },
    }
    kept = maker.facts_of("org/tiny-NVFP4", config, beside)
    assert {"rope_theta", "bos_token_id", "sliding_window", "auto_map"}.isdisjoint(kept["config"])
    assert kept["config"]["moe_intermediate_size"] == 64
    assert kept["hf_quant_config"]["quantization"]["exclude_modules"] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    ]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert model(name).num_params / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_lengths(name):
    spec = model(name)
    assert (spec.quantization, spec.kv_dtype, spec.max_model_len) == FORMATS[name]


def test_copies_in_other_formats_have_the_layers_of_their_base():
    for name in (
        "nvidia/Llama-3.1-70B-Instruct-FP8",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
    ):
        assert model(name).has_layers_of(model("llama-3.1-70b"))
        assert not model(name).has_layers_of(model("llama-3.1-8b"))


def test_an_fp8_kv_cache_of_the_checkpoint_has_twice_the_blocks(capsys):
    """The same weights but for their KV cache; until stored files decided, both had 16 bits."""
    blocks = {}
    for name, more in (("Qwen/Qwen3-235B-A22B-FP8", " --kv-cache-dtype fp8"), ("nvidia/Qwen3-235B-A22B-NVFP4", "")):
        serve = f"vllm serve {name} -tp 4 --kv-cache-memory-bytes 20G{more}"
        assert status(["plan", "--gpu", "b200", "--serve", serve, "--json", "-"]) == DONE
        found = json.loads(capsys.readouterr().out)
        blocks[name] = (found["num_gpu_blocks"], found["kv_cache_dtype"])
    assert len(set(blocks.values())) == 1 and {each[1] for each in blocks.values()} == {"fp8"}


def test_layers_in_sixteen_bits_by_hand():
    """Nemotron 3 Nano leaves 6 mixers of Mamba and 6 of attention of its 52 layers in 16 bits."""
    spec = model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4")
    assert (spec.quantization, len(spec.unquantized)) == ("nvfp4", 12)
    assert {layer for _, layer in spec.unquantized} == {4, 5, 11, 12, 18, 19, 25, 26, 32, 33, 41, 42}


class TestUnknownFamily:
    KEYS = {
        "model_type": "new_model", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 700, "vocab_size": 1000, "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip

    @pytest.fixture
    def folder(self, tmp_path):
        def write(**changes: Any) -> Path:
            path = tmp_path / "tiny"
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(self.KEYS | changes))
            return path

        return write

    def test_it_is_plain_grouped_query_attention(self, maker, folder):
        found = model(folder())
        like = model(folder(model_type="llama"))
        assert maker.answer(found) == maker.answer(like) and found.assumed is not None and like.assumed is None
        assert found.slot_bytes("bf16") == 4 * 2 * 2 * 32 * 2
        # Two matrices of 256 x 700 in place of three.
        assert like.num_params - model(folder(hidden_act="relu2")).num_params == 4 * 256 * 700

    @pytest.mark.parametrize(
        ("changes", "longest"),
        [
            ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 1024),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 512),
            (
                {"model_type": "gemma3_text", "head_dim": 32, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                512,
            ),
            ({"model_type": "cohere", "model_max_length": 256}, 256),
        ],
    )
    def test_the_longest_sequence_is_that_of_vllm(self, folder, changes, longest):
        assert model(folder(**changes)).max_model_len == longest

    def test_windows_are_read(self, folder):
        kinds = ["sliding_attention", "full_attention"] * 2
        assert len(model(folder(layer_types=kinds, sliding_window=64)).kv_groups()) == 2

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"intermediate_size": None, "hidden_size": None}, "its file lacks hidden_size, intermediate_size"),
            ({"kv_lora_rank": 512}, "multi-head latent attention is not understood in tiny"),
            ({"mamba_d_state": 16}, "keeps a state that is not a KV cache"),
            ({"num_experts": 8}, "a mixture of experts is not understood in tiny"),
            ({"cross_attention_layers": [1]}, "layers that attend to an encoder is not understood in tiny"),
            ({"layer_types": ["full_attention", "conv"] * 2}, "layer_types = 'conv': is not understood in tiny"),
        ],
    )
    def test_what_cannot_be_plain_is_refused(self, folder, changes, text):
        with pytest.raises(SettingError) as error:
            model(folder(**changes))
        assert text in str(error.value)

    @pytest.mark.slow
    @pytest.mark.parametrize("command", ["simulate", "plan"])
    def test_the_answer_begins_with_it(self, command, folder, capsys, tmp_path):
        path = folder()
        run = {
            "simulate": ["simulate", "--model", str(path), "--policy", "vllm-v1", "--num-prompts", "2"],
            "plan": ["plan", "--serve", f"vllm serve {path}"],
        }[command]
        assert status([*run, "--gpu", "h200"]) == DONE
        assert " ".join(capsys.readouterr().out.split()).startswith("tiny: model_type 'new_model' is not known;")
        report = tmp_path / "report.json"
        assert status([*run, "--gpu", "h200", "--json", str(report)]) == DONE
        assert "new_model" in json.loads(report.read_text())["notes"][0]
        folder(model_type="llama")
        assert status([*run, "--gpu", "h200", "--json", str(report)]) == DONE
        assert "notes" not in json.loads(report.read_text())


def test_a_doubted_copy_is_said_in_the_first_line(capsys):
    line = ["plan", "--gpu", "h200", "--serve", "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4"]
    assert status(line) == DONE
    first = capsys.readouterr().out
    assert first.startswith("meta-llama/Llama-3.3-70B-Instruct: ") and "longest sequence is not certain" in " ".join(
        first.split()
    )
