"""Memories: which sequence holds which slot."""

from __future__ import annotations

from .accounting.buckets import BUCKETS
from .accounting.kv_groups import GroupSize, PageGroups, most_prompt_blocks
from .contiguous.buddy import BuddyArena
from .contiguous.contiguous import BatchMemory, ContiguousMemory
from .contiguous.dialogue_copies import DialogueContiguousMemory
from .interface.memory import Memory, Transaction
from .paged.cached import CachedMemory
from .paged.deferred import DeferredMemory
from .paged.dialogue import DialogueMemory
from .paged.paged import PagedMemory
from .paged.radix_holdings import Windows
from .paged.radix_host import HostRadixMemory
from .paged.radix_memory import RadixMemory
from .paged.radix_slots import SlotRadixMemory
from .paged.reserved import ReservedMemory
from .paged.sharing import SharingMemory
from .prefix.block_pool import BlockPool

__all__ = [
    "BUCKETS",
    "BatchMemory",
    "BlockPool",
    "BuddyArena",
    "CachedMemory",
    "ContiguousMemory",
    "DeferredMemory",
    "DialogueContiguousMemory",
    "DialogueMemory",
    "GroupSize",
    "HostRadixMemory",
    "Memory",
    "PageGroups",
    "PagedMemory",
    "RadixMemory",
    "ReservedMemory",
    "SharingMemory",
    "SlotRadixMemory",
    "Windows",
    "Transaction",
    "most_prompt_blocks",
]
