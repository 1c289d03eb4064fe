"""What the client of ``vllm bench serve --save-detailed`` saw of each request, beside the trace of the same file.

Source: vllm-project/vllm, vllm/benchmarks/serve.py: ``ttfts`` and ``itls`` are in seconds, from when the client sent
a request (behind its own ``--max-concurrency``), and an answer is over with its last gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Any

import numpy as np

from ..sim.errors import TraceError
from .files import TraceFile
from .formats.bench_serve import bench_list, bench_result
from .reading import MOST_INFLATED_BYTES
from .table import shown
from .trace import Trace

TTFTS, GAPS = "ttfts", "itls"
#: Beyond any benchmark, in seconds or in requests.
_MOST = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A benchmark of a server; arrays are in the order of its trace, and times in seconds.

    Attributes:
        ttft_s: Float64 [n].
        gaps_s: Float64 [gaps], the inter-token latencies of all requests, one request after the other.
        num_gaps: int64 [n], how many of those each has.
        duration_s: From the client's start to its end, None where the file is silent.
        request_rate: Requests/s that were asked for, inf for all at once; None where the file is silent.
        burstiness: Of the gaps between them.
        max_concurrency: Most requests that the client let be under way, None for any number.
        model_id: Name of the model, None where the file is silent.
    """

    ttft_s: np.ndarray
    gaps_s: np.ndarray
    num_gaps: np.ndarray
    duration_s: float | None
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    model_id: str | None

    @property
    def e2el_s(self) -> np.ndarray:
        """End-to-end latencies, float64 [n]: the first token, and all gaps after it."""
        sums = np.bincount(np.repeat(np.arange(len(self.num_gaps)), self.num_gaps), self.gaps_s, len(self.num_gaps))
        return self.ttft_s + sums


def measured(path: str | PathLike[str], trace: Trace) -> Measured:
    """What a result of vllm bench serve says beside its trace.

    Args:
        trace: Read from the same file: requests that failed are in neither.

    Raises:
        TraceError: It is no such result, was saved without details, or holds a time that cannot be.
    """
    file = TraceFile(path, MOST_INFLATED_BYTES)
    result = bench_result(file)
    if "input_lens" not in result:
        raise TraceError(path, None, "input_lens", None, "is missing; run vllm bench serve with --save-detailed")
    rows = (trace.rows.lines - 1).tolist()
    ttfts, gaps = ([bench_list(file, result, name)[row] for row in rows] for name in (TTFTS, GAPS))
    for row, ttft, itl in zip(rows, ttfts, gaps, strict=True):
        _require_time(file, row, TTFTS, ttft)
        if not isinstance(itl, list):
            remedy = "must be a list of seconds; fetch the file again"
            raise TraceError(path, row + 1, GAPS, shown(itl), remedy, "row")
        for gap in itl:
            _require_time(file, row, GAPS, gap)
    if not any(ttfts):
        remedy = "is 0 throughout: the answers were not streamed; benchmark with streaming"
        raise TraceError(path, None, TTFTS, 0, remedy)
    limit = _number(file, result, "max_concurrency", None)
    return Measured(
        ttft_s=np.array(ttfts, dtype=np.float64),
        gaps_s=np.array([gap for itl in gaps for gap in itl], dtype=np.float64),
        num_gaps=np.array([len(itl) for itl in gaps], dtype=np.int64),
        duration_s=_number(file, result, "duration", None),
        request_rate=inf if result.get("request_rate") == "inf" else _number(file, result, "request_rate", None),
        burstiness=_number(file, result, "burstiness", 1.0),
        max_concurrency=None if limit is None else int(limit),
        model_id=result["model_id"] if isinstance(result.get("model_id"), str) else None,
    )


def _require_time(file: TraceFile, row: int, name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        remedy = "must be seconds, 0 or more; correct the request or drop it"
        raise TraceError(file.path, row + 1, name, shown(value), remedy, "row")


def _number(file: TraceFile, result: Mapping[str, Any], name: str, missing: float | None) -> float | None:
    value = result.get(name)
    if value is None:
        return missing
    if type(value) not in (int, float) or not 0 < value < _MOST:
        raise TraceError(file.path, None, name, shown(value), "must be a number above 0; fetch the file again")
    return value
