"""A finished run of several replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config.cluster import Cluster
from ..config.schedule import FleetSchedule
from ..config.settings import Settings
from ..workload.workload import Workload
from .run import Run


@dataclass(frozen=True)
class ClusterRun:
    """A finished run of a cluster.

    Attributes:
        settings, cluster, workload: The inputs.
        runs: The run of each replica, by its number, with its requests in order of arrival. All end together.
            Prefill replicas come first. On these every request has one output token; on decode replicas a request
            arrives with its KV.
        rows: The rows of the workload of each replica's requests, int64 [requests of the replica] each.
        smallest_pool_blocks: int64 [n], the smallest pool that can serve each request.
        transfers: int64 columns with the names of ``disaggregated.TRANSFER``: a row for each prompt with transferred
            KV.
        schedule: The sizes of the fleet over time; None if it is constant. Every replica that ever joins has a number,
            and its pool counts for the whole run.
    """

    settings: Settings
    cluster: Cluster
    workload: Workload
    runs: tuple[Run, ...]
    rows: tuple[np.ndarray, ...]
    smallest_pool_blocks: np.ndarray
    transfers: dict[str, np.ndarray]
    schedule: FleetSchedule | None = None

    @property
    def refused(self) -> np.ndarray:
        """bool [n]: requests that no replica's pool can ever hold; they were turned away before the router."""
        return self.smallest_pool_blocks > self.runs[0].replica.num_blocks

    @property
    def num_arriving(self) -> int:
        """Replicas at which requests arrive: those that prefill."""
        return self.cluster.num_arriving if self.schedule is None else len(self.schedule.lifetimes)

    def only_decodes(self, number: int) -> bool:
        """Whether a replica only decodes."""
        return number >= self.num_arriving

    def role(self, number: int) -> str:
        """Role of a replica: "prefill", "decode" or "both"."""
        if not self.cluster.disaggregated:
            return "both"
        return "decode" if self.only_decodes(number) else "prefill"

    def sequence_rows(self, number: int) -> np.ndarray:
        """Rows of the sequences of a replica's requests, in the workload's ``sequences``, int64."""
        rows = self.rows[number]
        if not self.workload.shares:
            return rows
        counts = self.workload.num_sequences[rows]
        return np.repeat(self.workload.first_sequences[rows] - (np.cumsum(counts) - counts), counts) + np.arange(
            counts.sum()
        )

    @property
    def end_ticks(self) -> int:
        """Finish of the last request."""
        return self.runs[0].log.end_ticks
