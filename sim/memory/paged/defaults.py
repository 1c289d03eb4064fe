"""What a policy may ask of any paged memory, and only some kinds of it do."""

from __future__ import annotations

from collections.abc import Iterable

from ...types.sequence import Sequence
from ...types.state import State
from ..base import Memory


class PagedDefaults(Memory):
    """The part of paged memory for prefix caches, sequences that share, and pages that stay mapped: without them it does nothing.

    Attributes:
        searches: Whether beams run: each of their steps is a decision.
        prefix_blocks: Blocks of a prefix that every prompt begins with, pinned from the start.
        due_copies: Shared blocks that running sequences copy in their next step.
    """

    searches = False
    prefix_blocks = due_copies = 0

    def steps_before_admission(self, state: State, steps: int) -> int:
        """Of so many steps those before one in which the running do what lets the first that waits in."""
        return steps

    def steps_settled(self, decode_step: int, limit: int) -> int:
        """Steps from ``decode_step`` on, at most ``limit``, in which ``cached_blocks`` changes in the first one at the most."""
        return limit

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Set ``computed_tokens`` of a waiting sequence, where what is found for it may change while it waits."""

    def may_grow(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether what is found for a waiting sequence may be more in a later step."""
        return False

    def is_settled(self) -> bool:
        """Whether steps without admissions, finishes and preemptions change nothing on the host and wait for nothing."""
        return True

    def may_admit(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a sequence that lacked blocks may find them, or more of its prefix, before a sequence leaves."""
        return True

    def promise(self, sequence: Sequence) -> None:
        """The sequence is admitted in this step: what was looked up for it stays until then."""

    def reserve_decodes(self, need: int) -> None:
        """The running sequences take ``need`` blocks in the coming step: make them free, if a cache has them."""

    def held_blocks(self, leader: Sequence, decode_step: int) -> int:
        """Blocks that come free if a sequence, and all that share with it, give way before ``decode_step``."""
        raise self.cannot("share blocks")

    def needed_blocks(self, members: Iterable[Sequence], tokens: int = 0) -> int:
        """Blocks that sequences which come together take for all but their last ``tokens`` known tokens."""
        raise self.cannot("share blocks")
