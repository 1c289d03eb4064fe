"""The output files of ``fragmeter plan --out``: page, summary in Markdown, tables and data."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

from ...reports.data.answer import KeyNumber, duration
from ...reports.explore.what_if import WhatIf
from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...reports.page.table import Table
from ...reports.style.labels import counted, metric_label
from ...sim.metrics.registry import METRICS
from ...sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, sums
from ...sim.output.files import as_json
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.types.optional import not_none
from ..runs.points import FINISHED, as_parquet
from ..vllm_serve.checks import gib
from .answer import Answer, Bill
from .candidates import Candidate
from .confidence import capped
from .day import DayPlan
from .day_text import day_cells, day_lines, day_rows, day_section
from .detail import Detail
from .manifest import FILES
from .prices import GPU_HOURS
from .text import (
    headroom_text,
    hourly_text,
    percent_text,
    purchase,
    range_text,
    rate_text,
    tokens_text,
)

PAGE, DATA, TABLE = "plan.html", "plan.json", "plan.parquet"
SUMMARY, CSV, DAY = "plan.md", "plan.csv", "day.csv"
PLAN = FolderKind("plan", (PAGE, DATA, TABLE, SUMMARY, CSV, DAY, FINISHED, *FILES.values()))


def write_plan(
    out: OutputFolder,
    document: dict[str, Any],
    ranks: Sequence[tuple[Answer, Bill]],
    assumptions: Sequence[str],
    what_if: WhatIf | None,
    day: DayPlan | None,
) -> Path:
    """Write the data, the tables (a row for each candidate, and for each step of a day), the summary and the page, and return
    the page's path.

    Args:
        day: The day of a load that changes.
        what_if: The sliders of the page; None without a wanted rate, or a fleet that is enough for it.

    Raises:
        UserError: They cannot be written.
    """
    out.write(DATA, as_json(document))
    currency = document["currency"]
    cells = candidate_cells(document["candidates"], ranks, currency)
    out.write(TABLE, as_parquet(cells))
    out.write(CSV, _csv(cells))
    if day is not None:
        out.write(DAY, _csv(day_cells(day, currency)))
    preempts = any(answer.at_rate.preemptions for answer, _ in ranks)
    listed = [_row(*each, document["currency"], preempts) for each in ranks]
    out.write(SUMMARY, _markdown(document, listed, assumptions, day))
    explained = "\n\n".join(document["explained"])
    sections = [Section("Other candidates", explained)] if explained else []
    if ranks:
        points = pareto_rows(ranks)
        drawn = [figures.pareto(points, document["currency"])] if points else []
        memory = "Likely sizes on each GPU; fragmeter plan --serve prints the interval of each."
        slots = "Means over time at the recommended rate, in percent of the pool: {}."
        sections = [
            Section("Candidates", rows=listed, figures=[figures.cost_bars(*_costs(ranks, document["currency"]))]),
            Section("The recommendation", "\n\n".join(document["details"])),
            *([] if what_if is None else [_sliders(what_if)]),
            *([] if day is None else [day_section(day, currency)]),
            Section("Price and speed", figures=drawn),
            *sections,
            Section("GPU memory", memory, rows=_memory_rows(ranks)),
            Section(
                "Contents of the KV cache",
                slots.format(PAPER_VIEW.title),
                rows=_view_rows(ranks, lambda at: at.paper_view_pct),
                definitions=PAPER_VIEW.definitions(),
            ),
            Section(
                "Use of each slot",
                "\n\n".join((slots.format(SLOTS_VIEW.title), f"In {PAPER_VIEW.title} {'; '.join(sums())}.")),
                rows=_view_rows(ranks, lambda at: at.buckets_pct),
                definitions=SLOTS_VIEW.definitions(),
            ),
        ]
    sections.append(Section("Basis of the plan", "\n\n".join(assumptions)))
    lead = "\n\n".join((document["recommendation"], _asked(document, ranks)))
    return write_page(out.path / PAGE, _question(document), lead, sections, numbers=_key_numbers(document, ranks))


def _sliders(what_if: WhatIf) -> Section:
    text = (
        "The sliders choose among finished runs of one replica of the first candidates; nothing is simulated on this page. Replicas are"
        " taken to be proportional to the request rate, and to change with lengths and objectives as the highest rate of a replica does."
        " Only one length at a time differs from the plan. Shorter answers may cost more where a TPOT is tight: a prefill then delays a"
        " larger share of their tokens. Plan again with the values of the sliders before you buy: a candidate that is not here may then"
        " be cheaper."
    )
    return Section("What would it cost if", text, widgets=[what_if], key="what-if")


def _question(document: Mapping[str, Any]) -> str:
    """The question that a plan answers."""
    model, wanted = document["model"], document["wanted_request_rate"]
    if wanted is None:
        return f"Which GPUs serve {model} at the lowest price?"
    return f"Which GPUs, and how many, serve {model} at {wanted:.3g} requests/s?"


def _asked(document: Mapping[str, Any], ranks: Sequence[tuple[Answer, Bill]]) -> str:
    """What was asked for: model, lengths, arrivals and objectives; and the flags of the recommendation."""
    goal = document["goal"]
    by_load = goal.get("loads", {"": goal["goodput"]})
    limits = "; ".join(
        f"{load} {' and '.join(f'{name.upper()} {limit:,g} ms' for name, limit in each.items())}".strip()
        for load, each in by_load.items()
    )
    chosen = [f" Each replica: {_ranks_text(ranks[0][0].candidate)}, {document['flags']}."] if ranks else []
    if "serve" in document:
        chosen = [f" Prefill: {document['serve'][0]}. Decode: {document['serve'][1]}."]
    return f"{document['model']}; {document['load']}; {limits} for {goal['attainment']:.0%} of the requests.{''.join(chosen)}"


def _ranks_text(candidate: Candidate) -> str:
    """The GPUs of a replica, by its parallelism."""
    chosen = not_none(candidate.settings)
    stages = f", PP {chosen.pipeline_parallel_size}" * (chosen.pipeline_parallel_size > 1)
    return f"{counted(candidate.num_gpus, 'GPU')} (TP {chosen.tensor_parallel_size}{stages})"


def _key_numbers(document: Mapping[str, Any], ranks: Sequence[tuple[Answer, Bill]]) -> list[KeyNumber]:
    """The numbers of the recommendation: GPUs, cost, how sure that is, and latencies beside their objectives."""
    if not ranks:
        return []
    (answer, bill), currency, limits = ranks[0], document["currency"], document["goal"]["goodput"]
    launch, at = answer.candidate.started.launch, answer.at_rate
    sides = answer.sides(bill.replicas)
    replicas = ", ".join(
        f"{counted(count, 'replica')} of {_ranks_text(each)}{role}"
        for (each, count), role in zip(sides, ("",) if len(sides) == 1 else (" to prefill", " to decode"), strict=True)
    )
    if bill.spare_gpus:
        replicas += f", {bill.spare_gpus:,} GPUs spare" if bill.spare_gpus > 1 else ", 1 GPU spare"
    gpus = f"{range_text(answer, bill)} x {launch.gpu.name}" if len(sides) == 1 else purchase(answer, bill)
    numbers = [KeyNumber("GPUs", gpus, replicas)]
    if currency != GPU_HOURS:
        tokens = f"{tokens_text(answer, bill)} {currency} a million tokens"
        numbers.append(KeyNumber(f"{currency} an hour", hourly_text(answer, bill), tokens))
    fleet = answer.fleet
    if answer.wanted is None:
        numbers.append(KeyNumber("Requests/s a replica", rate_text(answer).removesuffix(" requests/s")))
    elif fleet is not None and fleet.chance is not None:
        sure = percent_text(fleet.chance.chance)
        numbers.append(KeyNumber("Probability that it is enough", sure, f"headroom {headroom_text(answer)}"))
    else:
        numbers.append(KeyNumber("Headroom", headroom_text(answer)))
    for name in ("ttft", "tpot"):
        bound = f"at most {limits[name]:,g} ms" if name in limits else "no objective"
        if "loads" in document["goal"]:
            bound = "of all loads; objectives are by load"
        numbers.append(KeyNumber(f"p90 {name.upper()}", duration(at.metrics[f"p90_{name}_ms"]), bound))
    return numbers


def candidate_cells(
    candidates: Sequence[Mapping[str, Any]], ranks: Sequence[tuple[Answer, Bill]], currency: str
) -> list[dict[str, Any]]:
    """A row for each candidate, as numbers: what a planner reads. All other results are in the data.

    Args:
        candidates: Their data, those of ``ranks`` first.
    """
    axes = [each["candidate"] for each in candidates]
    differ = [name for name in axes[0] if name == "gpu" or len({values[name] for values in axes}) > 1]
    known = [_known_cells(answer, bill, currency) for answer, bill in ranks]
    none: dict[str, Any] = dict.fromkeys(known[0]) if known else {}
    return [
        {
            **{name: each["candidate"][name] for name in differ},
            **(known[place] if place < len(known) else none),
            "error": None if place < len(known) else _why_none(each),
        }
        for place, each in enumerate(candidates)
    ]


def _known_cells(answer: Answer, bill: Bill, currency: str) -> dict[str, Any]:
    at, limit, rate = answer.at_rate, answer.at_rate.limit, answer.fleet_rate
    unknown = answer.wanted is None or rate == inf or (answer.known_rates is not None and rate <= answer.wanted)
    headroom = None if unknown else rate / not_none(answer.wanted) - 1
    sure = answer.sure_rate
    return {
        "replicas_low": bill.fewest_replicas,
        "replicas_high": bill.replicas,
        "prefill_replicas_high": answer.prefill_replicas,
        "gpus_high": bill.gpus,
        "bill_low_per_hour": bill.fewest_per_hour,
        "bill_high_per_hour": bill.per_hour,
        "cost_per_million_tokens": bill.per_million["total"],
        "currency": currency,
        "request_rate_per_replica": None if answer.full_rate == inf else answer.full_rate,
        "headroom": headroom,
        "headroom_with_confidence": None if headroom is None or sure is None else sure / not_none(answer.wanted) - 1,
        "rate_is_known": answer.known_rates is None,
        "request_rate_bound": _rate_bound(answer),
        "cost_bound": "at least" if answer.is_burst else None,
        "limit": limit.objective or "throughput",
        "limit_cause": limit.cause,
        "attainment": at.attained,
        "p90_ttft_ms": at.metrics["p90_ttft_ms"],
        "p90_tpot_ms": at.metrics["p90_tpot_ms"],
        "kv_cache_pct": at.kv_cache_pct,
    }


def _rate_bound(answer: Answer) -> str | None:
    """What is known of a highest rate that is not known: bursts are served faster than a load, and a known load is below it."""
    if answer.known_rates is None:
        return None
    return "less than" if answer.fleet is None else "unknown" if answer.is_burst else "more than"


def _why_none(candidate: Mapping[str, Any]) -> str:
    """Why a candidate has no rate or no price."""
    if candidate.get("every_rate_meets"):
        return "every rate meets the objectives"
    return candidate["refused"] or candidate["error"] or "no rate meets the objectives"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with every column of any row, as CSV."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    # Twelve digits: sums of prices in binary have no others of meaning.
    writer.writerows(
        {name: float(f"{value:.12g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    )
    return text.getvalue()


def _markdown(
    document: dict[str, Any], rows: Sequence[Mapping[str, Any]], assumptions: Sequence[str], day: DayPlan | None
) -> str:
    """The answer, the table of candidates and the basis of the plan."""
    lines = [f"**{document['recommendation']}**", "", *_markdown_table(rows)]
    listed = [*document["details"], *document["explained"]]
    if day is not None:
        lines += _markdown_table(day_rows(day, document["currency"]))
        listed += day_lines(day, document["currency"])
    return "\n".join([*lines, *(f"- {line}" for line in (*listed, *assumptions)), ""])


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table and an empty line; nothing without rows."""
    if not rows:
        return []
    return [*Table.of_records(rows).markdown(), ""]


def _costs(ranks: Sequence[tuple[Answer, Bill]], currency: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of the cost figure, and their unit: the bill, or without a wanted rate the price of a token. That of bursts has no
    upper end."""
    rows = []
    for answer, bill in ranks:
        if answer.wanted is None:
            # The price of a token is inverse to the rate, which the seeds have between these.
            cost, rates = bill.per_million["total"], capped(answer.rates.seed_rates)
            low, high = (cost * answer.rate / max(rates), cost * answer.rate / min(rates))
        else:
            cost, low, high = bill.per_hour, bill.fewest_per_hour, bill.per_hour
        highest = None if answer.is_burst else max(high, cost)
        rows.append({"candidate": answer.candidate.name, "cost": cost, "lowest": min(low, cost), "highest": highest})
    hourly = "GPUs" if currency == GPU_HOURS else f"{currency} per hour"
    unit = f"{currency} per million tokens" if ranks[0][0].wanted is None else hourly
    return rows, unit


def pareto_rows(ranks: Sequence[tuple[Answer, Bill]]) -> list[dict[str, Any]]:
    """The points of the Pareto figure: the price of a token at the recommended rate, divided by the point's share of it.

    Candidates for which every rate meets the goal have no points.
    """
    return [
        {
            "candidate": answer.candidate.name,
            **asdict(point),
            "cost_per_million_tokens": bill.per_million["total"] * answer.rate / point.request_rate,
            "is_bound": answer.is_burst,
            "recommended": point is answer.at_rate.curve[-1],
        }
        for answer, bill in ranks
        for point in answer.at_rate.curve
    ]


def _row(answer: Answer, bill: Bill, currency: str, preempts: bool) -> dict[str, Any]:
    """A row of the table of candidates; ``preempts`` is whether any of them preempts requests."""
    at, limit, hourly = answer.at_rate, answer.at_rate.limit, hourly_text(answer, bill)
    per_hour = bill.per_hour if hourly == f"{bill.per_hour:,.2f}" else hourly
    return {
        "Candidate": answer.candidate.name,
        "GPUs": range_text(answer, bill),
        **({} if currency == GPU_HOURS else {f"{currency}/h": per_hour}),
        f"{currency}/M tokens": tokens_text(answer, bill),
        **(
            {"Requests/s a replica": rate_text(answer)}
            if answer.wanted is None
            else {"Headroom": headroom_text(answer)}
        ),
        "Meet objectives, %": f"{100 * at.attained:.1f}",
        METRICS["p90_ttft_ms"].heading: METRICS["p90_ttft_ms"].text(at.metrics["p90_ttft_ms"]),
        METRICS["p90_tpot_ms"].heading: METRICS["p90_tpot_ms"].text(at.metrics["p90_tpot_ms"]),
        "KV in use, %": f"{at.kv_cache_pct:.1f}",
        **({"Preemptions": at.preemptions} if preempts else {}),
        "Limited by": f"{limit.name}, {limit.cause}",
    }


def _memory_rows(ranks: Sequence[tuple[Answer, Bill]]) -> list[dict[str, Any]]:
    """The memory of each GPU by use, in GiB."""
    rows = []
    for answer, _ in ranks:
        stage = answer.candidate.started.pool().stage
        parts = {
            "Weights": stage.weights.likely,
            "Activations": stage.activations.likely,
            "Other": stage.non_torch.likely + stage.cuda_graphs.likely,
            "KV cache": stage.kv_cache_bytes,
        }
        rows.append(
            {"Candidate": answer.candidate.name} | {f"{name}, GiB": float(gib(part)) for name, part in parts.items()}
        )
    return rows


def _view_rows(
    ranks: Sequence[tuple[Answer, Bill]], view: Callable[[Detail], Mapping[str, float]]
) -> list[dict[str, Any]]:
    """The contents of the KV cache at the recommended rate, in percent. Some candidates alone have rejected drafts."""
    names = list(dict.fromkeys(name for answer, _ in ranks for name in view(answer.at_rate)))
    return [
        {"Candidate": answer.candidate.name}
        | {metric_label(f"{name}_pct").capitalize(): view(answer.at_rate).get(name, 0.0) for name in names}
        for answer, _ in ranks
    ]
