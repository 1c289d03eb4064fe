"""Sources of requests: trace readers, synthesis, arrival processes, the catalogue of public traces."""

from __future__ import annotations

from .arrivals.arrivals import declared_max_tokens, poisson, workload
from .arrivals.pacing import Pacing, paced, users
from .arrivals.streams import stream
from .catalogue import catalogue, download
from .parsing.reading import Reading
from .readers.measured import Measured, MeasuredSummary, measured
from .readers.readers import (
    holds_load,
    is_frame,
    read,
    read_with_content,
    trace_of_frame,
)
from .stats.stats import mean_rate, stats
from .synthesis.fitting import draw, fit
from .synthesis.load import Load, read_load, write_load
from .synthesis.sosp23 import paper_workload
from .synthesis.summaries import sample, synthetic_pairs
from .types.pairs import LengthPairs
from .types.trace import Trace, check_fits, require_count
from .writers import check_target, write

__all__ = [
    "LengthPairs",
    "Load",
    "Measured",
    "MeasuredSummary",
    "Pacing",
    "Reading",
    "Trace",
    "catalogue",
    "check_fits",
    "check_target",
    "declared_max_tokens",
    "download",
    "draw",
    "fit",
    "holds_load",
    "is_frame",
    "mean_rate",
    "measured",
    "paced",
    "paper_workload",
    "poisson",
    "read",
    "read_load",
    "read_with_content",
    "require_count",
    "sample",
    "stats",
    "stream",
    "synthetic_pairs",
    "trace_of_frame",
    "users",
    "workload",
    "write",
    "write_load",
]
