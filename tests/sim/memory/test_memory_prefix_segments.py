"""Cached blocks in segments: logs worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.memory.accounting.moments import in_step
from fragmeter.sim.memory.prefix import Chains, FreeIds, FreeQueue, SegmentPool
from fragmeter.sim.types.errors import SimulationFault
from machines.pools import Strings


def runs_of(*strings: str) -> Strings:
    """Requests with such tokens, one letter a token, and outputs of their own."""
    made = Strings()
    for string in strings:
        made.add([(ord(letter), 0, 1) for letter in string])
    return made


class TestPaths:
    def test_a_request_opens_a_chain_where_it_differs(self):
        chains = Chains(runs_of("aaaaaaaabbbb", "aaaaaaaacccc", "aaaaaaaabbbb", "aaaaaaaacccd"), 4)
        paths = [[(chain.number, stop) for chain, stop in chains.path(request)] for request in range(4)]
        assert paths == [[(1, 13)], [(1, 2), (2, 13)], [(1, 3), (3, 13)], [(1, 2), (4, 13)]]

    @given(
        strings=st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 7)), max_size=4)),
        size=st.integers(1, 4),
        data=st.data(),
    )
    def test_equal_names_are_equal_prefixes(self, strings, size, data):
        """However a string is cut into runs."""
        chains, prefix_of = Chains(Strings(), size), {}
        for runs in strings:
            tokens = [(stream, place) for stream, start, length in runs for place in range(start, start + length)]
            cut = [part for run in runs for part in cut_up(run, data.draw(st.integers(1, run[2])))]
            found = chains.path_of(runs)
            assert chains.path_of(cut) == found
            names, place = [], 0
            for chain, stop in found:
                names += [(chain.number, place) for place in range(place, stop)]
                place = stop
            assert len(names) == len(tokens) // size
            for place, name in enumerate(names, 1):
                assert prefix_of.setdefault(name, tuple(tokens[: place * size])) == tuple(tokens[: place * size])
        assert len(set(prefix_of.values())) == len(prefix_of)


def cut_up(run, most):
    """A run in parts of at most so many tokens."""
    stream, start, length = run
    return [(stream, start + place, min(most, length - place)) for place in range(0, length, most)]


class TestQueue:
    def test_taken_blocks_are_behind_the_head_and_hit_ones_leave_holes(self):
        queue = FreeIds(10)
        assert queue.take_many(6) == [0, 1, 2, 3, 4, 5]
        queue.put_ids([0, 1, 2, 3], 3)
        assert queue.put(0, 4, 3, 4, 0, 0, -1, 0) == 10
        assert queue.free_ids == (6, 7, 8, 9, 3, 2, 1, 0)
        queue.hit(12, 2, 0)
        assert queue.free_ids == (6, 7, 8, 9, 3, 2)
        assert queue.take_many(5) == [6, 7, 8, 9, 3] and [*queue.is_named[:4]] == [1, 1, 1, 0]
        assert queue.take_many(1) == [2] and queue.num_free == 0
        with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
            queue.take_many(1)

    def test_a_count_moves_the_head_as_ids_do(self):
        queue = FreeQueue(10)
        queue.put(0, 4, 3, 4, 0, 0, -1, 0)
        queue.hit(11, 3, 0)
        queue.reach(0)
        assert (queue.head, queue.num_taken, queue.num_free) == (11, 11, 0)
        with pytest.raises(SimulationFault, match="2 blocks are free that nothing released"):
            queue.reach(2)
        with pytest.raises(SimulationFault, match="was taken since it was looked up"):
            queue.hit(10, 1, 0)

    def test_blocks_without_a_name_may_be_taken_first_the_last_one_before_the_others(self):
        queue = FreeIds(5, unnamed_first=True)
        table = queue.take_many(4)
        queue.put_ids(table, 2)
        queue.put(0, 4, 2, 4, 0, 0, -1, 0)
        assert queue.free_ids == (3, 2, 4, 1, 0)
        assert queue.take_many(4) == [3, 2, 4, 1]


def served(pool: SegmentPool, request: int, blocks: int, now: int):
    """A table of so many full blocks, as far as they are not found."""
    path = pool.path(request)
    assert path is not None
    found = pool.look_up(path, blocks, 0)
    table = pool.enter(path, found, now)
    if missing := blocks - table.taken:
        pool.take(table, missing, 0, now)
    pool.publish(table, blocks, 0)
    return table, [stop - first for _, first, stop in found]


def test_a_segment_is_cut_where_another_request_goes_on_otherwise():
    pool = SegmentPool(20, 1, Chains(runs_of("abcdef", "abcx", "abcdef"), 1), in_step)
    first, _ = served(pool, 0, 6, 0)
    second, found = served(pool, 1, 4, 4)
    assert found == [3] and pool.num_shared == 3
    assert [(segment.first, segment.stop, segment.references) for segment in first.segments()] == [(0, 3, 2), (3, 6, 1)]
    pool.release(first, 6, 6, 8)
    assert pool.num_shared == 0 and pool.queue.num_free == 20 + 3
    _, found = served(pool, 2, 6, 12)
    assert found == [3, 3]
    pool.release(second, 4, 4, 16)
    assert pool.queue.num_free == 20 + 1


def test_of_two_blocks_of_one_name_the_first_is_found_and_the_other_remains():
    """Five blocks; 0 and 1 compute the same two."""
    pool = SegmentPool(5, 1, Chains(runs_of("ab", "ab", "ab"), 1), in_step)
    tables = []
    for request in range(2):
        table = pool.enter(pool.path(request), [], 0)
        pool.take(table, 2, 0, 0)
        tables.append(table)
    for table in tables:
        pool.publish(table, 2, 0)
    path = pool.path(2)
    assert pool.look_up(path, 2, 0) == [(tables[0].segments()[0], 0, 2)]
    pool.queue.reach(1)
    pool.release(tables[0], 2, 2, 4)
    pool.queue.reach(1)
    assert [(part[0] is tables[0].segments()[0], *part[1:]) for part in pool.look_up(path, 2, 0)] == [
        (True, 0, 1),
        (False, 1, 2),
    ]
    pool.queue.reach(0)
    assert pool.look_up(path, 2, 0) == [(tables[1].segments()[0], 0, 2)]


def test_a_request_that_no_other_shares_has_a_segment_only_when_it_comes_again():
    strings = Strings()
    pool = SegmentPool(9, 4, Chains(strings, 4), in_step)
    request = strings.add([])
    assert pool.path(request) is None
    table = pool.enter(None, [], 0)
    pool.take(table, 3, 0, 0)
    pool.queue.reach(6)
    pool.release(table, 3, 2, 4, returns=request)
    path = pool.path(request)
    assert [part[1:] for part in pool.look_up(path, 9, 0)] == [(0, 2)]
    assert pool.history.changes()["blocks"].tolist() == [2]
