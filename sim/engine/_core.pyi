from collections.abc import Callable

import numpy as np

#: Of the source that it was compiled from.
SOURCE_SHA256: str

# An opaque handle.
class Replica: ...

def start(
    index: np.ndarray,
    arrival_ticks: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    limits: tuple[int, int, int, int, int],
    edges: tuple[int, ...],
    step_ticks: Callable[[int, int, int, int], int],
    decode_line: Callable[[int, int], tuple[int, int, int | None]],
    terms: tuple[int, int, int, int, int] | None,
    /,
) -> Replica: ...
def serve(
    replica: Replica, until: int, rows: np.ndarray, residencies: np.ndarray, evictions: np.ndarray, /
) -> tuple[int, int, int, int, int, int, int]: ...
