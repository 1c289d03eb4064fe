"""Names of blocks at any block size, whatever pieces their contents are known by.

A block is named by all tokens up to its end (vLLM: hash(parent hash, tokens)). With the tokens given
as runs, that prefix is the runs before, the run that the block ends in, and how far into it:

    runs      (7, 0, 40)      (9, 0, 24)        blocks of 16 end at 16, 32, 48 and 64
    names     7:16  7:32      7:40 9:8  7:40 9:24

A run that begins behind a prefix gets a number, the same one wherever that happens, and a name is that
number and the tokens of the run in one. So a prefix has one name, and those of the blocks that end in
one run are evenly spaced.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...workload.content import Run, Tokens

_NOTHING = 0
_LENGTH_BITS = 32


class BlockNames:
    """Names of the full blocks of requests: equal names, equal keys and values.

    Args:
        runs: The requests' tokens.
        block_size: Tokens a block.
    """

    def __init__(self, runs: Tokens, block_size: int) -> None:
        self._runs = runs
        self._block_size = block_size
        self._numbers: dict[tuple[int, int, int], int] = {}

    def of(self, request: int) -> list[int]:
        """Of all blocks that the request fills to the end of its output, in order."""
        return self.of_runs((*self._runs.runs(request), *self._runs.output_runs(request)))

    def of_prompt(self, request: int) -> list[int]:
        """Of all blocks that the prompt of the request fills, in order."""
        return self.of_runs(self._runs.runs(request))

    def of_runs(self, runs: Iterable[Run]) -> list[int]:
        """Of the blocks that a string of tokens fills; how it is cut into runs does not matter."""
        size, numbers = self._block_size, self._numbers
        names: list[int] = []
        # The name of what was passed, the token that would go on with its last run, and tokens left of the block.
        prefix, follows, left = _NOTHING, None, size
        for stream, start, length in runs:
            if follows != (stream, start):
                prefix = numbers.setdefault((prefix, stream, start), len(numbers) + 1) << _LENGTH_BITS
            ends = range(prefix + left, prefix + length + 1, size)
            names += ends
            prefix += length
            left += len(ends) * size - length
            follows = (stream, start + length)
        return names


def run_of(name: int) -> int:
    """The number of the run that a named block ends in."""
    return name >> _LENGTH_BITS
