"""Who holds which slot."""

from __future__ import annotations

from .block_pool import BlockPool
from .buddy import BuddyArena
from .contiguous import BatchMemory, BuddyMemory, ContiguousMemory
from .integrals import BUCKETS, Window
from .paged import PagedMemory

__all__ = [
    "BUCKETS",
    "BatchMemory",
    "BlockPool",
    "BuddyArena",
    "BuddyMemory",
    "ContiguousMemory",
    "PagedMemory",
    "Window",
]
