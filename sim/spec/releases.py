"""Differences between releases of vLLM in the memory that they leave for the KV cache, and in their defaults.

Bytes are from start-up logs of H100s. Up to 0.16 the sampler of the profiled step holds 38 bytes per logit (Llama 3.1
8B: 4.76 GiB), since 0.17 14 bytes (1.89 GiB). Memory outside of torch is 0.13 GiB on one GPU and 0.55 GiB on each of
two; since 0.18 it is 0.25 and 2.1 GiB. Since 0.21 the memory of CUDA graphs is subtracted from the KV cache. Asynchronous
scheduling is the default since 0.14 (pull request 27614).
"""

from __future__ import annotations

from dataclasses import dataclass

from .pool import GIB


@dataclass(frozen=True, slots=True)
class Release:
    """A release and the later ones up to the next entry.

    Attributes:
        since: Major and minor version.
        sampler_bytes: Bytes per sampled logit at the peak of the profiled step.
        alone_bytes, together_bytes: Bytes outside of torch on a single GPU, and on each of several GPUs.
        counts_graphs: Whether the memory of CUDA graphs is subtracted from the KV cache.
        gpu_memory_utilization: The default. Its change in 0.21 is an assumption.
        async_scheduling: The default.
    """

    since: tuple[int, int]
    sampler_bytes: int
    alone_bytes: int
    together_bytes: int
    counts_graphs: bool
    gpu_memory_utilization: float
    async_scheduling: bool = True


_RELEASES = (
    Release((0, 0), 38, int(0.13 * GIB), int(0.55 * GIB), False, 0.9, async_scheduling=False),
    Release((0, 14), 38, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 17), 14, int(0.13 * GIB), int(0.55 * GIB), False, 0.9),
    Release((0, 18), 14, GIB // 4, int(2.1 * GIB), False, 0.9),
    Release((0, 21), 14, GIB // 4, int(2.1 * GIB), True, 0.92),
)
LATEST = _RELEASES[-1]


def release(version: tuple[int, int]) -> Release:
    """The entry for a version."""
    return max((found for found in _RELEASES if found.since <= version), key=lambda found: found.since)
