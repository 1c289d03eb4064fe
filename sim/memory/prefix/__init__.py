"""Prefix caches: KV of earlier requests, reused by requests with the same prefix."""

from __future__ import annotations

from .block_pool import FREE_QUEUES, UNSHARED, BlockPool, FreeKVCacheBlockQueue, LeastRecentlyUsed
from .chains import Chain, Chains, HashChain, Path, lookup_blocks, names_in
from .host_components import HostComponents, HostStateTree, HostWindowTree
from .host_radix import HostTree
from .radix import Pages, Place, RadixNode, RadixTree, Rest, all_but_last, first_tokens, shared_tokens
from .residency import BlockResidency, CoreResidency
from .state_radix import StateTree
from .window_radix import WindowTree

__all__ = [
    "FREE_QUEUES",
    "UNSHARED",
    "BlockPool",
    "BlockResidency",
    "Chain",
    "Chains",
    "CoreResidency",
    "FreeKVCacheBlockQueue",
    "HashChain",
    "HostComponents",
    "HostStateTree",
    "HostTree",
    "HostWindowTree",
    "LeastRecentlyUsed",
    "Pages",
    "Path",
    "Place",
    "RadixNode",
    "RadixTree",
    "Rest",
    "StateTree",
    "WindowTree",
    "all_but_last",
    "first_tokens",
    "lookup_blocks",
    "names_in",
    "shared_tokens",
]
