"""The buddy arena against a bitmap: merged as far as can be, the free chunks are the largest aligned holes."""

from __future__ import annotations

from copy import deepcopy

import pytest
from fragmeter.sim.errors import SimulationFault
from fragmeter.sim.memory import BuddyArena
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def chunks(arena: BuddyArena) -> set[tuple[int, int]]:
    """Free chunks as (first block, blocks)."""
    return {(start, size) for size, starts in arena.free_lists.items() for start in starts}


def largest_holes(free: list[bool], largest: int) -> set[tuple[int, int]]:
    """The bitmap cut into aligned powers of two, the largest first."""
    holes, covered, size = set(), set(), largest
    while size:
        for start in range(0, len(free) - size + 1, size):
            if start not in covered and all(free[start : start + size]):
                holes.add((start, size))
                covered.update(range(start, start + size))
        size //= 2
    return holes


class ArenaAgainstBitmap(RuleBasedStateMachine):
    """Allocates and frees at random; remembers when each free chunk came to its list."""

    @initialize(num_blocks=st.integers(1, 70), largest=st.sampled_from([1, 4, 16, 128]))
    def carve(self, num_blocks, largest):
        self.arena = BuddyArena(num_blocks, largest)
        self.largest = largest
        self.free = [True] * num_blocks
        self.taken: list[tuple[int, int]] = []
        self.came = {chunk: chunk[0] for chunk in largest_holes(self.free, largest)}
        self.now = num_blocks

    def note(self):
        """Chunks that are new to their lists came now."""
        self.now += 1
        holes = largest_holes(self.free, self.largest)
        self.came = {chunk: self.came.get(chunk, self.now) for chunk in holes}

    @rule(power=st.integers(0, 7))
    def allocate(self, power):
        blocks = 1 << power
        fitting = [size for _, size in self.came if size >= blocks]
        assert self.arena.fits(blocks) == bool(fitting)
        if not fitting:
            with pytest.raises(SimulationFault):
                deepcopy(self.arena).allocate(blocks)
            return
        # The smallest that fits, last in first out, and its lower end.
        best = [chunk for chunk in self.came if chunk[1] == min(fitting)]
        expected, _ = max(best, key=self.came.get)
        assert self.arena.allocate(blocks) == expected
        self.free[expected : expected + blocks] = [False] * blocks
        self.taken.append((expected, blocks))
        self.note()

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_one(self, data):
        start, blocks = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.arena.free(start, blocks)
        self.free[start : start + blocks] = [True] * blocks
        self.note()

    @rule(data=st.data())
    def free_twice(self, data):
        """Also where the chunk has been merged into a larger one."""
        start, size = data.draw(st.sampled_from(sorted(self.came) or [(0, 0)]))
        assume(size)
        blocks = 1 << data.draw(st.integers(0, size.bit_length() - 1))
        place = start + blocks * data.draw(st.integers(0, size // blocks - 1))
        with pytest.raises(SimulationFault):
            deepcopy(self.arena).free(place, blocks)

    @invariant()
    def free_chunks_are_the_largest_holes(self):
        """Invariant 7: aligned, disjoint, merged."""
        assert chunks(self.arena) == largest_holes(self.free, self.largest)
        starts = sorted(start for start, free in enumerate(self.free) if free)
        runs = self.arena.free_runs()
        assert [block for start, length in runs for block in range(start, start + length)] == starts
        assert all(end < start for (begin, length), (start, _) in zip(runs, runs[1:]) for end in [begin + length])
        for blocks in (0, 1, 2, 5, 200):
            assert self.arena.free_blocks_below(blocks) == sum(size for _, size in self.came if size < blocks)

    def teardown(self):
        """Invariant 7: all merge back to the initial carve when all is freed."""
        for start, blocks in getattr(self, "taken", []):
            self.arena.free(start, blocks)
        if hasattr(self, "arena"):
            assert chunks(self.arena) == chunks(BuddyArena(len(self.free), self.largest))


ArenaAgainstBitmap.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestArenaAgainstBitmap = ArenaAgainstBitmap.TestCase


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
