"""Decode-only steps as captured graphs: their inputs are one piece of memory that every step refills with one copy.

Batches are padded to the sizes that vLLM captures (``sim.spec.deployment``). The longest context is padded to a
power of two of blocks, since a graph's block tables have a fixed width. A calibration times decode attention with the same padding
(:func:`captured_size`), so that it measures the launches of a captured step. Steps over contiguous caches are captured
like those over paged ones, so that launch overhead does not differ between the two. Tests capture
on the CPU by remembering the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...sim.spec.deployment import MAX_CAPTURED, padded_batch
from .batch import Batch, Inputs, Stager
from .packing import packed, views

Replay = Callable[[], None]
#: Runs of a step before its capture; they compile kernels and create handles.
WARM_UPS = 3


class DecodeGraphs:
    """Captured steps, by padded batch size, blocks of the longest context, and layout.

    Args:
        stager: Makes the tensors of batches.
        block_size: Tokens of a block.
        device: The device that computes.
        forward: A step, from its inputs to its logits.
    """

    def __init__(
        self, stager: Stager, block_size: int, device: torch.device, forward: Callable[[Inputs], Tensor]
    ) -> None:
        self._stager, self._block_size, self._device, self._forward = stager, block_size, device, forward
        self._captured: dict[tuple[int, int, bool], tuple[Tensor, Replay, Tensor]] = {}

    def takes(self, batch: Batch) -> bool:
        """Whether a graph can run the batch: it has only decodes, and no more than vLLM captures."""
        return batch.only_decodes and len(batch.query_lens) <= MAX_CAPTURED

    def inputs(self, batch: Batch) -> Inputs:
        """The tensors of a batch on the host, padded to its captured size."""
        rows, blocks = self._size(batch)
        return self._stager.inputs(batch.padded(rows, blocks), max_context_len=blocks * self._block_size)

    def step(self, batch: Batch) -> Tensor:
        """Replay the graph of the batch's size; the first call for a size captures it."""
        inputs, shape = self.inputs(batch), (*self._size(batch), batch.is_paged)
        fresh = packed(inputs.tensors(), pinned=self._device.type == "cuda")
        if shape not in self._captured:
            self._captured[shape] = self._capture(inputs, fresh.to(self._device, copy=True))
        memory, replay, logits = self._captured[shape]
        memory.copy_(fresh, non_blocking=True)
        replay()
        return logits[: len(batch.query_lens)]

    def _capture(self, inputs: Inputs, memory: Tensor) -> tuple[Tensor, Replay, Tensor]:
        """The memory of a graph's inputs, its replay, and its logits."""
        held = inputs.holding(views(memory, inputs.tensors()))
        return memory, *capture(lambda: self._forward(held))

    def _size(self, batch: Batch) -> tuple[int, int]:
        return captured_size(len(batch.query_lens), int(batch.context_lens.max()), self._block_size)


def captured_size(rows: int, longest: int, block_size: int) -> tuple[int, int]:
    """Rows, and blocks of the longest context, to which a captured step is padded.

    Args:
        rows: Sequences of the step.
        longest: Tokens of the longest context.
    """
    blocks = -(-longest // block_size)
    return padded_batch(rows), 1 << (blocks - 1).bit_length()


def capture(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Capture ``work`` as a CUDA graph; returns its replay function and the tensor that receives the result.

    Graphs run one after the other, so all share the memory of what they compute in between.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory()):
        result = work()
    return graph.replay, result


@functools.cache
def _memory() -> Any:
    return torch.cuda.graph_pool_handle()
