"""Names of block contents, in chains: blocks with equal tokens up to their ends have the same place of the same chain.

A block's name stands for all tokens up to its end, like vLLM's hash(parent hash, tokens). The tokens of requests are runs
(``workload.content``), and a trie over the runs avoids work per block. A request that differs from all earlier ones from
token ``t`` on opens a chain at ``t`` with all its following tokens; a later request that differs from it opens another:

    request 0    a a a a a a a a b b b b        chain 1 from token 0
    request 1    a a a a a a a a c c c c        chain 1 up to token 8, chain 2 from token 8
    blocks of 4  (1, 0) (1, 1) (1, 2)           and (1, 0) (1, 1) (2, 2)

A block's name is a chain and a place. A request has a *path*: a list of chains, each with the block at which it ends. A
block that spans two chains belongs to the chain of its last token.

``HashChain`` numbers prefixes from blocks that are given one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain as chained
from operator import eq, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from ...workload.content import Run, Tokens

_ROOT = 0
PLACE_BITS = 32
_STREAM = itemgetter(0)
#: Chains of a request's full blocks, each with its end (exclusive). The chain of place p is the first with an end above p.
Path = list[tuple["Chain", int]]


class Chain:
    """The tokens of one request after the prefix that it shares with earlier requests.

    Attributes:
        number: Unique number, from 1.
        runs: Its tokens: stream, start and length of each run in one flat list of integers, which the garbage collector
            does not traverse. Adjacent runs are not contiguous.
    """

    __slots__ = ("number", "runs")

    def __init__(self, number: int, runs: list[int]) -> None:
        self.number, self.runs = number, runs

    def follow(self, runs: list[int]) -> tuple[int, list[int]]:
        """Number of tokens of the common prefix of ``runs`` and the chain, and the runs after it."""
        own = self.runs
        # Lower and upper bound of the number of equal runs.
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


class Paths(NamedTuple):
    """Paths of some requests as columns.

    Attributes:
        requests: Indices of the requests, ascending, int64 [n].
        shares: Whether a request shares a prefix, bool [n]; one that does not has no path here.
        offsets: The path of each lies between two of them, int64 [n + 1].
        numbers, stops: Numbers of its chains, and the blocks at which they end, int64.
    """

    requests: np.ndarray
    shares: np.ndarray
    offsets: np.ndarray
    numbers: np.ndarray
    stops: np.ndarray


class Chains:
    """The paths of requests.

    Args:
        tokens: Tokens of the requests.
        block_size: Tokens per block.
        lookahead_tokens: Tokens after a block for which its name stands, too; a block without them has no name.
        children: Chains that others know, too, with which these have the same names.
    """

    def __init__(
        self,
        tokens: Tokens,
        block_size: int,
        lookahead_tokens: int = 0,
        children: dict[tuple[int, int, int, int], Chain] | None = None,
    ) -> None:
        self._tokens, self._block_size, self.lookahead_tokens = tokens, block_size, lookahead_tokens
        #: Chains by number of the parent chain, token at which they begin, and their first token (stream, start).
        self._children: dict[tuple[int, int, int, int], Chain] = {} if children is None else children
        #: For each request, whether no other request begins with the same token.
        self.unshared = tokens.unshared

    def path(self, request: int) -> Path:
        """Path of all blocks that a request fills up to the end of its output."""
        tokens = self._tokens
        return self.path_of([*tokens.runs(request), *tokens.output_runs(request)])

    def paths(self, requests: np.ndarray, whole: bool = False) -> Paths:
        """Paths of requests in the order of their first look-ups, which ascends.

        Args:
            whole: Whether those of requests that share no prefix are among them.
        """
        shares = whole | ~np.array(self.unshared, dtype=bool)[requests]
        paths = [self.path(request) for request in requests[shares].tolist()]
        lengths = np.zeros(len(requests), dtype=np.int64)
        lengths[shares] = [*map(len, paths)]
        numbers = np.array([chain.number for path in paths for chain, _ in path], dtype=np.int64)
        stops = np.array([stop for path in paths for _, stop in path], dtype=np.int64)
        return Paths(requests, shares, np.append(0, np.cumsum(lengths)), numbers, stops)

    def names(self, request: int) -> list[int]:
        """Names, as numbers, of the blocks that a request fills up to the end of its output, in order."""
        return names_in(self.path(request))

    def prompt_names(self, request: int) -> list[int]:
        """As ``names``, for the blocks that the prompt fills."""
        return names_in(self.path_of([*self._tokens.runs(request)]))

    @staticmethod
    def own_names(request: int) -> range:
        """As ``names``, for a request that shares no block with another one: they take no place among the chains."""
        first = -(request + 1) << PLACE_BITS
        return range(first, first + (1 << PLACE_BITS))

    def path_of(self, runs: list[Run]) -> Path:
        """Path of the blocks that a string of tokens fills. It does not depend on the division into runs."""
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
            whole = max(0, token - self.lookahead_tokens) // size
            if whole > blocks:
                blocks = whole
                path.append((chain, blocks))
        return path


def names_in(path: Path) -> list[int]:
    """Names, as numbers other than 0, of the blocks of a path, in order."""
    names: list[int] = []
    for chain, stop in path:
        first = chain.number << PLACE_BITS
        names += range(first + len(names), first + stop)
    return names


def _joined(runs: list[Run]) -> list[int]:
    """The same tokens with contiguous runs merged, in the format of ``Chain.runs``."""
    streams = [*map(_STREAM, runs)]
    # Usually only the end of the prompt and the output can be merged.
    same = [*map(eq, streams, streams[1:])]
    first = same.index(True) if True in same else len(runs)
    joined = [*chained.from_iterable(runs[:first])]
    follows = None
    for stream, start, length in runs[first:]:
        if follows == (stream, start):
            joined[-1] += length
        else:
            joined += (stream, start, length)
        follows = stream, start + length
    return joined


_Count = TypeVar("_Count", int, np.ndarray)


def lookup_blocks(prompt_tokens: _Count, block_size: int) -> _Count:
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
