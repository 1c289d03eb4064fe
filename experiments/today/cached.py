"""What the cached blocks of today's models are worth: a row for each server and load whose prompts share contents.

A load is one of ``LOADS``, or the beginning of a record of requests with the contents of their prompts (``--trace``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...reports.page.table import Column, Table
from ...sim import Run, simulate
from ...sim.memory.accounting.worths import WORTHS
from ...sim.metrics.cache_bounds import cache_summary
from ...traces import Trace, workload
from ..paper.rows import Row
from .servers import Server

#: Servers of a record, with room for its long contexts.
RECORD_SERVERS = (
    Server("Llama 3.1 8B", "llama-3.1-8b", "h200", 4),
    Server("Qwen3-Next 80B", "qwen3-next-80b-a3b", "h200", 4),
    Server("DeepSeek V3.2", "deepseek-v3.2", "h200", 8),
)
#: Requests of a record that are served, from its first on.
MOST_REQUESTS = 3_000
#: Shares of the blocks that requests ask for: hit; the most of any order of eviction; and of a cache that evicts nothing.
RATES = {"hit": "hit_blocks", "best order": "fixed_schedule_hit_blocks", "infinite": "infinite_hit_blocks"}
DEFINITIONS = {
    "blocks": "percent of the pool's slots, over the run, that hold cached blocks which are hit later, evicted and asked for again, evicted"
    " and never asked for, and there at the end",
    "rates": "percent of the blocks that requests ask for: hit, in the best order of eviction, and in a cache without end, on the schedule"
    " of the run; of several KV groups the best order is a bound from above",
}


def measure_record(server: Server, record: Trace) -> list[Row]:
    """The row of one server under a record, at the record's own arrivals.

    Raises:
        UserError: The record has a request that is longer than the model takes, or no arrivals.
    """
    run = simulate(replace(server.settings(), leap=True), workload(record.first(min(MOST_REQUESTS, len(record)))))
    return cached_rows(server, record.name, run)


def cached_rows(server: Server, load: str, run: Run) -> list[Row]:
    """The row of a run; none where no contents are shared."""
    found = cache_summary(run)
    if found is None:
        return []
    row: dict[str, Any] = {"server": server.name, "load": load} | {name: found["pool_pct"][name] for name in WORTHS}
    asked = found.get("asked_blocks", 0)
    return [row | {name: 100 * found[key] / asked if asked else None for name, key in RATES.items()}]


def cached_table(rows: list[Row]) -> Table:
    """One table for the terminal, the page and Markdown."""
    table = Table("", Column("load", is_text=True), *(worth.label for worth in WORTHS.values()), *RATES, gap=1)
    for row in rows:
        cells = (f"{row[name]:.1f}" for name in WORTHS)
        rates = ("-" if row[name] is None else f"{row[name]:.1f}" for name in RATES)
        table.add_row(row["server"], row["load"], *cells, *rates)
    return table
