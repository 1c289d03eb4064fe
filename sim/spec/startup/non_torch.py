"""Memory of a GPU outside of torch: CUDA's modules and libraries, NCCL, buffers that ranks share.

vLLM counts what is there after the profiled step and was not at the worker's start. That start is before NCCL's until 0.10, and after it since
0.11 (``init_device`` of ``gpu_worker.py``). Since 0.27 it includes what torch
keeps beside the weights and could not give back (``total_consumed`` of ``memory_profiling``).

No formula gives these sizes: they are read off logs, as the low, the likely and the high GiB of each kind. Ranks on Hopper and later
cards with NVLink share buffers of NVLS and of fused all-reduces; others do not.
"""

from __future__ import annotations

from ..gpu import GpuSpec
from ..pool import GIB
from .estimate import Estimate
from .launch import Launch

_ALONE, _PCIE, _NVLINK, _NVLS = "alone", "pcie", "nvlink", "nvls"
#: From which minor version on, the GiB of one GPU by what links the ranks. The logs are in experiments/vllm_serve/facts/startups.json.
SIZES: tuple[tuple[int, dict[str, tuple[float, float, float]]], ...] = (
    (0, {_ALONE: (0.02, 0.13, 0.15), _PCIE: (0.1, 0.3, 0.75), _NVLINK: (0.2, 0.5, 1.0), _NVLS: (0.4, 0.55, 1.9)}),
    (18, {_ALONE: (0.07, 0.22, 0.3), _PCIE: (0.1, 0.3, 0.75), _NVLINK: (0.2, 0.5, 1.2), _NVLS: (1.6, 2.1, 2.2)}),
    (27, {_ALONE: (0.15, 0.27, 0.56), _PCIE: (0.4, 0.75, 1.7), _NVLINK: (0.4, 0.8, 1.7), _NVLS: (1.6, 1.8, 2.2)}),
)


def link(gpu: GpuSpec, ranks: int) -> str:
    """What links the ranks: "alone", "pcie", "nvlink", or "nvls" where the switches of NVLink can add up (compute capability 9 and later)."""
    if ranks == 1:
        return _ALONE
    if gpu.nvlink_bytes_per_s <= gpu.pcie_bytes_per_s:
        return _PCIE
    return _NVLS if (gpu.major or 0) >= 9 else _NVLINK


#: GiB by which programs of the CPU change what a profile finds in unified memory, either way: nine starts on DGX Sparks.
_SHARED = 3.5
#: GiB that are in use when a worker starts: the driver and CUDA's context, with several ranks NCCL's (since 0.11; the logs on PCIe are of two
#: servers of four RTX PRO 6000), of unified memory the operating system's. A GeForce or an RTX PRO may show a desktop (30.2 to 30.5 of 31.4 to 31.8 GiB are free on RTX 5090).
_ONE, _SEVERAL_PCIE, _SEVERAL, _UNIFIED = (0.17, 0.51, 0.65), (0.5, 0.99, 1.2), (0.5, 1.55, 2.2), (4.0, 9.4, 17.0)
_MOST_BESIDE_A_DESKTOP = 1.7
#: On a single RTX Blackwell since 0.27: five of six starts on RTX 5090 consume 1.3 to 1.9 GiB beside the weights, one 0.46; why is not known.
_RTX_BLACKWELL, _RTX_BLACKWELL_SIZES = 12, (0.27, 1.2, 1.9)


def used_at_start(launch: Launch) -> Estimate:
    """What is in use on each GPU before weights are loaded, as logged or by what logs of other servers have."""
    if launch.used_at_start_bytes is not None:
        return Estimate(*[launch.used_at_start_bytes] * 3)
    ranks, sizes = launch.num_gpus * launch.deployment.data_parallel, _ONE
    if launch.gpu.unified_memory:
        sizes = _UNIFIED
    elif ranks > 1 and launch.release.since >= (0, 11):
        sizes = _SEVERAL_PCIE if link(launch.gpu, ranks) == _PCIE else _SEVERAL
    low, likely, high = sizes
    if launch.gpu.name.startswith("rtx-"):
        high = max(high, _MOST_BESIDE_A_DESKTOP)
    return Estimate(*(round(size * GIB) for size in (low, likely, high)))


def non_torch_bytes(launch: Launch) -> Estimate:
    """What is outside of torch on each GPU."""
    ranks = launch.num_gpus * launch.deployment.data_parallel
    sizes = next(sizes for since, sizes in reversed(SIZES) if (0, since) <= launch.release.since)
    low, likely, high = sizes[link(launch.gpu, ranks)]
    if ranks == 1 and launch.release.benchmarks_embedding and launch.deployment.cuda_graphs:
        high += 2 * launch.model.vocab_size * launch.model.hidden_size / GIB
        if launch.gpu.major == _RTX_BLACKWELL and not launch.gpu.unified_memory:
            low, likely, high = _RTX_BLACKWELL_SIZES
    if launch.gpu.unified_memory:
        low, high = low - _SHARED, high + _SHARED
    buffers = launch.all_to_all_bytes if launch.model.experts else 0
    return Estimate(*(round(size * GIB) + buffers for size in (low, likely, high)))
