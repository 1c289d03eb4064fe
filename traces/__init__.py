"""Where requests come from: readers, synthesis, arrival processes, the catalogue."""

from __future__ import annotations

from . import catalogue, download
from .arrivals import poisson, told_max_tokens, workload
from .fitting import draw, fit
from .load import Load, read_load, write_load
from .measured import Measured, measured
from .pacing import Pacing, paced, users
from .pairs import LengthPairs
from .readers import HashedTrace, holds_load, read, read_hashed, read_with_content
from .reading import Reading
from .sosp23 import paper_workload
from .stats import stats
from .streams import stream
from .synthesis import sample, synthetic_pairs
from .trace import Trace, check_fits
from .writers import check_target, write

__all__ = [
    "HashedTrace",
    "LengthPairs",
    "Load",
    "Measured",
    "Pacing",
    "Reading",
    "Trace",
    "catalogue",
    "check_fits",
    "check_target",
    "download",
    "draw",
    "fit",
    "holds_load",
    "measured",
    "paced",
    "paper_workload",
    "poisson",
    "read",
    "read_hashed",
    "read_load",
    "read_with_content",
    "sample",
    "stats",
    "stream",
    "synthetic_pairs",
    "told_max_tokens",
    "users",
    "workload",
    "write",
    "write_load",
]
