"""Memory of CUDA graphs that vLLM subtracts at its start."""

from __future__ import annotations

from ..deployment import CUDA_GRAPH_BYTES
from .estimate import Estimate, exactly
from .launch import Launch


def cuda_graph_bytes(launch: Launch) -> Estimate:
    """What is subtracted for CUDA graphs before they are captured; 0 up to 0.19."""
    counted = launch.deployment.cuda_graphs and launch.profiling.counts_graphs
    return Estimate(CUDA_GRAPH_BYTES // 10, CUDA_GRAPH_BYTES, 2 * CUDA_GRAPH_BYTES) if counted else exactly(0)
