"""What happens, in simulated time. Imports nothing of the other packages."""

from __future__ import annotations

from .config.settings import Settings, settings
from .engine.run import simulate
from .metrics.result import write
from .metrics.summary import summary
from .runs.run import Run
from .workload.workload import Workload

__all__ = ["Run", "Settings", "Workload", "settings", "simulate", "summary", "write"]
