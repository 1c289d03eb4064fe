from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..cost.base import StepParts

#: Of the sources that it was compiled from.
SOURCE_SHA256: str

# An opaque handle.
class Replica: ...

_Costs: TypeAlias = tuple[
    Callable[[int, int, int, int], int],
    Callable[[int, int], tuple[int, int, int | None]],
    tuple[int, int, int, int, int] | None,
    StepParts | None,
]

def start(
    index: np.ndarray,
    arrival_ticks: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    ends_early: np.ndarray,
    limits: tuple[int, int, int, int, int],
    edges: tuple[int, ...],
    costs: _Costs,
    ahead: bool,
    unnamed_first: bool,
    /,
) -> Replica: ...
def serve(
    replica: Replica, until: int, rows: np.ndarray, residencies: np.ndarray, evictions: np.ndarray, /
) -> tuple[int, int, int, int, int, int, int]: ...

# Of a replica with a prefix cache: records since the last call (chunks, freed, hits, unstacked, touches, takes, growths);
# the free queue (end, head, passed, hit, pushed, holes, stack); and what sequences hold now (growths, takes).
def logs(replica: Replica, /) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
def queue(replica: Replica, /) -> tuple[int, int, int, int, int, bytes, bytes]: ...
def held(replica: Replica, /) -> tuple[bytes, bytes]: ...
