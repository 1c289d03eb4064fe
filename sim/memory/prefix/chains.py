"""The contents of blocks, in chains: equal blocks with equal tokens before them are one place of one chain.

A block is named by all tokens up to its end (vLLM: hash(parent hash, tokens)). The tokens of requests are runs
(``workload.content``), and a trie over them numbers nothing block by block: a request that differs from all others from
token ``t`` on opens a chain there, which has every token that follows, and a later one that differs from it opens another:

    request 0    a a a a a a a a b b b b        chain 1 from token 0
    request 1    a a a a a a a a c c c c        chain 1 up to token 8, chain 2 from token 8
    blocks of 4  (1, 0) (1, 1) (1, 2)           and (1, 0) (1, 1) (2, 2)

So a block's name is a chain and a place, and a request has a *path*: chains, each up to a block. A block that ends in one
chain and begins in another belongs to that of its last token.
"""

from __future__ import annotations

from itertools import chain as chained
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from ...workload.content import Run, Tokens

if TYPE_CHECKING:
    from .segments import BlockTable, Segment

_ROOT = 0
_PLACE_BITS = 32
_STREAM = itemgetter(0)
#: Chains of a request's full blocks, each with the place at which it ends: the chain of place p is the first with a higher end.
Path = list[tuple["Chain", int]]


class Chain:
    """The tokens of one request from where it differed from all requests before it.

    Attributes:
        number: Of its own, from 1.
        runs: Its tokens, as stream, start and length of one run after the other: a list of integers, which the collector of
            cycles has no need to look into. Of two runs in a row the second does not go on where the first ends.
        segments: Blocks that hold some of them and can be found, those published first in front.
        author: Table of the sequence that decodes more of it, or None.
    """

    __slots__ = ("author", "number", "runs", "segments")

    def __init__(self, number: int, runs: list[int]) -> None:
        self.number, self.runs = number, runs
        self.segments: list[Segment] = []
        self.author: BlockTable | None = None

    def follow(self, runs: list[int]) -> tuple[int, list[int]]:
        """How many tokens of ``runs`` are those with which the chain begins, and the runs that are left."""
        own = self.runs
        # Runs that are the same: so many, or more; and no more than so many.
        same, most = 0, min(len(runs), len(own)) // 3
        while same < most:
            half = (same + most + 1) // 2
            if runs[3 * same : 3 * half] == own[3 * same : 3 * half]:
                same = half
            else:
                most = half - 1
        at = 3 * same
        common = sum(runs[2:at:3])
        if at == min(len(runs), len(own)) or runs[at : at + 2] != own[at : at + 2]:
            return common, runs[at:]
        stream, start, length = runs[at : at + 3]
        if length <= own[at + 2]:
            return common + length, runs[at + 3 :]
        return common + own[at + 2], [stream, start + own[at + 2], length - own[at + 2], *runs[at + 3 :]]


class Chains:
    """The paths of requests.

    Args:
        tokens: Of the requests.
        block_size: Tokens a block.
    """

    def __init__(self, tokens: Tokens, block_size: int) -> None:
        self._tokens, self._block_size = tokens, block_size
        #: By chain (its number) and token behind which a chain begins, and its first token.
        self._children: dict[tuple[int, int, int, int], Chain] = {}
        #: Of each request whether no other begins with its first token.
        self.unshared = tokens.unshared

    def path(self, request: int) -> Path:
        """Of all blocks that a request fills to the end of its output."""
        tokens = self._tokens
        return self.path_of([*tokens.runs(request), *tokens.output_runs(request)])

    def names(self, request: int) -> list[int]:
        """A number for each block that a request fills to the end of its output, in order: equal names, equal blocks."""
        return _names(self.path(request))

    def prompt_names(self, request: int) -> list[int]:
        """As ``names``, of the blocks that the prompt fills."""
        return _names(self.path_of([*self._tokens.runs(request)]))

    def path_of(self, runs: list[Run]) -> Path:
        """Of the blocks that a string of tokens fills; how it is cut into runs does not matter."""
        left, children, size = _joined(runs), self._children, self._block_size
        path: Path = []
        number, token, blocks = _ROOT, 0, 0
        while left:
            stream, start = left[:2]
            chain = children.get((number, token, stream, start))
            if chain is None:
                chain = Chain(len(children) + 1, left)
                children[number, token, stream, start] = chain
                token += sum(left[2::3])
                left = []
            else:
                common, left = chain.follow(left)
                token += common
            number = chain.number
            if token // size > blocks:
                blocks = token // size
                path.append((chain, blocks))
        return path


def _names(path: Path) -> list[int]:
    names: list[int] = []
    for chain, stop in path:
        first = chain.number << _PLACE_BITS
        names += range(first + len(names), first + stop)
    return names


def _joined(runs: list[Run]) -> list[int]:
    """The same tokens in as few runs as there can be, as ``Chain.runs``."""
    streams = [*map(_STREAM, runs)]
    # Mostly there are none but the end of a prompt and the output.
    first = next((place for place, (one, other) in enumerate(pairwise(streams)) if one == other), len(runs))
    joined = [*chained.from_iterable(runs[:first])]
    follows = None
    for stream, start, length in runs[first:]:
        if follows == (stream, start):
            joined[-1] += length
        else:
            joined += (stream, start, length)
        follows = stream, start + length
    return joined
