"""One step of a skeleton: the batch on the host, and its tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...sim.types.optional import not_none

#: Maximum block size with which contiguous rows are passed to paged prefill as consecutive blocks.
MOST_CONTIGUOUS_BLOCK = 256


#: Block ids or lengths of a batch, in order.
Ints = Sequence[int] | np.ndarray


class Batch(NamedTuple):
    """The rows of one step, in any order. Each row is a sequence with one new token (a decode) or several.

    Attributes:
        query_lens: int ``[rows]``, new tokens of each row.
        context_lens: int ``[rows]``, all its tokens, including the new ones.
        token_ids: int64 ``[tokens]``, row after row; taken modulo the vocabulary size.
        slot_mapping: int64 ``[tokens]``, slots of their keys and values: ``block * block_size + offset``.
        block_tables: int ``[rows, most blocks]``; None for contiguous caches.
        slot_starts: int64 ``[rows]``, the first slot of each row; None for paged caches.
    """

    query_lens: np.ndarray
    context_lens: np.ndarray
    token_ids: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray | None = None
    slot_starts: np.ndarray | None = None

    @classmethod
    def paged(
        cls,
        query_lens: Ints,
        context_lens: Ints,
        token_ids: Ints,
        tables: Sequence[Ints] | np.ndarray,
        block_size: int,
    ) -> Batch:
        """Rows with lists of block ids as tables; the slots of the new tokens are computed from them."""
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        lens, contexts = np.asarray(query_lens), np.asarray(context_lens)
        rows, positions = _positions(lens, contexts)
        slots = padded[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return cls(lens, contexts, np.asarray(token_ids), slots, block_tables=padded)

    @classmethod
    def contiguous(
        cls,
        query_lens: Ints,
        context_lens: Ints,
        token_ids: Ints,
        slot_starts: Ints,
    ) -> Batch:
        """Rows with contiguous slots, from ``slot_starts`` on."""
        lens, contexts, starts = map(np.asarray, (query_lens, context_lens, slot_starts))
        rows, positions = _positions(lens, contexts)
        return cls(lens, contexts, np.asarray(token_ids), starts[rows] + positions, slot_starts=starts)

    @property
    def only_decodes(self) -> bool:
        """Whether every row has one new token."""
        return bool((self.query_lens == 1).all())

    @property
    def is_paged(self) -> bool:
        return self.block_tables is not None

    def padded(self, rows: int, columns: int) -> Batch:
        """A batch of decodes, padded with empty sequences that write nothing; block tables get ``columns`` columns."""
        more = rows - len(self.query_lens)
        tables = starts = None
        if self.block_tables is not None:
            held = self.block_tables[:, :columns]
            tables = np.pad(held, ((0, more), (0, columns - held.shape[1])))
        if self.slot_starts is not None:
            starts = np.pad(self.slot_starts, (0, more))
        return Batch(
            np.pad(self.query_lens, (0, more), constant_values=1),
            np.pad(self.context_lens, (0, more)),
            np.pad(self.token_ids, (0, more)),
            np.pad(self.slot_mapping, (0, more), constant_values=-1),
            tables,
            starts,
        )


def _positions(query_lens: np.ndarray, context_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every new token, row after row."""
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    ends = np.cumsum(query_lens)
    return rows, np.arange(len(rows)) - np.repeat(ends - context_lens, query_lens)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that attend in one call; ``query_start_loc`` is None for decodes, which have one token each.

    Attributes:
        tokens: The tokens of the step that belong to these rows.
        block_tables: int32 ``[rows, blocks]``; None for decodes over contiguous caches.
        slot_starts: int64 ``[rows]``, the first slots of decodes over contiguous caches.
    """

    tokens: slice
    context_lens: Tensor
    max_context_len: int
    block_size: int
    block_tables: Tensor | None = None
    slot_starts: Tensor | None = None
    query_start_loc: Tensor | None = None
    max_query_len: int = 1

    def tensors(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [getattr(self, name) for name in self._present()]

    def holding(self, tensors: Iterable[Tensor]) -> Rows:
        """The same rows with other tensors: the next ones, in the order of :meth:`tensors`."""
        left = iter(tensors)
        return replace(self, **{name: next(left) for name in self._present()})

    def _present(self) -> list[str]:
        names = ("context_lens", "block_tables", "slot_starts", "query_start_loc")
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch as tensors, decodes before prefills; ``last_tokens`` keeps the batch's own order of rows."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last_tokens: Tensor
    decodes: Rows | None
    prefills: Rows | None

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        rows = [tensor for part in (self.decodes, self.prefills) if part for tensor in part.tensors()]
        return [self.token_ids, self.positions, self.slot_mapping, self.last_tokens, *rows]

    def holding(self, tensors: Iterable[Tensor]) -> Inputs:
        """The same batch with other tensors, in the order of :meth:`tensors`."""
        left = iter(tensors)
        tokens = (next(left), next(left), next(left), next(left))
        return Inputs(*tokens, *(rows and rows.holding(left) for rows in (self.decodes, self.prefills)))


class Stager:
    """Makes tensors of batches, on the host.

    Args:
        vocab_size: Token ids are taken modulo this.
        block_size: Tokens of a block of the paged caches.
        num_slots: Slots of the caches.
    """

    def __init__(self, vocab_size: int, block_size: int, num_slots: int) -> None:
        self._vocab_size, self._block_size, self._num_slots = vocab_size, block_size, num_slots

    def inputs(self, batch: Batch, max_context_len: int | None = None) -> Inputs:
        """The batch as tensors; ``max_context_len`` overrides the maximum of the rows."""
        row_of_token, positions = _positions(batch.query_lens, batch.context_lens)
        prefills = batch.query_lens > 1
        tokens = np.argsort(prefills[row_of_token], kind="stable")
        decoding, prompts = np.flatnonzero(~prefills), np.flatnonzero(prefills)
        ends = np.empty(len(batch.query_lens), np.int64)
        order = np.concatenate((decoding, prompts))
        ends[order] = np.cumsum(batch.query_lens[order]) - 1
        return Inputs(
            torch.from_numpy(batch.token_ids[tokens] % self._vocab_size),
            torch.from_numpy(np.maximum(positions[tokens], 0)),
            torch.from_numpy(batch.slot_mapping[tokens].astype(np.int64)),
            torch.from_numpy(ends),
            self._decodes(batch, decoding, max_context_len) if len(decoding) else None,
            self._prefills(batch, prompts, len(decoding)) if len(prompts) else None,
        )

    def _decodes(self, batch: Batch, rows: np.ndarray, max_context_len: int | None) -> Rows:
        contexts = batch.context_lens[rows].astype(np.int32)
        tables, starts = batch.block_tables, batch.slot_starts
        return Rows(
            slice(0, len(rows)),
            torch.from_numpy(contexts),
            max_context_len or int(contexts.max()),
            self._block_size,
            block_tables=None if tables is None else torch.from_numpy(tables[rows].astype(np.int32)),
            slot_starts=None if starts is None else torch.from_numpy(starts[rows].astype(np.int64)),
        )

    def _prefills(self, batch: Batch, rows: np.ndarray, first_token: int) -> Rows:
        lens, contexts = batch.query_lens[rows], batch.context_lens[rows].astype(np.int32)
        block_size, tables = self._block_size, batch.block_tables
        if tables is None:
            block_size, tables = self._consecutive(not_none(batch.slot_starts), batch.context_lens)
        return Rows(
            slice(first_token, first_token + int(lens.sum())),
            torch.from_numpy(contexts),
            int(contexts.max()),
            block_size,
            block_tables=torch.from_numpy(tables[rows].astype(np.int32)),
            query_start_loc=torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
            max_query_len=int(lens.max()),
        )

    def _consecutive(self, starts: np.ndarray, contexts: np.ndarray) -> tuple[int, np.ndarray]:
        """Contiguous rows as tables of consecutive blocks, of the largest size that divides the start of every row."""
        block_size = math.gcd(MOST_CONTIGUOUS_BLOCK, self._num_slots, *map(int, starts))
        blocks = np.arange(-(-int(contexts.max()) // block_size))
        return block_size, starts[:, None] // block_size + blocks
