"""Numbers for prefixes in whole blocks, and the number of blocks of a prompt that are looked up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def lookup_blocks(prompt_tokens: int, block_size: int) -> int:
    """Number of blocks of a prompt that are looked up: the full blocks before its last token.

    The last token is always computed, because its output is the first generated token.
    """
    return (prompt_tokens - 1) // block_size


class HashChain:
    """Assigns a number to each prefix in whole blocks.

    It replaces vLLM's hash(parent hash, tokens); it is the same in every process and has no collisions.

    Attributes:
        parents: For each number, the number of the prefix without its last block; number 0 is the empty prefix.
    """

    EMPTY = 0

    def __init__(self) -> None:
        self.parents = [self.EMPTY]
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def extend(self, contents: Iterable[Hashable], prefix: int = EMPTY) -> list[int]:
        """The numbers of ``prefix`` extended by the first block of ``contents``, by the first two, and so on."""
        chain = []
        for content in contents:
            number = self._numbers.setdefault((prefix, content), len(self.parents))
            if number == len(self.parents):
                self.parents.append(prefix)
            chain.append(number)
            prefix = number
        return chain
