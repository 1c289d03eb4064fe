"""The KV cache of SGLang's server beside published lines of starts; its rule of thumb beside hand-worked values."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec import model
from fragmeter.sim.spec.startup.sglang import max_running_requests, prefill_graph_sizes, server_defaults
from fragmeter.sim.spec.startup.sglang_states import num_states, state_bytes
from fragmeter.sim.types.errors import SettingError

H100 = {"gpu": "h100-80gb"}
#: ``max_total_num_tokens`` of starts. In this order: SGLang 0.5.18 (a report of a course); May 2026 without flags (SGLang's own
#: ``.claude/skills/clean-startup-log``); July 2025 (vllm-project/vllm#21348); 0.5.19 (llm-d, ``guides/gke-pod-snapshots``; the share by its
#: log: (78.47 - 17.40 + 9.54) / 78.47); 2026, the reranker of this size; March 2025 (sgl-project/sglang#4760) and January 2025, both with the
#: default of then; June 2026 (a report on four RTX 4090); March 2025, QwQ on an AWS g6.12xlarge.
PUBLISHED = [
    (H100 | {"model": "qwen3-4b", "mem_fraction_static": 0.85}, 430_067),
    ({"model": "qwen3-8b", "gpu": "gb300"}, 1_707_904),
    (
        H100
        | {"model": "qwen3-235b-a22b", "quantization": "fp8", "tensor_parallel_size": 4, "mem_fraction_static": 0.93},
        367_404,
    ),
    (H100 | {"model": "qwen3-32b", "mem_fraction_static": 0.9}, 39_078),
    (H100 | {"model": "qwen3-0.6b", "mem_fraction_static": 0.3}, 208_651),
    (H100 | {"model": "llama-3.1-8b", "mem_fraction_static": 0.88}, 442_750),
    (H100 | {"model": "llama-3.1-8b", "mem_fraction_static": 0.88}, 444_500),
    ({"model": "qwen3-14b", "gpu": "rtx-4090", "tensor_parallel_size": 4, "mem_fraction_static": 0.8}, 298_447),
    ({"model": "qwen2.5-32b", "gpu": "l4", "tensor_parallel_size": 4, "mem_fraction_static": 0.85}, 46_611),
]


@pytest.mark.parametrize("line, real", PUBLISHED)
def test_pools_of_published_starts_are_within_two_percent(line, real):
    assert build(settings(policy="sglang", **line)).memory.capacity_slots == pytest.approx(real, rel=0.02)


def test_pools_of_windows_by_hand():
    """12 layers of gpt-oss-20b keep every token, 12 have windows, of 2,048 bytes a layer and token: 24,576 + 0.8 * 24,576."""
    apart, together = (
        build(settings(policy="sglang", model="gpt-oss-20b", disable_hybrid_swa_memory=off, **H100)).memory
        for off in (False, True)
    )
    bytes_of = together.capacity_slots * 2 * 24_576
    assert apart.capacity_slots == pytest.approx(bytes_of / (24_576 * 1.8), abs=2)
    assert (apart.windows.tokens, apart.windows.pages) == (127, int(apart.capacity_slots * 0.8))
    assert together.windows is None


def test_a_pool_with_too_few_windows_is_refused():
    with pytest.raises(
        SettingError, match=r"swa_full_tokens_ratio = 0.1: leaves 200 slots for windows, and a request may need 641"
    ):
        build(
            settings(
                policy="sglang", model="gpt-oss-20b", num_gpu_blocks_override=2000, swa_full_tokens_ratio=0.1, **H100
            )
        )


def test_published_starts_divide_the_memory_between_states_and_kv_cache():
    """Nemotron 3 Nano on four GB10 in October 2026, 0.5.21, KV cache in FP8: 2,211 states beside 19,644,177 slots. Qwen3.8 27B, of Qwen3.5's
    shape, on one in September 2026: 360 states and the one that pads batches have 0.99 + 50.77 GiB."""
    nano = model("nemotron-3-nano-30b-a3b")
    state = state_bytes(nano, 4, 1, None)
    slot = sum(nano.group_slot_bytes(group, "fp8", 4) for group in nano.kv_groups() if group.span.kind == "full")
    assert (state, slot) == (12_270_592, 6 * 256)
    assert num_states(2212 * state + 19_644_177 * slot, state, 0.9) == 2211
    assert 361 * state_bytes(model("qwen3.5-27b"), 1, 1, None) / (1 << 30) == pytest.approx(0.99 + 50.77, abs=0.01)


def test_pools_of_states_by_hand():
    """A state of Qwen3-Next on one of four ranks: 36 layers of 8 heads of 128 x 128 in fp32, and 3 inputs of 2,048 channels in bf16."""
    replica = build(settings(policy="sglang", model="qwen3-next-80b-a3b", tensor_parallel_size=4, **H100))
    memory = replica.memory
    state, slot = 36 * (8 * 128 * 128 * 4 + 3 * 2048 * 2), 12 * 2 * 256 * 2
    assert memory.states.slots * state / (memory.capacity_slots * slot) == pytest.approx(0.9, abs=0.005)
    assert (memory.states.tracked, memory.states.grid, memory.states.interval) == (2, 64, 256)
    assert replica.policy.limits.max_num_seqs == memory.states.slots // 5


def test_lfm2_has_no_overlap_schedule_by_itself():
    """As with ``disable_overlap_schedule``; without a radix cache it has one."""
    for given, ahead in (
        ({}, False),
        ({"disable_overlap_schedule": True}, False),
        ({"enable_prefix_caching": False}, True),
    ):
        replica = build(settings(policy="sglang", model="lfm2-1.2b", **H100 | given))
        assert (replica.policy.schedules_ahead, replica.memory.ahead, replica.memory.states.tracked) == (
            ahead,
            ahead,
            0,
        )
        assert replica.policy.options.disable_overlap_schedule is not ahead


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": "lfm2-1.2b", "mamba_radix_cache_strategy": "no_buffer"}, "keeps states without the overlap schedule; give disable_overlap_schedule"),
        ({"model": "lfm2-1.2b", "mamba_radix_cache_strategy": "extra_buffer"}, "SGLang does not support it for LiquidAI/LFM2-1.2B; leave it out"),
        ({"model": "jamba-1.5-mini"}, "model = 'jamba-1.5-mini': has layers with a fixed-size state, which policy sglang simulates for granite"),
        ({"mamba_radix_cache_strategy": "no_buffer"}, "keeps states without the overlap schedule; give disable_overlap_schedule, too"),
        ({"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "block_size": 16}, "block_size = 16: must be 1 with"),
        ({"block_size": 48, "max_num_batched_tokens": 4800}, "must divide the 128 tokens of a kernel's chunk, or be a multiple"),
        ({"mamba_track_interval": 200, "block_size": 16, "max_num_batched_tokens": 8192}, "must be a multiple of block_size = 16"),
        ({"mamba_track_interval": 64}, "mamba_track_interval = 64: must be at least the 128 tokens of a kernel's chunk"),
        ({"model": "qwen3-next-80b-a3b"}, "mem_fraction_static = 0.829: qwen3-next-80b-a3b leaves no slots on h100-80gb; give more, or use more or larger"),
        ({"model": "llama-3.1-8b", "enable_unified_memory": True}, "is for models with windows or states in a pool of their own, and llama-3.1-8b has none"),
        ({"model": "gpt-oss-20b", "enable_unified_memory": True, "enable_prefix_caching": False}, "is not simulated with windows and enable_prefix"),
        ({"pipeline_parallel_size": 2, "enable_unified_memory": True}, "is not simulated with pipeline parallelism; leave out one of them"),
        ({"enable_hierarchical_cache": True, "enable_unified_memory": True}, "is not simulated with enable_hierarchical_cache; leave out one"),
        ({"ids": True, "enable_unified_memory": True}, "is not simulated with block ids, which recordings need; leave out one of them"),
        ({"max_mamba_cache_size": 4}, "max_mamba_cache_size = 4: leaves 4 states on h100-80gb, and a request of nemotron-3-nano-30b-a3b may need 5"),
    ],
)  # fmt: skip
def test_states_that_are_not_served(given, text):
    with pytest.raises(SettingError) as raised:
        build(settings(**{"policy": "sglang", "model": "nemotron-3-nano-30b-a3b"} | H100 | given))
    assert text in str(raised.value)


def test_the_share_of_an_h100_by_hand():
    """512 + 1.5 * 8192 + 1024 / 8 + 2 * 256 + 8 * 58 = 13,904 MiB are kept of 81,559."""
    assert len(prefill_graph_sizes(8192)) == 58
    assert server_defaults(81_559) == (8192, 256, 0.83)
    # Chunks of 2,048 keep less than 10 GiB, which is the least there.
    assert server_defaults(81_559, chunked_prefill_size=2048).mem_fraction_static == round(1 - 10_240 / 81_559, 3)


def test_pools_have_at_least_two_slots_for_each_request():
    assert max_running_requests(1000, 2048) == 500
    assert max_running_requests(1000, 2048, given=64) == 64
    assert max_running_requests(10**7, 2048) == 4096


def test_weights_that_leave_no_slot_are_refused():
    with pytest.raises(SettingError, match="mem_fraction_static = 0.1: opt-13b leaves no slots on a100-40gb"):
        build(settings(policy="sglang", mem_fraction_static=0.1))
