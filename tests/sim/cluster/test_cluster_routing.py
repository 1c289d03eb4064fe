"""What routers choose, rule by rule; and what prefix-affine gains on a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim.cluster import cluster, cluster_summary, simulate_cluster
from fragmeter.sim.cluster.routing import Router, router
from fragmeter.sim.config.settings import settings
from fragmeter.traces import Pacing, Reading, paced, read_with_content, workload


@dataclass
class Fake:
    """A replica as a router sees it."""

    num_requests: int = 0
    outstanding: int = 0
    kv: int = 0
    kv_rises: bool = True

    def report_to(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def outstanding_tokens(self, now: int) -> int:
        return self.outstanding

    def kv_tokens(self, now: int) -> int:
        return self.kv


def choices(
    name: str, replicas: list[Fake], prompts: list[list[int]], most_blocks: int = 100, **thresholds: float
) -> list[int]:
    """Where requests with prompts of these blocks go, one after the other, while nothing else changes."""
    routed = cluster(num_replicas=len(replicas), **thresholds)
    chooser = router(name, len(replicas), routed, prompts.__getitem__, most_blocks)
    chooser.watch(replicas)
    return [chooser.choose(row, 0) for row in range(len(prompts))]


def choose(chooser: Router, row: int, *loads: int) -> int:
    """Where a request goes while replicas have so many requests."""
    chooser.watch([Fake(load) for load in loads])
    return chooser.choose(row, 0)


def test_round_robin_goes_round():
    assert choices("round-robin", [Fake(), Fake(), Fake()], [[]] * 7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_fewest_tokens_and_of_equals_the_first():
    replicas = [Fake(9, 50, 1), Fake(1, 40, 70), Fake(5, 40, 60)]
    assert choices("least-outstanding-tokens", replicas, [[]]) == [1]
    assert choices("kv-aware", replicas, [[]]) == [0]
    assert choices("kv-aware", [Fake(kv=5), Fake(kv=4), Fake(kv=4)], [[]]) == [1]


@pytest.mark.parametrize(("router_name", "field"), [("least-outstanding-tokens", "outstanding"), ("kv-aware", "kv")])
def test_a_choice_reads_what_reported_and_what_may_be_lowest(router_name, field):
    """A value that rose without a report is read when it is the lowest known; one that fell is reported."""
    replicas = [Fake(outstanding=level, kv=level) for level in (10, 20, 30)]
    chooser = router(router_name, 3, cluster(num_replicas=3), lambda row: [], 100)
    chooser.watch(replicas)
    assert chooser.choose(0, 0) == 0
    setattr(replicas[0], field, 25)
    assert chooser.choose(1, 0) == 1
    setattr(replicas[2], field, 5)
    replicas[2].changed()
    assert chooser.choose(2, 0) == 2
    assert [chooser.choose(row, 0, among) for row, among in enumerate([(0, 1), (0,), None])] == [1, 0, 2]


def test_where_slots_are_given_back_without_a_report_all_are_read():
    replicas = [Fake(kv=10, kv_rises=False), Fake(kv=20, kv_rises=False)]
    chooser = router("kv-aware", 2, cluster(num_replicas=2), lambda row: [], 100)
    chooser.watch(replicas)
    assert chooser.choose(0, 0) == 0
    replicas[1].kv = 5
    assert chooser.choose(1, 0) == 1


def test_thousands_of_choices_leave_no_more_than_a_few_entries_a_replica():
    """The heap of bounds is made anew before old ones add up; the choices stay those of a reading of all."""
    replicas, draw = [Fake() for _ in range(7)], np.random.default_rng(0)
    chooser = router("least-outstanding-tokens", 7, cluster(num_replicas=7), lambda row: [], 100)
    chooser.watch(replicas)
    for row, (place, level) in enumerate(zip(draw.integers(0, 7, 3000), draw.integers(0, 50, 3000), strict=True)):
        replicas[place].outstanding = int(level)
        replicas[place].changed()
        lowest = min(range(7), key=lambda number: replicas[number].outstanding)
        assert chooser.choose(row, 0) == lowest


def test_a_prompt_follows_its_prefix_where_enough_of_it_is_known():
    """By default more than 30 %: three blocks of ten do not suffice, four do."""
    first, other = [*range(10)], [*range(100, 110)]
    three, four = [0, 1, 2, *range(200, 207)], [0, 1, 2, 3, *range(300, 306)]
    # A new prompt goes where the record is smallest: 0, then 1, which [100] leaves the smaller one.
    assert choices("prefix-affine", [Fake(), Fake()], [first, other, four]) == [0, 1, 0]
    assert choices("prefix-affine", [Fake(), Fake()], [first, [100], three]) == [0, 1, 1]
    assert choices("prefix-affine", [Fake(), Fake()], [first, [100], three], cache_threshold=0.2) == [0, 1, 0]


def test_a_prompt_follows_its_prefix_only_to_a_replica_that_takes_requests():
    """0 has all of it and drains, and 2 has a part."""
    prompts = [[1, 2, 3, 4], [90], [1, 2, 8], [1, 2, 3, 4]]
    chooser = router("prefix-affine", 3, cluster(num_replicas=3), prompts.__getitem__, 100)
    chooser.watch([Fake(), Fake(), Fake()])
    among = [(0,), (1,), (2,), (1, 2)]
    assert [chooser.choose(row, 0, able) for row, able in enumerate(among)] == [0, 1, 2, 2]


def test_what_matters_is_the_beginning():
    """Blocks on record behind one that is not are no prefix."""
    assert choices("prefix-affine", [Fake(), Fake()], [[1, 2, 3, 4], [9], [8, 2, 3, 4]]) == [0, 1, 1]


def test_uneven_loads_go_to_the_idlest():
    """More than 64 requests over the idlest and more than 1.5 times as many; else the prefix counts."""
    prompt = [1, 2, 3]
    for busiest, idlest, chosen in ((64, 0, 0), (65, 0, 1), (196, 131, 0), (195, 130, 0), (195, 129, 1)):
        chooser = router("prefix-affine", 2, cluster(num_replicas=2), lambda row: prompt, 100)
        assert choose(chooser, 0, 0, 0) == 0
        assert choose(chooser, 1, busiest, idlest) == chosen


def test_of_equal_matches_and_equal_records_the_idler_one():
    assert choices("prefix-affine", [Fake(3), Fake(2), Fake(2)], [[1]]) == [1]
    chooser = router("prefix-affine", 2, cluster(num_replicas=2), lambda row: [1, 2], 100)
    assert [choose(chooser, 0, 70 * place, 70 - 70 * place) for place in (0, 1)] == [0, 1]
    assert choose(chooser, 0, 2, 1) == 1


def test_a_record_forgets_the_end_of_the_prefix_that_was_used_least_recently():
    """Four blocks: of 1 2 3 and then 7 8, 3 is forgotten, which leaves two of the three."""
    prompts = [[1, 2, 3], [90, 91, 92, 93], [7, 8], [1, 2, 3]]
    for threshold, last in ((0.6, 0), (0.7, 1)):
        routed = cluster(num_replicas=2, cache_threshold=threshold)
        chooser = router("prefix-affine", 2, routed, prompts.__getitem__, 4)
        assert [choose(chooser, row, 0, 1) for row in range(3)] == [0, 1, 0]
        # Both records are full now, so the idler one gets what too little is known of.
        assert choose(chooser, 3, 1, 0) == last


TRACES = os.environ.get("FRAGMETER_TRACES")


@pytest.mark.slow
@pytest.mark.skipif(TRACES is None, reason="FRAGMETER_TRACES names no folder")
def test_prefix_affine_finds_more_than_round_robin_on_mooncake():
    """The first 3,000 conversations on four replicas: half as much again, and the first token comes sooner."""
    trace = read_with_content(Path(TRACES) / "mooncake_conversation.jsonl.gz", Reading(), None).first(3000)
    work = workload(paced(trace, Pacing(), 0))
    chosen = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h200", block_size=512)
    summaries = {
        name: cluster_summary(simulate_cluster(chosen, work, cluster(num_replicas=4, router=name)))
        for name in ("round-robin", "prefix-affine")
    }
    hits = {name: content["prefix_cache"]["hit_tokens"] for name, content in summaries.items()}
    assert hits["prefix-affine"] > 1.5 * hits["round-robin"]
    assert summaries["prefix-affine"]["mean_ttft_ms"] < summaries["round-robin"]["mean_ttft_ms"]
