"""Kernel overhead of paging: decode attention by block tables, compared with contiguous slots.

The comparison of the paper's Fig 18a. Both variants read the same tokens of the same pool; the block tables list its
blocks in a random order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..devices import timing
from ..devices.timing import Work
from ..model.batch import Rows
from ..model.calls import Attention
from ..model.skeleton import DTYPES, Skeleton

#: Numbers of sequences, and tokens of each sequence.
SHAPES = {
    "cpu": ((8, 64), (8, 128), (8, 224), (4, 224)),
    "cuda": tuple((batch, context) for batch in (8, 32) for context in (64, 128, 256, 512, 1024, 2048)),
}


@torch.inference_mode()
def paged_against_contiguous(
    skeleton: Skeleton, shapes: Iterable[tuple[int, int]], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """One layer's decode attention over both layouts, for the shapes that fit into the pool.

    Returns:
        ``batch``, ``context``, ``paged_us``, ``contiguous_us`` and ``overhead``, the relative cost of block tables.
    """
    fitting = [shape for shape in shapes if _fits(skeleton, *shape)]
    rng, stopwatch = np.random.default_rng(seed), timing.stopwatch(skeleton.device)
    works = [work for shape in fitting for work in _both(skeleton, *shape, rng)]
    samples: list[list[float]] = [[] for _ in works]
    for index, us in timing.interleaved([stopwatch.sampler(work) for work in works], rounds, seed):
        samples[index].append(us)
    found = [timing.timing(taken, stopwatch.quantile).us for taken in samples]
    return [
        {
            "batch": batch,
            "context": context,
            "paged_us": round(paged, 3),
            "contiguous_us": round(contiguous, 3),
            "overhead": round(paged / contiguous - 1, 4),
        }
        for (batch, context), paged, contiguous in zip(fitting, found[::2], found[1::2], strict=True)
    ]


def _fits(skeleton: Skeleton, batch: int, context: int) -> bool:
    return batch * -(-context // skeleton.pool.block_size) <= skeleton.pool.num_blocks


def _both(skeleton: Skeleton, batch: int, context: int, rng: np.random.Generator) -> Sequence[Work]:
    pool, model = skeleton.pool, skeleton.model
    blocks = -(-context // pool.block_size)
    ids = rng.permutation(pool.num_blocks)[: batch * blocks].reshape(batch, blocks)
    held = skeleton.place(np.full(batch, context, np.int32))
    tables = skeleton.place(ids.astype(np.int32))
    starts = skeleton.place(np.arange(batch, dtype=np.int64) * (pool.num_slots // batch))
    shape = (batch, model.num_heads, model.head_dim)
    query = torch.randn(shape, device=skeleton.device.torch_device, dtype=DTYPES[skeleton.dtype])
    every = slice(0, batch)
    return (
        _attending(skeleton, query, Rows(every, held, context, pool.block_size, block_tables=tables)),
        _attending(skeleton, query, Rows(every, held, context, pool.block_size, slot_starts=starts)),
    )


def _attending(skeleton: Skeleton, query: torch.Tensor, rows: Rows) -> Work:
    """A call that rotates through the caches of all layers, so that its data are as cold as in a step."""
    out, pool, attention = torch.empty_like(query), skeleton.pool, Attention(skeleton.device, rows)

    def work(number: int) -> None:
        layer = number % skeleton.model.num_layers
        attention(out, query, *pool.layer(layer))

    return work
