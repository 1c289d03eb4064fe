"""What releases of vLLM differ in when they look for the KV cache's memory.

Bytes are as start-up logs of H100s have them: up to 0.16 the sampler of the profiled step held 38 bytes for a logit
(Llama 3.1 8B: 4.76 GiB), since then 14 (1.89 GiB); outside of torch lay 0.13 GiB on one GPU and 0.55 on each of
two, since 0.18 0.25 and 2.1. Since 0.21 what CUDA graphs take is left out of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from .pool import GIB


@dataclass(frozen=True, slots=True)
class Release:
    """A release and those after it, up to the next that differs.

    Attributes:
        since: Major and minor number.
        sampler_bytes: What a sampled logit holds at the peak of the profiled step.
        alone_bytes, together_bytes: What lies outside of torch on the only GPU, and on each of several.
        counts_graphs: Whether what CUDA graphs take is left out of the KV cache.
        gpu_memory_utilization: The default; that it changed in 0.21 is taken, not known.
    """

    since: tuple[int, int]
    sampler_bytes: int
    alone_bytes: int
    together_bytes: int
    counts_graphs: bool
    gpu_memory_utilization: float


_RELEASES = (
    Release((0, 0), 38, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 17), 14, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 18), 14, GIB // 4, int(2.1 * GIB), False, 0.9),
    Release((0, 21), 14, GIB // 4, int(2.1 * GIB), True, 0.92),
)
LATEST = _RELEASES[-1]


def release(version: tuple[int, int]) -> Release:
    """What holds of that version."""
    return max((found for found in _RELEASES if found.since <= version), key=lambda found: found.since)
