"""What happens, in simulated time. Imports nothing of the other packages."""

from __future__ import annotations

from .result import write
from .run import Run, simulate
from .settings import Settings, settings
from .summary import summary
from .workload import Workload

__all__ = ["Run", "Settings", "Workload", "settings", "simulate", "summary", "write"]
