"""The plan of a day in the output files of a plan: its section of the page, its table in Markdown, and ``day.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...reports.figures import figures
from ...reports.page.page import Section
from .day_text import clock, day_summary

#: Columns of ``day.csv``, of ``steps`` in the data.
_COLUMNS = (
    "start_s", "end_s", "request_rate", "requests", "replicas", "attained", "attained_by_constant_fleet", "concurrency",
    "kv_cache_usage", "peak_kv_cache_usage", "replica_hours", "price", "constant_price",
)  # fmt: skip


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
