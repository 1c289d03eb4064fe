"""The buddy arena on logs worked out by hand."""

from __future__ import annotations

import pytest

from fragmeter.sim.memory import BuddyArena
from fragmeter.sim.types.errors import SimulationFault


def chunks(arena: BuddyArena) -> set[tuple[int, int]]:
    """Free chunks as (first block, blocks)."""
    return {(start, size) for size, starts in arena.free_lists.items() for start in starts}


def test_the_papers_pool_is_carved_greedily():
    sizes = {size: len(starts) for size, starts in BuddyArena(983).free_lists.items() if starts}
    assert sizes == {128: 7, 64: 1, 16: 1, 4: 1, 2: 1, 1: 1}
    assert BuddyArena(983).free_runs() == [(0, 983)]


def test_a_split_leaves_the_upper_halves_and_the_last_one_freed_goes_first():
    arena = BuddyArena(256)
    assert [arena.allocate(16), arena.allocate(128)] == [128, 0]
    assert chunks(arena) == {(144, 16), (160, 32), (192, 64)}
    assert arena.free_blocks_below(64) == 48
    assert arena.free_runs() == [(144, 112)]
    arena.free(0, 128)
    arena.free(128, 16)
    assert chunks(arena) == {(0, 128), (128, 128)}
    assert arena.allocate(128) == 128


def test_an_arena_never_gives_what_it_has_not():
    arena = BuddyArena(6)
    assert arena.fits(4) and not arena.fits(8)
    with pytest.raises(SimulationFault, match="8"):
        arena.allocate(8)
    arena.allocate(4)
    with pytest.raises(SimulationFault):
        arena.allocate(4)
    with pytest.raises(SimulationFault, match="twice"):
        arena.free(4, 2)
