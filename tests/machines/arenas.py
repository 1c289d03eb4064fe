"""Arenas against a bitmap: of every block whether it is free, and of every free piece when it came."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fragmeter.sim.memory.contiguous.arena import BestFitArena, FirstFitArena
from fragmeter.sim.memory.contiguous.buddy import MAX_CHUNK_BLOCKS, BuddyArena
from fragmeter.sim.types.errors import SimulationFault

from .draws import combined, picks

ARENAS = {"buddy": BuddyArena, "first-fit": FirstFitArena, "best-fit": BestFitArena}


class Blocks:
    """Which blocks of a pool are free, and how an arena of that name may cut them."""

    def __init__(self, name: str, num_blocks: int, largest: int = MAX_CHUNK_BLOCKS) -> None:
        self.name, self.largest = name, largest
        self.free = [True] * num_blocks

    def piece_blocks(self, blocks: int) -> int:
        """Blocks of the piece for ``blocks``: as many, or as the smallest power of two that holds them."""
        return blocks if self.name != "buddy" else min(1 << power for power in range(12) if 1 << power >= blocks)

    def take(self, start: int, blocks: int) -> None:
        """Invariant 7: a piece lies in free blocks, and a buddy chunk is aligned."""
        assert all(self.free[start : start + blocks]) and start + blocks <= len(self.free)
        assert self.name != "buddy" or start % blocks == 0
        self.free[start : start + blocks] = [False] * blocks

    def give(self, start: int, blocks: int) -> None:
        assert not any(self.free[start : start + blocks])
        self.free[start : start + blocks] = [True] * blocks

    def pieces(self) -> list[tuple[int, int]]:
        """What can be cut, as (first block, blocks): whole runs, or these in aligned powers of two."""
        if self.name != "buddy":
            return self.runs()
        return [chunk for start, length in self.runs() for chunk in self._chunks(start, start + length)]

    def runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free blocks as (first block, blocks)."""
        runs, length = [], 0
        for block, is_free in enumerate([*self.free, False]):
            if not is_free and length:
                runs.append((block - length, length))
            length = length + 1 if is_free else 0
        return runs

    def _chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """A run in the largest aligned chunks: merged as far as can be."""
        chunks = []
        while start < end:
            size = self.largest
            while start % size or start + size > end:
                size //= 2
            chunks.append((start, size))
            start += size
        return chunks


class Placed:
    """An arena, the blocks that it should find free, and the pieces that are taken."""

    def __init__(self, name: str, num_blocks: int, largest: int) -> None:
        self.name = name
        self.fresh = BuddyArena(num_blocks, largest) if name == "buddy" else ARENAS[name](num_blocks)
        self.arena = deepcopy(self.fresh)
        self.model = Blocks(name, num_blocks, largest)
        self.taken: list[tuple[int, int]] = []
        #: When each free piece came; those of the carve by address.
        self.came = {piece: piece[0] for piece in self.model.pieces()}
        self.now = num_blocks

    def note(self) -> None:
        """Pieces that were not there before came now."""
        self.now += 1
        self.came = {piece: self.came.get(piece, self.now) for piece in self.model.pieces()}

    def place_for(self, blocks: int) -> int | None:
        """The first run; the shortest, of equals the first; the smallest chunk, of equals the last that came."""
        order = {
            "first-fit": lambda piece: piece[0],
            "best-fit": lambda piece: (piece[1], piece[0]),
            "buddy": lambda piece: (piece[1], -self.came[piece]),
        }[self.name]
        fitting = [piece for piece in self.came if piece[1] >= blocks]
        return min(fitting, key=order)[0] if fitting else None

    def allocate(self, asked: int) -> None:
        blocks = self.arena.piece_blocks(asked)
        assert blocks == self.model.piece_blocks(asked)
        place = self.place_for(blocks)
        assert self.arena.fits(blocks) == (place is not None)
        if place is None:
            with pytest.raises(SimulationFault):
                deepcopy(self.arena).allocate(blocks)
            return
        assert self.arena.allocate(blocks) == place
        self.model.take(place, blocks)
        self.taken.append((place, blocks))
        self.note()

    def free(self, pick: int) -> None:
        start, blocks = self.taken.pop(pick % len(self.taken))
        self.arena.free(start, blocks)
        self.model.give(start, blocks)
        self.note()

    def free_twice(self, pick: int, shift: int, size: int) -> None:
        """Some of what is free; runs may also stick out, to what is taken or beyond the pool."""
        start, length = list(self.came)[pick % len(self.came)]
        if self.name == "buddy":
            blocks = 1 << size % length.bit_length()
            start += shift * blocks % length
        else:
            blocks = 1 + size
            start = max(0, start + length - 1 - shift % (blocks + length - 1))
        broken = deepcopy(self.arena)
        with pytest.raises(SimulationFault):
            broken.free(start, blocks)
        assert broken.free_runs() == self.arena.free_runs()

    def check(self) -> None:
        """Invariant 7: free pieces are disjoint, aligned and merged, and with those that are taken all there is."""
        assert self.arena.free_runs() == self.model.runs()
        if self.name == "buddy":
            chunks = {(start, size) for size, starts in self.arena.free_lists.items() for start in starts}
            assert chunks == set(self.came)
        assert sum(size for _, size in (*self.came, *self.taken)) == len(self.model.free)
        for blocks in (0, 1, 2, 5, 200):
            assert self.arena.free_blocks_below(blocks) == sum(size for _, size in self.came if size < blocks)

    def empty(self) -> None:
        """Invariant 7: all merges back to the initial carve when all is freed."""
        for start, blocks in self.taken:
            self.arena.free(start, blocks)
        assert vars(self.arena) == vars(self.fresh)


class ArenaMachine(RuleBasedStateMachine):
    """The same operations on three arenas, misuse included."""

    @initialize(pool=combined(range(1, 65), (1, 4, 16, 128)))
    def carve(self, pool):
        self.arenas = [Placed(name, *pool) for name in ARENAS]

    # Mostly little, so that holes of several lengths lie beside each other.
    @rule(asked=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 12, 24]))
    def allocate(self, asked):
        for placed in self.arenas:
            placed.allocate(asked)

    @rule(pick=picks)
    def free(self, pick):
        for placed in self.arenas:
            if placed.taken:
                placed.free(pick)

    @rule(choice=combined(range(8), range(16), range(8)))
    def free_twice(self, choice):
        for placed in self.arenas:
            if placed.came:
                placed.free_twice(*choice)

    @invariant()
    def all_merges(self):
        for placed in self.arenas:
            placed.check()

    def teardown(self):
        for placed in getattr(self, "arenas", ()):
            placed.empty()
