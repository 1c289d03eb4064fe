"""Pipeline stages with other layers (``VLLM_PP_LAYER_PARTITION``), and the checks of memory that depend on stages, blocks and release."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve.checks import refusal
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec import gpu
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.capacity import (
    capacity,
    capture_blocks,
    fits,
    length_check,
    longest_model_len,
    stage_memories,
)
from fragmeter.sim.types.errors import SettingError

#: Llama 3.1 8B: bytes of a layer, and of a token in a layer's K and V.
LAYER = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096)
SLOT = 2 * 8 * 128 * 2


def printed(capsys: pytest.CaptureFixture, *tokens: str) -> str:
    assert status(["plan", *tokens]) == DONE
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_of_different_cards_the_answer_and_its_table_name_the_one_that_lacks_memory(capsys):
    partition = "VLLM_PP_LAYER_PARTITION={} vllm serve qwen3-32b -pp 2 --max-model-len 8192"
    for layers, card, size in (("44,20", "rtx-5090", 41.42), ("16,48", "rtx-3090", 45.05)):
        text = printed(capsys, "--gpu", "rtx-5090,rtx-3090", "--serve", partition.format(layers))
        taken = re.search(r"the weights take ([\d.]+) GiB of the (\S+) and", text)
        assert (float(taken[1]), taken[2]) == (pytest.approx(size, abs=0.5), card)
        assert f"of the {card}, with the least KV cache" in text and f"weights {taken[1]}" in text


def test_that_no_log_is_of_the_cards_vendor_is_said(capsys):
    line = ("--serve", "vllm serve llama-3.1-8b --max-model-len 8192")
    text = printed(capsys, "--gpu", "mi300x", *line)
    assert "by logs of NVIDIA's cards;" in text and "Not simulated: mi300x" in text
    assert "NVIDIA" not in printed(capsys, "--gpu", "h100-80gb", *line)


def launched(line: str, card="rtx-3090", version: tuple[int, int] | None = None, name: str | None = None):
    return started(parse_serve(line, version), card, name).launch


def test_the_stage_with_the_fewest_blocks_decides():
    launch = launched("VLLM_PP_LAYER_PARTITION=20,12 vllm serve llama-3.1-8b -pp 2 --max-model-len 8K")
    even = launched("vllm serve llama-3.1-8b -pp 2 --max-model-len 8K")
    found, before = stage_memories(launch), stage_memories(even)
    for stage, other, count in zip(found, before, (20, 12)):
        assert stage.block_bytes == 16 * count * SLOT
        assert stage.weights.likely - other.weights.likely == pytest.approx((count - 16) * LAYER, rel=0.01)
    blocks = [stage.kv_cache_bytes // stage.block_bytes for stage in found]
    assert capacity(launch).num_blocks == blocks[0] < blocks[1]


@pytest.mark.parametrize(
    ("given", "stages", "text"),
    [
        ("20,13", 2, "sum(partitions)=33 does not match num_hidden_layers=32."),
        ("16,16", 1, "len(partitions)=2 does not match pp_size=1."),
        ("8,8,16", 4, "len(partitions)=3 does not match pp_size=4."),
    ],
)
def test_a_partition_that_is_none_of_the_model_is_refused_as_by_vllm(given, stages, text):
    launch = launched(f"VLLM_PP_LAYER_PARTITION={given} vllm serve llama-3.1-8b -pp {stages} --max-model-len 8K")
    refused = refusal(launch)
    assert (refused.kind, refused.text) == ("parallel", text)
    # vLLM's own division starts.
    own = next(each for each in remedies(launch) if each.flag == "VLLM_PP_LAYER_PARTITION")
    assert own.value == ",".join([str(32 // stages)] * stages) and refusal(own.launch) is None


@pytest.mark.parametrize("given", ["20,a", "0,32", "33,-1", ""])
def test_a_partition_that_is_no_list_of_layers_is_a_mistake(given):
    with pytest.raises(SettingError, match="VLLM_PP_LAYER_PARTITION"):
        launched(f"VLLM_PP_LAYER_PARTITION={given} vllm serve llama-3.1-8b -pp 2")


def test_layers_that_move_to_the_other_stage_are_a_remedy():
    launch = launched(
        "VLLM_PP_LAYER_PARTITION=28,4 vllm serve llama-3.1-8b -pp 2 --max-model-len 8K -q none --gpu-memory-utilization 0.6"
    )
    assert refusal(launch).kind in ("KV cache", "no KV cache")
    moved = next(each for each in remedies(launch) if each.flag == "VLLM_PP_LAYER_PARTITION")
    assert moved.value == "16,16" and refusal(moved.launch) is None


def test_a_drafter_is_on_the_last_stage():
    line = "vllm serve llama-3.1-8b -pp 2 --max-model-len 8K"
    drafts = """ --speculative-config '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2}'"""
    first, last = (stage_memories(launched(line + each)) for each in ("", drafts))
    assert last[0].weights == first[0].weights and last[0].block_bytes == first[0].block_bytes
    assert last[1].weights.likely > first[1].weights.likely + LAYER / 2
    assert last[1].block_bytes == 16 * 17 * SLOT


@pytest.mark.slow
def test_releases_in_which_each_stage_needs_the_kv_cache_of_all():
    """vllm-project/vllm#32105: GLM-4.7 FP8 in 8 stages on A100s, 28.57 GiB of KV cache, refused with 71.16 GiB."""
    line = (
        "vllm serve zai-org/GLM-4.7-FP8 -q fp8 --pipeline-parallel-size 8 --max-num-seqs 128 --gpu-memory-utilization 0.925"
        " --max-model-len 202752"
    )
    found = {}
    for minor in (13, 14, 15, 16, 17):
        launch = launched(line, "a100-80gb", (0, minor), "zai-org/GLM-4.7")
        found[minor] = refusal(launch)
    assert [minor for minor, refused in found.items() if refused] == [14, 15, 16]
    assert "max seq len (202752), (71.16 GiB KV cache is needed" in found[15].text
    launch = launched(line, "a100-80gb", (0, 15), "zai-org/GLM-4.7")
    logged = replace(launch, kv_cache_memory_bytes=int(28.57 * 2**30))
    assert refusal(logged).text.endswith(
        "available KV cache memory (28.57 GiB). Based on the available memory, the estimated maximum model length is 81392."
    )


def test_the_null_block_is_not_for_the_longest_sequence_since_0_29():
    launch = launched("vllm serve llama-3.1-8b --max-model-len 8K")
    block = 16 * 32 * SLOT
    for minor, blocks in ((28, 512), (29, 513), (33, 513)):
        exact = replace(launch, release=release((0, minor)), kv_cache_memory_bytes=blocks * block)
        assert fits(exact) and longest_model_len(exact) == 8192
        short = replace(exact, kv_cache_memory_bytes=blocks * block - 1)
        assert not fits(short) and longest_model_len(short) == 8192 - 16
        assert length_check(short).available == 512 * block - 1


def test_too_few_blocks_by_the_user_are_refused_since_0_20():
    """One sequence of 8,192 tokens takes 512 blocks, and the null block is one more."""
    line = "vllm serve llama-3.1-8b --max-model-len 8K --num-gpu-blocks-override {}"
    few = launched(line.format(512))
    refused = refusal(few)
    assert refused.kind == "KV cache" and "estimated maximum model length is 8176." in refused.text
    assert "(1.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.00 GiB)" in refused.text
    assert refusal(launched(line.format(513))) is None
    assert refusal(launched(line.format(512), version=(0, 28))) is None
    assert refusal(launched(line.format(100), version=(0, 20))).kind == "KV cache"
    assert refusal(launched(line.format(100), version=(0, 19))) is None


def test_more_blocks_than_the_weights_leave_are_out_of_memory():
    line = "vllm serve llama-3.1-8b --max-model-len 8K --num-gpu-blocks-override {}"
    # 2 MiB a block; 24 GiB less 15 of weights leave room for 4,600.
    refused = refusal(launched(line.format(5000)))
    assert refused.kind == "KV memory" and "the KV cache takes 9.77 GiB of each GPU" in refused.text
    assert refusal(launched(line.format(3500))) is None


def test_the_states_of_a_pool_by_the_user_are_its_blocks():
    line = "vllm serve qwen3.6-27b -q fp8 --max-model-len 8K --max-num-seqs 300 --num-gpu-blocks-override {}"
    assert refusal(launched(line.format(300), "h100-80gb")) is None
    few = launched(line.format(299), "h100-80gb")
    assert refusal(few).kind == "states" and capture_blocks(few) == 299


UNEQUAL = ["rtx-3090", "rtx-5090"]


def test_each_stage_has_the_memory_of_its_card():
    line = "VLLM_PP_LAYER_PARTITION={} vllm serve llama-3.1-8b -pp 2 --max-model-len 8K"
    launch = launched(line.format("16,16"), UNEQUAL)
    found = stage_memories(launch)
    assert [memory.total_bytes for memory in found] == [gpu(name).memory_bytes for name in UNEQUAL]
    for memory, name in zip(found, UNEQUAL):
        alone = stage_memories(launched(line.format("16,16"), name))[UNEQUAL.index(name)]
        assert memory == alone
    moved = launched(line.format("12,20"), UNEQUAL)
    assert capacity(moved).num_blocks > 1.14 * capacity(launch).num_blocks
    assert capacity(launched(line.format("20,12"), UNEQUAL[::-1])).num_blocks == pytest.approx(
        capacity(moved).num_blocks, rel=0.1
    )


def test_of_unequal_ranks_the_smallest_card_decides():
    line = "vllm serve llama-3.1-8b -tp 2 --max-model-len 8K"
    small, large = (capacity(launched(line, name)).num_blocks for name in UNEQUAL)
    for order in (UNEQUAL, UNEQUAL[::-1]):
        assert capacity(launched(line, order)).num_blocks == small < large
    # The first one has vLLM's defaults of a step.
    assert [launched(line, ["rtx-3090", "h100-80gb"][::step]).max_num_seqs for step in (1, -1)] == [256, 1024]


@pytest.mark.slow
def test_layers_move_to_the_larger_card_as_a_remedy():
    cards = [replace(gpu("rtx-5090"), memory_bytes=16 * 2**30), gpu("rtx-5090")]
    line = "vllm serve qwen3-32b -pp 2 -q fp8 --max-model-len 8K --gpu-memory-utilization 0.85"
    launch = launched(line, cards)
    assert refusal(launch).kind in ("no KV cache", "weights", "KV cache")
    moved = next(each for each in remedies(launch) if each.flag == "VLLM_PP_LAYER_PARTITION")
    first, second = map(int, moved.value.split(","))
    assert first < second and first + second == 64 and refusal(moved.launch) is None


def test_a_report_of_unequal_cards():
    """vllm-project/vllm#34076: 16 of 48 layers on a card with 15.47 GiB, and 32 on one with 31.36."""
    cards = [replace(gpu("rtx-5090"), memory_bytes=int(size * 2**30)) for size in (15.47, 31.36)]
    line = "VLLM_PP_LAYER_PARTITION=16,32 vllm serve Qwen/Qwen3-Coder-30B-A3B-Instruct -q fp8 --gpu-memory-utilization 0.9 -pp 2"
    launch = replace(launched(line, cards, (0, 15)), used_at_start_bytes=2**29)
    assert "(262144), (24.00 GiB KV cache is needed" in refusal(launch).text
    stage = capacity(launch).stage
    assert stage.kv_cache.low < 3.18 * 2**30 < stage.kv_cache.high and stage.total_bytes == cards[0].memory_bytes
    assert longest_model_len(replace(launch, kv_cache_memory_bytes=int(3.181 * 2**30))) == 34_736


@pytest.mark.parametrize("flags", ["", " -pp 3", " -pp 2 -dp 2"])
def test_cards_are_those_of_the_ranks(flags):
    with pytest.raises(SettingError, match="gpu = 'rtx-3090,rtx-5090': must be one GPU, or that of each of the"):
        launched(f"vllm serve llama-3.1-8b{flags}", UNEQUAL)


def test_unequal_cards_have_an_answer_and_no_simulation(capsys):
    plan = ["plan", "--serve", "vllm serve llama-3.1-8b -pp 2 --max-model-len 8K --gpu-memory-utilization 0.85"]
    assert status([*plan, "--gpu", "rtx-3090,rtx-5090"]) == DONE
    shown = capsys.readouterr().out
    assert "llama-3.1-8b on rtx-3090, rtx-5090 in 2" in " ".join(shown.split()) and "As a simulation" not in shown
    assert status([*plan, "--gpu", "rtx-3090,rtx-3090"]) == DONE
    assert "As a simulation: fragmeter simulate" in capsys.readouterr().out
