"""Three arenas against a bitmap, on one hand-worked log, and under a policy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random

import numpy as np
import pytest
from fragmeter.sim.errors import SimulationFault
from fragmeter.sim.memory.arena import BestFitArena, FirstFitArena, arena
from fragmeter.sim.memory.buddy import BuddyArena
from fragmeter.sim.requests import request_times
from fragmeter.sim.run import simulate
from fragmeter.sim.settings import settings as run_settings
from fragmeter.sim.workload import Workload
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NAMES = ("buddy", "first-fit", "best-fit")


def runs_of(free: list[bool]) -> list[tuple[int, int]]:
    """Maximal runs of free blocks as (start, length)."""
    runs, start = [], None
    for block, is_free in enumerate([*free, False]):
        if is_free and start is None:
            start = block
        elif not is_free and start is not None:
            runs.append((start, block - start))
            start = None
    return runs


def holes_of(free: list[bool], largest: int = 128) -> list[tuple[int, int]]:
    """The bitmap cut into aligned powers of two, the largest first."""
    holes, covered, size = [], set(), largest
    while size:
        for start in range(0, len(free) - size + 1, size):
            if start not in covered and all(free[start : start + size]):
                holes.append((start, size))
                covered.update(range(start, start + size))
        size //= 2
    return holes


class Checked:
    """An arena, and of every block whether it is free; each operation is held against the bitmap."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.arena = arena(name, num_blocks, num_blocks)
        self.free = [True] * num_blocks
        self.taken: list[tuple[int, int]] = []

    def pieces(self) -> list[tuple[int, int]]:
        """What can be cut: aligned chunks, or whole runs."""
        return holes_of(self.free) if self.name == "buddy" else runs_of(self.free)

    def places(self, blocks: int) -> set[int]:
        """Where ``blocks`` may go; a buddy arena chooses among chunks of one size by when they came."""
        fitting = [(start, size) for start, size in self.pieces() if size >= blocks]
        if self.name == "first-fit":
            return {min(fitting)[0]} if fitting else set()
        shortest = min((size for _, size in fitting), default=0)
        starts = [start for start, size in fitting if size == shortest]
        return set(starts) if self.name == "buddy" else {min(starts)} if starts else set()

    def allocate(self, asked: int) -> None:
        blocks = self.arena.piece_blocks(asked)
        assert asked <= blocks < (2 * asked if self.name == "buddy" else asked + 1)
        places = self.places(blocks)
        assert self.arena.fits(blocks) == bool(places)
        if not places:
            with pytest.raises(SimulationFault):
                deepcopy(self.arena).allocate(blocks)
            return
        start = self.arena.allocate(blocks)
        assert start in places
        self.free[start : start + blocks] = [False] * blocks
        self.taken.append((start, blocks))

    def give_back(self, number: int) -> None:
        start, blocks = self.taken.pop(number)
        self.arena.free(start, blocks)
        self.free[start : start + blocks] = [True] * blocks

    def free_twice(self, integer: Callable[[int, int], int]) -> None:
        """A whole free piece, or some of it: buddy chunks keep their alignment, others may stick out."""
        pieces = self.pieces()
        start, size = pieces[integer(0, len(pieces) - 1)]
        if self.name == "buddy":
            blocks = 1 << integer(0, size.bit_length() - 1)
            start += blocks * integer(0, size // blocks - 1)
        else:
            blocks = integer(1, size + 3)
            start += integer(max(-start, 1 - blocks), size - 1)
        broken = deepcopy(self.arena)
        with pytest.raises(SimulationFault):
            broken.free(start, blocks)
        assert broken.free_runs() == self.arena.free_runs()

    def check(self) -> None:
        assert self.arena.free_runs() == runs_of(self.free)
        pieces = self.pieces()
        for blocks in (0, 1, 2, 5, 200):
            assert self.arena.free_blocks_below(blocks) == sum(size for _, size in pieces if size < blocks)

    def empty(self) -> None:
        """All joins into the whole pool when all is freed."""
        while self.taken:
            self.give_back(0)
        assert self.arena.free_runs() == [(0, len(self.free))]


class ArenaAgainstBitmap(RuleBasedStateMachine):
    """Any operations in any order."""

    @initialize(name=st.sampled_from(NAMES), num_blocks=st.integers(1, 90))
    def begin(self, name, num_blocks):
        self.checked = Checked(name, num_blocks)

    @rule(asked=st.integers(1, 40))
    def allocate(self, asked):
        self.checked.allocate(asked)

    @precondition(lambda self: self.checked.taken)
    @rule(data=st.data())
    def give_back(self, data):
        self.checked.give_back(data.draw(st.integers(0, len(self.checked.taken) - 1)))

    @precondition(lambda self: any(self.checked.free))
    @rule(data=st.data())
    def free_twice(self, data):
        self.checked.free_twice(lambda low, high: data.draw(st.integers(low, high)))

    @invariant()
    def agrees(self):
        self.checked.check()

    def teardown(self):
        if hasattr(self, "checked"):
            self.checked.empty()


ArenaAgainstBitmap.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestArenaAgainstBitmap = ArenaAgainstBitmap.TestCase


@pytest.mark.slow
def test_20_000_sequences_of_operations():
    """Seeded, without hypothesis's care for small examples: twenty times as many a second."""
    random = Random(20_000)
    for _ in range(20_000):
        checked = Checked(random.choice(NAMES), random.randint(1, 90))
        for _ in range(random.randint(1, 40)):
            what = random.random()
            if what < 0.5 or not checked.taken:
                checked.allocate(random.randint(1, random.choice([2, 10, 40])))
            elif what < 0.95 or not any(checked.free):
                checked.give_back(random.randrange(len(checked.taken)))
            else:
                checked.free_twice(random.randint)
            checked.check()
        checked.empty()


class TestTheSameRequestsInThreePlaces:
    """A pool of 32 blocks. Five come (3, 5, 4, 2 and 1 blocks), the second and the fourth go, one of 2 comes.

        buddy       aaa~ccccbbbbb~~~dde.............    rounds to 4, 8, 4, 2, 1
        the others  aaabbbbbccccdde.................
    """

    ASKED = (3, 5, 4, 2, 1)
    PLACED = {"buddy": [0, 8, 4, 16, 18], "first-fit": [0, 3, 8, 12, 14], "best-fit": [0, 3, 8, 12, 14]}
    RUNS = {
        "buddy": [(8, 10), (19, 13)],
        "first-fit": [(3, 5), (12, 2), (15, 17)],
        "best-fit": [(3, 5), (12, 2), (15, 17)],
    }
    # The smallest chunk of 2; the first run; the shortest run.
    LAST = {"buddy": 16, "first-fit": 3, "best-fit": 12}
    # Chunks of 1; runs of 3 (5 to 7) and 2 (12 and 13); none, since 5 blocks in a row are left at 3.
    TOO_SMALL_FOR_4 = {"buddy": 1, "first-fit": 5, "best-fit": 0}

    @pytest.mark.parametrize("name", NAMES)
    def test_log(self, name):
        placed = arena(name, 32, 32)
        blocks = [placed.piece_blocks(asked) for asked in self.ASKED]
        assert blocks == ([4, 8, 4, 2, 1] if name == "buddy" else [3, 5, 4, 2, 1])
        assert [placed.allocate(count) for count in blocks] == self.PLACED[name]
        for gone in (1, 3):
            placed.free(self.PLACED[name][gone], blocks[gone])
        assert placed.free_runs() == self.RUNS[name]
        assert placed.allocate(2) == self.LAST[name]
        assert placed.free_blocks_below(4) == self.TOO_SMALL_FOR_4[name]


def test_names_and_chunks():
    assert [type(arena(name, 983, 128)) for name in NAMES] == [BuddyArena, FirstFitArena, BestFitArena]
    assert arena("buddy", 983, 3).max_chunk_blocks == 128
    assert arena("buddy", 983, 129).max_chunk_blocks == 256


@pytest.mark.parametrize("kind", [FirstFitArena, BestFitArena])
def test_what_lies_outside_cannot_be_freed(kind):
    whole = kind(8)
    whole.allocate(8)
    for start, blocks in ((-1, 2), (7, 2), (8, 1)):
        with pytest.raises(SimulationFault, match=f"{blocks} blocks at {start} are freed twice, or lie outside"):
            whole.free(start, blocks)
    assert whole.free_runs() == [] and not whole.fits(1)
    assert kind(0).free_runs() == []


def served(name: str, policy: str = "orca-oracle", leap: bool = True, blocks: int = 40, prompts: tuple[int, ...] = ()):
    """A run over 60 requests of 1 to 200 tokens, or over prompts that all arrive at once."""
    random = np.random.default_rng(7)
    lengths = np.array(prompts) if prompts else random.integers(1, 150, 60)
    outputs = np.full(len(lengths), 8) if prompts else random.integers(1, 50, 60)
    arrivals = np.zeros(len(lengths), int) if prompts else np.cumsum(random.integers(0, 10**11, 60))
    chosen = run_settings(policy=policy, arena=name, num_gpu_blocks_override=blocks, leap=leap)
    return simulate(chosen, Workload("arenas", arrivals, lengths, outputs))


class TestUnderAPolicy:
    def test_a_request_that_rounding_would_not_let_in_is_served(self):
        """264 + 8 tokens are 17 blocks: a chunk of 32, or 17 of the 20 that there are."""
        assert served("buddy", blocks=20, prompts=(264,)).smallest_pool_blocks.tolist() == [32]
        for name in ("first-fit", "best-fit"):
            run = served(name, blocks=20, prompts=(264,))
            assert run.smallest_pool_blocks.tolist() == [17]
            assert len(request_times(run).index) == 1

    def test_only_whole_blocks_are_rounded_up(self):
        """Two of 33 + 8 tokens reserve 3 blocks each, 48 slots of which 7 are round-up; the buddy's 4 hold 64."""
        for name, rounded_up in (("buddy", 23), ("first-fit", 7), ("best-fit", 7)):
            run = served(name, prompts=(33, 33))
            assert run.accounts.at_rows()["round_up"].tolist()[0] == 2 * rounded_up

    @pytest.mark.parametrize("name", NAMES)
    def test_leaping_is_stepping(self, name):
        leapt, stepped = (served(name, leap=leap) for leap in (True, False))
        assert leapt.window == stepped.window
        times = [request_times(run) for run in (leapt, stepped)]
        np.testing.assert_array_equal(times[0].finish_ticks, times[1].finish_ticks)

    def test_runs_let_more_in_than_chunks(self):
        """The same load finishes sooner where nothing is rounded to powers of two."""
        waited = {name: int(request_times(served(name)).finish_ticks.sum()) for name in NAMES}
        assert waited["first-fit"] < waited["buddy"] and waited["best-fit"] < waited["buddy"]
