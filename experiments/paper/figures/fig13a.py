"""Fig 13a: mean number of batched requests of ShareGPT, OPT-13B at 2 requests/s.

Set-up, from the paper: an hour of requests, measured from 600 to 3,600 s. The scale of the step time is fitted on
vLLM's value here (``fit``), and the three Orcas are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench import Bench
from ..comparison import Payload, compare
from ..fit import fit
from ..paper import FIG13A
from ..rows import Row, accuracy, ordered


def fig13a(bench: Bench) -> Payload:
    """The figure as a document."""
    payload = compare(FIG13A, bench, fit(bench))
    return payload | {"findings": findings(payload["rows"])}


def findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Accuracy of the Orcas, and the order of the series by batch size."""
    return [accuracy(rows, "Fig 13a"), ordered(rows)]
