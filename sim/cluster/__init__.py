"""Several replicas behind a router, and disaggregated prefill and decode."""

from __future__ import annotations

from ..config.cluster import Cluster, Pair, cluster
from ..config.schedule import FleetSchedule, Lifetime
from ..runs.cluster_run import ClusterRun
from .result import cluster_requests_table, cluster_table_of, write_cluster
from .run import simulate_cluster
from .summary import cluster_summary, cluster_times

__all__ = [
    "Cluster",
    "ClusterRun",
    "FleetSchedule",
    "Lifetime",
    "Pair",
    "cluster",
    "cluster_requests_table",
    "cluster_summary",
    "cluster_table_of",
    "cluster_times",
    "simulate_cluster",
    "write_cluster",
]
