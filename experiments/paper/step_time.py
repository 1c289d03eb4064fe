"""A decode step of OPT-13B on an A100: published times beside the cost models, none of which is fitted to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from ...reports.page.table import Column, Table
from ...sim.cost import StepCost, cost
from ...sim.spec import gpu, model
from ...sim.types.ticks import PER_MS
from ..runs.output import Report
from .comparison import Payload
from .context_cost import published_step_times
from .published import usual_length
from .rows import Row

FIGURE = "step-time"
MODEL = "opt-13b"
#: ``paper`` is fitted to Fig 1 itself.
COSTS = ("fitted", "roofline")
#: Points of a published formula: sequences, and tokens of each. DistServe's formula differs beyond 95 sequences.
BATCHES, LENGTHS = (8, 32, 64), (256, 1024)


def compare_step_times() -> Payload:
    """Every published value, with the value of each cost."""
    facts = published_step_times()
    cards = {fact["gpu"] for fact in facts["series"]}
    costs = {(name, card): cost(name, model(MODEL), gpu(card)) for name in COSTS for card in cards}
    rows = [row for fact in facts["series"] for row in _rows(fact, costs)]
    return {
        "figure": FIGURE,
        "workload": f"{MODEL} on one A100, steps that only decode",
        "rows": rows,
        "summary": list(_summary(rows)),
        "sources": {fact["series"]: fact["source"] for fact in facts["series"]},
        "basis": list(_basis()),
    }


def _rows(fact: Mapping[str, Any], costs: Mapping[tuple[str, str], StepCost]) -> Iterator[Row]:
    for batch, length, published in _values(fact):
        for name in COSTS:
            simulated = costs[name, fact["gpu"]].step_ticks(batch, batch * length, 0, 0) / PER_MS
            yield {
                "series": fact["series"],
                "gpu": fact["gpu"],
                "metric": "step_ms",
                "x": batch,
                "tokens_a_sequence": length,
                "published": round(published, 3),
                "how": fact["how"],
                "cost": name,
                "simulated": round(simulated, 3),
                "error": round(simulated - published, 3),
                "error_pct": round(100 * (simulated / published - 1), 2),
                "kind": "predicted",
            }


def _values(fact: Mapping[str, Any]) -> Iterator[tuple[int, int, float]]:
    """Sequences, tokens of each, and ms."""
    if "batch" in fact:
        for batch, tokens_per_s in zip(fact["batch"], fact["tokens_per_s"], strict=True):
            yield batch, usual_length(), 1e3 * batch / tokens_per_s
        return
    for length in LENGTHS:
        for batch in BATCHES:
            context = fact["ms_per_context_token"] * batch * length
            yield batch, length, fact["ms"] + context + fact["ms_per_sequence"] * batch


def _summary(rows: list[Row]) -> Iterator[dict[str, Any]]:
    for series in dict.fromkeys(row["series"] for row in rows):
        for name in COSTS:
            errors = [row["error_pct"] for row in rows if (row["series"], row["cost"]) == (series, name)]
            bounds = {"least_pct": min(errors), "most_pct": max(errors)}
            yield {"series": series, "cost": name, "mean_pct": round(fmean(errors), 2), **bounds}


def _basis() -> Iterator[str]:
    yield (
        f"Fig 1 does not say how long its sequences are: {usual_length()} tokens, half way through ShareGPT's mean"
        " request. The published ones differ among themselves: other engines, other memories, and Fig 1's attention"
        " kernel is the first one that there was."
    )
    yield "fitted: the profile of the GPU, fitted to kernel times; roofline: data sheets. Neither saw any of these."


def print_step_times(payload: Payload, report: Report) -> None:
    """Print a table for each published series, with a summary line for each cost."""
    report.print_line(f"{FIGURE}: {payload['workload']}, published beside simulated")
    for series in dict.fromkeys(row["series"] for row in payload["rows"]):
        mine = [row for row in payload["rows"] if row["series"] == series]
        report.print_line()
        report.print_line(f"{series}, {mine[0]['gpu']}", style="bold")
        report.console.print(_table(mine))
        for found in payload["summary"]:
            if found["series"] == series:
                span = f"{found['least_pct']:+.1f} to {found['most_pct']:+.1f} %"
                report.print_line(f"{found['cost']}: {found['mean_pct']:+.1f} % in the mean, {span}")
    report.print_line()
    for text in payload["basis"]:
        report.print_line(text)


def _table(rows: list[Row]) -> Table:
    pairs = [text for name in COSTS for text in (name, "error")]
    table = Table(Column("sequences"), "tokens each", "published ms", *pairs)
    for place in range(0, len(rows), len(COSTS)):
        first = rows[place]
        table.add_row(
            str(first["x"]),
            str(first["tokens_a_sequence"]),
            f"{first['published']:.1f}",
            *(text for row in rows[place : place + len(COSTS)] for text in _cells(row)),
        )
    return table


def _cells(row: Row) -> tuple[str, str]:
    return f"{row['simulated']:.1f}", f"{row['error_pct']:+.1f} %"
