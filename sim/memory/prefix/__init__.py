"""Prefix caches: what is left of requests that are gone, for those that begin alike."""

from __future__ import annotations

from .hash_chain import HashChain, HashedBlockPool, lookup_blocks
from .history import BlockHistory
from .names import BlockNames
from .radix import RadixNode, RadixTree, all_but_last, first_tokens

__all__ = [
    "BlockHistory",
    "BlockNames",
    "HashChain",
    "HashedBlockPool",
    "RadixNode",
    "RadixTree",
    "all_but_last",
    "first_tokens",
    "lookup_blocks",
]
