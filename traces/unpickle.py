"""The SOSP'23 artifact's own format, a pickled list of (prompt_len, output_len), read without trust.

A pickle is a program for a small stack machine, and the usual one calls any function it is told
to. This one knows only the instructions that build lists, tuples and numbers; every other is
refused before it runs. Protocols 0 to 5.
"""

from __future__ import annotations

import io
import pickle
from os import PathLike

import numpy as np
import pyarrow as pa

from ..sim.errors import TraceError
from .table import Table, shown
from .trace import Rows

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
    """The pickle asks for more than lists, tuples and numbers."""


class _Harmless(dict):
    """The instructions that are known, by opcode; looking up another refuses it."""

    def __missing__(self, opcode: int) -> object:
        raise _Refused(_OPCODE_NAMES.get(opcode, f"opcode {opcode}"))


class _PlainUnpickler(pickle._Unpickler):
    # The interpreter in Python takes its instructions from a table, so that what is not in the
    # table cannot run; the one in C has no table, and can be made to reserve gigabytes besides.
    dispatch = _Harmless(
        (opcode, run) for opcode, run in pickle._Unpickler.dispatch.items() if _OPCODE_NAMES[opcode] in _HARMLESS
    )


def read_pickle(path: str | PathLike[str], data: bytes) -> Table:
    """The pairs pickled in ``data``.

    Raises:
        TraceError: not a pickle, damaged, or holding anything but a list of pairs of whole numbers.
    """
    remedy = "a pickled trace is a list of (prompt, output) in plain ints; save it as CSV instead"
    try:
        pairs = _PlainUnpickler(io.BytesIO(data)).load()
    except _Refused as refused:
        raise TraceError(path, None, "pickle instruction", str(refused), f"refused, never run: {remedy}") from None
    except Exception as error:  # a damaged pickle fails in any way its stack machine can
        raise TraceError(path, None, None, None, f"is no readable pickle ({type(error).__name__}): {remedy}") from None
    if type(pairs) is not list or not pairs:
        raise TraceError(path, None, "pickle", shown(pairs), remedy)
    for row, pair in enumerate(pairs):
        if not _is_pair(pair):
            raise TraceError(path, row + 1, "pair", shown(pair), f"must be two whole numbers: {remedy}", "row")
    lengths = np.array(pairs, dtype=np.int64)
    columns = {"prompt_tokens": pa.array(lengths[:, 0]), "output_tokens": pa.array(lengths[:, 1])}
    return Table(path, list(columns), columns, Rows())


def _is_pair(pair: object) -> bool:
    if type(pair) not in (tuple, list) or len(pair) != 2:
        return False
    return all(type(tokens) is int and abs(tokens) < 2**63 for tokens in pair)
