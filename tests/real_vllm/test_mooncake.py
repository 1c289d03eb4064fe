"""Hits of the prefix cache on an excerpt of Mooncake's conversations: the installed vLLM's beside ``vllm-v1``, to the token."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import read_with_content

TRACES = Path(os.environ.get("FRAGMETER_TRACES", ""))
FILE = TRACES / "mooncake_conversation.jsonl.gz"


@pytest.mark.skipif(not FILE.is_file(), reason="needs FRAGMETER_TRACES")
@pytest.mark.parametrize("blocks", [12_000, 40_000], ids=["evicts", "evicts less"])
def test_hits_are_those_of_vllm_to_the_token(blocks):
    """120 requests at ten times their rate, in a pool that holds the prompts of about 15 or 50."""
    trace = read_with_content(FILE).first(120)
    work = Workload(
        "mooncake", trace.arrival_ticks // 10, trace.prompt_tokens, trace.output_tokens, content=trace.content
    )
    runs = [
        simulate(
            settings(
                policy=policy,
                model="llama-3.1-8b",
                gpu="h200",
                num_gpu_blocks_override=blocks,
                enable_prefix_caching=True,
            ),
            work,
        )
        for policy in ("vllm-real", "vllm-v1")
    ]
    real, ours = (run.replica.cache_log.look_up_columns() for run in runs)
    assert all(np.array_equal(real[name], ours[name]) for name in real)
    assert ours["hit_tokens"].sum() > 0
    evicted = [run.replica.memory.evicted_blocks for run in runs]
    assert evicted[0] == evicted[1] > 0
