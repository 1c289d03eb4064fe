"""Static batches through transformers: the same lengths, and what is said where it cannot run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fragmeter.sim import Settings, Workload
from fragmeter.sim.recording.plans import record
from fragmeter.sim.spec import model

torch = pytest.importorskip("torch")

from fragmeter.experiments.measured import validation
from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.validate import generate

PROMPTS, OUTPUTS = np.array([5, 9, 9, 7, 3]), np.array([4, 2, 3, 6, 2])


@pytest.fixture
def batches() -> list[generate.StaticBatch]:
    workload = Workload("few", np.zeros(5, np.int64), PROMPTS, OUTPUTS)
    settings = Settings(
        policy="static", model="toy-llama", num_gpu_blocks_override=16, max_model_len=40, max_num_seqs=2
    )
    plan = record(settings, workload)[1]
    assert [batch.steps.stop for batch in generate.static_batches(plan, workload, 9)] == [4]
    assert len(generate.static_batches(plan, workload, 1)) == 1
    return generate.static_batches(plan, workload)


def test_batches_are_those_of_the_plan(batches):
    assert [batch.prompt_tokens.tolist() for batch in batches] == [[5, 9], [9, 7], [3]]
    assert [batch.output_tokens.tolist() for batch in batches] == [[4, 2], [3, 6], [2]]
    # A step for each token of the longest output.
    assert [len(batch.steps) for batch in batches] == [4, 6, 2]


class Llama:
    """Writes down what it is asked to generate."""

    def __init__(self, config, dtype) -> None:
        self.config, self.dtype, self.calls = config, dtype, []
        self.device = torch.get_default_device()

    def eval(self) -> Llama:
        return self

    def generate(self, input_ids, attention_mask, min_new_tokens, max_new_tokens, **_) -> None:
        assert input_ids.shape == attention_mask.shape and min_new_tokens == max_new_tokens
        self.calls.append((attention_mask.tolist(), max_new_tokens))


def test_generate_gets_the_lengths_of_each_batch(batches, monkeypatch):
    made = []
    library = SimpleNamespace(
        __version__="5.0",
        LlamaConfig=lambda **shapes: shapes,
        AutoModelForCausalLM=SimpleNamespace(
            from_config=lambda *config, **dtype: made.append(Llama(*config, **dtype)) or made[0]
        ),
    )
    monkeypatch.setattr(generate, "_library", lambda: library)
    us, version = generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batches, 1)
    (llama,) = made
    first, second = [[0] * 4 + [1] * 5, [1] * 9], [[1] * 9, [0] * 2 + [1] * 7]
    assert llama.calls == [(first, 2), (first, 4), (second, 6), ([[1] * 3], 2)]
    assert llama.config["num_key_value_heads"] == model("toy-llama").num_kv_heads and llama.dtype == torch.float32
    assert version == "5.0" and len(us) == 3 and all(one > 0 for one in us)


def test_without_transformers_a_line_says_so(batches, monkeypatch):
    def missing():
        raise ModuleNotFoundError("transformers")

    monkeypatch.setattr(generate, "_library", missing)
    with pytest.raises(ImportError):
        generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batches, 1)
    found = {"reason": "it is not installed; pip install transformers"}
    assert validation._transformers_text(found) == (
        "Static batches through transformers: not measured, it is not installed; pip install transformers."
    )


def test_the_real_library_has_the_same_weights(batches):
    """No word of a config is misread: as many parameters as the skeleton's model has."""
    library = pytest.importorskip("transformers")
    llama = generate._llama(library, model("toy-llama"), torch.bfloat16)
    assert sum(one.numel() for one in llama.parameters()) == model("toy-llama").num_params
    us, _ = generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batches[:1], 1)
    assert us[0] > 0
