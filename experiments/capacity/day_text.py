"""The day of a capacity plan: as text, on its page, as a table in Markdown, and as ``day.csv``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...reports.figures import figures
from ...reports.page.page import Section
from ...reports.page.table import Column, Table
from .day import DayPlan
from .text import TOO_FEW, replicas_text

#: Columns of ``day.csv``, of ``steps`` in the data.
_COLUMNS = (
    "start_s", "end_s", "request_rate", "requests", "replicas", "attained", "attained_by_constant_fleet", "concurrency",
    "kv_cache_usage", "peak_kv_cache_usage", "replica_hours", "price", "constant_price",
)  # fmt: skip


def day_table(plan: DayPlan) -> Table:
    """A row for each step of the day, and the attainment of the constant fleet beside that of the changing one."""
    table = Table(
        Column("from"),
        "requests/s",
        "replicas",
        "meet the\nobjectives",
        "constant\nfleet",
        "in flight\na replica",
        "KV cache\nmean, peak",
    )
    served = zip(
        plan.day.start_s, plan.day.rates, plan.replicas, plan.following.steps, plan.constant.steps, strict=True
    )
    for start, rate, size, step, beside in served:
        cells = map(_share, (step.attained, beside.attained))
        use = f"{step.kv_cache_usage:.0%}, {step.peak_kv_cache_usage:.0%}"
        from_ = clock(start, plan.day.start_s)
        table.add_row(from_, f"{rate:,.3g}", f"{size:,}", *cells, f"{step.concurrency:,.1f}", use)
    return table


def clock(start_s: float, starts_s: Sequence[float]) -> str:
    """The start of a step as the time of the day; with seconds if any of the steps starts between two minutes."""
    seconds = round(start_s)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}"
    return text if all(round(each) % 60 == 0 for each in starts_s) else f"{text}:{seconds % 60:02}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def day_lines(plan: DayPlan, currency: str) -> list[str]:
    """The bill of the day, its attainment, and the targets of autoscalers."""
    return day_summary(plan.as_dict(), currency)


def day_summary(day: Mapping[str, Any], currency: str) -> list[str]:
    """As ``day_lines``, of the data of a ``DayPlan``."""
    worst = min((step["attained"] for step in day["steps"] if step["attained"] is not None), default=1.0)
    targets, saved = day["autoscaler_targets"], 1 - day["price"] / day["constant_price"]
    beside = f"{saved:.0%} less than" if saved >= 0.005 else "as much as"
    return [
        f"The day: following the curve takes {day['replica_hours']:,.1f} replica-hours, {day['price']:,.2f} {currency},"
        f" {beside} {replicas_text(day['constant_replicas'])} throughout"
        f" ({day['constant_replica_hours']:,.1f} hours, {day['constant_price']:,.2f} {currency}). {day['attained']:.1%} of"
        f" {day['requests']:,} requests meet the objectives, {worst:.1%} in the worst step, and"
        f" {day['attained_by_constant_fleet']:.1%} with the constant fleet.",
        f"Replicas are ordered {day['startup_seconds']:,.0f} s (--startup-seconds) before a busier step and paid for from then on,"
        " until they have drained.",
        *_confidence(day, worst),
        f"Targets of autoscalers, a replica with its share of {targets['request_rate']:,.3g} requests/s: {targets['concurrency']:,.1f} requests in flight"
        f" (vllm:num_requests_running + vllm:num_requests_waiting), {targets['kv_cache_usage']:.0%} of the KV cache in use"
        " (vllm:kv_cache_usage_perc).",
    ]


def _confidence(day: Mapping[str, Any], worst: float) -> list[str]:
    """Whether the replicas of the steps may be too few, or more than they need; ``worst`` is the share of the requests that meet the
    objectives in the worst step."""
    if worst < day["attainment"]:
        return [
            f"The replicas are not enough: {worst:.1%} meet the objectives in the worst step, and {day['attainment']:.0%} should. The runs by which"
            " they were sized, and those of the targets below, are shorter than the steps: more requests (--num-prompts) fill the replicas."
        ]
    if day["rates_are_lower_bounds"]:
        return [
            f"Steps may need fewer replicas: the rates that smaller fleets take are lower bounds, because their runs have {TOO_FEW}."
        ]
    return []


def day_section(day: Mapping[str, Any], currency: str, attainment: float) -> Section:
    """The load, the fleet and their results by hour, and the bills.

    Args:
        day: ``DayPlan.as_dict``.
        attainment: Share of the requests that must meet the objectives.
    """
    steps = day["steps"]
    bills = [
        {"fleet": "following the load", "replica_hours": day["replica_hours"], "price": day["price"]},
        {
            "fleet": f"{day['constant_replicas']:,} replicas throughout",
            "replica_hours": day["constant_replica_hours"],
            "price": day["constant_price"],
        },
    ]
    drawn = [
        figures.day_fleet(steps, day["constant_replicas"]),
        figures.day_service(steps, attainment),
        figures.day_cost(bills, currency),
    ]
    return Section(
        "Load over a day", "\n\n".join(day_summary(day, currency)), figures=drawn, rows=day_rows(day, currency)
    )


def day_rows(day: Mapping[str, Any], currency: str) -> list[dict[str, Any]]:
    """A row for each step, as text."""
    starts = [step["start_s"] for step in day["steps"]]
    return [
        {
            "From": clock(step["start_s"], starts),
            "Requests/s": f"{step['request_rate']:,.3g}",
            "Replicas": step["replicas"],
            "Meet objectives, %": _percent(step["attained"]),
            "Constant fleet, %": _percent(step["attained_by_constant_fleet"]),
            "In flight a replica": f"{step['concurrency']:,.1f}",
            "KV in use, mean, %": _percent(step["kv_cache_usage"]),
            "KV in use, peak, %": _percent(step["peak_kv_cache_usage"]),
            currency: f"{step['price']:,.2f}",
            f"Constant fleet, {currency}": f"{step['constant_price']:,.2f}",
        }
        for step in day["steps"]
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def day_cells(day: Mapping[str, Any], currency: str) -> list[dict[str, Any]]:
    """A row for each step, as numbers."""
    return [{name: step[name] for name in _COLUMNS} | {"currency": currency} for step in day["steps"]]
