from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..cost.paper import StepTerms
from .core import Parts
from .core_header import CoreLimits
from .observer import MapLimits

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
def logs(replica: Replica, /) -> tuple[*tuple[memoryview, ...], int]: ...
def kept(replica: Replica, /) -> memoryview: ...

# Of a replica with tables: records a block map from now on, of some blocks, int64. Then the stride of its grid, and as int32 and records of
# ``look_type`` the look of each time of the grid and the looks, in memory of the replica.
def record(replica: Replica, shown: np.ndarray, limits: MapLimits, /) -> None: ...
def recorded(replica: Replica, /) -> tuple[int, memoryview, memoryview]: ...

# Passes over int64 columns (``_core_history.c`` has the columns). A state carries a pass from one call to the next.
# ``moments``: sums of blocks taken in rows. ``date``: times of moments. ``count``: the sum of the values that are counted, in two
# halves of 64 bits.
def moments(columns: tuple[np.ndarray, ...], size: int, state: np.ndarray, found: np.ndarray, /) -> None: ...
def date(columns: tuple[np.ndarray, ...], end: int, moments: np.ndarray, found: np.ndarray, /) -> None: ...
def count(
    values: np.ndarray, blocks: np.ndarray, bounds: np.ndarray, counts: np.ndarray, widths: np.ndarray, /
) -> tuple[int, int]: ...
