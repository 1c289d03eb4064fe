"""Requests whose prompts are known block by block: who could share what with whom.

A trace as ``traces.read`` reads it, in JSON lines, with two more keys:

    hash_ids       one whole number a block of the prompt; equal numbers, equal contents
    block_tokens   tokens of each block; optional, without it all blocks but the last are full

In Mooncake's traces a number stands for a block of 512 tokens together with all that precedes it, in
RAGPulse's for a chunk of content wherever it occurs. Both are read alike: who needs prefixes numbers
chains of ids (``sim.memory.prefix.HashChain``), which tells chained ids apart no further.

A third key, ``session_id`` (a whole number or a text), says which requests are turns of one session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np

from ..sim.content import NO_SESSION, PromptContent
from ..sim.errors import TraceError
from .lines import filled_lines
from .pairs import frozen_column
from .readers import _content, read
from .table import shown
from .trace import Trace

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces, which do not say it themselves."""

_TOO_LARGE = 2**63


@dataclass(frozen=True, slots=True, eq=False)
class HashedTrace:
    """A trace and the blocks of its prompts, request after request; int64, read-only.

    Attributes:
        trace: Arrivals and lengths.
        offsets: [n + 1]; request i has the blocks from ``offsets[i]`` up to ``offsets[i + 1]``.
        hash_ids: [blocks].
        block_tokens: [blocks], at least 1. Those of a request add up to its prompt, or to no more
            than that where the file gives them.
    """

    trace: Trace
    offsets: np.ndarray
    hash_ids: np.ndarray
    block_tokens: np.ndarray

    def __post_init__(self) -> None:
        for name in ("offsets", "hash_ids", "block_tokens"):
            object.__setattr__(self, name, frozen_column(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.trace)


def read_hashed(path: str | PathLike[str], block_size: int = MOONCAKE_BLOCK_TOKENS) -> HashedTrace:
    """The trace in ``path`` with its blocks.

    Args:
        path: JSON lines, also gzipped.
        block_size: Tokens of a full block, for files without ``block_tokens``.

    Raises:
        TraceError: As ``traces.read``; or names the first row whose blocks are missing, are no whole
            numbers, or do not fit its prompt.
    """
    trace = read(path)
    return HashedTrace(trace, *_pieces(list(_rows(path)), trace, block_size))


def read_with_content(path: str | PathLike[str], block_size: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """The trace in ``path``, and what its prompts are made of, where the file is JSON lines that say so.

    Args:
        path, block_size: As for ``read_hashed``.

    Raises:
        TraceError: As ``read_hashed``, where any row has ``hash_ids``; or names a session_id that is none.
    """
    trace, data = read(path), _content(path)
    if not _is_jsonl(data) or not any(key in data for key in (b'"hash_ids"', b'"session_id"')):
        return trace
    rows = list(_rows(path))
    sessions = _sessions(rows)
    if any("hash_ids" in row.record for row in rows):
        return replace(trace, content=PromptContent(*_pieces(rows, trace, block_size), sessions))
    return trace if sessions is None else replace(trace, content=PromptContent.of_sessions(sessions))


def _pieces(rows: Sequence[_Row], trace: Trace, block_size: int) -> list[np.ndarray]:
    """Where each request's blocks begin, their ids and their tokens."""
    offsets, ids, tokens = [0], [], []
    sized = any("block_tokens" in row.record for row in rows)
    for prompt_tokens, row in zip(trace.prompt_tokens.tolist(), rows, strict=True):
        row_ids = row.numbers("hash_ids", -_TOO_LARGE)
        ids += row_ids
        tokens += row.sizes(len(row_ids), prompt_tokens) if sized else row.full(len(row_ids), prompt_tokens, block_size)
        offsets.append(len(ids))
    return [np.array(column, dtype=np.int64) for column in (offsets, ids, tokens)]


def _sessions(rows: Sequence[_Row]) -> np.ndarray | None:
    """Sessions numbered as they begin; None where no row has one."""
    numbers: dict[int | str | None, int] = {None: NO_SESSION}
    sessions = [numbers.setdefault(row.session(), len(numbers)) for row in rows]
    return np.array(sessions, dtype=np.int64) if len(numbers) > 1 else None


def _is_jsonl(data: bytes) -> bool:
    return data.lstrip().startswith(b"{")


def _rows(path: str | PathLike[str]) -> Iterator[_Row]:
    """The rows of a file that ``traces.read`` has found to be well."""
    data = _content(path)
    if not _is_jsonl(data):
        raise TraceError(path, None, None, None, "has no hash_ids; give JSON lines with a list of block ids a request")
    data, lines = filled_lines(path, data)
    for line, text in zip(lines.tolist(), data.split(b"\n"), strict=True):
        yield _Row(path, line, _record(path, line, text))


def _record(path: str | PathLike[str], line: int, text: bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # numbers of thousands of digits, and brackets as deep
        remedy = "cannot be read as JSON; give one plain object a line"
        raise TraceError(path, line, "row", shown(text.decode()), remedy) from None


@dataclass(frozen=True, slots=True)
class _Row:
    path: str | PathLike[str]
    line: int
    record: dict[str, Any]

    def numbers(self, field: str, lowest: int) -> list[int]:
        """The list of whole numbers under ``field``."""
        values = self.record.get(field)
        if values is None:
            raise self.error(field, None, "is missing; give a list, one whole number a block")
        if not isinstance(values, list):
            raise self.error(field, values, "must be a list, one whole number a block; correct the row")
        for value in values:
            if type(value) is not int or not lowest <= value < _TOO_LARGE:
                remedy = f"must hold whole numbers from {lowest} to {_TOO_LARGE - 1}; correct the row"
                raise self.error(field, value, remedy)
        return values

    def session(self) -> int | str | None:
        """``session_id``, None where there is none."""
        value = self.record.get("session_id")
        if value is not None and type(value) not in (int, str):
            raise self.error("session_id", value, "must be a whole number or a text; correct the row")
        return value

    def sizes(self, num_blocks: int, prompt_tokens: int) -> list[int]:
        """``block_tokens``, which must be as many as the ids, and no more tokens than the prompt."""
        tokens = self.numbers("block_tokens", 1)
        if len(tokens) != num_blocks:
            remedy = f"must have a value for each of the {num_blocks} hash_ids; correct the row"
            raise self.error("block_tokens", tokens, remedy)
        if sum(tokens) > prompt_tokens:
            remedy = f"adds up to {sum(tokens)}, more than the prompt's {prompt_tokens} tokens; correct the row"
            raise self.error("block_tokens", tokens, remedy)
        return tokens

    def full(self, num_blocks: int, prompt_tokens: int, block_size: int) -> list[int]:
        """Full blocks, the last one as full as the prompt leaves it."""
        needed = -(-prompt_tokens // block_size)
        if num_blocks != needed:
            remedy = (
                f"{num_blocks} ids where {prompt_tokens} tokens of prompt are {needed} blocks of {block_size};"
                " correct the row, or give block_tokens"
            )
            raise self.error("hash_ids", self.record["hash_ids"], remedy)
        return [block_size] * (needed - 1) + [prompt_tokens - (needed - 1) * block_size]

    def error(self, field: str, value: object, remedy: str) -> TraceError:
        """The error that names this row."""
        return TraceError(self.path, self.line, field, shown(value), remedy)
