"""Operation tables: times of single kernels, in the columns that the collector of aiconfigurator writes.

A table is a file ``NAME.parquet``, ``.csv``, ``.csv.gz`` or ``.txt`` (comma-separated, as the collector writes it) below the folder of
a card. ``COLUMNS`` has the names and the columns. A row is one call; ``latency`` is in milliseconds.

In the published layout, ``.../<framework>/<version>/NAME.parquet``, the newest version of vLLM's kernels is read.
"""

from __future__ import annotations

import csv
import gzip
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from io import BytesIO, StringIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fragmeter.sim.output import frames as pd
from fragmeter.sim.types.errors import UserError

FRAMEWORK = "vllm"
_FRAMEWORKS = (FRAMEWORK, "sglang", "trtllm")
_ENDINGS = (".parquet", ".csv", ".csv.gz", ".txt")
#: Columns of the tables, with the least value of a whole number; None is text. All tables have ``latency``, too.
_ATTENTION = {
    "attn_dtype": None,
    "kv_cache_dtype": None,
    "batch_size": 1,
    "num_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
}
_LATENT = {"model": None, "gemm_type": None, "kv_cache_dtype": None, "num_heads": 1, "batch_size": 1}
_SPARSE = _LATENT | {"step": 0}
_EXPERTS = ("num_tokens", "topk", "num_experts", "moe_ep_size", "moe_tp_size", "hidden_size", "inter_size")
_DELTA = ("batch_size", "seq_len", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
COLUMNS: dict[str, dict[str, int | None]] = {
    "gemm_perf": {"gemm_dtype": None, "m": 1, "n": 1, "k": 1},
    "generation_attention_perf": _ATTENTION | {"step": 0},
    "context_attention_perf": _ATTENTION | {"isl": 1},
    "mla_generation_module_perf": _LATENT | {"step": 0},
    "mla_context_module_perf": _LATENT | {"isl": 1},
    "dsa_generation_module_perf": _SPARSE,
    "dsa_context_module_perf": _SPARSE | {"isl": 1},
    "msa_generation_module_perf": _SPARSE,
    "msa_context_module_perf": _SPARSE | {"isl": 1},
    **dict.fromkeys(("dsv4_csa_generation_module_perf", "dsv4_hca_generation_module_perf"), _SPARSE),
    **dict.fromkeys(("dsv4_csa_context_module_perf", "dsv4_hca_context_module_perf"), _SPARSE | {"isl": 1}),
    "mhc_module_perf": {"op_name": None, "num_tokens": 1, "hidden_size": 1},
    "gdn_perf": {"kernel_source": None, **dict.fromkeys(_DELTA, 1)},
    "scale_matrix_perf": {"m": 1, "k": 1},
    "custom_allreduce_perf": {"backend": None, "num_gpus": 2, "message_size": 1},
    "moe_perf": {"moe_dtype": None, "distribution": None, "kernel_source": None, **dict.fromkeys(_EXPERTS, 1)},
}
#: Read if a table has it.
_WINDOW = "window_size"
TIME = "latency"


class OperationTable(NamedTuple):
    """One table.

    Attributes:
        path: Below the folder of the tables, or below ``systems/data`` of the published ones.
        frame: Its rows; the columns of ``COLUMNS`` are checked.
    """

    path: str
    frame: pd.DataFrame

    def said(self, column: str) -> str | None:
        """The first value of a column that describes all rows, such as ``device``; None if the table has none."""
        return str(self.frame[column].iloc[0]) if column in self.frame and len(self.frame) else None


class OperationTables:
    """The tables of one card.

    Args:
        place: A folder, or the wheel of aiconfigurator-core.
        system: System of the published layout, e.g. ``h100_sxm``; None: the folder has the tables of one card.
        framework: The engine of which the tables have kernels.

    Raises:
        UserError: ``place`` is neither a folder nor a wheel.
    """

    def __init__(self, place: Path, system: str | None = None, framework: str = FRAMEWORK) -> None:
        self._framework = framework
        self.place, self._prefix = place, PurePosixPath(place.as_posix())
        self._paths = sorted(_files(place))
        self.system = system
        self._read: dict[str, OperationTable | None] = {}

    def has(self, system: str) -> bool:
        """Whether the tables are published ones, of this system among others."""
        return any(self._is_of(path, system) for path in self._paths)

    def read(self, name: str) -> OperationTable | None:
        """A table of ``COLUMNS``; None if there is none.

        Raises:
            UserError: There are several, or a row is wrong: the file, the line, the column, the value and the remedy.
        """
        if name not in self._read:
            self._read[name] = self._find(name)
        return self._read[name]

    def _find(self, name: str) -> OperationTable | None:
        found = [path for path in self._paths if self._is_table(path, name)]
        if not found:
            return None
        newest = max(found, key=_version)
        older = [path for path in found if _card(path) == _card(newest) and _version(path) < _version(newest)]
        others = [path for path in found if path not in (newest, *older)]
        if others:
            remedy = "name the folder of one card; in published tables that is systems/data/NAME"
            raise UserError(f"{self.place}: has {name} twice, {newest} and {others[0]}; {remedy}")
        full = self._prefix / newest
        frame = checked(self._content(newest), str(full), COLUMNS[name], TIME)
        return OperationTable(str(newest) if self.system is None else "/".join(full.parts[-5:]), frame)

    def _is_table(self, path: PurePosixPath, name: str) -> bool:
        if path.name not in {name + ending for ending in _ENDINGS}:
            return False
        if self.system is not None:
            return self._is_of(path, self.system)
        return not _is_versioned(path) or path.parts[-3] == self._framework

    def _is_of(self, path: PurePosixPath, system: str) -> bool:
        return (self._prefix / path).match(f"systems/data/{system}/*/{self._framework}/*/*.parquet")

    def _content(self, path: PurePosixPath) -> bytes:
        if self.place.is_dir():
            return Path(self.place, path).read_bytes()
        with zipfile.ZipFile(self.place) as wheel:
            return wheel.read(str(path))


def _files(place: Path) -> Iterator[PurePosixPath]:
    """Paths of all files below a folder or in a wheel."""
    if place.is_dir():
        files = (path for path in place.rglob("*") if path.is_file())
        yield from (PurePosixPath(path.relative_to(place).as_posix()) for path in files)
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as wheel:
            yield from map(PurePosixPath, wheel.namelist())
    else:
        remedy = "name a folder of tables, or the wheel: pip download aiconfigurator-core==0.12.0 --no-deps"
        raise UserError(f"{place}: is neither a folder nor a wheel; {remedy}")


def _is_versioned(path: PurePosixPath) -> bool:
    """Whether a path is in the published layout, ``.../<framework>/<version>/NAME``."""
    return len(path.parts) >= 3 and path.parts[-3] in _FRAMEWORKS


def _version(path: PurePosixPath) -> list[int]:
    return [int(part) for part in path.parts[-2].split(".") if part.isdecimal()] if _is_versioned(path) else []


def _card(path: PurePosixPath) -> tuple[str, ...]:
    """The folder of the card; in the published layout the one above kind, framework and version."""
    return path.parts[:-4] if _is_versioned(path) else path.parts[:-1]


def checked(content: bytes, path: str, columns: Mapping[str, int | None], time: str) -> pd.DataFrame:
    """A table as numbers and text.

    Args:
        path: Of the file, for its format and for errors.
        columns: Columns that it must have, with the least value of a whole number; None is text.
        time: Column of the times, positive numbers.

    Raises:
        UserError: The file cannot be read, lacks a column or has a wrong row; the first one is named.
    """
    frame = _frame(content, path)
    for column in (*columns, time):
        if column not in frame:
            raise UserError(f"{path}: {column} is missing; the columns are {', '.join(map(str, frame.columns))}")
    numbers = {name: least for name, least in columns.items() if least is not None}
    numbers |= {_WINDOW: 0} if _WINDOW in frame else {}
    values = {name: pd.to_numeric(frame[name], errors="coerce") for name in (*numbers, time)}
    good = {name: (values[name] >= least) & (values[name] % 1 == 0) for name, least in numbers.items()}
    good[time] = (values[time] > 0) & np.isfinite(values[time])
    wrong = ~np.logical_and.reduce(list(good.values()))
    if wrong.any():
        place = int(np.argmax(wrong))
        column = next(name for name, fits in good.items() if not fits.iloc[place])
        remedy = "must be a positive number" if column == time else f"must be a whole number from {numbers[column]}"
        unit, number = ("row", place + 1) if path.endswith(".parquet") else ("line", int(frame.index[place]))
        raise UserError(f"{path}, {unit} {number}: {column} = {_shown(frame[column].iloc[place])}: {remedy}")
    return frame.assign(**values)


def _shown(value: object) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)


def _frame(content: bytes, path: str) -> pd.DataFrame:
    """The rows of a file; those of text have the numbers of their lines as index."""
    try:
        if path.endswith(".parquet"):
            return pd.read_parquet(BytesIO(content))
        text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8-sig")
        lines = csv.reader(StringIO(text), strict=True)
        header = next(lines, [])
        rows = [(lines.line_num, row) for row in lines if any(row)]
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        form = "Parquet" if path.endswith(".parquet") else "comma-separated"
        raise UserError(f"{path}: is no {form} table: {' '.join(str(error).split())}") from None
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: has {len(row)} fields; the header has {len(header)}")
    return pd.DataFrame([row for _, row in rows], columns=header, index=[line for line, _ in rows], dtype=str)
