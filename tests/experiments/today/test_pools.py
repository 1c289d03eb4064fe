"""Allocators for several kinds of layers: stories by hand, and invariants over random operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fragmeter.experiments.today.pools import PageKind, TwoLevelPool, page_kinds, separate_pools
from fragmeter.sim.spec import cache_layers, model

#: Pages of 3 and of 6 units; a large page of 6 has two of the first or one of the second.
SMALL, LARGE = PageKind("full", 1, 3), PageKind("sliding", 1, 6, window_tokens=32)


def test_a_request_fills_its_own_large_page_before_it_begins_another():
    pool = TwoLevelPool([SMALL, LARGE], 18)
    assert (pool.large_bytes, pool.num_large) == (6, 3)
    [[(a, _)], [(b, _)]] = [pool.take(owner, SMALL) for owner in "ab"]
    assert a != b and pool.stranded_bytes(SMALL) == 6
    assert pool.take("a", SMALL) == [(a, 1)]
    assert pool.stranded_bytes(SMALL) == 3 and pool.free_large == 1


def test_without_a_free_large_page_it_takes_from_that_of_another_request():
    pool = TwoLevelPool([SMALL, LARGE], 12)
    [(a, _)] = pool.take("a", SMALL)
    pool.take("b", LARGE)
    assert pool.take("b", SMALL) == [(a, 1)]
    assert pool.take("b", SMALL) == [] and pool.take("a", LARGE) == []


def test_a_large_page_is_free_for_the_other_kind_when_its_last_small_page_comes_back():
    pool = TwoLevelPool([SMALL, LARGE], 6)
    parts = pool.take("a", SMALL, 2)
    assert [part.pages for part in parts] == [2] and pool.take("b", LARGE) == []
    pool.give([parts[0]._replace(pages=1)])
    assert pool.stranded_bytes(SMALL) == 3 and pool.take("b", LARGE) == []
    pool.give([parts[0]._replace(pages=1)])
    assert pool.stranded_bytes(SMALL) == 0 and pool.take("b", LARGE)


def test_a_page_that_outlives_its_request_remains_open_for_others():
    pool = TwoLevelPool([SMALL, LARGE], 6)
    first = pool.take("a", SMALL)
    second = pool.take("b", SMALL)
    assert second == first
    pool.give(first)
    pool.forget("a")
    assert pool.take("c", SMALL) == first
    pool.give(second)
    pool.give(first)
    assert pool.free_large == 1


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=60),
    st.sampled_from([(1, 1, 1), (2, 3, 1), (3, 6, 4), (5, 7, 2)]),
    st.integers(0, 400),
)
def test_pages_are_conserved_and_kinds_never_share_a_large_page(operations, sizes, pool_bytes):
    kinds = [PageKind(name, 1, size) for name, size in zip(("full", "sliding", "state"), sizes)]
    pool = TwoLevelPool(kinds, pool_bytes)
    held: dict[int, list] = {}
    for owner, place, count, leaves in operations:
        if leaves:
            for _, parts in held.pop(owner, []):
                pool.give(parts)
            pool.forget(owner)
        else:
            held.setdefault(owner, []).append((kinds[place], pool.take(owner, kinds[place], count)))
        kind_of: dict[int, PageKind] = {}
        pages: dict[PageKind, int] = dict.fromkeys(kinds, 0)
        in_large: dict[int, int] = {}
        for kind, parts in (each for mine in held.values() for each in mine):
            for number, taken in parts:
                assert kind_of.setdefault(number, kind) == kind
                pages[kind] += taken
                in_large[number] = in_large.get(number, 0) + taken
        assert all(count <= pool.pages_of(kind_of[number]) for number, count in in_large.items())
        assert all(pool._used[kind] == count for kind, count in pages.items())
        assert pool.free_large == pool.num_large - len(in_large)
        stranded = sum(pool.stranded_bytes(kind) for kind in kinds)
        used = sum(count * kind.layer_bytes for kind, count in pages.items())
        assert stranded + used + pool.free_large * pool.large_bytes == pool.num_large * pool.large_bytes


def test_kinds_of_a_model_with_windows_and_of_one_with_states():
    gemma = page_kinds(cache_layers(model("gemma-3-27b"), "fp16", 2))
    assert [(kind.name, kind.layers, kind.window_tokens) for kind in gemma] == [("sliding", 52, 1024), ("full", 10, 0)]
    assert gemma[0].layer_bytes == gemma[1].layer_bytes
    full, state = sorted(page_kinds(cache_layers(model("nemotron-h-8b"))), key=lambda kind: kind.name)
    assert (full.layers, state.layers, state.block_tokens) == (4, 24, 0)
    assert state.page_bytes == 24 * state.layer_bytes > 1000 * full.layer_bytes
    # Of all layers of a kind at once a large page would have 779 MiB.
    whole = [PageKind("full", 1, full.page_bytes), PageKind("state", 1, state.page_bytes, block_tokens=0)]
    assert TwoLevelPool(whole, 0).large_bytes == 779.25 * 2**20
    assert TwoLevelPool([full, state], 0).large_bytes == 64.9375 * 2**20


def test_separate_pools_divide_by_tokens_of_windows_and_bytes_of_states():
    full, sliding = PageKind("full", 2, 100), PageKind("sliding", 5, 100, window_tokens=64)
    pages = separate_pools([full, sliding], 600_000)
    assert pages == {full: 1000, sliding: 800}
    state = PageKind("state", 3, 1000, block_tokens=0)
    pages = separate_pools([full, state], 190_000)
    assert pages == {full: 500, state: 30}
    assert separate_pools([full], 1000) == {full: 5} and separate_pools([state], 6000) == {state: 2}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "gemma-3-27b"])
def test_layers_of_equal_pages_strand_nothing(name):
    kinds = page_kinds(cache_layers(model(name)))
    pool = TwoLevelPool(kinds, 1 << 30)
    for owner in range(5):
        for kind in kinds:
            assert pool.take(owner, kind, kind.layers)
    assert sum(pool.stranded_bytes(kind) for kind in kinds) == 0
