"""Requests with a parent, and how long what a parent computed is kept, in paged and in contiguous memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np

from ...types.sequence import Sequence
from ...workload.dialogue import NO_PARENT, Dialogue

#: What a memory keeps of a parent: a block table, or a piece.
Kept = TypeVar("Kept")


class Parents(ABC, Generic[Kept]):
    """The part of a memory that knows a tree of requests.

    Attributes:
        kept: What parents that are done keep, by request, the one used longest ago first.
    """

    #: Whether a sequence is admitted in this step.
    _joining: bool

    def know(self, dialogue: Dialogue) -> None:
        """Set the parent of every request; call it first."""
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self._parent, self._parent_tokens = dialogue.parent.tolist(), dialogue.parent_tokens.tolist()
        self._rolls_back = dialogue.rolls_back.tolist()
        self._children = [0] * len(dialogue)
        self._running: dict[int, Sequence] = {}

    def expect(self, children: np.ndarray) -> None:
        """How many requests that will be served go on from each, int64 [n]."""
        self._children = children.tolist()

    def may_grow(self, sequence: Sequence, decode_step: int) -> bool:
        """Whether a sequence that is not admitted may be in the next step: after admissions, when what was promised to
        them can be given up, and until its parent, if it runs, gets as far as it goes on from."""
        parent, tokens = self._parent[sequence.index], self._parent_tokens[sequence.index]
        return self._joining or (parent in self._running and not self._has_computed(parent, tokens, decode_step))

    def _has_computed(self, parent: int, tokens: int, decode_step: int) -> bool:
        """Whether a parent runs and has computed so many tokens before ``decode_step``."""
        return parent in self._running and self._running[parent].held_tokens(decode_step) >= tokens

    @abstractmethod
    def _release_kept(self, parent: int) -> object:
        """Release the blocks or the piece that are kept of a finished parent."""

    def _forget_child(self, parent: int) -> None:
        """Count a child of ``parent`` as finished; after the last one, release what is kept of the parent."""
        if parent != NO_PARENT:
            self._children[parent] -= 1
            if not self._children[parent] and parent in self.kept:
                self._release_kept(parent)
