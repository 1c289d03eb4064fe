"""A finished run of one replica."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config.settings import Settings
from ..workload.workload import Workload
from .integrals import Accounts, Window
from .replica import Replica
from .run_log import RunLog


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        settings, workload: The inputs.
        replica: The replica in its final state.
        log: Rows and residencies of the whole run.
        smallest_pool_blocks: int64 [n], the smallest pool that can serve each request.
        rejected: bool [n], requests that exceeded ``max_num_queued_reqs`` or ``max_num_queued_tokens`` and were not served;
            None without these limits.
        in_python: What the compiled core does not have of the settings or the requests, whether or not it is built and wanted; None
            if it has all.
    """

    settings: Settings
    workload: Workload
    replica: Replica
    log: RunLog
    smallest_pool_blocks: np.ndarray
    rejected: np.ndarray | None = None
    in_python: str | None = None

    @property
    def refused(self) -> np.ndarray:
        """bool [n]: requests that the pool can never hold; they were not served."""
        return self.smallest_pool_blocks > self.replica.num_blocks

    @cached_property
    def accounts(self) -> Accounts:
        """The ledger's integrals."""
        return Accounts(self.log)

    @cached_property
    def window(self) -> Window:
        """The ledger over the settings' window, or over the whole run."""
        return self.accounts.window(*self.settings.edges)
