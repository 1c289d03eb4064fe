"""Prefix caches: KV of earlier requests, reused by requests with the same prefix."""

from __future__ import annotations

from .chains import Chain, Chains, HashChain, Path, lookup_blocks
from .free_queue import ALONE, FreeIds, FreeQueue
from .hashed_pool import HashedBlockPool
from .history import QueueHistory
from .radix import Place, RadixNode, RadixTree, Rest, all_but_last, first_tokens, shared_tokens
from .segments import BlockTable, Found, Segment, SegmentPool

__all__ = [
    "ALONE",
    "BlockTable",
    "Chain",
    "Chains",
    "Found",
    "FreeIds",
    "FreeQueue",
    "HashChain",
    "HashedBlockPool",
    "Path",
    "Place",
    "QueueHistory",
    "RadixNode",
    "RadixTree",
    "Rest",
    "Segment",
    "SegmentPool",
    "all_but_last",
    "first_tokens",
    "lookup_blocks",
    "shared_tokens",
]
