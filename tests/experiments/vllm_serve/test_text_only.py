"""A line that serves text alone holds no encoder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.types.errors import SettingError


def weights(model: str, limits: str) -> tuple[int, bool]:
    """Likely bytes of the weights, and whether the flag's memory is not counted."""
    answer = started(parse_serve(f"vllm serve {model} {limits}"), "h100-80gb")
    uncounted = any("limit-mm-per-prompt" in text for text in answer.line.uncounted)
    stage = answer.outcome().kv_cache
    assert stage is not None
    return stage.likely, uncounted


@pytest.mark.parametrize(
    "limits",
    ["""'{"image": 0, "video": 0}'""", """'{"image": {"count": 0}, "video": 0}'""", "image=0,video=0", ".image 0 --limit-mm-per-prompt.video 0", """'{"video":0,"image":0,"audio":1}'"""],
)  # fmt: skip
def test_limits_of_zero_leave_the_encoder_out(limits):
    whole, _ = weights("qwen3-vl-8b", "")
    without, _ = weights("qwen3-vl-8b", "--language-model-only")
    assert weights("qwen3-vl-8b", f"--limit-mm-per-prompt{limits if limits[0] == '.' else f' {limits}'}") == (
        without,
        False,
    )
    assert without > whole + (1 << 29)


@pytest.mark.parametrize("limits", ["""'{"image": 0}'""", """'{"image": 1, "video": 0}'""", "video=0"])
def test_an_encoder_of_what_is_left_is_kept(limits):
    whole, _ = weights("qwen3-vl-8b", "")
    assert weights("qwen3-vl-8b", f"--limit-mm-per-prompt {limits}") == (whole, True)


def test_a_limit_of_videos_frees_their_outputs_in_old_releases():
    line = "docker run vllm/vllm-openai:v0.11.0 --model qwen3-vl-8b"
    videos, images = (
        started(parse_serve(f"{line} {limit}"), "h100-80gb").outcome().kv_cache
        for limit in ("", "--limit-mm-per-prompt.video 0")
    )
    assert videos and images and images.likely - videos.likely > 3 << 29


def test_a_tower_of_images_alone_needs_no_limit_of_videos():
    assert weights("gemma-3-12b", """--limit-mm-per-prompt '{"image": 0}'""") == (
        weights("gemma-3-12b", "--language-model-only")[0],
        False,
    )
    # Nothing is left to count in a model of text.
    assert weights("llama-3.1-8b", """--limit-mm-per-prompt '{"image": 1}'""")[1] is False


def test_limits_that_are_no_object_are_refused():
    with pytest.raises(SettingError, match="limit-mm-per-prompt"):
        weights("qwen3-vl-8b", "--limit-mm-per-prompt '[1]'")


@pytest.mark.parametrize(
    ("flags", "card", "minor", "tokens"),
    [
        ("", "l40s", 22, 2496),
        ("", "l40s", 21, 2048),
        ("", "h100-80gb", 23, 8192),
        ("--language-model-only", "l40s", 23, 2048),
        ("--max-num-batched-tokens 2048", "l40s", 23, 2048),
    ],
)
def test_the_tokens_of_a_step_have_room_for_a_video_of_gemma_4(flags, card, minor, tokens):
    """32 frames of 78 tokens (``_get_min_mm_batched_tokens`` of vLLM's arg_utils.py); a public log on an L40S under 0.25.1 has 9.81 sequences by it."""
    line = f"vllm serve google/gemma-4-26B-A4B --max-model-len 32768 {flags}"
    launch = started(parse_serve(line, (0, minor)), card).launch
    assert launch.max_num_batched_tokens == tokens
    if tokens == 2496:
        logged = replace(launch, kv_cache_memory_bytes=round(12.75 * 2**30))
        assert capacity(logged).max_concurrency == pytest.approx(9.81, rel=1e-3)
