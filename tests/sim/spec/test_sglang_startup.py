"""The KV cache of SGLang's server beside published lines of starts; its rule of thumb beside hand-worked values."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec.startup.sglang import max_running_requests, prefill_graph_sizes, server_defaults
from fragmeter.sim.types.errors import SettingError

#: ``max_total_num_tokens`` of starts, and how far off it may be. The first is of SGLang 0.5.18 (a report of a course on an H100), the
#: second of May 2026 without flags (SGLang's own ``.claude/skills/clean-startup-log``). The third is of July 2025
#: (vllm-project/vllm#21348); it misses 2 %: four ranks leave less than vLLM's, whose logs our start is fitted to.
PUBLISHED = [
    ({"model": "qwen3-4b", "gpu": "h100-80gb", "mem_fraction_static": 0.85}, 430_067, 0.02),
    ({"model": "qwen3-8b", "gpu": "gb300"}, 1_707_904, 0.02),
    (
        {
            "model": "qwen3-235b-a22b",
            "quantization": "fp8",
            "gpu": "h100-80gb",
            "tensor_parallel_size": 4,
            "mem_fraction_static": 0.93,
        },
        367_404,
        0.025,
    ),
]


@pytest.mark.parametrize("line, real, most", PUBLISHED)
def test_pools_of_published_starts(line, real, most):
    assert build(settings(policy="sglang", **line)).memory.capacity_slots == pytest.approx(real, rel=most)


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
