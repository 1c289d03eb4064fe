"""Decode attention over a paged KV cache, under the name of its interface: ``out = paged_attention.forward(query, key_cache, ...)``.

The functions are those of ``fragmeter.gpu.ops``. Arrays of numpy and CPU tensors of torch run through the kernels' CPU build, which needs g++; those on
a GPU need CuPy, and a call without it says what to install.
"""

from fragmeter.gpu.ops import contiguous, prefill
from fragmeter.gpu.ops.cache import copy_blocks, reshape_and_cache, swap_blocks
from fragmeter.gpu.ops.paged_attention import forward, paged_attention_cuda_forward, prepare

__all__ = [
    "contiguous",
    "copy_blocks",
    "forward",
    "paged_attention_cuda_forward",
    "prefill",
    "prepare",
    "reshape_and_cache",
    "swap_blocks",
]
