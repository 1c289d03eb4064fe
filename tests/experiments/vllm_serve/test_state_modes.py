"""Where a line keeps states, and in which number formats: blocks and states of a sequence by hand, by release."""

from __future__ import annotations

import pytest

from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.types.errors import NotSimulated, SettingError

#: Nemotron-H 8B: bytes of a state in fp32 beside its inputs, and of a token in a layer with attention.
STATE, TOKEN = 4_255_744, 2 * 8 * 128 * 2
CACHED = "vllm serve nemotron-h-8b --enable-prefix-caching"
DRAFTS = """ --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'"""


def answer(text: str, vllm: str = "0.33") -> Started:
    return started(parse_serve(text, version(vllm)), "h100-80gb")


def per_group(text: str, vllm: str = "0.33") -> tuple[int, int, str]:
    """Tokens of a block, most blocks of a sequence of 8,192 tokens in each group of states, and the mode."""
    launch = answer(text, vllm).launch
    config = launch.layout.config
    states = sum(group.kind == "state" for group in config.groups)
    full = -(-8192 // config.block_size)
    blocks, rest = divmod(launch.sequence_blocks(8192) - full * (len(config.groups) - states), states)
    assert rest == 0
    return config.block_size, blocks, config.mamba_cache_mode


ALIGNED = -(-STATE // (16 * TOKEN)) * 16
CHUNKED = -(-STATE // (128 * TOKEN)) * 128
#: Inputs of 10,240 channels for two drafts are in a state.
DRAFTED = -(-(STATE + 2 * 10_240 * 2) // (16 * TOKEN)) * 16


@pytest.mark.parametrize(
    ("vllm", "more", "found"),
    [
        ("0.11", "", (ALIGNED, 1, "none")),
        ("0.12", "", (CHUNKED, 8, "all")),
        ("0.20", "", (CHUNKED, 8, "all")),
        ("0.20", DRAFTS, (DRAFTED, 2 + 2, "align")),
        ("0.24", "", (CHUNKED, 8, "all")),
        ("0.24", " --mamba-cache-mode align", (ALIGNED, 2, "align")),
        ("0.24", " --mamba-cache-mode none", (CHUNKED, 8, "all")),
        ("0.28", "", (ALIGNED, 2, "align")),
        ("0.28", " --mamba-cache-mode all", (CHUNKED, 8, "all")),
        ("0.28", " --mamba-cache-mode all --mamba-block-size 1024", (2048, 4, "all")),
        ("0.28", " --mamba-block-size 1024", (ALIGNED, 2, "align")),
        ("0.33", " --mamba-cache-mode none", (ALIGNED, 3, "align")),
        ("0.24", " --no-enable-prefix-caching --mamba-cache-mode all", (ALIGNED, 1, "none")),
    ],
)
def test_blocks_and_states_of_a_sequence_by_release(vllm, more, found):
    assert (ALIGNED, CHUNKED) == (1040, 1152)
    assert per_group(CACHED + more, vllm) == found


@pytest.mark.parametrize(
    ("vllm", "mode"), [("0.11", "none"), ("0.14", "none"), ("0.15", "align"), ("0.24", "align"), ("0.28", "align")]
)
def test_kernels_without_states_of_all_blocks_align_them(vllm, mode):
    line = "vllm serve qwen3-next-80b-a3b -q fp8 --enable-prefix-caching --mamba-cache-mode all"
    found = answer(line if vllm >= "0.15" else line.removesuffix(" --mamba-cache-mode all"), vllm).launch
    assert found.layout.config.mamba_cache_mode == mode
    assert found.enable_prefix_caching == (mode != "none")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"{CACHED} --mamba-cache-mode all", "must be align or none in this release"),
        (f"{CACHED} --mamba-ssm-cache-dtype fp8", "must be one of auto, float32, float16, bfloat16"),
        ("vllm serve kimi-linear-48b-a3b --mamba-ssm-cache-dtype float16", "float32 or bfloat16"),
        (
            "vllm serve nemotron-h-8b --no-enable-prefix-caching --mamba-block-size 1024",
            "can only be set with --enable-prefix-caching",
        ),
    ],
)
def test_what_vllm_refuses_is_a_mistake(line, complaint, capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", line]) == MISTAKE
    assert complaint in capsys.readouterr().err


def test_formats_of_states_change_blocks():
    """Of Qwen3.6 27B: three inputs of 10,240 channels, and 48 x 128 x 128 elements in fp32; a token has 4,096 bytes."""
    inputs, matrix, token = 3 * 10_240, 48 * 128 * 128, 2 * 4 * 256 * 2
    line = "vllm serve qwen3.6-27b -q fp8 --no-enable-prefix-caching --max-num-seqs 256"
    found = {}
    for flags, size in (
        ("", 2 * inputs + 4 * matrix),
        (" --mamba-ssm-cache-dtype bfloat16", 2 * inputs + 2 * matrix),
        (" --mamba-cache-dtype float32", 4 * inputs + 4 * matrix),
        (" --mamba-cache-dtype float32 --mamba-ssm-cache-dtype float16", 4 * inputs + 2 * matrix),
    ):
        parsed = parse_serve(line + flags)
        assert not parsed.uncounted
        launch = answer(line + flags).launch
        assert launch.block_tokens == -(-size // (16 * token)) * 16
        found[flags] = capacity(launch).num_blocks
    assert found[" --mamba-ssm-cache-dtype bfloat16"] > 1.8 * found[""]


def test_kimi_delta_attention_reads_the_format_of_later_releases():
    line = "vllm serve kimi-linear-48b-a3b --no-enable-prefix-caching --mamba-ssm-cache-dtype bfloat16"
    sizes = [answer(line, vllm).launch.model.mixer.state_bytes() for vllm in ("0.28", "0.30")]
    assert sizes[0] == 2_170_880 and sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize(
    ("vllm", "flags"), [("0.24", " --enable-prefix-caching"), ("0.33", " --mamba-ssm-cache-dtype bfloat16")]
)
def test_other_states_have_an_answer_and_no_simulation(vllm, flags, capsys):
    plan = ["plan", "--gpu", "h100-80gb", "--vllm", vllm, "--serve", f"vllm serve nemotron-h-8b{flags}"]
    assert status(plan) == DONE
    shown = capsys.readouterr().out
    assert shown.startswith("It starts: ") and "As a simulation" not in shown and "Not simulated: --mamba" in shown
    line = parse_serve(f"vllm serve nemotron-h-8b{flags}", version(vllm))
    with pytest.raises(NotSimulated, match="--mamba"):
        candidates(line, ["h100-80gb"], {})


def test_the_format_that_a_model_has_is_simulated():
    answer("vllm serve nemotron-h-8b --mamba-ssm-cache-dtype float32 --mamba-cache-dtype bfloat16").require_simulated()
    with pytest.raises(SettingError, match="mamba-cache-dtype"):
        answer("vllm serve nemotron-h-8b --mamba-cache-dtype float64")
