"""Attention backends, and decodes in calls that prefill too."""

from __future__ import annotations

import numpy as np
import pytest

import fragmeter.sim.cost as costs
from calibrations import calibration
from fragmeter.sim.cost import CalibratedCost, ServerConstants, calibrated, cost, profile
from fragmeter.sim.cost.attention_curves import AttentionCurves
from fragmeter.sim.cost.backends import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASHINFER,
    Backend,
    MixedCalls,
    attention_backend,
)
from fragmeter.sim.cost.base import prompt_blocks
from fragmeter.sim.output import frames as pd
from fragmeter.sim.spec import Deployment, gpu, model
from tools.profiles.mixed_calls import rule_us
from tools.servers.servers import runs_of

QWEN = model("qwen3-14b")


@pytest.mark.parametrize(
    ("card", "name", "kv_dtype", "expected"),
    [
        ("a100-80gb", "qwen3-14b", "fp16", "FLASH_ATTN 2"),
        ("a100-80gb", "gpt-oss-20b", "fp16", "TRITON_ATTN"),
        ("a100-80gb", "qwen3-14b", "fp8", "FLASHINFER"),
        ("l40s", "gpt-oss-20b", "fp16", "TRITON_ATTN"),
        ("rtx-pro-6000", "qwen3-32b", "fp16", "FLASH_ATTN 2"),
        ("h100-80gb", "qwen3-14b", "fp16", "FLASH_ATTN 3"),
        ("h200", "gpt-oss-120b", "fp16", "FLASH_ATTN 3"),
        ("h100-80gb", "qwen3-14b", "fp8", "FLASH_ATTN 3"),
        ("b200", "qwen3-14b", "fp16", "FLASHINFER"),
        ("v100-32gb", "qwen3-14b", "fp16", "TRITON_ATTN"),
        ("mi300x", "qwen3-14b", "fp16", "TRITON_ATTN"),
    ],
)
def test_the_backend_is_that_of_the_card_the_model_and_the_cache(card, name, kv_dtype, expected):
    assert attention_backend(model(name), gpu(card), Deployment(kv_dtype=kv_dtype)).name == expected


def test_a_step_time_names_its_backend_and_that_of_its_table():
    """FlashAttention 2 takes no sinks."""
    for name, backend in (("qwen3-14b", "FLASH_ATTN 2"), ("gpt-oss-20b", "TRITON_ATTN")):
        described = cost("fitted", model(name), gpu("a100-80gb")).describe()
        assert (described["attention_backend"], described["attention_table"]) == (backend, "FLASH_ATTN 2")


def k_of(card: str, name: str, batch: int, length: int, tensor_parallel: int = 1) -> float:
    """Time of decodes in a mixed call over their time alone."""
    curves = AttentionCurves(profile(card), model(name), gpu(card), tensor_parallel, 16)
    return curves.mixed_decode(batch)(batch * length) / curves.decode(batch)(batch * length)


class TestUnpackedHeads:
    def test_read_their_keys_once_each_beyond_half_of_a_divided_cache(self):
        """An A100: 64 sequences of 4,096 tokens are 134 MB of one KV head; 5 query heads read it."""
        assert k_of("a100-80gb", "qwen3-14b", 64, 4096) == pytest.approx(5, rel=0.01)

    def test_find_in_the_cache_what_several_sequences_name(self):
        """128 sequences of 600 tokens on two A100s are 39 MB of one KV head, of which 17 MB are distinct."""
        curves = AttentionCurves(profile("a100-80gb"), model("mixtral-8x7b"), gpu("a100-80gb"), 2, 16)
        context, repeated = 128 * 600, 128 * 600 - 34_000
        full, alone = curves.mixed_decode(128)(context), curves.decode(128)(context)
        assert full / alone == pytest.approx(4, rel=0.01)
        assert (full - curves.saved(128, context, repeated)) / alone < 2.1
        # Half of the cache holds 40,960 tokens; all are read again from 61,440 distinct ones on.
        assert curves.saved(128, context, 0) == curves.saved(128, context, context - 61_500) == 0
        assert curves.saved(32, 32 * 600, 9000) == 0
        described = [cost("fitted", model("mixtral-8x7b"), gpu(card)).saved_ticks for card in ("h100-80gb", "b200")]
        assert described == [None, None]

    @pytest.mark.slow
    def test_have_the_measured_steps_of_shared_prompts(self):
        """A server of 45 prompts on two A100s, without which its TPOT is 18 % too long; experts are the rest."""
        (run,) = (each for each in runs_of(None) if each.name == "a100-80gb mixtral-8x7b x2 general 8/s")
        found = run.simulated(ServerConstants())["mean_tpot_ms"] / run.measured["mean_tpot_ms"] - 1
        assert 0.08 < found < 0.13

    def test_take_the_tensor_cores_where_the_cache_holds_the_keys(self):
        """64 rows a query head at the rate of prompts, 191 TFLOP/s, over all 40 layers."""
        curves = cost("fitted", QWEN, gpu("a100-80gb"))._attention
        us = 40 * 40 * 16 * (1000 + 64) * 4 * 64 * 128 / 191.34e12 * 1e6
        assert curves.mixed_decode(16)(16_000) / 1e6 == pytest.approx(us, rel=0.01)

    def test_share_reads_with_those_that_run_at_the_same_time(self):
        """An RTX PRO 6000 runs 188 tiles at once: two heads of 64 sequences, one of 128."""
        rule = MixedCalls(FLASH_ATTN_2, gpu("rtx-pro-6000"), 32, 4, 128, 1e18, 2048)
        alone = np.ones(1)
        k = {batch: float(rule.decode_us(batch, np.array([batch * 16_384.0]), alone)[0]) for batch in (16, 64, 128)}
        assert k == {16: 1, 64: 4, 128: 8}

    def test_add_the_empty_tiles_of_the_longest_prompt(self):
        curves = cost("fitted", QWEN, gpu("a100-80gb"))._attention
        short, long = ((256, tokens, tokens * (tokens + 1) // 2) for tokens in (64, 2048))
        rest = [
            curves.mixed(batch, batch * 300, tokens, pairs) - curves.prefill(tokens, pairs)
            for batch, tokens, pairs in (short, long)
        ]
        assert (rest[1] - rest[0]) / 1e6 == pytest.approx(31 * 256 * 40 * 40 * 0.35 / 216, rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "pairs", "blocks"),
    [
        (1, 1, 1),
        (65, 65 * 66 // 2, 2),
        (64, 64 * 65 // 2, 1),
        (2048, 8 * 256 * 257 // 2, 5),
        (500, 500 * 8000, 8),
        (40, 40 * 41 // 2, 1),
    ],
)
def test_blocks_are_those_of_the_mean_prompt_or_of_the_chunk(tokens, pairs, blocks):
    assert prompt_blocks(tokens, pairs) == blocks


#: (card, model, sequences, tokens of each, chunk, microseconds of the call, of its decodes and of its prefill apart): calls of one layer in
#: LLMServingSim's tables (casys-kaist/LLMServingSim at 5daddb2, profiler/perf, MIT).
CALLS = [
    ("rtx-4090", "llama-3.1-8b", 16, 1024, 512, 206.0, 99.3, 41.1),
    ("rtx-4090", "llama-3.1-8b", 64, 512, 2048, 841.4, 191.9, 336.1),
    ("rtx-4090", "llama-3.1-8b", 128, 4096, 1024, 9156.5, 2302.3, 381.7),
    ("rtx-4090", "llama-3.1-8b", 128, 256, 256, 501.5, 177.5, 15.0),
    ("rtx-pro-6000", "llama-3.1-8b", 16, 1024, 512, 111.0, 60.3, 24.9),
    ("rtx-pro-6000", "llama-3.1-8b", 64, 512, 2048, 452.0, 127.4, 172.6),
    ("rtx-pro-6000", "llama-3.1-8b", 128, 4096, 1024, 5617.7, 1461.1, 188.1),
    ("rtx-pro-6000", "llama-3.1-8b", 128, 256, 256, 264.6, 134.8, 11.1),
    ("rtx-pro-6000", "qwen3-30b-a3b", 16, 1024, 512, 109.8, 36.9, 24.5),
    ("rtx-pro-6000", "qwen3-30b-a3b", 64, 512, 2048, 448.4, 65.2, 174.6),
    ("rtx-pro-6000", "qwen3-30b-a3b", 128, 256, 256, 254.5, 68.6, 11.0),
    ("rtx-pro-6000", "qwen3-32b", 16, 1024, 512, 195.7, 66.9, 37.3),
    ("rtx-pro-6000", "qwen3-32b", 64, 512, 2048, 855.9, 127.3, 299.8),
    ("rtx-pro-6000", "qwen3-32b", 128, 256, 256, 491.0, 121.0, 16.6),
]


def errors_of_calls(backend: Backend) -> list[float]:
    """Computed over measured time, less one."""
    found = []
    for card, name, batch, length, chunk, measured, decode, prefill in CALLS:
        calls = pd.DataFrame(
            {
                "n_decode": [batch],
                "kv_decode": [length],
                "prefill_chunk": [chunk],
                "decode": [decode],
                "prefill": [prefill],
            }
        )
        found.append(float(rule_us(calls, model(name), gpu(card), backend)[0]) / measured - 1)
    return found


def test_the_rule_gives_published_calls():
    found = np.abs(errors_of_calls(FLASH_ATTN_2))
    assert np.median(found) < 0.1 and found.max() < 0.25


@pytest.mark.parametrize("backend", [FLASH_ATTN_3, FLASHINFER])
def test_other_backends_do_not_give_them(backend):
    assert np.median(np.abs(errors_of_calls(backend))) > 0.3


#: Measured stages of dense models on H100 with warm prompts.
STAGES = ["llama-2-70b codegen 10/s", "qwen3-14b codegen 10/s", "codellama-34b x2 codegen 10/s"]


@pytest.mark.slow
@pytest.mark.parametrize(("k", "limits"), [(None, (0.0, 0.04)), (5.0, (0.06, 0.2))])
def test_a_k_of_5_on_hopper_is_too_slow_for_its_servers(monkeypatch, k, limits):
    """The query heads of FlashAttention 3 share a tile: were each to read the keys by itself, as in version 2, these would be slower."""
    if k is not None:
        planted = FLASH_ATTN_3._replace(k=k)
        monkeypatch.setattr(calibrated, "attention_backend", lambda *_: planted)
    costs._calibrated.cache_clear()
    runs = [run for run in runs_of(None) if run.name.removeprefix("h100-80gb ") in STAGES]
    off = [run.simulated(ServerConstants())["mean_tpot_ms"] / run.measured["mean_tpot_ms"] - 1 for run in runs]
    costs._calibrated.cache_clear()
    assert len(off) == 3 and limits[0] < np.median(np.abs(off)) < limits[1]


def test_a_table_of_another_group_is_not_taken():
    """The profile's table is of 4 query heads a KV head."""
    same, other = (
        cost("fitted", model(name), gpu("rtx-pro-6000"))._attention for name in ("llama-3.1-8b", "qwen3-32b")
    )
    assert same.mixed_model is not None and other.mixed_model is None
    assert k_of("rtx-pro-6000", "qwen3-32b", 32, 2048) == pytest.approx(2.5, rel=0.2)


def test_a_calibration_is_of_the_project_s_own_kernels():
    found = CalibratedCost(calibration(), model("llama-3.1-8b"), gpu("a100-80gb"))
    assert found.describe()["attention_backend"] == "two calls"
    assert found._attention.mixed_decode(8)(8000) == found._attention.decode(8)(8000)
