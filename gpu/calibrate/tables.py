"""Published kernel times: the tables of ``aiconfigurator-core`` (NVIDIA, Apache-2.0), from its wheel or a folder.

Their path is ``systems/data/<system>/<kind>/<framework>/<version>/<table>.parquet``. A row is one call, with ``latency``
in milliseconds. Only bf16 rows are read; rows of other number formats and of sliding windows are skipped.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from ...sim.cost.operations import OpName
from ...sim.output import frames as pd
from ...sim.types.errors import UserError
from .fitting import Points

FRAMEWORK = "vllm"
_PLACES: dict[OpName, tuple[str, str]] = {
    "gemm": ("gemm", "gemm_perf"),
    "decode_attention": ("attention", "generation_attention_perf"),
    "prefill_attention": ("attention", "context_attention_perf"),
}


class Table(NamedTuple):
    """The rows of one table that describe an operation.

    Attributes:
        path: Path below ``systems/data``.
        device: Device name in the rows.
        rows: Number of rows of the whole table, including other formats and windows.
    """

    path: str
    device: str
    rows: int
    points: Points


def read(tables: Path, system: str, operation: OpName) -> Table:
    """The newest table of vLLM's kernels for an operation on a system, e.g. ``h100_sxm``.

    Raises:
        UserError: There is no table, or it lacks a column.
    """
    kind, name = _PLACES[operation]
    found = [
        path for path in _files(tables) if path.match(f"systems/data/{system}/{kind}/{FRAMEWORK}/*/{name}.parquet")
    ]
    if not found:
        raise UserError(f"{tables}: has no {name} of {FRAMEWORK} for {system}; give the wheel or its unpacked folder")
    path = max(found, key=lambda path: [int(part) for part in path.parts[-2].split(".") if part.isdecimal()])
    frame = pd.read_parquet(BytesIO(_bytes(tables, path)))
    try:
        points = _points(operation, frame)
    except AttributeError as error:
        raise UserError(f"{path}: {error.name} is missing") from None
    return Table("/".join(path.parts[-5:]), str(frame.device.iloc[0]), len(frame), points)


def _files(tables: Path) -> Iterator[PurePosixPath]:
    if tables.is_dir():
        yield from (PurePosixPath(path.as_posix()) for path in tables.rglob("*.parquet"))
    elif zipfile.is_zipfile(tables):
        with zipfile.ZipFile(tables) as wheel:
            yield from map(PurePosixPath, wheel.namelist())
    else:
        raise UserError(
            f"{tables}: is neither a folder nor a wheel; pip download aiconfigurator-core==0.12.0 --no-deps"
        )


def _bytes(tables: Path, path: PurePosixPath) -> bytes:
    if tables.is_dir():
        return Path(path).read_bytes()
    with zipfile.ZipFile(tables) as wheel:
        return wheel.read(str(path))


def _points(operation: OpName, frame: pd.DataFrame) -> Points:
    """The bf16 rows as the arguments of an operation."""
    if operation == "gemm":
        frame = frame[frame.gemm_dtype == "bfloat16"]
        return Points(operation, _floats(m=frame.m, n=frame.n, k=frame.k), _us(frame))
    frame = frame[(frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == "bfloat16")]
    if "window_size" in frame:
        frame = frame[frame.window_size == 0]
    heads = {"heads": frame.num_heads, "kv_heads": frame.num_key_value_heads, "head_dim": frame.head_dim}
    if operation == "decode_attention":
        # The context has ``step`` tokens before the decoded one.
        return Points(
            operation,
            _floats(batch=frame.batch_size, context_tokens=frame.batch_size * (frame.step + 1), **heads),
            _us(frame),
        )
    tokens = frame.batch_size * frame.isl
    counts = _floats(tokens=tokens, pairs=tokens * (frame.isl + 1) / 2, context_tokens=tokens, **heads)
    return Points(operation, counts, _us(frame))


def _floats(**columns: pd.Series) -> dict[str, np.ndarray]:
    return {name: column.to_numpy(float) for name, column in columns.items()}


def _us(frame: pd.DataFrame) -> np.ndarray:
    return frame.latency.to_numpy(float) * 1e3
