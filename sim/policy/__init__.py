"""Schedulers, one file each, and the options, limits and memory that each declares."""

from __future__ import annotations

from .base import Limits, Policy, Pool, Server
from .options import Options
from .registry import HYBRID, POLICIES, SHARING, policies, policy

__all__ = [
    "HYBRID",
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
