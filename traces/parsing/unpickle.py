"""The SOSP'23 artifact's own format, a pickled list of (prompt_len, output_len), read without trusting the file.

A pickle is a program for a small stack machine. Python's unpickler calls any function that the file names.
This unpickler supports only the instructions that build lists, tuples and numbers, and refuses every other
instruction before it runs. Protocols 0 to 5.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import NoReturn

import numpy as np

from ...sim.types.errors import TraceError
from . import arrow as pa
from .files import TraceFile
from .table import Table, shown

_HARMLESS = (
    "PROTO FRAME STOP MARK INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"
).split()
_OPCODE_NAMES = {
    value[0]: name
    for name, value in vars(pickle).items()
    if name.isupper() and isinstance(value, bytes) and len(value) == 1
}


class _Refused(Exception):
    """The pickle contains more than lists, tuples and numbers."""


class _Harmless(dict[int, Callable[..., None]]):
    """The supported instructions, by opcode; a lookup of another opcode raises ``_Refused``."""

    def __missing__(self, opcode: int) -> NoReturn:
        raise _Refused(_OPCODE_NAMES.get(opcode, f"opcode {opcode}"))


class _PlainUnpickler(pickle._Unpickler):
    # Python's pure-Python unpickler dispatches through this table, so an instruction that is not in the
    # table cannot run. The C unpickler has no table, and a file can make it allocate gigabytes.
    dispatch = _Harmless(
        (opcode, run) for opcode, run in pickle._Unpickler.dispatch.items() if _OPCODE_NAMES[opcode] in _HARMLESS
    )


Pair = tuple[int, object]
"""A row, from 1, and what it holds."""
_REMEDY = "a pickled trace is a list of (prompt, output) in plain ints; save it as CSV instead"


def pickle_pieces(file: TraceFile) -> Iterator[list[Pair]]:
    """The pairs in a pickle file.

    Raises:
        TraceError: The file is not a pickle, is damaged, or contains anything but a list.
    """
    path = file.path
    try:
        pairs = _PlainUnpickler(file.stream()).load()
    except _Refused as refused:
        raise TraceError(path, None, "pickle instruction", str(refused), f"refused, never run: {_REMEDY}") from None
    except TraceError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception in its stack machine
        raise TraceError(
            path, None, None, None, f"is not a readable pickle ({type(error).__name__}): {_REMEDY}"
        ) from None
    if type(pairs) is not list or not pairs:
        raise TraceError(path, None, "pickle", shown(pairs), _REMEDY)
    yield list(enumerate(pairs, 1))


def pickle_table(path: str | PathLike[str], batch: Sequence[Pair]) -> Table:
    """The lengths of some pairs.

    Raises:
        TraceError: An element is not a pair of whole numbers.
    """
    table = Table(path, {}, np.array([row for row, _ in batch]), "row")
    for place, (_, pair) in enumerate(batch):
        if not _is_pair(pair):
            raise table.error(place, "pair", pair, f"must be two whole numbers: {_REMEDY}")
    lengths = np.array([pair for _, pair in batch], dtype=np.int64)
    return table.having(prompt_tokens=pa.array(lengths[:, 0]), output_tokens=pa.array(lengths[:, 1]))


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    return all(type(tokens) is int and abs(tokens) < 2**63 for tokens in pair)
