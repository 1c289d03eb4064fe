"""Figures over tables: each function but ``data_of`` returns a ``plotly.graph_objects.Figure``.

Figures come in their light form, with the numbers they show in ``layout.meta["numbers"]``; ``reports.page`` prints
both and recolours them for dark screens. ``data_of`` is what a figure draws, as a table.
"""

from __future__ import annotations

from .fig_blocks import block_map
from .fig_comparison import fig2, fig13a, fig15
from .fig_fragmentation import free_run_histogram, largest_free_run
from .fig_latency import latency_cdf
from .fig_ledger import ledger_over_time
from .fig_measured import simulated_against_measured
from .fig_plan import pareto
from .fig_rates import against_rate, throughput_pareto
from .fig_scale import scale_sensitivity
from .fig_seeds import seeds
from .fig_serving import batch_over_time, throughput_over_time
from .fig_story import story
from .fig_timeline import request_timeline
from .fig_trace import arrivals, lengths
from .fig_values import bars, curves
from .fig_waste import waste
from .fig_waste_cost import waste_cost
from .look import data_of

__all__ = [
    "against_rate",
    "arrivals",
    "bars",
    "batch_over_time",
    "block_map",
    "curves",
    "data_of",
    "fig13a",
    "fig15",
    "fig2",
    "free_run_histogram",
    "largest_free_run",
    "latency_cdf",
    "ledger_over_time",
    "lengths",
    "pareto",
    "request_timeline",
    "scale_sensitivity",
    "seeds",
    "simulated_against_measured",
    "story",
    "throughput_over_time",
    "throughput_pareto",
    "waste",
    "waste_cost",
]
