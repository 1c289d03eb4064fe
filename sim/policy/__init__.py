"""Schedulers, one module each. Each declares its options, its limits and its memory."""

from __future__ import annotations

from .base import Policy
from .options import Options
from .registry import POLICIES, SHARING, policies, policy
from .server import Limits, Pool, Server

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
