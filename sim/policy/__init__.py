"""Schedulers, one module each. Each declares its options, its limits and its memory."""

from __future__ import annotations

from .base import Limits, Policy, Pool, Server
from .options import Options
from .registry import POLICIES, SHARING, policies, policy

__all__ = [
    "POLICIES",
    "SHARING",
    "Limits",
    "Options",
    "Policy",
    "Pool",
    "Server",
    "policies",
    "policy",
]
