"""How many sequences take a block in each step, or give one back, by the step modulo the block size.

A decoding sequence takes a block every ``block_size`` steps, and past its window it gives one back as often: in the steps of one
*phase*, fixed from its admission until it leaves. So a histogram of phases tells what any span of steps takes at a cost that does
not grow with the number of sequences:

    phase      0  1  2  3          block size 4, seven sequences
    count      2  0  4  1          steps 4, 5, 6, ... take 2, 0, 4, 1, 2, 0, 4, ... blocks
"""

from __future__ import annotations


class Phases:
    """A histogram of phases.

    Attributes:
        counts: By phase; stored twice over, so that a span shorter than the block size is one slice.
    """

    __slots__ = ("_size", "counts")

    def __init__(self, block_size: int) -> None:
        self._size, self.counts = block_size, [0] * (2 * block_size)

    def add(self, phase: int, number: int) -> None:
        """So many sequences more have a phase."""
        self.counts[phase] += number
        self.counts[phase + self._size] += number

    def cycle(self, step: int) -> list[int]:
        """Blocks of each of the ``block_size`` steps from ``step`` on."""
        start = step % self._size
        return self.counts[start : start + self._size]

    def total(self, step: int, steps: int) -> int:
        """Blocks of the ``steps`` steps from ``step`` on."""
        start = step % self._size
        cycles, rest = divmod(steps, self._size)
        return cycles * sum(self.counts[: self._size]) + sum(self.counts[start : start + rest])

    def steps_within(self, step: int, blocks: int) -> int:
        """Steps from ``step`` on with at most ``blocks`` together. Only where some sequence has a phase; else the answer has no end."""
        cycles, left = divmod(blocks, sum(self.counts[: self._size]))
        steps = cycles * self._size
        for need in self.cycle(step):
            if need > left:
                break
            left -= need
            steps += 1
        return steps


class GrowingGroups:
    """KV groups with blocks of one size, each of which allocates a block whenever a sequence fills one.

    Attributes:
        size: Tokens of a block.
        number: Number of groups.
        units: Units of a block (``BlockCounts.unit_tokens`` each).
        phases: Phases of the decoding sequences, modulo ``size``.
        blocks: Blocks that all sequences have allocated in one group, released ones included.
    """

    __slots__ = ("blocks", "number", "phases", "size", "units")

    def __init__(self, size: int, number: int, units: int, phases: Phases) -> None:
        self.size, self.number, self.units, self.phases = size, number, units, phases
        self.blocks = 0

    def more(self, units: int, before: int) -> int:
        """See ``more_blocks``, for one group."""
        return more_blocks(units, before, self.units)


def more_blocks(units: int, before: int, ratio: int) -> int:
    """Blocks of ``ratio`` units that a sequence allocates as it grows from ``before`` units by ``units``."""
    return units if ratio == 1 else -(-(before + units) // ratio) + -before // ratio
