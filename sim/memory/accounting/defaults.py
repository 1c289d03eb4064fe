"""What a memory answers where it has nothing of the kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from .cache_log import CacheLog
from .kv_groups import PageGroups

if TYPE_CHECKING:
    from ..base import Placement, Tables
    from ..paged.offload import HostTier
    from ..paged.speculative import Speculation


class MemoryDefaults:
    """The part of ``Memory`` that most kinds have no use for.

    What cannot happen under the policies of a kind raises SimulationFault.
    """

    host_blocks = host_free = 0
    groups = PageGroups()
    reserves = False
    leaves_together = False
    pinned_slots = 0
    tables: Tables | None = None
    cache_log: CacheLog | None = None
    cached_level: CacheLog | None = None
    transfers: HostTier | None = None
    speculation: Speculation | None = None

    @property
    def placement(self) -> Placement | None:
        """See ``Memory``."""
        return None

    @property
    def evicted_blocks(self) -> int:
        """See ``Memory``."""
        return 0

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("preempt a sequence")

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("swap a sequence in")

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("prefill in chunks")

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("stall a sequence")

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("release a stalled sequence")

    def hold_finished(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("be scheduled ahead")

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        raise self._cannot("be scheduled ahead")

    def swapped_blocks(self, sequences: tuple[Sequence, ...]) -> int:
        """See ``Memory``."""
        raise self._cannot("swap")

    def copied_slots(self, decodes: bool) -> int:
        """See ``Memory``."""
        return 0

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``."""
        return 0

    def room_only_falls(self) -> bool:
        """See ``Memory``."""
        return True

    def verify(self, state: State) -> None:
        """See ``Memory``."""
        raise self._cannot("verify drafts")

    def expect(self, children: np.ndarray) -> None:
        """See ``Memory``; nothing is kept for requests that go on from others."""

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``."""

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``."""
        return np.zeros(0, dtype=np.int64)

    def _cannot(self, what: str) -> SimulationFault:
        return SimulationFault(
            f"{type(self).__name__} cannot {what}; the policy calls a method that its memory does not have"
        )
