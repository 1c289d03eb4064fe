"""Fig 2: contents of the KV pool under four policies, OPT-13B on ShareGPT at 4 requests/s.

Set-up, from the paper: 900 s of requests, in percent of the pool, means over the iterations from 300 to 900 s. All 13
printed values are predicted: the scale of the step time is fitted on Fig 13a's vLLM value. Single draws of lengths move the
values by points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench import Bench
from ..comparison import Payload, compare
from ..fit import fit
from ..grades import POINTS
from ..paper import FIG2
from ..rows import Row, accuracy, ordered


def fig2(bench: Bench) -> Payload:
    """The figure as a document."""
    payload = compare(FIG2, bench, fit(bench))
    return payload | {"findings": findings(payload["rows"])}


def findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Accuracy of the bars, and the order of the systems by share of the pool in use."""
    used = [row for row in rows if row["metric"] == "token_states_pct"]
    return [accuracy(rows, "Fig 2", POINTS), ordered(used, "token states")]
