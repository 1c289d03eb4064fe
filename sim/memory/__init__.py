"""Who holds which slot."""

from __future__ import annotations

from .block_pool import BlockPool
from .buddy import BuddyArena
from .cached import CachedMemory
from .chunked import ChunkedMemory
from .contiguous import BatchMemory, BuddyMemory, ContiguousMemory
from .copies import CopyingBuddyMemory, CopyingMemory
from .deferred import DeferredMemory
from .dialogue import DialogueMemory
from .dialogue_copies import DialogueBuddyMemory, DialogueContiguousMemory
from .groups import PageGroups, most_prompt_blocks
from .hybrid import HybridMemory
from .integrals import BUCKETS, Window
from .paged import PagedMemory
from .radix_memory import RadixMemory
from .radix_slots import SlotRadixMemory
from .reserved import ReservedMemory
from .sharing import SharingMemory

__all__ = [
    "BUCKETS",
    "BatchMemory",
    "BlockPool",
    "BuddyArena",
    "BuddyMemory",
    "CachedMemory",
    "ChunkedMemory",
    "ContiguousMemory",
    "CopyingBuddyMemory",
    "CopyingMemory",
    "DeferredMemory",
    "DialogueBuddyMemory",
    "DialogueContiguousMemory",
    "DialogueMemory",
    "HybridMemory",
    "PageGroups",
    "PagedMemory",
    "RadixMemory",
    "ReservedMemory",
    "SharingMemory",
    "SlotRadixMemory",
    "Window",
    "most_prompt_blocks",
]
