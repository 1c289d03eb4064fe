"""The contents of prompts: which requests could share keys and values.

The text is unknown; only the equality of tokens is known. A token is therefore a position in an abstract *stream*, and
the tokens of a request are a list of *runs* of streams:

    request 3    piece 7 (512 tokens)   piece 9 (88)    its own: 20 of the prompt, then the output
    runs         (7, 0, 512)            (9, 0, 88)      (own 3, 0, 20)  (own 3, 20, ...)

Two requests share a prefix as far as their runs name the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Protocol, cast

import numpy as np

from ..types.columns import column_of
from ..types.errors import SettingError
from .dialogue import Dialogue

Run = tuple[int, int, int]
"""Tokens ``start`` to ``start + length`` (length at least 1) of ``stream``: (stream, start, length)."""

NO_SESSION = -1
#: Streams of requests are numbered from here, beyond any id of a piece.
_OWN = 1 << 63
_COLUMNS = ("offsets", "ids", "tokens", "session_id", "same_as")


@dataclass(frozen=True, slots=True, eq=False)
class PromptContent:
    """The contents of prompts as lists of pieces.

    Attributes:
        offsets: int64 [n + 1]; request i has the pieces from ``offsets[i]`` up to ``offsets[i + 1]``.
        ids: int64 [pieces]; equal ids have equal contents. If their lengths differ, the shorter is a prefix of the
            longer.
        tokens: int64 [pieces], at least 1. The pieces of a request cover at most its prompt; the rest of the prompt
            is not shared.
        session_id: int64 [n], or None. Requests with the same number are turns of one session, ``NO_SESSION`` is none.
            If no request has pieces, a turn's prompt begins with the prompt and the output of the turn before.
        same_as: int64 [n], or None: a row with the same prompt, as for sequences of one request. None: each row has its
            own prompt.
        covers_outputs: Whether pieces may go on into the output, so that other prompts can continue an answer. Requests
            have one sequence each then.
    """

    offsets: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    session_id: np.ndarray | None = None
    same_as: np.ndarray | None = None
    covers_outputs: bool = False

    def __post_init__(self) -> None:
        for field in self.columns():
            column = np.ascontiguousarray(getattr(self, field), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, field, column)
        if not len(self.offsets) or self.offsets[0] or (np.diff(self.offsets) < 0).any():
            raise SettingError("offsets", "not ascending", "must run from 0 upwards, with one more than requests")
        for field in ("ids", "tokens"):
            if len(getattr(self, field)) != self.offsets[-1]:
                remedy = f"must have a value for each of {self.offsets[-1]} pieces"
                raise SettingError(field, len(getattr(self, field)), remedy)
        if len(self.tokens) and self.tokens.min() < 1:
            raise SettingError("tokens", int(self.tokens.min()), "must be at least 1")
        for field in ("session_id", "same_as"):
            column = getattr(self, field)
            if column is not None and len(column) != len(self):
                raise SettingError(field, len(column), f"must have a value for each of {len(self)} requests")

    @classmethod
    def of_sessions(cls, session_id: np.ndarray) -> PromptContent:
        """Contents with known sessions and nothing else."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(len(session_id) + 1, dtype=np.int64), nothing, nothing, session_id)

    @classmethod
    def unknown(cls, requests: int) -> PromptContent:
        """Unknown contents: no request shares tokens with another."""
        return cls.of_sessions(np.full(requests, NO_SESSION))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def columns(self) -> list[str]:
        """Names of the columns that are present."""
        return [field for field in _COLUMNS if getattr(self, field) is not None]

    def first(self, requests: int) -> PromptContent:
        """The contents of the first requests alone."""
        pieces = self.offsets[requests]
        session_id, same_as = (
            None if column is None else column[:requests] for column in (self.session_id, self.same_as)
        )
        columns = self.offsets[: requests + 1], self.ids[:pieces], self.tokens[:pieces]
        return PromptContent(*columns, session_id, same_as, self.covers_outputs)

    def repeated(self, times: np.ndarray) -> PromptContent:
        """The contents with each request so many times (int64 [n]), one after the other, as its sequences are.

        They have one prompt. A session goes on from the first of them.

        Raises:
            SettingError: Pieces cover outputs, and a request has several sequences.
        """
        if self.covers_outputs:
            if (times != 1).any():
                raise SettingError("n", int(times.max()), "must be 1 where the contents of outputs are given")
            return self
        rows = np.repeat(np.arange(len(self)), times)
        pieces = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(pieces)])
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], pieces)
        sessions = None
        if self.session_id is not None:
            sessions = np.where(np.diff(rows, prepend=-1) > 0, self.session_id[rows], NO_SESSION)
        return PromptContent(offsets, self.ids[place], self.tokens[place], sessions, (np.cumsum(times) - times)[rows])

    def piece_tokens(self) -> np.ndarray:
        """Tokens of each request's pieces together, int64 [n]."""
        before = np.concatenate([[0], np.cumsum(self.tokens)])
        return np.diff(before[self.offsets])


class Tokens(Protocol):
    """Contents of prompts and outputs by request, as a prefix cache reads them."""

    def runs(self, request: int) -> tuple[Run, ...]:
        """The prompt of a request."""

    def output_runs(self, request: int) -> tuple[Run, ...]:
        """Its output."""

    @property
    def unshared(self) -> list[bool]:
        """Of each request whether no other can begin with its first token; grows as requests come."""


class PromptSource(Protocol):
    """Requests with possibly known prompts: a workload, or the requests that a router sends to one replica."""

    @property
    def may_share_prefixes(self) -> bool:
        """Whether it is known what prompts are made of."""

    def token_runs(self) -> Tokens:
        """The tokens of every request."""


class TokenRuns:
    """The tokens of every request as runs, in the form that ``memory.prefix`` takes.

    Args:
        content: Contents of the prompts.
        prompt_tokens, output_tokens: int64 [n], of the workload.
    """

    def __init__(self, content: PromptContent, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        self._offsets, self._ids, self._tokens = (
            _ints(getattr(content, field)) for field in ("offsets", "ids", "tokens")
        )
        self._prompts, self._outputs = _ints(prompt_tokens), _ints(output_tokens)
        before = np.full(len(content), -1)
        # Where pieces say more, sessions say nothing.
        if content.session_id is not None and not len(content.ids):
            before = turns_before(content.session_id)
        history = np.minimum(prompt_tokens, (prompt_tokens + output_tokens)[before])
        # Tokens of each prompt that are not its own.
        pieces = content.piece_tokens()
        self._known = _ints(np.where(before < 0, np.minimum(pieces, prompt_tokens), history))
        # Tokens of each output that are not its own.
        self._answered = _ints(np.maximum(pieces - prompt_tokens, 0))
        self._before = _ints(before)
        self._same_as = range(len(content)) if content.same_as is None else _ints(content.same_as)

    @classmethod
    def of_dialogue(cls, dialogue: Dialogue, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> TokenRuns:
        """The tokens of requests with parents."""
        runs = cls(PromptContent.of_sessions(np.full(len(dialogue), NO_SESSION)), prompt_tokens, output_tokens)
        runs._before, runs._known = _ints(dialogue.parent), _ints(dialogue.parent_tokens)
        return runs

    def runs(self, request: int) -> tuple[Run, ...]:
        """The prompt of a request."""
        request = self._same_as[request]
        if self._before[request] >= 0:
            return self._turn(request)
        runs = self._piece_runs(request)
        if self._answered[request]:
            return _cut(runs, self._prompts[request])[0]
        own = self._prompts[request] - self._known[request]
        if own:
            runs.append((_OWN + request, 0, own))
        return tuple(runs)

    def output_runs(self, request: int) -> tuple[Run, ...]:
        """The output of a request; after its pieces it continues the stream of the prompt's own tokens."""
        answered, start = self._answered[request], self._prompts[request] - self._known[request]
        own = ((_OWN + request, start, self._outputs[request] - answered),)
        if not answered:
            return own
        pieces = _cut(self._piece_runs(request), self._prompts[request])[1]
        return pieces + own if own[0][2] else pieces

    def _piece_runs(self, request: int) -> list[Run]:
        start, end = self._offsets[request], self._offsets[request + 1]
        return [*zip(self._ids[start:end], repeat(0), self._tokens[start:end])]

    @cached_property
    def unshared(self) -> list[bool]:
        """Of each request whether no other can begin with its first token: nothing of it is known, and none goes on from it."""
        before, count = np.array(self._before, dtype=np.int64), len(self._known)
        follows = np.bincount(before[before >= 0], minlength=count) > 0
        same = np.bincount(np.array(self._same_as, dtype=np.int64), minlength=count) != 1
        unshared: list[bool] = (~follows & ~same & (np.array(self._known, dtype=np.int64) == 0)).tolist()
        return unshared

    def _turn(self, request: int) -> tuple[Run, ...]:
        """Back through the session: what each turn added, as far as this prompt reaches."""
        runs, end = [], self._prompts[request]
        while end:
            known = self._known[request]
            if end > known:
                runs.append((_OWN + request, 0, end - known))
                end = known
            request = self._before[request]
        return tuple(reversed(runs))


def _ints(column: np.ndarray) -> Sequence[int]:
    """A column that is read one Python int at a time, without an object for each value."""
    return cast(Sequence[int], column_of([column]).data)


def _cut(runs: Iterable[Run], tokens: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The first ``tokens`` of some runs, and the rest of them."""
    first: list[Run] = []
    rest: list[Run] = []
    for stream, start, length in runs:
        part = min(length, tokens)
        tokens -= part
        if part:
            first.append((stream, start, part))
        if part < length:
            rest.append((stream, start + part, length - part))
    return tuple(first), tuple(rest)


def turns_before(session_id: np.ndarray) -> np.ndarray:
    """The row of the turn before each one in its session, int64 [n]; -1 where there is none."""
    before = np.full(len(session_id), -1)
    order = np.argsort(session_id, kind="stable")
    session = session_id[order]
    goes_on = np.flatnonzero((session[1:] == session[:-1]) & (session[1:] != NO_SESSION))
    before[order[goes_on + 1]] = order[goes_on]
    return before
