"""The output files of ``fragmeter plan --out``: page, table and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...sim.output.files import as_json
from ...sim.output.folders import FolderKind, OutputFolder
from ..runs.points import FINISHED, as_parquet, flat
from .answer import Answer, Bill
from .text import headroom_text, memory_rows, range_text, rate_text, view_rows

PAGE, DATA, TABLE = "plan.html", "plan.json", "plan.parquet"
PLAN = FolderKind("plan", (PAGE, DATA, TABLE, FINISHED))


def write_plan(
    out: OutputFolder,
    document: dict[str, Any],
    ranks: Sequence[tuple[Answer, Bill]],
    assumptions: Sequence[str],
) -> Path:
    """Write plan.json, plan.parquet (one row per candidate) and the page, and print the page's path.

    Raises:
        UserError: They cannot be written.
    """
    out.write(DATA, as_json(document))
    rows = [{name: value for name, value in each.items() if name not in _LONG} for each in document["candidates"]]
    out.write(TABLE, as_parquet([dict(flat(row)) for row in rows]))
    sections = [Section("Other candidates", "\n\n".join(document["explained"]))]
    if ranks:
        points = pareto_rows(ranks)
        drawn = [figures.pareto(points, document["currency"])] if points else []
        memory = "Of each GPU. Activations are estimated."
        slots = (
            "Means over time at the recommended rate, in percent of the pool: in the paper's view, and slot by slot."
        )
        sections = [
            Section("Candidates", rows=[_row(*each, document["currency"]) for each in ranks]),
            Section("The recommendation", "\n\n".join(document["details"])),
            Section("Price and speed", figures=drawn),
            *sections,
            Section("GPU memory", memory, rows=memory_rows(ranks)),
            Section("Contents of the KV cache", slots, rows=view_rows(ranks, "paper_view_pct")),
            Section("Use of each slot", slots, rows=view_rows(ranks, "buckets_pct")),
        ]
    sections.append(Section("Basis of the plan", "\n\n".join(assumptions)))
    return write_page(out.path / PAGE, f"A plan for {document['load']}", document["recommendation"], sections)


#: Keys of a candidate's data that are not table cells.
_LONG = ("curve", "seed_rates")


def pareto_rows(ranks: Sequence[tuple[Answer, Bill]]) -> list[dict[str, Any]]:
    """The points of the Pareto figure: the price of a token at the recommended rate, divided by the point's share of it.

    Candidates for which every rate meets the goal have no points.
    """
    return [
        {
            "candidate": answer.candidate.name,
            **point,
            "cost_per_million_tokens": bill.per_million["total"] * answer.rate / point["request_rate"],
            "recommended": point is answer.at_rate["curve"][-1],
        }
        for answer, bill in ranks
        for point in answer.at_rate["curve"]
    ]


def _row(answer: Answer, bill: Bill, currency: str) -> dict[str, Any]:
    at, limit = answer.at_rate, answer.at_rate["limit"]
    return {
        "Candidate": answer.candidate.name,
        "GPUs": range_text(answer, bill),
        f"{currency}/h": bill.per_hour,
        f"{currency}/M tokens": f"{bill.per_million['total']:.3g}",
        **(
            {"Requests/s a replica": rate_text(answer)}
            if answer.wanted is None
            else {"Headroom": headroom_text(answer)}
        ),
        "Meet the objectives, %": 100 * at["attained"],
        "p90 TTFT, ms": at["p90_ttft_ms"],
        "p90 TPOT, ms": at["p90_tpot_ms"],
        "KV cache in use, %": at["kv_cache_pct"],
        "Preemptions": at["preemptions"],
        "Limited by": f"{(limit['objective'] or 'throughput').upper()}, {limit['cause']}",
    }
