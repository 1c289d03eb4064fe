"""Memory of a rank outside of torch: CUDA libraries, NCCL, buffers of kernels."""

from __future__ import annotations

from .estimate import Estimate, within
from .launch import Launch


def non_torch_bytes(launch: Launch) -> Estimate:
    """What is outside of torch on each GPU."""
    alone = launch.num_gpus == launch.deployment.data_parallel == 1
    return within(launch.release.alone_bytes if alone else launch.release.together_bytes, 0.5)
