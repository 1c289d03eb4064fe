"""Models of pools with ids: a stack of free ones, a list a sequence, tables that share, pages that stay mapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.types.sequence import Sequence


def walk(pool: BlockPool, tables: dict[Sequence, list[int]], cached: Iterable[int] = ()) -> None:
    """Invariant 2: a block's references are the table entries that name it, and one if it is kept. Invariant 3: no block is in
    two tables, as nothing is shared here. Every block is in a table, cached or free."""
    named = Counter(block for table in (*tables.values(), cached) for block in table)
    assert pool.reference_counts == [named[block] for block in range(pool.num_blocks)]
    assert sorted([*named.elements(), *pool.free_ids]) == list(range(pool.num_blocks))


class Tables:
    """Blocks by id; the last one freed is the first one taken."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(reversed(range(num_blocks)))
        self.tables: dict[Sequence, list[int]] = {}

    def hold(self, sequence: Sequence, blocks: int) -> None:
        """Let a table have so many blocks."""
        table = self.tables.setdefault(sequence, [])
        while len(table) < blocks:
            table.append(self.free.pop())

    def grow(self, sequences: list[Sequence]) -> None:
        """A block for each of several in one step."""
        for sequence in sequences:
            self.tables[sequence].append(self.free.pop())

    def drop(self, sequence: Sequence) -> None:
        self.free += self.tables.pop(sequence)


class SharedTables(Tables):
    """Blocks that several tables may name; those of ``pins`` are named by something else besides."""

    def __init__(self, num_blocks: int, pinned: int = 0) -> None:
        super().__init__(num_blocks)
        self.pins = [[self.free.pop() for _ in range(pinned)]]

    def names(self) -> Counter[int]:
        """How many tables and pins name each block."""
        return Counter(block for table in (*self.pins, *self.tables.values()) for block in table)

    def drop(self, sequence: Sequence) -> None:
        """Blocks that no other table names are free."""
        table, names = self.tables.pop(sequence), self.names()
        self.free += [block for block in table if not names[block]]

    def write(self, sequence: Sequence, place: int) -> None:
        """The token at ``place`` opens a block, or goes to the one before it, copied if another table names it."""
        table = self.tables[sequence]
        if place == len(table):
            table.append(self.free.pop())
        elif self.names()[table[place]] > 1:
            table[place] = self.free.pop()

    def move(self, sequence: Sequence, pool: SharedTables, moved: dict[int, int]) -> None:
        """A table without its pinned blocks goes to another pool; ``moved`` says where blocks of other tables are."""
        pinned = {block for pin in self.pins for block in pin}
        table = [block for block in self.tables[sequence] if block not in pinned]
        for block in table:
            if block not in moved:
                moved[block] = pool.free.pop()
        self.drop(sequence)
        pool.tables[sequence] = [*pool.pins[0], *(moved[block] for block in table)]

    def check(self, pool: BlockPool, tables: dict[Sequence, list[int]]) -> None:
        """Invariant 2: references are table entries and pins; unnamed blocks are free. Invariant 1: that is all."""
        assert tables == self.tables
        named = Counter(block for table in (*self.pins, *tables.values()) for block in table)
        assert pool.reference_counts == [named[block] for block in range(pool.num_blocks)]
        assert [*reversed(pool.free_ids)] == self.free
        assert sorted([*named, *pool.free_ids]) == list(range(pool.num_blocks))


class MappedTables(Tables):
    """vAttention's rule as docs/policies/other-servers.md numbers it: a sequence that leaves keeps its pages mapped."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.deferred: list[list[int]] = []
        self.spare: dict[Sequence, list[int]] = {}

    @property
    def cached(self) -> list[int]:
        return [page for pages in (*self.deferred, *self.spare.values()) for page in pages]

    def drop(self, sequence: Sequence) -> None:
        """Rule 1: the region is deferred with all that is mapped."""
        self.deferred.append(self.tables.pop(sequence) + self.spare.pop(sequence, []))

    def hold(self, sequence: Sequence, blocks: int) -> None:
        """Rule 2: the tightest region that holds it, else the largest; of equals the one left first."""
        enough = [region for region in self.deferred if len(region) >= blocks]
        region = min(enough, key=len) if enough else max(self.deferred, key=len, default=[])
        if region:
            self.deferred.remove(region)
        self.tables[sequence], spare = region[:blocks], region[blocks:]
        if spare:
            self.spare[sequence] = spare
        self._map([sequence] * (blocks - len(region)))

    def grow(self, sequences: list[Sequence]) -> None:
        """Rule 3: into a spare page; a sequence without one is mapped another one."""
        others = [sequence for sequence in sequences if sequence not in self.spare]
        for sequence in sequences:
            if sequence in self.spare:
                self.tables[sequence].append(self.spare[sequence].pop(0))
        self._forget()
        self._map(others)

    def _map(self, sequences: list[Sequence]) -> None:
        """Rule 4: an unmapped page for each; as many as lack are unmapped first."""
        while len(self.free) < len(sequences):
            self.free.append((self.deferred or list(self.spare.values()))[0].pop())
            self._forget()
        super().grow(sequences)

    def _forget(self) -> None:
        """Regions and spares of no pages are none."""
        self.deferred = [region for region in self.deferred if region]
        self.spare = {sequence: pages for sequence, pages in self.spare.items() if pages}
