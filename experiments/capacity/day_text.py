"""The day of a capacity plan: as text, on its page, as a table in Markdown, and as ``day.csv``."""

from __future__ import annotations

from collections.abc import Sequence
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
    for each in plan.steps():
        step = each.served
        cells = map(_share, (step.attained, each.constant.attained))
        use = f"{step.kv_cache_usage:.0%}, {step.peak_kv_cache_usage:.0%}"
        from_ = clock(each.start_s, plan.day.start_s)
        table.add_row(from_, f"{each.request_rate:,.3g}", f"{each.replicas:,}", *cells, f"{step.concurrency:,.1f}", use)
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
    following, constant, targets = plan.following, plan.constant, plan.targets
    worst = min((step.attained for step in following.steps if step.attained is not None), default=1.0)
    price, constant_price = plan.bills
    saved = 1 - price / constant_price
    beside = f"{saved:.0%} less than" if saved >= 0.005 else "as much as"
    return [
        f"The day: following the curve takes {following.replica_hours:,.1f} replica-hours, {price:,.2f} {currency},"
        f" {beside} {replicas_text(plan.constant_replicas)} throughout"
        f" ({constant.replica_hours:,.1f} hours, {constant_price:,.2f} {currency}). {following.attained:.1%} of"
        f" {following.requests:,} requests meet the objectives, {worst:.1%} in the worst step, and"
        f" {constant.attained:.1%} with the constant fleet.",
        f"Replicas are ordered {plan.startup_s:,.0f} s (--startup-seconds) before a busier step and paid for from then on,"
        " until they have drained.",
        *_confidence(plan, worst),
        f"Targets of autoscalers, a replica with its share of {plan.full_rate:,.3g} requests/s: {targets.concurrency:,.1f} requests in flight"
        f" (vllm:num_requests_running + vllm:num_requests_waiting), {targets.kv_cache_usage:.0%} of the KV cache in use"
        " (vllm:kv_cache_usage_perc).",
    ]


def _confidence(plan: DayPlan, worst: float) -> list[str]:
    """Whether the replicas of the steps may be too few, or more than they need; ``worst`` is the share of the requests that meet the
    objectives in the worst step."""
    if worst < plan.attainment:
        return [
            f"The replicas are not enough: {worst:.1%} meet the objectives in the worst step, and {plan.attainment:.0%} should. The runs by which"
            " they were sized, and those of the targets below, are shorter than the steps: more requests (--num-prompts) fill the replicas."
        ]
    if plan.short_runs:
        return [
            f"Steps may need fewer replicas: the rates that smaller fleets take are lower bounds, because their runs have {TOO_FEW}."
        ]
    return []


def day_section(plan: DayPlan, currency: str) -> Section:
    """The load, the fleet and their results by hour, and the bills."""
    steps, (price, constant_price) = [step.as_dict() for step in plan.steps()], plan.bills
    bills = [
        {"fleet": "following the load", "replica_hours": plan.following.replica_hours, "price": price},
        {
            "fleet": f"{plan.constant_replicas:,} replicas throughout",
            "replica_hours": plan.constant.replica_hours,
            "price": constant_price,
        },
    ]
    drawn = [
        figures.day_fleet(steps, plan.constant_replicas),
        figures.day_service(steps, plan.attainment),
        figures.day_cost(bills, currency),
    ]
    text = "\n\n".join(day_lines(plan, currency))
    return Section("Load over a day", text, figures=drawn, rows=day_rows(plan, currency))


def day_rows(plan: DayPlan, currency: str) -> list[dict[str, Any]]:
    """A row for each step, as text."""
    return [
        {
            "From": clock(step.start_s, plan.day.start_s),
            "Requests/s": f"{step.request_rate:,.3g}",
            "Replicas": step.replicas,
            "Meet objectives, %": _percent(step.served.attained),
            "Constant fleet, %": _percent(step.constant.attained),
            "In flight a replica": f"{step.served.concurrency:,.1f}",
            "KV in use, mean, %": _percent(step.served.kv_cache_usage),
            "KV in use, peak, %": _percent(step.served.peak_kv_cache_usage),
            currency: f"{step.price:,.2f}",
            f"Constant fleet, {currency}": f"{step.constant_price:,.2f}",
        }
        for step in plan.steps()
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def day_cells(plan: DayPlan, currency: str) -> list[dict[str, Any]]:
    """A row for each step, as numbers."""
    steps = [step.as_dict() for step in plan.steps()]
    return [{name: step[name] for name in _COLUMNS} | {"currency": currency} for step in steps]
