"""Who runs next: one file a policy."""

from __future__ import annotations

from .base import Limits, Policy
from .orca import OrcaMax, OrcaOracle, OrcaPaper, OrcaPow2
from .static import FasterTransformer, StaticBatching
from .vllm_sosp23 import VllmSosp23

__all__ = ["POLICIES", "Limits", "Policy"]

#: Every policy by its name on the command line, from the most wasteful kind to the least.
POLICIES: dict[str, type] = {
    policy.name: policy
    for policy in (StaticBatching, FasterTransformer, OrcaPaper, OrcaMax, OrcaPow2, OrcaOracle, VllmSosp23)
}
