"""The longest sequence with rotary positions that a line gives, by ``_get_and_verify_max_len`` in the wheels."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.types.errors import SettingError

YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def answer(flags: str, minor: int):
    return started(parse_serve(f"vllm serve qwen3-8b {flags}", (0, minor)), "h100-80gb")


@pytest.mark.parametrize(
    ("flags", "minor", "longest"),
    [
        ("", 28, 40_960),
        (f"--rope-scaling '{YARN}'", 10, 131_072),
        (f"""--hf-overrides '{{"rope_scaling": {YARN}}}'""", 28, 131_072),
        # Since 0.30 the positions are taken to be scaled.
        (f"""--hf-overrides '{{"rope_parameters": {YARN}}}'""", 30, 40_960),
        (f"""--hf-overrides '{{"rope_parameters": {YARN}, "max_position_embeddings": 131072}}'""", 30, 131_072),
        ("""--hf-overrides '{"rope_scaling": {"type": "linear", "factor": 2}}'""", 28, 81_920),
        ("""--hf-overrides '{"rope_scaling": {"type": "llama3", "factor": 8}}'""", 28, 40_960),
        ("""--hf-overrides '{"architectures": ["Other"]}'""", 28, 40_960),
        ("--hf-overrides.max_position_embeddings 50000", 28, 50_000),
        ("--hf-overrides.rope_scaling.type linear --hf-overrides.rope_scaling.factor 2", 28, 81_920),
    ],
)
def test_the_longest_sequence(flags, minor, longest):
    assert answer(flags, minor).launch.max_model_len == longest
    over = answer(f"{flags} --max-model-len {longest + 1}", minor).refusal()
    assert over is not None and over.kind == "length"


def test_what_is_counted_is_not_named_as_uncounted():
    assert not answer(f"""--hf-overrides '{{"rope_scaling": {YARN}}}'""", 28).line.uncounted
    named = answer("""--hf-overrides '{"architectures": ["Other"], "max_position_embeddings": 65536}'""", 28).line
    assert named.uncounted_names == ["--hf-overrides"]


def test_a_factor_that_is_no_number():
    with pytest.raises(SettingError, match="factor"):
        answer("""--hf-overrides '{"rope_scaling": {"type": "yarn", "factor": "four"}}'""", 28)
