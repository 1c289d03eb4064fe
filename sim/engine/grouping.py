"""Requests of several sequences, with a prefix in common or with parents: which policies handle them, and with what."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..memory import (
    CopyingBuddyMemory,
    CopyingMemory,
    DialogueBuddyMemory,
    DialogueContiguousMemory,
    DialogueMemory,
    PagedMemory,
    SharingMemory,
)
from ..policy import POLICIES, Policy
from ..policy.orca import OrcaMax, OrcaPaper
from ..policy.sharing import SharingSosp23, SharingV0
from ..policy.vllm_sosp23 import VllmSosp23
from ..policy.vllm_v0 import VllmV0
from ..types.errors import SettingError
from ..workload.closed_loop import ClosedLoop, Maker
from ..workload.groups import Ancestry, Grouping, GroupLoop, GroupState
from ..workload.workload import Workload
from .settings import Settings

# Policies over paged memory that know groups, and what they are then.
_GROUPED = {VllmSosp23: SharingSosp23, VllmV0: SharingV0}


def grouped_policy(kind: type) -> type:
    """What a policy is where sequences share."""
    return _GROUPED.get(kind, kind)


def is_grouped(settings: Settings, workload: Workload) -> bool:
    """Whether sequences share memory, or copy what they would share if it were paged.

    Where the policy knows no groups, the sequences of a request are requests of their own.

    Raises:
        SettingError: Beams, or a shared prefix, for a policy that knows neither; a prompt no longer than the prefix.
    """
    policy, prefix = settings.policy, settings.shared_prefix_tokens
    paged = POLICIES[policy] in _GROUPED
    knows = paged or issubclass(POLICIES[policy], OrcaPaper)
    if settings.use_beam_search and not knows:
        raise SettingError("use_beam_search", True, f"{policy} knows no beams; take vllm-sosp23, vllm-v0 or an orca")
    if prefix:
        _check_prefix(policy, prefix, paged, workload)
    return bool(prefix) or (knows and (workload.shares or workload.dialogue is not None))


def _check_prefix(policy: str, prefix: int, paged: bool, workload: Workload) -> None:
    field = "shared_prefix_tokens"
    if not paged:
        raise SettingError(field, prefix, f"{policy} pins no prefix; take vllm-sosp23 or vllm-v0")
    if workload.dialogue is not None:
        raise SettingError(field, prefix, "does not go with a trace whose requests have parents; leave one out")
    if (workload.prompt_tokens <= prefix).any():
        shortest = int(workload.prompt_tokens.min())
        raise SettingError(field, prefix, f"the shortest prompt has {shortest} tokens; give fewer")


def grouped_memory(
    settings: Settings, kind: type, num_blocks: int, size: int, max_model_len: int, host: int, workload: Workload
) -> Any:
    """The memory of a policy where sequences share, or have parents.

    Args:
        kind: The policy.
        host: Blocks of the swap space.
    """
    dialogue = workload.dialogue
    if issubclass(kind, OrcaMax):
        arena = max_model_len, settings.arena
        if dialogue is None:
            return CopyingBuddyMemory(num_blocks, size, *arena)
        return DialogueBuddyMemory(num_blocks, size, dialogue, *arena)
    if issubclass(kind, OrcaPaper):
        if dialogue is None:
            return CopyingMemory(num_blocks, size)
        return DialogueContiguousMemory(num_blocks, size, dialogue)
    if dialogue is not None:
        return DialogueMemory(num_blocks, size, dialogue)
    prefix = settings.shared_prefix_tokens // size
    if prefix >= num_blocks:
        remedy = f"fills {prefix} blocks, and the pool has {num_blocks}; take a shorter one"
        raise SettingError("shared_prefix_tokens", settings.shared_prefix_tokens, remedy)
    return SharingMemory(num_blocks, size, host, settings.ids or settings.use_beam_search, prefix)


def grouped_source(
    settings: Settings, workload: Workload, policy: Policy, memory: Any, refused: np.ndarray
) -> tuple[GroupLoop | ClosedLoop, GroupState]:
    """Where requests come from, and the state that knows their groups.

    Args:
        refused: bool [n], by request.
    """
    # Of a contiguous piece siblings share nothing.
    size = memory.block_size if isinstance(memory, PagedMemory) else 1
    prefix = settings.shared_prefix_tokens // size * size
    if workload.dialogue is not None:
        memory.expect(workload.dialogue.children(~refused))
    beams = partial(Ancestry, settings.beam_survival, settings.seed) if settings.use_beam_search else None
    grouping, longest = Grouping(prefix, beams), policy.limits.max_model_len
    if workload.users is None:
        source = GroupLoop(workload, refused, longest, grouping)
    else:
        source = ClosedLoop(workload, refused, Maker(workload, longest, grouping))
    return source, GroupState(policy.preempted_first, size, prefix)


def leaders(workload: Workload, grouped: bool) -> np.ndarray:
    """Who prefills for each sequence: the first of its request, or itself; int64 [sequences]."""
    if grouped:
        return np.repeat(workload.first_sequences, workload.num_sequences)
    return np.arange(int(workload.num_sequences.sum()))


def smallest_pools(policy: Policy, block_size: int, workload: Workload, grouped: bool) -> np.ndarray:
    """Blocks of the smallest pool that can ever serve each request; of separate ones, any sequence's, int64 [n]."""
    if grouped:
        return policy.smallest_pool_blocks(workload, block_size)
    return policy.smallest_pool_blocks(workload.sequences, block_size)[workload.first_sequences]
