"""Several replicas: a router in front of them, and prefill and decode on different ones."""

from __future__ import annotations

from .config import Cluster, cluster
from .run import ClusterRun, simulate_cluster

__all__ = ["Cluster", "ClusterRun", "cluster", "simulate_cluster"]
