"""A static batch through transformers: the same lengths, and what is said where it cannot run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fragmeter.sim import Settings, Workload
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.spec import model

torch = pytest.importorskip("torch")

from fragmeter.experiments.measured import validation
from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.validate import generate

PROMPTS, OUTPUTS = np.array([5, 9, 9, 7, 3]), np.array([4, 2, 3, 6, 2])


@pytest.fixture
def plan() -> tuple[Plan, Workload]:
    workload = Workload("few", np.zeros(5, np.int64), PROMPTS, OUTPUTS)
    settings = Settings(
        policy="static", model="toy-llama", num_gpu_blocks_override=16, max_model_len=40, max_num_seqs=2
    )
    return record(settings, workload)[1], workload


@pytest.fixture
def batch(plan) -> generate.StaticBatch:
    return generate.first_batch(*plan)


def test_the_batch_is_the_first_one_of_the_plan(plan, batch):
    """A step for each token of the longest output; and of fewer steps, their tokens."""
    assert batch.prompt_tokens.tolist() == [5, 9]
    assert (batch.steps, batch.output_tokens.tolist()) == (range(4), [4, 2])
    short = generate.first_batch(*plan, most_steps=3)
    assert (short.steps, short.output_tokens.tolist()) == (range(3), [3, 2])


@pytest.mark.parametrize(
    ("timed", "us", "decodes_us"),
    [
        ([0, 1, 3, 9], [100, 10, 14, 0], 10 + 12 + 14),
        ([0, 7], [100, 10], 3 * 10),
        # The second batch begins at step 4.
        ([0, 1, 4, 5], [100, 10, 900, 18], 10 + 12 + 14),
    ],
)
def test_steps_that_are_not_timed_are_on_a_line_between_those_that_are(timed, us, decodes_us, plan, batch):
    """And the prompts count once, whatever share of the timed steps they are."""
    assert batch.us(plan[0], np.array(timed), np.array(us, float)) == 100 + decodes_us


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


def test_generate_gets_the_lengths_of_the_batch(batch, monkeypatch):
    made = []
    library = SimpleNamespace(
        __version__="5.0",
        LlamaConfig=lambda **shapes: shapes,
        AutoModelForCausalLM=SimpleNamespace(
            from_config=lambda *config, **dtype: made.append(Llama(*config, **dtype)) or made[0]
        ),
    )
    monkeypatch.setattr(generate, "_library", lambda: library)
    us, version = generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batch, 1)
    (llama,) = made
    mask = [[0] * 4 + [1] * 5, [1] * 9]
    assert llama.calls == [(mask, 2), (mask, 4)]
    assert llama.config["num_key_value_heads"] == model("toy-llama").num_kv_heads and llama.dtype == torch.float32
    assert version == "5.0" and us > 0


def test_without_transformers_a_line_says_so(batch, monkeypatch):
    def missing():
        raise ModuleNotFoundError("transformers")

    monkeypatch.setattr(generate, "_library", missing)
    with pytest.raises(ImportError):
        generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batch, 1)
    found = {"reason": "it is not installed; pip install transformers"}
    assert validation._transformers_text(found) == (
        "A static batch through transformers: not measured, it is not installed; pip install transformers."
    )


@pytest.mark.slow
def test_the_real_library_has_the_same_weights(batch):
    """No word of a config is misread: as many parameters as the skeleton's model has."""
    library = pytest.importorskip("transformers")
    llama = generate._llama(library, model("toy-llama"), torch.bfloat16)
    assert sum(one.numel() for one in llama.parameters()) == model("toy-llama").num_params
    us, _ = generate.generated_us(Skeleton(model("toy-llama"), devices.open("cpu"), 4), batch, 1)
    assert us > 0
