"""Prompt contents, block by block: lists of ids, and the number of tokens of each block."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from . import arrow as pa
from .form import BLOCK_TOKENS, HASH_IDS, MOONCAKE_BLOCK_TOKENS, VLLM_BLOCK_TOKENS
from .jsonl_format import IN_64_BITS, MOST
from .table import Table


def whole_pieces(table: Table, prompt_tokens: np.ndarray, block_tokens: int) -> dict[str, np.ndarray]:
    """Full blocks, except for the last block of each prompt, which has the remaining tokens.

    Returns:
        ``pieces`` (int64 [n], number of ids of each request), ``ids`` and ``tokens`` (int64, concatenated over requests).

    Raises:
        TraceError: The number of ids of a request differs from the number of blocks of its prompt; names the request.
    """
    pieces, ids = _lists(table, HASH_IDS)
    needed = -(-prompt_tokens // block_tokens)
    wrong = pieces != needed
    if wrong.any():
        row = int(wrong.argmax())
        remedy = (
            f"{pieces[row]} ids where {prompt_tokens[row]} tokens of prompt are {needed[row]} blocks of {block_tokens};"
            " correct the row, or give block_tokens"
        )
        raise table.error(row, HASH_IDS, table.columns[HASH_IDS][row].as_py(), remedy)
    tokens = np.full(len(ids), block_tokens)
    tokens[np.cumsum(pieces) - 1] = prompt_tokens - (needed - 1) * block_tokens
    return {"pieces": pieces, "ids": ids, "tokens": tokens}


def sized_pieces(table: Table, prompt_tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of the sizes in the file; they may cover only a prefix of the prompt.

    Returns:
        As ``whole_pieces``.

    Raises:
        TraceError: The sizes of a request do not fit its ids or its prompt.
    """
    (pieces, ids), (sizes, tokens) = _lists(table, HASH_IDS), _lists(table, BLOCK_TOKENS)
    request = np.repeat(np.arange(len(sizes)), sizes)
    low = tokens < 1
    if low.any():
        first = int(low.argmax())
        remedy = f"must hold whole numbers from 1 to {2**63 - 1}; correct the row"
        raise table.error(int(request[first]), BLOCK_TOKENS, int(tokens[first]), remedy)
    # Sizes are capped above the longest prompt, so that the sum fits into 64 bits.
    before = np.concatenate([[0], np.cumsum(np.minimum(tokens, 2**31))])
    totals = np.diff(before[np.concatenate([[0], np.cumsum(sizes)])])
    for wrong, remedy in (
        (pieces != sizes, "must have a value for each of the {pieces} hash_ids; correct the row"),
        (totals > prompt_tokens, "adds up to {total}, more than the prompt's {prompt} tokens; correct the row"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            found = table.columns[BLOCK_TOKENS][row].as_py()
            message = remedy.format(pieces=pieces[row], total=sum(found), prompt=prompt_tokens[row])
            raise table.error(row, BLOCK_TOKENS, found, message)
    return {"pieces": pieces, "ids": ids, "tokens": tokens}


def likely_block_tokens(counts: Iterable[tuple[int, int]]) -> int:
    """The likely block size in tokens: the one of the two known sizes that more prompts match in their number of ids.

    Args:
        counts: Number of ids and prompt tokens of some requests.
    """
    fits = {MOONCAKE_BLOCK_TOKENS: 0, VLLM_BLOCK_TOKENS: 0}
    for ids, prompt_tokens in counts:
        for size in fits:
            fits[size] += ids == -(-prompt_tokens // size)
    return max(fits, key=fits.__getitem__)


def _lists(table: Table, field: str) -> tuple[np.ndarray, np.ndarray]:
    """The length of the list in each row, and all numbers concatenated; int64."""
    column = table.columns[field]
    if not pa.types.is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        raise table.error(0, field, column[0].as_py(), "must be a list, one whole number a block; correct the row")
    missing = pa.as_numpy(column.is_null())
    table.refuse(missing, field, np.full(len(missing), None), "is missing; give a list, one whole number a block")
    lengths = pa.as_numpy(pa.compute.list_value_length(column)).astype(np.int64)
    numbers = pa.compute.list_flatten(column)
    wrong = pa.as_numpy(numbers.is_null())
    if pa.types.is_uint64(numbers.type):
        wrong |= pa.as_numpy(numbers.fill_null(0)) > MOST
    if wrong.any():
        row = int(np.repeat(np.arange(len(lengths)), lengths)[wrong.argmax()])
        raise table.error(row, field, column[row].as_py(), IN_64_BITS)
    return lengths, pa.as_numpy(numbers.cast(pa.int64()))
