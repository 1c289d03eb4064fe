"""Prefix caches one request at a time: against search, against the oracle's figures, and from the file to the table."""

from __future__ import annotations

import json
import os
import random
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.experiments.paper.rows import as_finding
from fragmeter.sim.memory.prefix import RadixTree
from fragmeter.traces import Trace
from hashed_files import MOONCAKE, SIZED, put
from tools import prefix_cache
from tools.prefix_cache import (
    INFINITE,
    POLICIES,
    HashedTrace,
    compare_prefix_caches,
    hit_tokens,
    oracle,
    prefix_trace,
    read_hashed,
)

real_traces = pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")


def cases(count: int):
    """Requests with ids that recur at many places, as content chunks do, and a capacity; the same ones each time."""
    draw = random.Random(0)
    for _ in range(count):
        lengths = [draw.randint(1, 4) for _ in range(draw.randint(1, 24))]
        requests = [[draw.randrange(3) for _ in range(length)] for length in lengths]
        yield requests, draw.randint(1, 9)


def hashed(requests, tokens=None) -> HashedTrace:
    """A trace of the given block ids; blocks of one token where nothing else is said."""
    tokens = tokens or [[1] * len(ids) for ids in requests]
    offsets = np.cumsum([0, *map(len, requests)])
    ones = np.ones(len(requests))
    return HashedTrace(Trace("made", ones, ones), offsets, sum(requests, []), sum(tokens, []))


def prefixes(ids) -> list[tuple]:
    return [tuple(ids[:end]) for end in range(1, len(ids) + 1)]


def found(path, cached) -> int:
    """How many of ``path`` are cached before the first that is not."""
    return next((place for place, prefix in enumerate(path) if prefix not in cached), len(path))


def is_closed(cached) -> bool:
    return all(prefix[:-1] in cached for prefix in cached if len(prefix) > 1)


def next_request(requests, now, prefix):
    """The next request after ``now`` that begins with ``prefix``; as late as can be where there is none."""
    later = range(now + 1, len(requests))
    return next((place for place in later if tuple(requests[place][: len(prefix)]) == prefix), len(requests))


def hits_by_search(requests, capacity, policy) -> list[int]:
    """Every leaf looked at for every eviction; blocks of the current request excepted."""
    cached, had, hits = set(), {}, []
    for now, ids in enumerate(requests):
        path = prefixes(ids)
        hits.append(found(path, cached))
        had |= dict.fromkeys(path, now)
        for prefix in path:
            if prefix not in cached and len(cached) == capacity:
                worth = {leaf: had[leaf] for leaf in cached - {other[:-1] for other in cached} - set(path)}
                if policy == "optimal":
                    worth = {leaf: -next_request(requests, now, leaf) for leaf in worth}
                if not worth or policy == "optimal" and min(worth.values()) >= -next_request(requests, now, prefix):
                    break
                cached.remove(min(worth, key=worth.get))
            cached.add(prefix)
        assert is_closed(cached)
    return hits


class TestAgainstSearch:
    @pytest.mark.slow
    @pytest.mark.parametrize("policy", ["lru", "optimal"])
    def test_leaves(self, policy):
        for requests, capacity in cases(800):
            trace = prefix_trace(hashed(requests))
            assert hit_tokens(trace, policy, capacity) == hits_by_search(requests, capacity, policy), requests

    def test_fifo(self):
        for requests, capacity in cases(400):
            queue, hits = [], []
            for ids in requests:
                hits.append(found(prefixes(ids), queue))
                for prefix in prefixes(ids):
                    if prefix not in queue:
                        queue = [*queue, prefix][-capacity:]
            assert hit_tokens(prefix_trace(hashed(requests)), "fifo", capacity) == hits, requests

    @settings(max_examples=60)
    @given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 4))
    def test_no_choice_of_what_to_keep_hits_more_than_optimal(self, requests, capacity):
        """Every prefix-closed choice after every request, of what was cached and what the request brought."""
        best = {frozenset(): 0}
        for ids in requests:
            path, after = prefixes(ids), {}
            for cached, hits in best.items():
                hits += found(path, cached)
                held = sorted(cached.union(path))
                for size in range(min(capacity, len(held)) + 1):
                    for kept in map(frozenset, combinations(held, size)):
                        if is_closed(kept):
                            after[kept] = max(hits, after.get(kept, 0))
            best = after
        trace = prefix_trace(hashed(requests))
        assert sum(hit_tokens(trace, "optimal", capacity)) == max(best.values())

    def test_infinite_hits_all_that_came_before_and_room_for_all_is_as_good(self):
        for requests, capacity in cases(100):
            tokens = [[7 + place for place in range(len(ids))] for ids in requests]
            seen, hits = set(), []
            for ids, weights in zip(requests, tokens, strict=True):
                path = prefixes(ids)
                hits.append(sum(weight for prefix, weight in zip(path, weights, strict=True) if prefix in seen))
                seen.update(path)
            trace = prefix_trace(hashed(requests, tokens))
            assert hit_tokens(trace, INFINITE) == hits
            for policy in POLICIES:
                assert hit_tokens(trace, policy, trace.num_prefixes) == hits
                assert sum(hit_tokens(trace, policy, capacity)) <= sum(hits)


def test_a_request_larger_than_the_cache_keeps_its_beginning_but_not_in_a_queue():
    trace = prefix_trace(hashed([[1, 2, 3], [1, 2, 3]]))
    assert hit_tokens(trace, "lru", 2) == hit_tokens(trace, "optimal", 2) == [0, 2]
    assert hit_tokens(trace, "fifo", 2) == [0, 0]


def test_optimal_leaves_out_what_never_comes_again():
    trace = prefix_trace(hashed([[1], [2], [1]]))
    assert hit_tokens(trace, "optimal", 1) == [0, 0, 1]
    assert hit_tokens(trace, "lru", 1) == [0, 0, 0]


@real_traces
class TestTheOracle:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mooncake_conversation", "ragpulse"])
    def test_every_value_is_equal(self, name):
        read = read_hashed(Path(os.environ["FRAGMETER_TRACES"]) / f"{name}.jsonl.gz")
        payload, facts = compare_prefix_caches(read), oracle()["traces"][name]
        assert read.block_tokens[read.offsets[len(read) // 2] :].sum() == facts["measured_tokens"]
        assert payload["recognised"] == name
        ours = {(row["series"], row["metric"], row["x"]): row["simulated"] for row in payload["rows"]}
        for policy in POLICIES:
            for capacity, value in zip(facts["capacity_blocks"], facts[policy], strict=True):
                assert value in (None, ours[policy, "hit_tokens", capacity])
        for metric, value in facts["infinite"].items():
            assert ours["infinite", metric, None] == value
        compared = [row["error"] for row in payload["rows"] if row["published"] is not None]
        assert compared == [0] * {"mooncake_conversation": 26, "ragpulse": 17}[name]

    @pytest.mark.slow
    def test_a_radix_tree_without_evictions_hits_the_same_tokens_as_the_infinite_cache(self):
        """Another structure, token by token: a block of Mooncake's is a run of its own stream."""
        read = read_hashed(Path(os.environ["FRAGMETER_TRACES"]) / "mooncake_conversation.jsonl.gz")
        runs = [(block, 0, tokens) for block, tokens in zip(read.hash_ids.tolist(), read.block_tokens.tolist())]
        tree, offsets = RadixTree(), read.offsets.tolist()
        hits = sum(tree.insert(runs[start:end])[1] for start, end in pairwise(offsets))
        assert hits == oracle()["traces"]["mooncake_conversation"]["infinite"]["all_requests_hit_tokens"]


def test_the_facts_are_the_oracles():
    """A few, typed in a second time, so that a slip in the file is seen."""
    facts = oracle()["traces"]["mooncake_conversation"]
    assert (facts["infinite"]["all_requests_hit_tokens"], facts["fingerprint"]["tokens"]) == (54_098_411, 144_793_823)
    assert dict(zip(facts["capacity_blocks"], facts["lru"], strict=True))[10_000] == 14_910_149
    assert oracle()["traces"]["ragpulse"]["fifo"] == [2_600_945, 3_018_593, 3_209_057, 3_270_934, 3_296_022, None]


class TestTheCommand:
    @pytest.fixture
    def facts(self, monkeypatch):
        """An oracle that knows the small trace and is right about it; worked by hand."""
        counts = {"requests": 3, "blocks": 7, "block_ids": 4, "prefixes": 4, "tokens": 2724}
        known = {
            "fingerprint": counts, "origin": "made", "licence": "none", "blocks": "small", "capacity_blocks": [1, 2],
            "fifo": [0, 512], "lru": [1024, 1536], "optimal": [1024, None],
            "infinite": {"all_requests_hit_tokens": 1536, "hit_tokens": 1536},
        }  # fmt: skip
        monkeypatch.setattr(prefix_cache, "oracle", lambda: oracle() | {"traces": {"small": known}})
        return known

    def test_reports_the_oracles_values_beside_ours(self, facts, tmp_path, capsys):
        assert prefix_cache.main([str(put(tmp_path, MOONCAKE)), "--json", "-"]) == 0
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        assert (document["figure"], document["recognised"], captured.err) == ("prefix-cache", "small", "")
        assert document["workload"] == "trace: 3 requests, 7 blocks, 2,724 tokens"
        assert document["rows"][3] == {
            "series": "lru", "metric": "hit_tokens", "x": 2, "published": 1536, "how": "oracle", "simulated": 1536,
            "error": 0, "kind": "predicted", "hit_rate_pct": round(100 * 1536 / 1624, 3),
        }  # fmt: skip
        assert [(row["published"], row["simulated"]) for row in document["rows"]] == [
            (0, 0), (512, 512), (1024, 1024), (1536, 1536), (1024, 1024), (None, 1536), (1536, 1536), (1536, 1536),
        ]  # fmt: skip
        assert document["findings"] == [as_finding("7 of 7 values equal the oracle's, to the token.", True)]

    def test_says_so_where_they_differ(self, facts, tmp_path, capsys):
        facts["lru"] = [1024, 1535]
        assert prefix_cache.main([str(put(tmp_path, MOONCAKE))]) == 0
        text = capsys.readouterr().out
        assert "Fail: 6 of 7 values equal the oracle's, to the token." in text
        assert "Recognised by its counts: small (made; none)." in text
        lines = [line.split() for line in text.splitlines()]
        assert ["lru", "2", "1,535", "1,536", "+1", "94.6", "%"] in lines
        assert ["optimal", "2", "-", "1,536", "-", "94.6", "%"] in lines

    def test_a_trace_that_the_oracle_does_not_know_has_our_values_alone(self, tmp_path, capsys):
        assert prefix_cache.main([str(put(tmp_path, SIZED)), "--json", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["recognised"], document["findings"]) == (None, [])
        assert {row["published"] for row in document["rows"]} == {None}
        assert {row["x"] for row in document["rows"][:-2]} == set(prefix_cache.CAPACITY_BLOCKS)

    def test_a_damaged_trace_is_one_line(self, tmp_path, capsys):
        trace = str(put(tmp_path, [*MOONCAKE[:2], MOONCAKE[2] | {"hash_ids": [0]}]))
        assert prefix_cache.main([trace]) == 2
        captured = capsys.readouterr()
        message = f"{trace}, line 3: hash_ids = [0]: 1 ids where 600 tokens of prompt are 2 blocks"
        assert captured.out == "" and captured.err.startswith(f"tools.prefix_cache: {message}")
        assert captured.err.count("\n") == 1
