"""Shapes of models and GPUs, and the pools that follow from them."""

from .gpu import GpuSpec, gpu, gpu_names
from .model import model, model_names
from .pool import block_bytes, host_blocks, paper_num_blocks
from .shape import ModelSpec, dtype_bits

__all__ = [
    "GpuSpec",
    "ModelSpec",
    "block_bytes",
    "dtype_bits",
    "gpu",
    "gpu_names",
    "host_blocks",
    "model",
    "model_names",
    "paper_num_blocks",
]
