"""Decode attention over blocks of one's own, over blocks that four samples share, and over blocks of a large pool: CPU time of the CPU
device, in turns.

The calibration of ``fragmeter validate`` knows only tables of distinct blocks, in a pool of 256 MiB. Shared blocks are read again while
they are still in the processor's caches, and the blocks of a small pool have fewer pages. Before each call a product with 32 MB of weights sweeps the caches, as the GEMMs of a step do.
"""

from __future__ import annotations

import time
from typing import Annotated

import cyclopts
import numpy as np
import torch

from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.batch import Rows
from fragmeter.gpu.model.calls import Attention
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.sim.spec import model

SAMPLES, BLOCK_SIZE = 4, 16
#: Blocks of the small and of the large pool: 32 and 256 MiB.
BLOCKS, MANY_BLOCKS = 512, 4096
#: Sequences, and tokens of each.
SHAPES = ((16, 160), (32, 160), (16, 320))
#: Blocks at the end of a table that a sample has for itself.
OWN_BLOCKS = 2


def tables(sequences: int, blocks: int, shared: bool, of: int, rng: np.random.Generator) -> np.ndarray:
    """Block tables in a pool ``of`` so many, int32 [sequences, blocks]; of ``SAMPLES`` that share, all but the last blocks are the same."""
    ids = rng.permutation(of)[: sequences * blocks].reshape(sequences, blocks).astype(np.int32)
    if shared:
        leaders = np.arange(sequences) // SAMPLES * SAMPLES
        ids[:, :-OWN_BLOCKS] = ids[leaders, :-OWN_BLOCKS]
    return ids


def main(turns: Annotated[int, cyclopts.Parameter(help="Turns of each shape.")] = 150) -> None:
    """Print the lower quartile of all three, for the attention of all layers of toy-llama."""
    torch.set_num_threads(1)
    device, spec, rng = devices.open_timed("cpu"), model("toy-llama"), np.random.default_rng(0)
    small, large = (Skeleton(spec, device, blocks, BLOCK_SIZE, "fp32", 0) for blocks in (BLOCKS, MANY_BLOCKS))
    variants = ((small.pool, False), (small.pool, True), (large.pool, False))
    weights = torch.randn(spec.hidden_size, 16_384)
    for sequences, context in SHAPES:
        query = torch.randn(sequences, spec.num_heads, spec.head_dim)
        out, hidden = torch.empty_like(query), torch.randn(sequences, spec.hidden_size)
        held, blocks = small.place(np.full(sequences, context, np.int32)), -(-context // BLOCK_SIZE)
        calls, taken = [], ([], [], [])
        for pool, shared in variants:
            ids = small.place(tables(sequences, blocks, shared, pool.num_blocks, rng))
            calls.append(Attention(device, Rows(slice(0, sequences), held, context, BLOCK_SIZE, block_tables=ids)))
        for _ in range(turns):
            for which in rng.permutation(len(variants)).tolist():
                pool, ticks = variants[which][0], 0
                for keys, values in zip(pool.keys, pool.values, strict=True):
                    hidden @ weights
                    start = time.thread_time_ns()
                    calls[which](out, query, keys, values)
                    ticks += time.thread_time_ns() - start
                taken[which].append(ticks / 1e3)
        own, common, many = (float(np.quantile(each, 0.25)) for each in taken)
        print(
            f"{sequences} x {context} tokens: own {own:,.0f} us, shared {common:,.0f} us ({common / own - 1:+.1%}), "
            f"large pool {many:,.0f} us ({many / own - 1:+.1%})"
        )


if __name__ == "__main__":
    with torch.inference_mode():
        cyclopts.run(main)
