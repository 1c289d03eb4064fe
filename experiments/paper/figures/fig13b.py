"""Fig 13b: mean number of batched requests of Alpaca at 30 requests/s.

Set-up, from the paper: as Fig 13a (OPT-13B, an hour of requests, measured from 600 to 3,600 s) with Alpaca. Its contexts
are a sixth of ShareGPT's, and a step of many short sequences takes less than Fig 1's line gives. The scale of the step
time is fitted on ShareGPT, on Fig 13a's vLLM value, and every value here is predicted. vLLM's value without the context
is reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....sim.types.optional import not_none
from ..bench import Bench, Case
from ..comparison import Payload, compare
from ..fit import FITTED_ON, METRIC, fitted_before
from ..paper import FIG13B, SERIES
from ..rows import accuracy, ordered


def fig13b(bench: Bench) -> Payload:
    """The figure as a document."""
    alpaca = Bench(bench.source.alpaca)
    payload = compare(FIG13B, alpaca, fitted_before(), scales=())
    findings = [accuracy(payload["rows"], "Batched requests"), ordered(payload["rows"])]
    return payload | {"findings": findings, "remarks": [*_without_context(alpaca), *payload["remarks"]]}


def _without_context(alpaca: Bench) -> Iterator[str]:
    plain = fitted_before(by_context=False)
    seed = alpaca.source.seeds[0]
    case = Case(FIG13B, seed, SERIES[FITTED_ON], plain.scale, plain.by_context)
    found = alpaca.measure([case], "without context")[0].values[METRIC]
    published = not_none(FIG13B.published()[FITTED_ON, METRIC])
    yield (
        f"With steps that know no context (s = {plain.scale:g}, seed {seed}), {FITTED_ON} would batch {found:.1f}"
        f" requests, {found / published - 1:+.0%}: Alpaca's short sequences would each take as long as Fig 1's."
    )
