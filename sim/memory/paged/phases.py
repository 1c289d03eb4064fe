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
    """Groups with blocks of one size that take a block with every block of a sequence.

    Attributes:
        size: Tokens of a block.
        number: How many groups.
        units: Blocks of the smallest size to one of theirs.
        phases: Of the sequences that decode, modulo their size.
        blocks: Blocks of all sequences in one group that gives none back.
    """

    __slots__ = ("blocks", "number", "phases", "size", "units")

    def __init__(self, size: int, number: int, units: int, phases: Phases) -> None:
        self.size, self.number, self.units, self.phases = size, number, units, phases
        self.blocks = 0

    def more(self, units: int, before: int) -> int:
        """Blocks more in one group if a sequence has so many ``units`` more than ``before``."""
        return more_blocks(units, before, self.units)


def more_blocks(units: int, before: int, ratio: int) -> int:
    """Blocks of ``ratio`` units that a sequence takes for so many ``units`` more than ``before``."""
    return units if ratio == 1 else -(-(before + units) // ratio) + -before // ratio
