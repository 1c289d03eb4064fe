"""Token ids, derived from the requests alone.

The id of a token covers all tokens before it, since its keys and values depend on them. A run of tokens that continues
from a token has a number, the same number wherever that happens; an id is that number and the position in the run:

    request 0   prompt 0 ............. output 0 ........     1:0 1:1 1:2 ...
    request 1   forks 0 after 2 tokens, own ........         1:0 1:1 2:0 2:1 ...
    a beam      dies and continues as a copy of another      1:0 1:1 1:2 5:0 ...
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...types.sequence import Sequence
from ...workload.content import Run
from ...workload.workload import Workload

_NOTHING = -1
_PLACE_BITS = 32
#: The stream of the prefix that all prompts share; pieces and requests have numbers above it.
_PREFIX = -(1 << 64)


class TokenNames:
    """The tokens of every sequence, by name, to the end of its output.

    Args:
        sequences: A row a sequence.
        prefix_tokens: Tokens that all prompts begin with.
    """

    def __init__(self, sequences: Workload, prefix_tokens: int = 0) -> None:
        self._runs = sequences.token_runs()
        self._prefix_tokens = prefix_tokens
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._strings: dict[int, np.ndarray] = {}

    def prefix(self) -> np.ndarray:
        """The tokens that all prompts begin with."""
        return self._named(self._prefix_runs())

    def of(self, sequence: Sequence) -> np.ndarray:
        """The tokens of a sequence, int64 [prompt + output]."""
        string = self._strings.get(sequence.index)
        if string is None:
            string = self._strings[sequence.index] = self._named(self._string(sequence.index))
        return string

    def replace(self, dead: Sequence, parent: Sequence, held_tokens: int) -> None:
        """A beam goes on as a copy of another and holds all its tokens; what it generates next is its own."""
        (own,) = self._runs.output_runs(dead.index)
        generated = held_tokens - dead.prompt_tokens
        known = self.of(parent)[:held_tokens]
        rest = _without(own, generated)
        self._strings[dead.index] = np.concatenate([known, self._named(rest, int(known[-1]))])

    def forget(self, sequence: Sequence) -> None:
        """A sequence is done."""
        self._strings.pop(sequence.index, None)

    def _prefix_runs(self) -> tuple[Run, ...]:
        return ((_PREFIX, 0, self._prefix_tokens),) if self._prefix_tokens else ()

    def _string(self, index: int) -> Iterable[Run]:
        yield from self._prefix_runs()
        passed = 0
        for run in (*self._runs.runs(index), *self._runs.output_runs(index)):
            yield from _without(run, max(0, self._prefix_tokens - passed))
            passed += run[2]

    def _named(self, runs: Iterable[Run], before: int = _NOTHING) -> np.ndarray:
        """Names of a string that goes on from a token; how it is cut into runs does not matter."""
        parts = [np.zeros(0, dtype=np.int64)]
        # The token that would go on with the last run, and its name.
        follows, name = None, _NOTHING
        for stream, start, length in runs:
            if follows != (stream, start):
                number = self._numbers.setdefault((before, stream, start), len(self._numbers))
                name = number << _PLACE_BITS
            parts.append(np.arange(name, name + length))
            follows, name = (stream, start + length), name + length
            before = name - 1
        return np.concatenate(parts)


def _without(run: Run, tokens: int) -> tuple[Run, ...]:
    """A run without its first tokens, if any are left."""
    stream, start, length = run
    return ((stream, start + tokens, length - tokens),) if tokens < length else ()
