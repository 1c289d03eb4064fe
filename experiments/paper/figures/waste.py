"""The waste table: one trace, one pool, one row per policy of the paper."""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from typing import Any

from ....sim.metrics.views import SLOTS_VIEW
from ....sim.types.optional import not_none
from ..bench import OVER_THE_RUN, Bench, Case
from ..comparison import Payload, compared_rows, pool_text
from ..constants import STEP, scale
from ..fit import ON, Fit
from ..paper import FIG2, SERIES
from ..published import published_fig2
from ..rows import Row, as_finding

STATIC, FASTERTRANSFORMER, ORCA, ORCA_MAX, ORACLE, VLLM = (
    "Static (naive)", "FasterTransformer", "Orca", "Orca (Max)", "Orca (Oracle)", "vLLM",
)  # fmt: skip
#: Labels of the policies in the table.
NAMES = {
    "static": STATIC,
    "fastertransformer": FASTERTRANSFORMER,
    "orca": ORCA,
    **{policy: name for name, policy in SERIES.items()},
}
#: Columns of the table: the paper's view, the slots one by one, and those beside them.
METRICS = (
    *FIG2.metrics,
    *(f"{bucket}_pct" for bucket in SLOTS_VIEW.categories),
    "batched_requests",
    *OVER_THE_RUN,
)
#: Share of the pool, in percent, below which a kind of waste counts as eliminated.
_CURED_PCT = 1


def waste_table(bench: Bench, fit: Fit) -> Payload:
    """Fig 2's workload under every policy of the paper, to the last request.

    Percentages and batches are means over iterations in Fig 2's window, and over the seeds of the source: those of Fig 2's systems
    are the values of Fig 2. Throughput is over the whole run. Each value carries its change with the seed and with 1 % of step
    time.
    """
    seeds = bench.source.seeds
    systems = {name: policy for policy, name in NAMES.items()}
    rows = compared_rows(FIG2, bench, fit, systems, METRICS, to_the_end=True)
    one = bench.measure([Case(FIG2, seeds[0], systems[VLLM], fit.scale, fit.by_context, to_the_end=True)], "pool")[0]
    return {
        "figure": "waste",
        "workload": bench.source.description(FIG2),
        "rows": rows,
        "num_blocks": one.num_blocks,
        "block_size": one.block_size,
        "step_scale": fit.scale,
        "fit": fit.describe(),
        "constants": [*STEP, scale(fit.scale, ON)],
        "seeds": list(seeds),
        "findings": findings(rows),
        "basis": [pool_text(one), fit.description()],
    }


def by_policy(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows with one line per policy, for a table or a picture: ``policy`` and every metric."""
    lines: dict[str, dict[str, Any]] = {}
    for cells in rows:
        line = lines.setdefault(cells["series"], {"policy": cells["series"]})
        line[cells["metric"]] = cells["simulated"]
    return list(lines.values())


def findings(rows: list[Row]) -> list[dict[str, Any]]:
    """Findings about these systems.

    The text of a finding has the numbers that decide it, for a pass and for a fail.
    """
    at = {(cells["series"], cells["metric"]): cells["simulated"] for cells in rows}
    found = (_idle_slots(at), _over_estimates(at), _overhead_left(at), _paging(at), _throughput(at), _two_orcas(at))
    return [as_finding(text, bool(passes)) for text, passes in found]


Values = dict[tuple[str, str], float]


def _of(at: Values, series: str, *buckets: str) -> float:
    """Percent of the pool in some buckets, or in a category of the paper's view."""
    return fsum(at[series, f"{bucket}_pct"] for bucket in buckets)


def _idle_slots(at: Values) -> tuple[str, bool]:
    static, faster, orca = (_of(at, name, "finished_hold") for name in (STATIC, FASTERTRANSFORMER, ORCA_MAX))
    return (
        "Continuous batching removes one part of internal, slots of ended sequences and padding:"
        f" {static:.1f} % of the pool ({STATIC}) and {faster:.1f} % ({FASTERTRANSFORMER}), {orca:.1f} % ({ORCA_MAX}); limit:"
        f" below {_CURED_PCT} %.",
        orca < _CURED_PCT < min(static, faster),
    )


def _over_estimates(at: Values) -> tuple[str, bool]:
    (static, orca), (below, never) = (
        [_of(at, name, share) for name in (STATIC, ORCA_MAX)] for share in ("internal", "over_estimate")
    )
    return (
        f"It leaves the other part, slots for output that never comes: of internal's {static:.1f} % ({STATIC}) these are"
        f" {below:.1f} points, of {orca:.1f} % ({ORCA_MAX}) {never:.1f} points.",
        never > _CURED_PCT and orca < static,
    )


_LOST = ("round_up", "stranded")


def _overhead_left(at: Values) -> tuple[str, bool]:
    reserved, lost = _of(at, ORACLE, "reservation"), _of(at, ORACLE, *_LOST)
    others = _of(at, ORACLE, "external_and_others")
    return (
        f"Two kinds stay even where every output length is known beforehand: reservation {reserved:.1f} %, and {lost:.1f}"
        f" points of {others:.1f} % external & others, lost to rounding up and to gaps ({ORACLE}); limit: each above"
        f" {_CURED_PCT} %.",
        min(reserved, lost) >= _CURED_PCT,
    )


def _paging(at: Values) -> tuple[str, bool]:
    reserved, internal, others = (_of(at, VLLM, name) for name in ("reservation", "internal", "external_and_others"))
    lost = _of(at, VLLM, *_LOST)
    allowed = 100 - not_none(published_fig2()[VLLM, "token_states_pct"])
    wasted = reserved + internal + lost
    return (
        f"Paging leaves little: reservation {reserved:.1f} %, internal {internal:.2f} %, and {lost:.1f} points of {others:.1f} %"
        f" external & others that are not free ({VLLM}), {wasted:.1f} % together, of {allowed:.1f} % that the paper leaves for"
        " all that is not token states.",
        wasted <= allowed,
    )


def _throughput(at: Values) -> tuple[str, bool]:
    names = (STATIC, ORCA_MAX, ORACLE, VLLM)
    used, rates = ([at[name, metric] for name in names] for metric in ("token_states_pct", "output_tokens_per_s"))
    others = zip(names[1:], used[1:], rates[1:], strict=True)
    rest = ", ".join(f"{name} {share:.1f} % and {rate / rates[0]:.1f}x" for name, share, rate in others)
    return (
        f"Less waste is more throughput, in token states and output tokens/s: {STATIC} {used[0]:.1f} % and"
        f" {rates[0]:,.0f}, {rest}.",
        all(low < high for values in (used, rates) for low, high in pairwise(values)),
    )


def _two_orcas(at: Values) -> tuple[str, bool]:
    metrics = ("reservation_pct", "internal_pct", "batched_requests")
    own, most = ([at[name, metric] for metric in metrics] for name in (ORCA, ORCA_MAX))
    return (
        f"Where clients declare no max_tokens, as here, Orca as its own paper has it has the reservation of {ORCA_MAX}"
        f" ({own[0]:.1f} % and {most[0]:.1f} %), the internal ({own[1]:.1f} % and {most[1]:.1f} %) and the batch"
        f" ({own[2]:.2f} and {most[2]:.2f} requests).",
        own == most,
    )
