from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..cost.paper import StepTerms
from .core import Parts
from .core_header import CoreLimits

#: Of the sources that it was compiled from.
SOURCE_SHA256: str

# An opaque handle.
class Replica: ...

_Costs: TypeAlias = tuple[
    Callable[[int, int, int, int], int],
    Callable[[int, int], tuple[int, int, int | None]],
    StepTerms | None,
    Parts | None,
]

def start(
    index: np.ndarray,
    arrival_ticks: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    ends_early: np.ndarray,
    limits: CoreLimits,
    edges: tuple[int, ...],
    costs: _Costs,
    ahead: bool,
    tables: tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int] | tuple[str] | None,
    routed: bool,
    looked: bool,
    /,
) -> Replica: ...
def serve(
    replica: Replica,
    until: int,
    rows: np.ndarray,
    residencies: np.ndarray,
    evictions: np.ndarray,
    chunks: np.ndarray,
    /,
) -> tuple[int, int, int, int, int, int, int, int]: ...

# Of a replica behind a router: a request arrives, no more do; status, time and waiting requests when all before a tick has
# happened; what a router reads (``Seen``: requests, outstanding tokens, KV tokens); and all records.
def send(
    replica: Replica,
    ticks: int,
    prompt_tokens: int,
    output_tokens: int,
    ends_early: bool,
    names: tuple[int, ...] | None,
    /,
) -> None: ...
def close(replica: Replica, /) -> None: ...
def advance(replica: Replica, until: int, /) -> tuple[int, int, int]: ...
def look(replica: Replica, now: int, /) -> tuple[int, int, int]: ...
def records(replica: Replica, /) -> tuple[bytes, bytes, bytes, bytes]: ...

# Of a replica with a prefix cache: records since the last call (lives without a hit, lives, gaps, changes, look-ups; ``CoreResidency``), and
# evictions so far. The records are to be copied before the next call.
def logs(replica: Replica, /) -> tuple[memoryview, memoryview, memoryview, memoryview, memoryview, int]: ...

# Of a replica that is looked at: what is decided and not taken (whether it is a rest, start, end, steps, and ticks of the first step,
# of the second, and by which each later one is longer); and its blocks (``CoreEngine.look``).
def kept(replica: Replica, /) -> tuple[bool, int, int, int, int, int, int] | None: ...
def blocks(
    replica: Replica,
    steps: int,
    codes: tuple[int, ...],
    shown: np.ndarray,
    bucket: np.ndarray,
    sequence: np.ndarray,
    live_slots: np.ndarray,
    references: np.ndarray,
    census: np.ndarray,
    free_runs: np.ndarray,
    /,
) -> tuple[int, int, int]: ...

# Passes over int64 columns (``_core_history.c`` has the columns). A state carries a pass from one call to the next.
# ``moments``: sums of blocks taken in rows. ``date``: times of moments. ``count``: the sum of the values that are counted, in two
# halves of 64 bits.
def moments(columns: tuple[np.ndarray, ...], size: int, state: np.ndarray, found: np.ndarray, /) -> None: ...
def date(columns: tuple[np.ndarray, ...], end: int, moments: np.ndarray, found: np.ndarray, /) -> None: ...
def count(
    values: np.ndarray, blocks: np.ndarray, bounds: np.ndarray, counts: np.ndarray, widths: np.ndarray, /
) -> tuple[int, int]: ...
