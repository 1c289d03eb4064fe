"""The sizes that a calibration measures: one grid for a CPU, one for a GPU, and a small one for smoke tests.

Libraries are fastest at powers of two, and requests have other sizes: the grids contain both. Products of fewer than 16 rows
have other kernels on a CPU, so its grid has the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes to measure; sizes that do not fit the model or the pool are left out.

    Attributes:
        tokens: Rows of GEMMs, of the KV write, the layers' elementwise work and the embedding.
        head_rows: Rows of the output head.
        batches, contexts: Numbers of decoding sequences, and approximate tokens of each sequence.
        ragged: (sequences, mean tokens) of batches with widely different lengths.
        block_sizes: Block sizes besides the model's own; each is measured for ``ragged`` with similar lengths.
        shared: (sequences, approximate tokens of each, sequences that have the blocks of three quarters of their tokens in common)
            of batches with the model's own block size.
        contiguous: (sequences, approximate tokens of each) of decodes without block tables; none where calibrations leave it to
            those with.
        chunks, prefixes: New tokens of one prompt, and the tokens before them.
        prompts: (prompts, tokens) of prompts that are prefilled in one call.
        mixed: (sequences, approximate tokens of each, chunk, tokens before it) of attention of a step that decodes and
            prefills; values from batches, contexts, chunks and prefixes.
        moved_blocks: Blocks of a copy or a swap.
        steps: Whole steps: (sequences, approximate tokens of each, tokens of a prompt in the same step); values from
            batches, contexts and chunks, or 0 for none.
        rounds: Samples of each point.
        pool_bytes: Maximum size of the KV pool; None is half of the free memory.
    """

    tokens: tuple[int, ...]
    head_rows: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    ragged: tuple[tuple[int, int], ...]
    block_sizes: tuple[int, ...]
    shared: tuple[tuple[int, int, int], ...]
    contiguous: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    prefixes: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int, int], ...]
    moved_blocks: tuple[int, ...]
    steps: tuple[tuple[int, int, int], ...]
    rounds: int
    pool_bytes: int | None


CPU = Grid(
    tokens=(*range(1, 17), 23, 32, 45, 64, 91, 128, 181, 256, 362, 512),
    head_rows=(*range(1, 17), 23, 32, 45, 64),
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(16, 64, 128, 256, 512, 1024, 2048),
    ragged=((4, 128), (8, 512), (16, 128), (32, 256), (64, 128)),
    block_sizes=(8, 32, 128),
    shared=((8, 512, 4), (8, 1024, 8), (16, 256, 4), (16, 256, 16), (32, 256, 8), (32, 128, 32)),
    contiguous=tuple(product((1, 2, 4, 8, 16, 32), (16, 64, 256, 1024))),
    chunks=(16, 29, 64, 111, 256, 443, 512),
    prefixes=(0, 61, 256, 509, 1024),
    prompts=((2, 32), (4, 64), (2, 128)),
    mixed=((1, 512, 64, 0), (4, 128, 256, 0), (8, 256, 64, 256), (16, 64, 256, 61), (32, 128, 16, 1024)),
    moved_blocks=(1, 2, 4, 8, 16, 32, 64),
    steps=(
        (1, 64, 0),
        (1, 512, 0),
        (2, 128, 0),
        (4, 64, 0),
        (4, 256, 0),
        (8, 128, 0),
        (16, 64, 0),
        (16, 256, 0),
        (32, 128, 0),
        (64, 64, 0),
        (1, 2048, 0),
        (4, 1024, 0),
        (8, 1024, 0),
        (16, 1024, 0),
        (32, 512, 0),
        (32, 1024, 0),
        (64, 512, 0),
        (0, 0, 29),
        (0, 0, 111),
        (0, 0, 256),
        (0, 0, 512),
        (2, 128, 29),
        (8, 128, 111),
        (16, 256, 64),
        (16, 64, 256),
        (32, 128, 29),
    ),
    rounds=10,
    pool_bytes=256 * MIB,
)
CUDA = Grid(
    tokens=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 200, 256, 333, 512, 700, 1024, 1500, 2048, 3000, 4096, 8192),
    head_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts=(64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    ragged=((8, 1024), (16, 4096), (32, 512), (64, 1024), (128, 256), (256, 512)),
    block_sizes=(8, 32, 64, 128),
    shared=(
        (16, 4096, 4),
        (32, 2048, 4),
        (32, 2048, 32),
        (64, 1024, 4),
        (64, 1024, 16),
        (128, 1024, 4),
        (128, 512, 128),
    ),
    contiguous=(),
    chunks=(64, 128, 333, 512, 1024, 1500, 2048, 4096, 8192),
    prefixes=(0, 500, 1024, 4096, 16384),
    prompts=((2, 128), (4, 256), (8, 512), (2, 1024)),
    mixed=tuple(product((1, 8, 32, 128), (256, 2048), (64, 512, 2048), (0, 1024))),
    moved_blocks=(1, 2, 4, 8, 16, 32, 64, 128),
    steps=(
        (1, 512, 0),
        (1, 2048, 0),
        (2, 1024, 0),
        (8, 256, 0),
        (8, 1024, 0),
        (32, 512, 0),
        (64, 256, 0),
        (64, 1024, 0),
        (128, 512, 0),
        (256, 256, 0),
        (0, 0, 64),
        (0, 0, 333),
        (0, 0, 1024),
        (0, 0, 2048),
        (0, 0, 8192),
        (8, 1024, 64),
        (8, 1024, 333),
        (32, 512, 512),
        (64, 256, 2048),
        (256, 256, 512),
    ),
    rounds=15,
    pool_bytes=None,
)
QUICK = Grid(
    tokens=(1, 4, 16, 32),
    head_rows=(1, 4),
    batches=(1, 4),
    contexts=(16, 64, 128),
    ragged=((4, 64),),
    block_sizes=(32,),
    shared=((4, 64, 4), (4, 128, 2)),
    contiguous=((1, 64), (4, 64)),
    chunks=(16, 32),
    prefixes=(0, 64),
    prompts=((2, 16),),
    mixed=((1, 64, 16, 64), (4, 16, 32, 0)),
    moved_blocks=(1, 4),
    steps=(
        (1, 64, 0),
        (4, 64, 0),
        (0, 0, 16),
        (0, 0, 32),
        (4, 64, 16),
    ),
    rounds=2,
    pool_bytes=16 * MIB,
)
