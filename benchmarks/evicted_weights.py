"""GEMMs of a step behind the KV that its attention reads: CPU time of the CPU device, in turns.

In a pass over all layers attention runs untimed where a step has it, over tables of distinct blocks. What it reads evicts weights from the
processor's caches, so that the next GEMMs take longer. Each pass is preceded by an untimed one like it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import cyclopts
import numpy as np
import torch
from torch import Tensor

from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.batch import Rows
from fragmeter.gpu.model.calls import Attention
from fragmeter.gpu.model.layers import Matrix, multiply
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.sim.spec import model

BLOCKS, BLOCK_SIZE = 4840, 16
ROWS = (1, 5, 17, 48, 64, 128, 256)
#: Sequences and tokens of each: no KV, and from 16 to 128 MiB of it in all layers.
READ = ((0, 0), (4, 1024), (8, 1024), (16, 1024), (32, 1024))


def reading(skeleton: Skeleton, sequences: int, tokens: int, rng: np.random.Generator) -> Callable[[int], object]:
    """Attention in a layer; nothing without sequences."""
    if not sequences:
        return lambda layer: None
    pool, spec, blocks = skeleton.pool, skeleton.model, tokens // BLOCK_SIZE
    ids = rng.permutation(BLOCKS)[: sequences * blocks].reshape(sequences, blocks).astype(np.int32)
    held, query = np.full(sequences, tokens, np.int32), torch.randn(sequences, spec.num_heads, spec.head_dim)
    every, out = slice(0, sequences), torch.empty_like(query)
    rows = Rows(every, skeleton.place(held), tokens, BLOCK_SIZE, block_tables=skeleton.place(ids))
    attention = Attention(skeleton.device, rows)
    return lambda layer: attention(out, query, *pool.layer(layer))


def gemms_us(skeleton: Skeleton, rows: int, read: Callable[[int], object]) -> float:
    """Microseconds of the GEMMs of a pass over ``rows`` tokens, the output head's included."""
    taken, weights, spec = 0, skeleton.weights, skeleton.model

    def timed(hidden: Tensor, matrix: Matrix) -> Tensor:
        nonlocal taken
        start = time.thread_time_ns()
        found = multiply(hidden, matrix)
        taken += time.thread_time_ns() - start
        return found

    def attend(query: Tensor, *_: Tensor) -> Tensor:
        read(number)
        return query

    tokens = torch.arange(rows)
    hidden, rotary = weights.embed(tokens % spec.vocab_size, tokens)
    for number, layer in enumerate(weights.layers):
        hidden = layer.forward(hidden, rotary, attend, timed)
    timed(hidden, weights.head)
    return taken / 1e3


def main(turns: Annotated[int, cyclopts.Parameter(help="Turns of each size.")] = 12) -> None:
    """Print the lower quartile of the GEMMs for each number of rows, and by how much KV lengthens it."""
    device, spec, rng = devices.open_timed("cpu"), model("toy-llama"), np.random.default_rng(0)
    skeleton = Skeleton(spec, device, BLOCKS, BLOCK_SIZE)
    reads = [reading(skeleton, *size, rng) for size in READ]
    mib = [sequences * tokens * spec.slot_bytes("fp32") >> 20 for sequences, tokens in READ]
    for rows in ROWS:
        taken: list[list[float]] = [[] for _ in reads]
        for _ in range(turns):
            for which in rng.permutation(len(reads)).tolist():
                gemms_us(skeleton, rows, reads[which])
                taken[which].append(gemms_us(skeleton, rows, reads[which]))
        alone, *behind = (float(np.quantile(each, 0.25)) for each in taken)
        longer = ", ".join(f"{size} MiB {us / alone - 1:+.0%}" for size, us in zip(mib[1:], behind, strict=True))
        print(f"{rows} rows: {alone / 1e3:.1f} ms; behind {longer}")


if __name__ == "__main__":
    with torch.inference_mode():
        cyclopts.run(main)
