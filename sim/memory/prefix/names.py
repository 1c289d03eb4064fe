"""Names of blocks at any block size, whatever pieces their contents are known by.

A block is named by all tokens up to its end (vLLM: hash(parent hash, tokens)). With the tokens given
as runs, that prefix is the runs before, the run that the block ends in, and how far into it:

    runs      (7, 0, 40)      (9, 0, 24)        blocks of 16 end at 16, 32, 48 and 64
    names     7:16  7:32      7 9:8  7 9:24

``HashChain`` numbers the runs, each with those before it; so a name is a number, too, and those of
the blocks that end in one run are evenly spaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...content import Run, TokenRuns
from .hash_chain import HashChain

_LENGTH_BITS = 32


class BlockNames:
    """Names of the full blocks of requests: equal names, equal keys and values.

    Args:
        runs: The requests' tokens.
        block_size: Tokens a block.
    """

    def __init__(self, runs: TokenRuns, block_size: int) -> None:
        self._runs = runs
        self._block_size = block_size
        self._chain = HashChain()

    def of(self, request: int) -> list[int]:
        """Of all blocks that the request fills to the end of its output, in order."""
        return self.of_runs((*self._runs.runs(request), *self._runs.output_runs(request)))

    def of_runs(self, runs: Iterable[Run]) -> list[int]:
        """Of the blocks that a string of tokens fills; how it is cut into runs does not matter."""
        size, names = self._block_size, []
        # Where the next block ends, counted from the start of the run.
        prefix, end = HashChain.EMPTY, size
        for stream, start, length in _merged(runs):
            begun, done = self._chain.extend(((stream, start), length), prefix)
            numbered = begun << _LENGTH_BITS
            ends = range(numbered + end, numbered + length + 1, size)
            names += ends
            prefix, end = done, end + len(ends) * size - length
        return names


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """The runs, with those in one that go on where the one before ends."""
    current: Run | None = None
    for run in runs:
        if current and run[:2] == (current[0], current[1] + current[2]):
            current = (*current[:2], current[2] + run[2])
        else:
            if current:
                yield current
            current = run
    if current:
        yield current
