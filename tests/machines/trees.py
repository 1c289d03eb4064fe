"""Trees of requests, as the machines of both kinds of memory grow them."""

from __future__ import annotations

from hypothesis import strategies as st

from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue

from .draws import EITHER, combined
from .served import Served

#: Prompt, output, how many rows before it its parent is, how much of that it leaves out, whether it rolls that back.
ROWS = st.lists(combined(range(1, 10), range(1, 10), range(4), (0, 0, 1, 2, 3, 5), EITHER), min_size=3, max_size=9)


def tree(rows: list[tuple]) -> Dialogue:
    """Parents as far as lengths allow them."""
    parent, tokens, rolls = [], [], []
    for row, (prompt, _, back, cut, rolls_back) in enumerate(rows):
        most = min(prompt - 1, sum(rows[row - back][:2]) - 1) if 0 < back <= row else 0
        parent.append(row - back if most else NO_PARENT)
        tokens.append(most - cut % most if most else 0)
        rolls.append(rolls_back and most > 0)
    return Dialogue(parent, tokens, rolls)


class Tree(Served):
    """Requests of a tree: which one comes next, and which parents are there.

    ``tokens`` are those with a slot before the coming step, in which all take theirs together.
    """

    def plant(self, rows: list[tuple]) -> Dialogue:
        """What is known of the requests before any of them arrives."""
        dialogue = tree(rows)
        self.parents, self.parent_tokens = dialogue.parent.tolist(), dialogue.parent_tokens.tolist()
        self.rolls_back = dialogue.rolls_back.tolist()
        self.children = [self.parents.count(row) for row in range(len(rows))]
        self.to_come = [Sequence(row, *lengths[:2], lengths[1]) for row, lengths in enumerate(rows)]
        return dialogue

    def running(self, row: int) -> Sequence | None:
        return next((sequence for sequence in self.tokens if sequence.index == row), None)

    def heads(self, again: bool) -> list[Sequence]:
        """Up to three that wait, or that come now."""
        return [*self.state.waiting][:3] if again else self.to_come[:3]

    def take_head(self, again: bool) -> None:
        if again:
            self.state.waiting.popleft()
        else:
            del self.to_come[0]

    def logged_cached(self) -> int:
        """Cached slots by the changes that were logged so far."""
        return int(self.memory.cache_log.changes.columns()["slots"].sum())
