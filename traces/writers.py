"""Writes a trace to a file in our own columns."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..sim.output import frames as pd
from ..sim.output.files import require_writable_file, write_whole
from ..sim.types.errors import SettingError
from ..sim.workload.content import NO_SESSION, PromptContent
from ..sim.workload.dialogue import NO_PARENT, Dialogue
from .parsing import arrow as pa
from .parsing.times import to_seconds
from .types.trace import Trace

#: Values of one column of the file.
Values: TypeAlias = "np.ndarray | pd.Series | list[np.ndarray]"
#: Columns with a list in each row.
_NOT_IN_CSV = ("hash_ids", "block_tokens")


def write(trace: Trace, path: str | PathLike[str]) -> None:
    """Write ``trace`` as CSV, JSON lines (both also ``.gz`` and ``.zst``) or Parquet, by the suffix of ``path``.

    The write is atomic, and the same trace gives the same bytes. Arrivals are
    written in seconds, to the nanosecond; sessions as numbers. CSV cannot hold ``hash_ids``.

    Raises:
        SettingError: The suffix is unknown.
        UserError: The file cannot be written.
    """
    write_whole(path, _form(path)(_frame(trace)))


def check_target(path: str | PathLike[str]) -> None:
    """Refuse a path that ``write`` cannot write; call it before reading a trace.

    Raises:
        SettingError: The suffix is unknown.
        UserError: The file cannot be written.
    """
    _form(path)
    require_writable_file(path)


def _form(path: str | PathLike[str]) -> Callable[[pd.DataFrame], bytes]:
    target = Path(path)
    form = next((form for ending, form in _FORMS.items() if target.name.endswith(ending)), None)
    if form is None:
        raise SettingError("path", str(target), f"must end in one of {', '.join(_FORMS)}")
    return form


def _frame(trace: Trace) -> pd.DataFrame:
    columns: dict[str, Values] = {"prompt_tokens": trace.prompt_tokens, "output_tokens": trace.output_tokens}
    if trace.arrival_ticks is not None:
        columns = {"arrival_s": to_seconds(trace.arrival_ticks), **columns}
    if trace.delay_ticks is not None:
        columns["delay_s"] = to_seconds(trace.delay_ticks)
    if trace.max_tokens is not None:
        columns["max_tokens"] = trace.max_tokens
    if trace.n is not None:
        columns["n"] = trace.n
    if trace.priority is not None:
        columns["priority"] = trace.priority
    if trace.ignore_eos is not None:
        columns["ignore_eos"] = trace.ignore_eos
    if trace.dialogue is not None:
        columns |= _dialogue(trace.dialogue)
    if trace.content is not None:
        columns |= _content(trace.content)
    return pd.DataFrame(columns)


def _content(content: PromptContent) -> dict[str, Values]:
    columns: dict[str, Values] = {}
    if content.session_id is not None:
        sessions = pd.Series(content.session_id, dtype="Int64")
        columns["session_id"] = sessions.where(content.session_id != NO_SESSION)
    if len(content.ids):
        ends = content.offsets[1:-1]
        columns |= {
            name: np.split(column, ends)
            for name, column in (("hash_ids", content.ids), ("block_tokens", content.tokens))
        }
    return columns


def _dialogue(dialogue: Dialogue) -> dict[str, pd.Series]:
    child, back = dialogue.parent != NO_PARENT, dialogue.rolls_back
    tokens = pd.Series(dialogue.parent_tokens, dtype="Int64")
    return {
        "parent": pd.Series(dialogue.parent, dtype="Int64").where(child),
        "fork_at": tokens.where(child & ~back),
        "truncate_to": tokens.where(back),
    }


def dropped_columns(trace: Trace, path: str | PathLike[str]) -> list[str]:
    """Columns of ``trace`` that a file of this suffix cannot hold."""
    return [name for name in _frame(trace) if name in _NOT_IN_CSV] if ".csv" in Path(path).suffixes else []


def _csv(frame: pd.DataFrame) -> bytes:
    frame = frame.drop(columns=[*_NOT_IN_CSV], errors="ignore")
    return frame.to_csv(index=False, lineterminator="\n").encode()


def _jsonl(frame: pd.DataFrame) -> bytes:
    return frame.to_json(orient="records", lines=True, double_precision=9).encode()


def _parquet(frame: pd.DataFrame) -> bytes:
    return frame.to_parquet(engine="pyarrow", index=False)


def _zipped(form: Callable[[pd.DataFrame], bytes]) -> Callable[[pd.DataFrame], bytes]:
    return lambda frame: gzip.compress(form(frame), mtime=0)


def _squeezed(form: Callable[[pd.DataFrame], bytes]) -> Callable[[pd.DataFrame], bytes]:
    return lambda frame: pa.compress(form(frame), codec="zstd", asbytes=True)


_FORMS = {
    ending + more: wrap(form)
    for ending, form in {".csv": _csv, ".jsonl": _jsonl}.items()
    for more, wrap in {"": lambda form: form, ".gz": _zipped, ".zst": _squeezed}.items()
} | {".parquet": _parquet}
