"""Split of attention over a context into partitions, which a second kernel merges."""

from __future__ import annotations

import functools

from .arrays import Array, empty

#: Size limits of a partition: below the minimum its merge costs too much, and above the maximum one long sequence would
#: occupy a block alone.
MIN_PARTITION_TOKENS, MAX_PARTITION_TOKENS = 256, 2048
#: Fixed cost of a block, in tokens: the first block table lookup, the first copies, the merge.
PARTITION_OVERHEAD_TOKENS = 64


def partial_results(rows: int, head_dim: int, partitions: int, like: Array) -> tuple[Array, Array]:
    """Buffers for the maximum and sum, and for the values, of each row and partition; empty for one partition."""
    if partitions == 1:
        nothing = empty("partial_results", (0,), "float32", like)
        return nothing, nothing
    states = empty("partial_states", (rows, 2), "float32", like)
    return states, empty("partial_values", (rows, head_dim), "float32", like)


@functools.lru_cache(256)  # many steps have the same arguments
def filling_size(max_context_len: int, columns: int, places: int) -> int:
    """Tokens of a partition, chosen so that the blocks fill the device a whole number of times, as nearly as possible.

    Every sequence counts as the longest. No partition has more tokens than :data:`MAX_PARTITION_TOKENS`.

    Args:
        max_context_len: Length of the longest sequence, in tokens.
        columns: Blocks of a partition: sequences x tiles of rows.
        places: Number of resident blocks of the device.
    """

    def duration(tokens: int) -> int:
        blocks = columns * -(-max_context_len // tokens)
        return -(-blocks // places) * (tokens + PARTITION_OVERHEAD_TOKENS)

    most = (max(1, waves * places // max(1, columns)) for waves in range(1, 9))
    sizes = {-(-max_context_len // (partitions * 64)) * 64 for partitions in most}
    limited = (min(max(size, MIN_PARTITION_TOKENS), MAX_PARTITION_TOKENS) for size in sizes)
    return min(sorted(limited, reverse=True), key=duration)
