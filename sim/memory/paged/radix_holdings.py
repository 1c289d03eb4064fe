"""What sequences have in SGLang's radix tree and beside it, and the pools of windows and of states beside that of all tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ...workload.content import Run
from ..prefix import Place, RadixNode, Rest


@dataclass(slots=True)
class Holding:
    """What a sequence has in the tree, and beside it.

    Attributes:
        node: The node that it locks.
        pages: Pages up to there.
        computed: Tokens computed up to its last prefill.
        rest: The pages that follow in its prompt and output, once any of them has joined the tree.
        bound: Of its lock, see ``WindowTree.lock``.
        freed: Pages whose windows it has given back, from its first one on.
        branch: Pages that its look-up walked through, where windows were missing at their end, 0 once they are there again; or a state.
        states: States of its own.
        inserted: Pages that it has inserted into the tree.
    """

    node: RadixNode
    pages: int
    computed: int
    rest: Rest | None = None
    bound: int = 0
    freed: int = 0
    branch: int = 0
    states: int = 0
    inserted: int = 0

    @property
    def first(self) -> int:
        """Its first page with windows of its own."""
        return max(self.pages, self.freed)


@dataclass(slots=True)
class Known:
    """The known tokens of a sequence that waits, prefills or runs: they are looked up again and again.

    Attributes:
        tokens: How many they are.
        string: All of them.
        pages: The full pages of all of them.
        before_last: The full pages of all but the last one, which has to be computed.
        place, found: How far the tree had ``pages`` and ``before_last`` when they were looked up last.
    """

    tokens: int
    string: tuple[Run, ...]
    pages: tuple[Run, ...]
    before_last: tuple[Run, ...]
    place: Place
    found: Place


@dataclass(slots=True)
class Windows:
    """The pool of the layers with a sliding window, beside that of all others.

    Attributes:
        tokens: ``sliding_window_size`` of SGLang: tokens before the coming one that it attends to.
        pages: Pages of the pool.
        slot_bytes: Bytes of a slot of the other pool, and of this one.
        in_flight: Most tokens of a chunk that runs while the next step is decided.
        own: Pages of it that sequences have beside the tree.
    """

    tokens: int
    pages: int
    slot_bytes: tuple[int, int]
    in_flight: int
    own: int = 0


@dataclass(slots=True)
class States:
    """The pool of the layers with a state (Mamba, linear attention), beside that of all tokens.

    Attributes:
        slots: States that it has.
        tracked: States of a sequence beside the one that it computes with: copies, of which the latest joins the tree
            (``--mamba-radix-cache-strategy extra_buffer``). With 0 the one that it computes with does, or a copy made then (``no_buffer``).
        grid: Tokens of a prefill from one that can be copied to the next.
        interval: Tokens of a sequence that decodes from one that is copied to the next.
        slot_bytes: Bytes of a slot of the other pool, and of a state.
        own: States of it that sequences have beside the tree.
    """

    slots: int
    tracked: int
    grid: int
    interval: int
    slot_bytes: tuple[int, int]
    own: int = 0

    def of_prefill(self, first: int, end: int, branch: int) -> int:
        """Tokens of a sequence up to a state that joins the tree after a prefill from ``first`` to ``end``; 0 without any.

        The last one on the grid, which begins with the prefill; the one at ``branch``, if that is on it.
        """
        if not self.tracked:
            return end
        last = end - (end - first) % self.grid
        if last == first:
            return 0
        return branch if first < branch < last and not (branch - first) % self.grid else last

    def of_decodes(self, first: int, end: int) -> int:
        """Tokens up to the last state that was copied while a sequence grew from ``first`` to ``end``; 0 without any."""
        last = end - end % self.interval if self.tracked else end
        return last if last > first else 0
