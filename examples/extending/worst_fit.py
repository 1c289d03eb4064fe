"""An allocator of your own: contiguous reservations, each cut from the longest free run.

PYTHONPATH=examples/extending fragmeter simulate --policy orca-oracle --arena first-fit --allocator worst_fit:WorstFit
"""

from __future__ import annotations

from fragmeter.sim.memory import ContiguousMemory
from fragmeter.sim.memory.contiguous.arena import FirstFitArena
from fragmeter.sim.policy import Pool


class WorstFitArena(FirstFitArena):
    """Free runs by address; the longest is cut at its lower end, which leaves large remainders."""

    def choose(self, blocks: int) -> int | None:
        longest = max(self.lengths, default=0)
        return self.lengths.index(longest) if longest >= blocks else None


class WorstFit(ContiguousMemory):
    """The reservations of the Orca policies, placed by worst fit."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.num_blocks, pool.block_size, WorstFitArena(pool.num_blocks))
