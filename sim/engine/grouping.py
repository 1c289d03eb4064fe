"""Requests with sequences that share memory (samples, beams, a shared prefix, parents): checks, source and state."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..config.settings import Settings
from ..config.unread import is_required, refuse_lacking
from ..memory import Memory
from ..policy.base import AnyPolicy
from ..policy.registry import serves_groups
from ..types.errors import SettingError
from ..types.plugins import broken, is_plugin
from ..workload.closed_loop import ClosedLoop, Maker
from ..workload.groups import Ancestry, Grouping, GroupLoop, GroupState
from ..workload.workload import Workload


def is_grouped(settings: Settings, workload: Workload) -> bool:
    """Whether sequences share blocks, or copy the tokens that paged memory would share.

    Under a policy without groups, the sequences of a request are served as separate requests.

    Raises:
        SettingError: Beams or a shared prefix under a policy that lacks them; a prompt no longer than the prefix.
    """
    refuse_lacking(settings)
    prefix = settings.policy_options.pinned_tokens
    if prefix:
        _check_prefix(prefix, workload)
    groups = serves_groups(settings.kind)
    if not groups:
        for name, value in settings.options:
            if is_required(name):
                raise SettingError(name, value, f"{settings.policy} does not support it; leave it out")
    return bool(prefix) or (groups and (workload.shares or workload.dialogue is not None))


def _check_prefix(prefix: int, workload: Workload) -> None:
    field = "shared_prefix_tokens"
    if workload.dialogue is not None:
        raise SettingError(field, prefix, "cannot be combined with a trace with parent requests; leave one out")
    if (workload.prompt_tokens <= prefix).any():
        shortest = int(workload.prompt_tokens.min())
        raise SettingError(field, prefix, f"the shortest prompt has {shortest} tokens; give fewer")


def grouped_source(
    settings: Settings, workload: Workload, policy: AnyPolicy, memory: Memory, refused: np.ndarray
) -> tuple[GroupLoop | ClosedLoop, GroupState]:
    """The source of the requests, and a state with their groups.

    Args:
        refused: bool [n], by request.
    """
    # Siblings share no part of a contiguous piece.
    size = 1 if memory.reserves else memory.block_size
    options = settings.policy_options
    prefix = options.pinned_tokens // size * size
    if workload.dialogue is not None:
        memory.expect(workload.dialogue.children(~refused))
    survival = options.survival_of_beams
    beams = None if survival is None else partial(Ancestry, survival, settings.seed)
    grouping, longest = Grouping(prefix, beams), policy.limits.max_model_len
    source: GroupLoop | ClosedLoop
    if workload.users is None:
        source = GroupLoop(workload, refused, longest, grouping)
    else:
        source = ClosedLoop(workload, refused, Maker(workload, longest, grouping))
    return source, GroupState(policy.preempted_first, size, prefix)


def leaders(workload: Workload, grouped: bool) -> np.ndarray:
    """The leader of each sequence, the first of its request, or itself without groups; int64 [sequences]."""
    if grouped:
        return np.repeat(workload.first_sequences, workload.num_sequences)
    return np.arange(int(workload.num_sequences.sum()))


def smallest_pools(policy: AnyPolicy, block_size: int, workload: Workload, grouped: bool) -> np.ndarray:
    """Blocks of the smallest pool that can serve each request, int64 [n]; without groups, one of its sequences."""
    asked = workload if grouped else workload.sequences
    found = policy.smallest_pool_blocks(asked, block_size)
    if is_plugin(policy) and (np.shape(found) != (len(asked),) or np.asarray(found).dtype.kind not in "iu"):
        what = f"smallest_pool_blocks returns no integer for each of {len(asked)} requests; return an int64 array"
        raise broken(type(policy), "smallest_pool_blocks", "limits", what)
    return found if grouped else found[workload.first_sequences]
