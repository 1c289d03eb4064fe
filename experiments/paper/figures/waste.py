"""The waste table: one trace, one pool, one row per policy of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....sim.types.optional import not_none
from ..bench import Bench, Case, Measured
from ..comparison import Payload, pool_text, row
from ..constants import STEP, scale
from ..fit import ON, Fit
from ..paper import FIG2, SERIES
from ..published import published_fig2
from ..rows import OTHER_SEEDS, STEP_CHANGES, Row, as_finding, moved

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
#: Columns of the table, and their metrics in a measurement.
METRICS = {
    "token_states_pct": "token_states_pct",
    "paper_reservation_pct": "reservation_pct",
    "paper_internal_pct": "internal_pct",
    "paper_external_and_others_pct": "external_and_others_pct",
    "popular_reservation_pct": "popular_reservation_pct",
    "popular_internal_pct": "popular_internal_pct",
    "popular_external_pct": "popular_external_pct",
    "popular_unused_pct": "popular_free_pct",
    "batched_requests": "batched_requests",
    "requests_per_s": "requests_per_s",
    "output_tokens_per_s": "output_tokens_per_s",
}
#: Share of the pool, in percent, below which a kind of waste counts as eliminated.
_CURED_PCT = 1
_POPULAR_WASTE = ("popular_reservation_pct", "popular_internal_pct", "popular_external_pct")


def waste_table(bench: Bench, fit: Fit) -> Payload:
    """Fig 2's workload under every policy of the paper, with the source's first seed, to the last request.

    Percentages and batches are means over iterations in Fig 2's window; throughput is over the whole run. Each value
    carries its change with other seeds and with 1 % of step time.
    """
    seed = bench.source.seeds[0]
    cases = {
        (name, what): mine for policy, name in NAMES.items() for what, mine in _cases(policy, seed, fit.scale).items()
    }
    runs = bench.measure_groups(cases, "waste")
    rows = [
        row
        for name in NAMES.values()
        for row in _rows(name, {what: found for (series, what), found in runs.items() if series == name})
    ]
    one = runs[VLLM, "requested"][0]
    return {
        "figure": "waste",
        "workload": bench.source.description(FIG2, (seed,)),
        "rows": rows,
        "num_blocks": one.num_blocks,
        "block_size": one.block_size,
        "step_scale": fit.scale,
        "fit": fit.describe(),
        "constants": [*STEP, scale(fit.scale, ON)],
        "seeds": [seed],
        "findings": findings(rows),
        "basis": [pool_text(one), fit.description()],
    }


def _cases(policy: str, seed: int, scale: float) -> dict[Any, list[Case]]:
    """The run itself, and the runs with other seeds and other step times."""
    base = Case(FIG2, seed, policy, scale, to_the_end=True)
    others = [other for other in OTHER_SEEDS if other != seed]
    return {
        "requested": [base],
        "other_seeds": [replace(base, seed=other) for other in others],
        **{change: [replace(base, scale=round(scale * change, 6))] for change in STEP_CHANGES},
    }


def _rows(series: str, runs: dict[Any, list[Measured]]) -> Iterator[Row]:
    published = published_fig2()
    for metric, measured in METRICS.items():
        # Fig 2 is the same measurement for four of the policies.
        value = published.get((series, measured))
        yield row(series, measured, value, runs["requested"], **_moves(measured, runs)) | {"metric": metric}


def _moves(measured: str, runs: dict[Any, list[Measured]]) -> dict[str, Any]:
    """The change of a value over seeds and step times."""
    values = {what: [run.values[measured] for run in mine] for what, mine in runs.items()}
    step_1pct = moved(values["requested"], *(values[change] for change in STEP_CHANGES))
    return {"other_seeds": values["other_seeds"], "step_1pct": step_1pct}


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


def _idle_slots(at: Values) -> tuple[str, bool]:
    static, faster, orca = (at[name, "popular_internal_pct"] for name in (STATIC, FASTERTRANSFORMER, ORCA_MAX))
    return (
        "Continuous batching removes the internal waste of static batches, slots of sequences that have ended and"
        f" padding: {static:.1f} % of the pool ({STATIC}) and {faster:.1f} % ({FASTERTRANSFORMER}), {orca:.1f} %"
        f" ({ORCA_MAX}); limit: below {_CURED_PCT} %.",
        orca < _CURED_PCT < min(static, faster),
    )


def _over_estimates(at: Values) -> tuple[str, bool]:
    static, orca = (at[name, "paper_internal_pct"] for name in (STATIC, ORCA_MAX))
    return (
        "It removes only part of what the paper calls internal, which counts slots for output that never comes:"
        f" {static:.1f} % ({STATIC}), still {orca:.1f} % ({ORCA_MAX}).",
        _CURED_PCT < orca < static,
    )


def _overhead_left(at: Values) -> tuple[str, bool]:
    reserved, external = (at[ORACLE, metric] for metric in ("popular_reservation_pct", "popular_external_pct"))
    return (
        f"Reservation and external waste stay even where every output length is known beforehand: {reserved:.1f} %"
        f" and {external:.1f} % ({ORACLE}), neither below {_CURED_PCT} %.",
        min(reserved, external) >= _CURED_PCT,
    )


def _paging(at: Values) -> tuple[str, bool]:
    kinds = [at[VLLM, metric] for metric in _POPULAR_WASTE]
    allowed = 100 - not_none(published_fig2()[VLLM, "token_states_pct"])
    reserved, internal, external = kinds
    return (
        f"Paging leaves little of the three: reservation {reserved:.1f} %, internal {internal:.2f} %, external"
        f" {external:.1f} % ({VLLM}), {sum(kinds):.1f} % together, of {allowed:.1f} % that the paper leaves for all"
        " that is not token states.",
        sum(kinds) <= allowed,
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
    metrics = ("popular_reservation_pct", "batched_requests")
    own, most = ([at[name, metric] for metric in metrics] for name in (ORCA, ORCA_MAX))
    return (
        f"Where clients declare no max_tokens, as here, Orca as its own paper has it reserves what {ORCA_MAX} does"
        f" ({own[0]:.1f} % and {most[0]:.1f} %) and batches as many requests ({own[1]:.2f} and {most[1]:.2f}).",
        own == most,
    )
