"""Memory of n samples of a prompt: computed from the lengths, and simulated.

A prompt of P tokens and an output of O tokens hold ceil((P + O - 1) / B) blocks of B tokens at their end; the last
token is never stored. With n samples

    that fork (vLLM up to V0)       the full blocks of the prompt are there once, floor(P / B) of them; a last one
                                    that is not full is copied when samples write to it: never, for one token
    as requests of their own (V1)   each finds the others' prompt in the prefix cache, but for the block of its last
                                    token, which must be computed: floor((P - 1) / B) blocks are there once

tests/experiments/capacity/test_plan_questions.py compares both with simulated groups, block for block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate, summary
from ...sim.config.settings import settings as checked
from ...sim.config.unread import only_read
from ..runs.pool_use import pool_use
from .preemption import WATERMARK

FORKING, SEPARATE = "vllm-v0", "vllm-v1"


@dataclass(frozen=True)
class Samples:
    """Blocks that the requests of a load hold at their ends, on average.

    Attributes:
        n: Samples of each request.
        one: Blocks with one sample.
        forking, separate: Blocks with n samples under V0 and under V1.
        unshared: Blocks with n samples that share nothing.
    """

    n: int
    one: float
    forking: float
    separate: float
    unshared: float


def blocks_of_samples(
    prompt_tokens: np.ndarray, output_tokens: np.ndarray, n: int, block_size: int, policy: str
) -> np.ndarray:
    """Blocks of requests with n samples at their ends, int64 [requests].

    Args:
        policy: ``FORKING`` or ``SEPARATE``.
    """
    each = -(-(prompt_tokens + output_tokens - 1) // block_size)
    if policy == SEPARATE:
        shared = (prompt_tokens - 1) // block_size
    else:
        # With an output of one token no sequence writes to the prompt's last block, so that block is shared too.
        shared = np.where(output_tokens == 1, each, prompt_tokens // block_size)
    return shared + n * (each - shared)


def memory_of_samples(prompt_tokens: np.ndarray, output_tokens: np.ndarray, n: int, block_size: int) -> Samples:
    """The memory of n samples at these lengths."""
    lengths = prompt_tokens, output_tokens
    one, forking, separate = (
        float(blocks_of_samples(*lengths, count, block_size, policy).mean())
        for count, policy in ((1, FORKING), (n, FORKING), (n, SEPARATE))
    )
    return Samples(n, one, forking, separate, n * one)


def simulated(settings: Settings, work: Workload, n: int) -> list[dict[str, Any]]:
    """The load with one sample and with n samples, under V1 and under V0; one row each."""
    sampled = replace(work, n=np.full(len(work), n))
    alone = replace(work, n=None)
    caching = checked(**settings.as_dict() | {"policy": SEPARATE, "enable_prefix_caching": True})
    forking = checked(**settings.as_dict() | {"policy": FORKING, "enable_prefix_caching": None, "watermark": WATERMARK})
    return [_row(settings, alone, 1), _row(caching, sampled, n), _row(forking, sampled, n)]


def _row(settings: Settings, work: Workload, n: int) -> dict[str, Any]:
    run = simulate(only_read(settings, work), work, logs_contents=False)
    results, pool = summary(run), pool_use(run)
    return {
        "policy": settings.policy,
        "n": n,
        "mean_kv_cache_usage": pool.mean_usage,
        "max_kv_cache_usage": pool.max_usage,
        "preemptions": sum(results["preemptions"].values()),
        "prefix_cache_hit_rate": pool.hit_rate,
        "request_throughput": results["request_throughput"],
        "output_throughput": results["output_throughput"],
        "mean_ttft_ms": results["mean_ttft_ms"],
        "mean_e2el_ms": results["mean_e2el_ms"],
    }
