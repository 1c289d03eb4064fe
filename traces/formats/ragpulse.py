"""RAGPulse, JSON lines.

    {"timestamp": "27", "input_length": 3861, "output_length": 127, "session_id": "1758081660427-xa8rbsd2uco1",
     "hash_ids": {"sys_prompt": [8325, 8326], "passages_ids": [6123], "history": [], "web_search": [], "user_input": [23648]}}

``timestamp`` is in seconds, as text. ``hash_ids`` identify chunks of content, independent of their position. The chunk
sizes are in five other files. The reader uses those that lie beside the trace, under their upstream names:

    1_sys_prompt.jsonl ... 5_web_search.jsonl     {"hash_id": 8325, "token_length": 512}

If a chunk has an unknown size, or the chunks are longer than the prompt, only the prefix before that point is known.

Source: flashserve/RAGPulse, README.md and example/single_local_instance/preprocess_data.py (which takes the two values
of a line in that order and ignores their keys).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import fspath
from pathlib import Path
from typing import Any

from ...sim.types.errors import TraceError
from ...sim.types.user_files import json_value
from ..parsing import arrow as pa
from ..parsing.form import BLOCK_TOKENS, HASH_IDS, SECONDS, Form
from ..parsing.jsonl_format import sessions, whole_lists
from ..parsing.table import Column, Table, shown

_CHUNKS, _TALK = "hash_ids", "session_id"


def _chunks(table: Table, name: str, values: Sequence[Any]) -> Column:
    """The chunks of each prompt in prompt order, of all kinds."""
    for row, value in enumerate(values):
        if not isinstance(value, dict) or not all(isinstance(ids, list) for ids in value.values()):
            raise table.error(row, name, value, "must be an object of lists of chunks; correct the row")
    return whole_lists(table, name, [[chunk for ids in value.values() for chunk in ids] for value in values])


def _sized() -> Callable[[Table], Table]:
    """Returns a function that adds the chunk sizes; without sizes the contents of the prompts are unknown."""
    sizes: dict[int, int] | None = None

    def prepared(table: Table) -> Table:
        """The table with hash ids and their tokens; the size files are read once, at the first table."""
        nonlocal sizes
        if _CHUNKS not in table.columns:
            return table
        sizes = _sizes(Path(fspath(table.path)).parent) if sizes is None else sizes
        if not sizes:
            bare = {name: column for name, column in table.columns.items() if name not in (_CHUNKS, _TALK)}
            return Table(table.path, bare, table.lines, table.unit)
        prompts = table.columns.get("input_length", pa.nulls(len(table))).to_pylist()
        known = [
            _known(ids, sizes, prompt) for ids, prompt in zip(table.columns[_CHUNKS].to_pylist(), prompts, strict=True)
        ]
        kind = pa.list_(pa.int64())
        ids, tokens = (pa.array([part[place] for part in known], kind) for place in (0, 1))
        return table.having(**{HASH_IDS: ids, BLOCK_TOKENS: tokens})

    return prepared


def _known(ids: list[int], sizes: dict[int, int], prompt_tokens: float | None) -> tuple[list[int], list[int]]:
    """The known chunks and their tokens, up to the end of the prompt."""
    # A length that is missing or not a number is refused later, with the other columns.
    left, tokens = prompt_tokens if prompt_tokens and prompt_tokens > 0 else 0, []
    for chunk in ids:
        size = min(sizes.get(chunk, 0), int(left))
        if size < 1:
            break
        tokens.append(size)
        left -= size
    return ids[: len(tokens)], tokens


def _sizes(folder: Path) -> dict[int, int]:
    """Tokens of each chunk, from the files beside the trace."""
    sizes: dict[int, int] = {}
    for path in sorted(folder.glob("[1-5]_*.jsonl")):
        for line, text in enumerate(path.read_bytes().splitlines(), 1):
            try:
                chunk, tokens = json_value(text).values()
                sizes[int(chunk)] = int(tokens)
            except (ValueError, AttributeError, TypeError, OverflowError):
                remedy = "must be an object of a chunk and its tokens; fetch the file again"
                raise TraceError(path, line, "row", shown(text.decode(errors="replace")), remedy) from None
    return sizes


RAGPULSE = Form(
    "RAGPulse",
    {"timestamp": SECONDS},
    content={_CHUNKS: _chunks, _TALK: sessions},
    preparer=_sized,
)
