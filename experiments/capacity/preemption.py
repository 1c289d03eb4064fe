"""Cost of preemption by swapping and by recomputation: simulated, and for one preemption in closed form.

One preemption of a sequence of L tokens in B blocks costs

    swap        out(B) + in(B): the copies over PCIe in both directions
    recompute   a step that prefills L tokens alone: L (L + 1) / 2 pairs

A break-even is a length at which the cheaper mode changes. vLLM swaps up to V0; V1 only recomputes. Swapping is therefore
simulated with the policies of older releases, ``vllm-v0`` and ``vllm-sosp23``. Those releases have no KV groups: layers
with a window keep every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate, summary
from ...sim.config.settings import settings as checked
from ...sim.config.unread import only_read
from ...sim.cost import StepCost
from ...sim.engine.replica import build
from ...sim.types.optional import not_none
from ...sim.types.ticks import PER_MS

MODES = ("recompute", "swap")
SWAPPING = ("vllm-v0", "vllm-sosp23")
#: Defaults of the releases that swap: --swap-space in GiB (vllm/config, V0), the watermark of the block manager.
SWAP_SPACE_GIB, WATERMARK = 4.0, 0.01
#: Least token budget of a step in vLLM V0 without chunked prefill.
_LEAST_BATCHED_TOKENS = 2048
_METRICS = ("request_throughput", "mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms")


@dataclass(frozen=True)
class Preemption:
    """Cost of one preemption.

    Attributes:
        tokens: Length of the sequence.
        swap_ms, recompute_ms: Cost of either mode.
    """

    tokens: int
    swap_ms: float
    recompute_ms: float

    @property
    def cheaper(self) -> str:
        """The cheaper mode; recompute on a tie, because it needs no host memory."""
        return "swap" if self.swap_ms < self.recompute_ms else "recompute"


def one_preemption(cost: StepCost, block_size: int, tokens: int) -> Preemption:
    """The cost of preempting one sequence of this many tokens."""
    blocks = -(-tokens // block_size)
    swap = cost.swap_out_ticks(blocks) + cost.swap_in_ticks(blocks)
    recompute = cost.step_ticks(0, 0, tokens, tokens * (tokens + 1) // 2)
    return Preemption(tokens, swap / PER_MS, recompute / PER_MS)


def preemptions(settings: Settings, lengths: list[int]) -> list[Preemption]:
    """The cost of preempting sequences of these lengths on that replica."""
    replica = build(settings)
    return [one_preemption(replica.cost, replica.block_size, tokens) for tokens in lengths]


def break_evens(settings: Settings) -> list[tuple[int, str]]:
    """Lengths from which on a mode is the cheaper one, in whole blocks, from one block up to the longest sequence."""
    replica = build(settings)
    size = replica.block_size
    found: list[tuple[int, str]] = []
    for tokens in range(size, max(replica.max_model_len, size) + 1, size):
        cheaper = one_preemption(replica.cost, size, tokens).cheaper
        if not found or found[-1][1] != cheaper:
            found.append((tokens, cheaper))
    return found


def simulated(settings: Settings, work: Workload) -> list[dict[str, Any]]:
    """The load under each release that swaps, with both modes, and under V1; one row each."""
    rows = [_row(_older(settings, policy, mode), work) for policy in SWAPPING for mode in MODES]
    return rows + [_row(settings, work)]


def _older(settings: Settings, policy: str, mode: str) -> Settings:
    budget = max(build(settings).max_model_len, _LEAST_BATCHED_TOKENS)
    older: dict[str, Any] = {"policy": policy, "preemption_mode": mode, "enable_prefix_caching": None}
    return checked(
        **replace(settings, **older).as_dict()
        | {"swap_space": SWAP_SPACE_GIB, "watermark": WATERMARK, "max_num_batched_tokens": budget}
        | {"disable_hybrid_kv_cache_manager": True}
    )


def _row(settings: Settings, work: Workload) -> dict[str, Any]:
    results = summary(simulate(only_read(settings, work), work, logs_contents=False))
    done, counts = results["work"], results["preemptions"]
    return {
        "policy": settings.policy,
        # V1 has no other mode.
        "preemption_mode": settings.as_dict().get("preemption_mode", "recompute"),
        "recomputed": counts["recompute"],
        "swapped": counts["swap"],
        "recomputed_tokens": done["tokens"]["recomputed"],
        "swapping_s": done["seconds"].get("swapping", 0.0),
        **{name: results[name] for name in _METRICS},
    }


def lengths_of(work: Workload | None, mean_tokens: int | None, longest: int) -> list[int]:
    """Lengths for which the cost of a preemption is reported: median and longest of the load, or the requested ones."""
    if work is None:
        return sorted({not_none(mean_tokens), longest})
    tokens = work.prompt_tokens + work.output_tokens
    return sorted({int(np.median(tokens)), int(tokens.max())})
