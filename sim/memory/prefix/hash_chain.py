"""Numbers for block contents together with all that precedes them, and how many blocks of a prompt may be looked up."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def lookup_blocks(prompt_tokens: int, block_size: int) -> int:
    """How many blocks of a prompt may be looked up: the full ones that leave its last token out.

    That token is always computed, since its output is the first token of the answer.
    """
    return (prompt_tokens - 1) // block_size


class HashChain:
    """Numbers block contents together with all that precedes them: one number, one prefix.

    Stands in for vLLM's hash(parent hash, tokens), but is the same in every process and never collides.

    Attributes:
        parents: The prefix that each number prolongs by one block; number 0 is the empty prefix.
    """

    EMPTY = 0

    def __init__(self) -> None:
        self.parents = [self.EMPTY]
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def extend(self, contents: Iterable[Hashable], prefix: int = EMPTY) -> list[int]:
        """The numbers of ``prefix`` prolonged by the first block of ``contents``, by the first two, and so on."""
        chain = []
        for content in contents:
            number = self._numbers.setdefault((prefix, content), len(self.parents))
            if number == len(self.parents):
                self.parents.append(prefix)
            chain.append(number)
            prefix = number
        return chain
