"""Random operations on every allocator, each against a simple model that shares no code with it.

    pools         blocks with reference counts; ``hashed_pool``: with hashes and both orders of eviction
    radix         SGLang's tree
    radix_memory  the pool over it; ``host_radix``: with a host
    arenas        where contiguous pieces are placed
    draws         the numbers that are drawn, few and cheap
    served        what the models of memories share: a memory is served as the engine serves it
    tables        models of pools with ids; the walk over block tables
    hybrid        KV groups over one pool
    paged         paged memory, with prefills in chunks, with pages that stay mapped
    policies      every composition that a policy can reach, served by that policy
    sharing       paged memory of groups with sequences that share blocks
    trees         requests that go on from others
    dialogue      paged memory of trees of requests
    copies        contiguous memory of groups, which copy what paged memory shares; ``dialogue_copies``: of trees
    reservations  contiguous memory: counted, in chunks of an arena, in whole blocks, in static batches

After every operation all invariants are walked that the allocator answers for, by their numbers in the design.
"""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine

from .arenas import ArenaMachine
from .copies import CopyMachine
from .dialogue import DialogueMachine
from .dialogue_copies import DialogueCopyMachine
from .hashed_pool import HashedPoolMachine
from .host_components import HostStateMachine, HostWindowMachine
from .host_radix import HostRadixMemoryMachine, HostTreeMachine
from .hybrid import HybridMachine
from .paged import ChunkedMachine, DeferredMachine, PagedMachine
from .policies import POLICY_MACHINES
from .pools import PoolMachine
from .radix import RadixMachine
from .radix_memory import RadixMemoryMachine, SlotRadixMachine
from .reservations import ReservationMachine
from .sharing import SharingMachine
from .state_radix import StateMachine
from .window_radix import WindowMachine

__all__ = ["MACHINES", "POLICY_MACHINES"]

#: By the allocator's class, and what it is composed of; some machines do the same to several.
MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "BlockPool": PoolMachine,
    "BlockPool, hashes": HashedPoolMachine,
    "RadixTree": RadixMachine,
    "WindowTree": WindowMachine,
    "StateTree": StateMachine,
    "HostTree": HostTreeMachine,
    "HostStateTree": HostStateMachine,
    "HostWindowTree": HostWindowMachine,
    **dict.fromkeys(("BuddyArena", "FirstFitArena", "BestFitArena"), ArenaMachine),
    "PagedMemory": PagedMachine,
    "PagedMemory, chunked prefills": ChunkedMachine,
    "PagedMemory, KV groups": HybridMachine,
    "CachedMemory": POLICY_MACHINES["vllm-v1: CachedMemory, steps ahead"],
    "DeferredMemory": DeferredMachine,
    "RadixMemory": RadixMemoryMachine,
    "SlotRadixMemory": SlotRadixMachine,
    "HostRadixMemory": HostRadixMemoryMachine,
    "SharingMemory": SharingMachine,
    "DialogueMemory": DialogueMachine,
    "ContiguousMemory, groups": CopyMachine,
    "DialogueContiguousMemory": DialogueCopyMachine,
    **dict.fromkeys(("ContiguousMemory", "ReservedMemory", "BatchMemory"), ReservationMachine),
}
