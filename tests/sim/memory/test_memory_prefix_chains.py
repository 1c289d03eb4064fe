"""Names of blocks, in chains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.memory.prefix import Chains
from token_strings import Strings


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

    @pytest.mark.slow
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


def test_own_names_meet_no_others():
    chains = Chains(runs_of("abcd", "abce", "x"), 1)
    shared = {name for request in range(3) for name in chains.names(request)}
    own = [chains.own_names(request)[:99] for request in range(3)]
    assert len({*shared, *own[0], *own[1], *own[2], 0}) == len(shared) + 3 * 99 + 1
