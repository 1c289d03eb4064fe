"""What happens, in simulated time. Imports nothing of the other packages."""

from __future__ import annotations

from .engine.run import Run, simulate
from .engine.settings import Settings, settings
from .metrics.result import write
from .metrics.summary import summary
from .workload.workload import Workload

__all__ = ["Run", "Settings", "Workload", "settings", "simulate", "summary", "write"]
