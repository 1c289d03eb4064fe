"""Several replicas behind a router, and disaggregated prefill and decode."""

from __future__ import annotations

from .config import Cluster, cluster
from .result import cluster_requests_table, cluster_table_of, write_cluster
from .run import ClusterRun, simulate_cluster
from .schedule import FleetSchedule, Lifetime
from .summary import cluster_summary, cluster_times

__all__ = [
    "Cluster",
    "ClusterRun",
    "FleetSchedule",
    "Lifetime",
    "cluster",
    "cluster_requests_table",
    "cluster_summary",
    "cluster_table_of",
    "cluster_times",
    "simulate_cluster",
    "write_cluster",
]
