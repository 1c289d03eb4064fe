"""Who runs next: one file a policy."""

from __future__ import annotations

from .base import Limits, Policy
from .fastgen import FastGen
from .hybrid import HYBRID
from .lightllm import LightLLM
from .orca import OrcaMax, OrcaOracle, OrcaPaper, OrcaPow2
from .sarathi import Sarathi
from .sglang import SGLang
from .static import FasterTransformer, StaticBatching
from .tgi import Tgi
from .trtllm import TrtllmMaxUtil, TrtllmNoEvict
from .vattention import VAttention
from .vllm_sosp23 import VllmSosp23
from .vllm_v0 import VllmV0
from .vllm_v1 import VllmV1

__all__ = ["CACHING_POLICIES", "HYBRID", "POLICIES", "Limits", "Policy"]

_KINDS = (
    *(StaticBatching, FasterTransformer, OrcaPaper, OrcaMax, OrcaPow2, OrcaOracle, VllmSosp23),
    *(VllmV0, VllmV1, Sarathi, Tgi, TrtllmNoEvict, TrtllmMaxUtil, LightLLM, FastGen, VAttention, SGLang),
)
#: Every policy by its name on the command line: those of the SOSP'23 paper first, from the most wasteful
#: kind to the least.
POLICIES: dict[str, type] = {policy.name: policy for policy in _KINDS}
#: Those that can keep prefixes for others.
CACHING_POLICIES = tuple(name for name, policy in POLICIES.items() if getattr(policy, "caches_prefixes", False))
