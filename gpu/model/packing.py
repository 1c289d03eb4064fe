"""The tensors of a batch in one piece of memory, which one copy brings to a GPU.

A step has five to eight tensors. Each alone would take pinned memory, a copy, and in a captured step another one into the graph's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Each tensor begins at a multiple of this many bytes, as memory of its own would.
ALIGNMENT = 256


def packed(tensors: Sequence[Tensor], pinned: bool = False) -> Tensor:
    """The bytes of tensors on the host, one after the other: uint8, in pinned memory if a GPU is to copy it."""
    spans = list(_spans(tensors))
    memory = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=pinned)
    held = memory.numpy()
    for span, tensor in zip(spans, tensors, strict=True):
        held[span] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memory


def views(memory: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that :func:`packed` brought into ``memory``, in it.

    Args:
        memory: That memory, or a copy of it on a device.
        like: The packed tensors, or others of their shapes and dtypes.
    """
    for span, tensor in zip(_spans(like), like, strict=True):
        yield memory[span].view(tensor.dtype).view(tensor.shape)


def _spans(tensors: Sequence[Tensor]) -> Iterator[slice]:
    start = 0
    for tensor in tensors:
        yield slice(start, start + tensor.nbytes)
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
