"""Figures over tables: each function but ``data_of`` returns a ``plotly.graph_objects.Figure``.

Figures are in their light form, with their numbers in ``layout.meta["numbers"]``; ``reports.page.page`` prints both and
recolours them for dark screens. ``data_of`` returns the data of a figure as a table.
"""

from __future__ import annotations

from ..blockmap.figure import block_map
from ..style.look import data_of
from .comparison import fig2, fig13a, fig15
from .day import day_cost, day_fleet, day_service
from .fragmentation import free_run_histogram, largest_free_run
from .latency import latency_cdf
from .ledger import ledger_over_time
from .measured import simulated_against_measured
from .memory import hbm, kv_bytes
from .plan import cost_bars, pareto
from .rates import against_rate, throughput_pareto
from .server import server_over_time
from .serving import batch_over_time, throughput_over_time
from .slots import slot_grid
from .tiers import hits_by_tier, worth_by_tier
from .timeline import request_timeline
from .trace import arrivals, lengths
from .values import bars, curves, with_limit
from .waste import waste, waste_cost

__all__ = [
    "against_rate",
    "arrivals",
    "bars",
    "batch_over_time",
    "block_map",
    "cost_bars",
    "curves",
    "data_of",
    "day_cost",
    "day_fleet",
    "day_service",
    "fig13a",
    "fig15",
    "fig2",
    "free_run_histogram",
    "hbm",
    "hits_by_tier",
    "kv_bytes",
    "largest_free_run",
    "latency_cdf",
    "ledger_over_time",
    "lengths",
    "pareto",
    "request_timeline",
    "server_over_time",
    "simulated_against_measured",
    "slot_grid",
    "throughput_over_time",
    "throughput_pareto",
    "waste",
    "waste_cost",
    "with_limit",
    "worth_by_tier",
]
