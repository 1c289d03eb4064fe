"""Balanced experts (``--enable-eplb``): copies, maps and buffers of DeepSeek V3 on 16 engines, by hand, and vLLM's refusals."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.checks import refusal
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.activations import phases
from fragmeter.sim.spec.startup.capacity import stage_memories
from fragmeter.sim.types.errors import SettingError

LINE = "vllm serve deepseek-v3 -dp 16 --enable-expert-parallel --max-model-len 16K"
#: An expert in fp8: three matrices with a scale of 4 bytes an output, and the values of gate and up.
EXPERT, GATE_AND_UP = 3 * 7168 * 2048 + 4 * (2 * 2048 + 7168), 2 * 7168 * 2048
LAYERS = 58


def launched(line: str, version: tuple[int, int] | None = None):
    return started(parse_serve(line, version), "h200").launch


def balanced(redundant: int, more: str = "") -> str:
    return f"""{LINE} --enable-eplb --eplb-config '{{"num_redundant_experts": {redundant}{more}}}'"""


def more_weights(line: str, version: tuple[int, int] | None = None, plain: str = LINE) -> int:
    with_, without = (stage_memories(launched(each, version))[0].weights.likely for each in (line, plain))
    return with_ - without


def kept(copies: int, window: int = 1000, layers: int = LAYERS) -> int:
    return layers * (8 * (256 * 1025 + copies) + 4 * copies * (1 + window))


def test_copies_maps_and_a_buffer_are_weights():
    """288 experts on 16 ranks are 18 each, two more than without copies."""
    expected = LAYERS * 2 * EXPERT + kept(288) + 18 * EXPERT
    assert more_weights(balanced(32)) == pytest.approx(expected, rel=0.002)
    assert more_weights(balanced(0)) == pytest.approx(kept(256) + 16 * EXPERT, rel=0.002)
    shorter = more_weights(balanced(32)) - more_weights(balanced(32, ', "window_size": 10'))
    assert shorter == kept(288) - kept(288, 10)


def test_a_drafter_with_experts_has_its_own():
    drafts = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
    plain = more_weights(LINE + drafts)
    # The experts of a drafter are divided among the engines, as the model's: 16 of 256, beside attention and projection.
    assert 16 * EXPERT < plain < 16 * EXPERT + 5 * 10**8
    more = more_weights(balanced(32) + drafts, plain=LINE + drafts) - more_weights(balanced(32))
    assert more == pytest.approx(2 * EXPERT + kept(288, layers=1) + 18 * EXPERT, rel=0.002)


def test_older_releases_have_flags_of_their_own_and_no_buffer():
    flags = f"{LINE} --enable-eplb --num-redundant-experts 32 --eplb-window-size 10"
    line = parse_serve(flags, (0, 11))
    assert not line.uncounted and not line.of_other_releases
    assert more_weights(flags, (0, 11)) == pytest.approx(LAYERS * 2 * EXPERT + kept(288, 10), rel=0.002)
    assert more_weights(balanced(32, ', "window_size": 10'), (0, 12)) > more_weights(flags, (0, 11)) + 17 * EXPERT


@pytest.mark.parametrize(
    ("version", "more", "gathers"),
    [
        ((0, 19), "", 3),
        ((0, 33), "", 2),
        ((0, 33), ', "communicator": "nixl"', 0),
        ((0, 33), ', "communicator": "torch_gloo"', 3),
    ],
)
def test_a_dummy_rearrangement_gathers_the_experts_of_a_layer(version, more, gathers):
    """Of the least, the likely and the most that is allocated, the last ``gathers`` have it."""
    launch = launched(balanced(32, more), version)
    hidden = 2 * launch.max_num_batched_tokens * 7168
    moved = 18 * EXPERT + 16 * 18 * GATE_AND_UP + hidden
    found = [phases(launch, range(61), True, bound).balancing for bound in range(3)]
    assert found == [0] * (3 - gathers) + [moved] * gathers


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            balanced(33),
            "EPLB currently only supports even distribution of experts across ranks. Got 289 experts and 16 EP ranks.",
        ),
        (balanced(32).replace(" --enable-expert-parallel", ""), "enable_expert_parallel must be True to use EPLB."),
        (balanced(32).replace(" --enable-eplb", ""), "num_redundant_experts is set to 32 but EPLB is not enabled."),
        (
            balanced(32).replace(" -dp 16", ""),
            "EPLB requires tensor, prefill-context, or data parallelism, but got TP=1,",
        ),
        (balanced(32) + " -q awq", "EPLB is not supported AutoAWQMoEMethod."),
    ],
)
def test_refusals(line, text):
    refused = refusal(launched(line))
    assert refused.kind == "parallel" and refused.text.startswith(text)


@pytest.mark.slow
def test_as_many_copies_as_ranks_divide_are_a_remedy():
    found = {remedy.flag: remedy.value for remedy in remedies(launched(balanced(33)))}
    assert found["--eplb-config.num_redundant_experts"] == "32"


@pytest.mark.parametrize("config", ["{", "[]", '{"num_redundant_experts": -1}', '{"window_size": "a"}'])
def test_what_is_no_configuration_is_a_mistake(config):
    with pytest.raises(SettingError, match="eplb-config"):
        launched(f"{LINE} --enable-eplb --eplb-config '{config}'")


def test_a_model_without_experts_has_nothing_to_balance():
    plain, asked = (
        launched(f"vllm serve llama-3.1-8b -tp 2{more}") for more in ("", " --enable-eplb --enable-expert-parallel")
    )
    assert stage_memories(plain) == stage_memories(asked) and refusal(asked) is None


@pytest.mark.parametrize(
    ("line", "gib"),
    [
        (f"{LINE} --all2all-backend deepep_high_throughput", 2),
        (f"{LINE.replace('16', '8', 1)} --all2all-backend deepep_high_throughput", 1),
        (f"VLLM_ALL2ALL_BACKEND=deepep_high_throughput VLLM_DEEPEP_BUFFER_SIZE_MB=512 {LINE}", 1),
        (f"{LINE} --all2all-backend allgather_reducescatter", 0),
        (f"{LINE.replace(' --enable-expert-parallel', '')} --all2all-backend deepep_high_throughput", 0),
    ],
)
def test_buffers_of_deepep_are_outside_of_torch(line, gib):
    plain = line.split(" --all2all")[0].replace("VLLM_ALL2ALL_BACKEND=deepep_high_throughput ", "")
    more = [stage_memories(launched(each))[0].non_torch for each in (line, plain)]
    assert [with_ - without for with_, without in zip(*more)] == [gib << 30] * 3


def test_buffers_that_deepep_computes_are_not_counted():
    assert parse_serve(f"{LINE} --all2all-backend deepep_low_latency").uncounted_names == ["--all2all-backend"]
    assert not parse_serve(f"{LINE} --all2all-backend deepep_high_throughput").uncounted
