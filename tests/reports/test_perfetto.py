"""The timeline for Perfetto: what its file says, by its schema, is what the tables of the run say."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.reports.data.results import Result, read_result
from fragmeter.reports.figures.timeline import request_spans
from fragmeter.reports.perfetto.timeline import lanes, write_timeline
from fragmeter.sim import Settings, Workload, simulate
from fragmeter.sim.cluster import cluster, simulate_cluster, write_cluster
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.result import write
from perfetto_reader import Timeline, read_timeline
from plan_cases import swapping_case

#: Requests that a pool of 18 blocks of 4 is too small for, and one of 99 tokens, which it can never hold.
REQUESTS = 14
CASES = ("samples", "chunks", "static")


def small_case(policy: str) -> tuple[Settings, Workload]:
    draw = np.random.default_rng(7)
    arrival_ticks = np.sort(draw.integers(0, 20, REQUESTS)) * 10**8 + 7
    prompts, outputs = draw.integers(5, 45, REQUESTS), draw.integers(5, 30, REQUESTS)
    prompts[6] = 99
    small = {"model": "toy-opt", "block_size": 4, "num_gpu_blocks_override": 18, "max_model_len": 128, "watermark": 0}
    budget = {"max_num_batched_tokens": 16, "max_num_seqs": 8} if policy == "vllm-v1" else {}
    return Settings(policy=policy, **small, **budget), Workload("small", arrival_ticks, prompts, outputs)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    """Samples that are swapped out; prompts preempted between chunks; batches that end together; three replicas."""
    folder = tmp_path_factory.mktemp("results")
    runs = [swapping_case(beams=False), small_case("vllm-v1"), small_case("fastertransformer")]
    for name, case in zip(CASES, runs, strict=True):
        write(simulate(*case), folder / name, {})
    served = simulate_cluster(*small_case("vllm-sosp23"), cluster(num_replicas=3))
    write_cluster(served, folder / "replicas", {})
    return {name: read_result(folder / name, name) for name in (*CASES, "replicas")}


@pytest.fixture(scope="module")
def timeline(results, tmp_path_factory) -> Timeline:
    """All of them in one file."""
    return read_timeline(write_timeline(tmp_path_factory.mktemp("file") / "runs.pftrace", list(results.values())))


@pytest.mark.slow
def test_the_cases_have_what_they_are_for(results):
    for name in ("chunks", "static", "replicas"):
        assert results[name].requests["refused"].sum() == 1
    kinds = results["samples"].preemptions["kind"].value_counts()
    assert kinds["swap"] and kinds["recompute"]
    # A sequence that is preempted during its prefill has no residency.
    preempted_residencies = results["chunks"].residencies["ended"].eq("preempted").sum()
    assert 0 < preempted_residencies < len(results["chunks"].preemptions)
    assert results["replicas"].preemptions["replica"].nunique() == 3


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_there_is_a_slice_for_each_request(results, timeline, name):
    requests = results[name].requests
    slices = timeline.of("request", name)
    assert len(slices) == len(requests)
    assert sorted(one.name for one in slices) == sorted(f"request {number}" for number in range(len(requests)))
    for one in slices:
        row = requests.loc[int(one.name.split()[1])]
        end = row["arrival_ticks"] if row["refused"] else row["finish_ticks"]
        assert (one.begin_ns, one.end_ns, one.depth) == (row["arrival_ticks"] // 1000, end // 1000, 0)
        expected = {name: 0 if pd.isna(row[name]) else int(row[name]) for name in one.values}
        assert one.values == expected
        assert set(expected) == {"prompt_tokens", "output_tokens", "recomputed", "swapped", "refused"}
        assert "/requests/lane " in one.track


@pytest.mark.parametrize("name", CASES)
def test_lanes_are_as_few_as_can_be(timeline, name):
    slices = timeline.of("request", name)
    meeting = max(sum(one.begin_ns <= at.begin_ns < one.end_ns for one in slices) for at in slices)
    assert len({one.track for one in slices if one.end_ns > one.begin_ns}) == meeting


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_what_a_request_did_lies_within_its_slice(results, timeline, name):
    spans = request_spans(results[name].requests, results[name].residencies)
    wanted = [(row.request, row.state, row.start_s, row.end_s) for row in spans.itertuples()]
    states = timeline.of("state", name)
    found = [(int(one.within.name.split()[1]), one.name, one.begin_ns, one.end_ns) for one in states]
    found.sort(key=lambda span: (span[0], span[2]))
    for (request, state, begin_ns, end_ns), (wanted_request, wanted_state, start_s, end_s) in zip(
        found, wanted, strict=True
    ):
        assert (request, state) == (wanted_request, wanted_state)
        assert start_s - 1e-9 <= begin_ns / 1e9 <= start_s + 1e-12 and end_s - 1e-9 <= end_ns / 1e9 <= end_s + 1e-12
    for one in states:
        assert one.depth == 1 and one.within.begin_ns <= one.begin_ns <= one.end_ns <= one.within.end_ns


def parts(result: Result) -> dict[str, Result]:
    """A result by its tracks' name: that of each replica, where there are several."""
    if "replica" not in result.steps:
        return {result.name: result}
    found = {}
    for number in range(3):
        tables = {name: getattr(result, name) for name in ("steps", "memory", "residencies")}
        own = {name: table[table["replica"] == number] for name, table in tables.items()}
        found[f"{result.name}, replica {number}"] = replace(result, **own)
    return found


def at(counter: list[tuple[int, int]], ns: int) -> int:
    """A counter's value once everything has happened that happens then."""
    return counter[bisect_right(counter, (ns, np.inf)) - 1][1]


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_counters_are_the_ledger(results, timeline, name):
    for track, part in parts(results[name]).items():
        rows = part.memory.assign(ns=part.memory["start_ticks"] // 1000).groupby("ns").last()
        starts, ends = (part.steps["start_ticks"] + over for over in (0, part.steps["ticks"]))
        idle_ns = {end // 1000 for end in ends if not ((starts <= end) & (end < ends)).any()}
        capacity, free = rows.iloc[0][list(BUCKETS)].sum(), timeline.counters[f"{track}/memory/free"]
        # What is pinned, or cached, stays where it is.
        kept = part.about["settings"].get("shared_prefix_tokens") or part.about["replica"]["enable_prefix_caching"]
        assert {at(free, ns) for ns in idle_ns} == {capacity} or kept
        for bucket in BUCKETS:
            counter = timeline.counters[f"{track}/memory/{bucket.replace('_', ' ')}"]
            assert [at(counter, ns) for ns in rows.index] == rows[bucket].tolist()
            assert {ns for ns, _ in counter} <= {0, *rows.index, *idle_ns}
            assert all(value != later for (_, value), (_, later) in zip(counter, counter[1:]))


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_sequences_are_counted(results, timeline, name):
    for track, part in parts(results[name]).items():
        running, waiting = (timeline.counters[f"{track}/sequences/{kind}"] for kind in ("running", "waiting"))
        begin, end = part.residencies["start_ticks"] // 1000, part.residencies["end_ticks"] // 1000
        for ns, _ in running:
            assert at(running, ns) == ((begin <= ns) & (ns < end)).sum()
        assert running[-1][1] == 0 < max(value for _, value in running)
        steps = part.steps.assign(ns=part.steps["start_ticks"] // 1000).groupby("ns").last()
        assert [at(waiting, ns) for ns in steps.index] == steps["waiting"].tolist()


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_every_leap_is_a_slice(results, timeline, name):
    for track, part in parts(results[name]).items():
        slices = [one for one in timeline.of("step") if one.track == f"{track}/steps"]
        assert len(slices) == len(part.steps) and {one.depth for one in slices} == {0}
        for one, row in zip(slices, part.steps.to_dict("records"), strict=True):
            end_ticks = row["start_ticks"] + row["ticks"]
            assert (one.begin_ns, one.end_ns) == (row["start_ticks"] // 1000, end_ticks // 1000)
            columns = ("iterations", "decodes", "batch_size", "prefill_tokens", "waiting")
            assert one.values == {key: row[key] for key in columns}
            assert ("prefill" in one.name) == (row["prefill_tokens"] > 0)
            decodes = row["decodes"] > 0 or row["iterations"] > 1
            assert ("decode" in one.name) == decodes and (one.name == "in vain") == (not row["batch_size"])


@pytest.mark.parametrize("name", [*CASES, "replicas"])
def test_preemptions_are_those_of_the_summary(results, timeline, name):
    result = results[name]
    instants = [one for one in timeline.instants if one.track.startswith(name) and one.track.endswith("/preemptions")]
    assert Counter(one.name for one in instants) == +Counter(result.summary["preemptions"])
    for kind, column in (("recompute", "recomputed"), ("swap", "swapped")):
        counted = Counter(one.values["request"] for one in instants if one.name == kind)
        assert [counted[number] for number in result.requests.index] == result.requests[column].fillna(0).tolist()
    # A sequence on the device leaves it at that time.
    happened = {(one.values["request"], one.begin_ns) for one in instants}
    ended = result.residencies[result.residencies["ended"].isin(("preempted", "swapped"))]
    assert {(row.request, row.end_ticks // 1000) for row in ended.itertuples()} <= happened


def test_tracks_stand_in_order(results, timeline):
    tops = [*CASES, *(f"replicas, replica {number}" for number in range(3))]
    assert sorted((path for path in timeline.order if "/" not in path), key=timeline.order.get) == tops
    kinds = [f"samples/{kind}" for kind in ("requests", "steps", "preemptions", "memory", "sequences")]
    assert sorted(kinds, key=timeline.order.get) == kinds
    buckets = [f"samples/memory/{bucket.replace('_', ' ')}" for bucket in BUCKETS]
    assert sorted(buckets, key=timeline.order.get) == buckets


def test_the_same_runs_give_the_same_bytes(results, tmp_path):
    first, second = (write_timeline(tmp_path / name, [results["samples"]]) for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_a_hundred_thousand_requests_are_as_many_slices(tmp_path):
    load = ["--policy", "vllm-sosp23", "--num-prompts", "100000", "--request-rate", "1.7"]
    assert status(["simulate", *load, "--out", str(tmp_path / "run")]) == DONE
    result = read_result(tmp_path / "run")
    found = read_timeline(write_timeline(tmp_path / "run.pftrace", [result]))
    assert len(found.of("request")) == 100_000 and len(found.of("step")) == len(result.steps)
    assert Counter(one.name for one in found.instants) == +Counter(result.summary["preemptions"])


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12).map(sorted))
def test_lanes_do_not_overlap(intervals):
    begin, end = [come for come, _ in intervals], [come + residency for come, residency in intervals]
    taken = lanes(begin, end)
    for place, lane in enumerate(taken):
        earlier = [end[other] for other in range(place) if taken[other] == lane]
        assert all(gone <= begin[place] for gone in earlier)
        assert {taken[other] for other in range(place) if end[other] > begin[place]} >= set(range(lane))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(simulate(*small_case("vllm-v1")), tmp_path_factory.mktemp("run") / "run", {})


class TestCommand:
    @pytest.mark.slow
    def test_it_writes_page_and_timeline(self, folder, tmp_path, capsys):
        target = tmp_path / "deep" / "run.pftrace"
        arguments = ["report", str(folder), "--perfetto", str(target), "--out", str(tmp_path / "report.html")]
        assert status(arguments) == DONE
        assert f"Timeline for ui.perfetto.dev: {target}\n" in capsys.readouterr().out
        assert len(read_timeline(target).of("request", "vllm-v1/requests")) == REQUESTS

    def test_without_the_package_nothing_is_written(self, folder, tmp_path, capsys, monkeypatch):
        for name in [*filter(lambda name: "perfetto" in name, sys.modules)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "perfetto", None)
        places = ["--perfetto", str(tmp_path / "run.pftrace"), "--out", str(tmp_path / "report.html")]
        assert status(["report", str(folder), *places]) == MISTAKE
        said = capsys.readouterr().err
        assert "the package perfetto is not installed; pip install -e '.[perfetto]'" in said
        assert said.count("\n") == 1 and not any(tmp_path.iterdir())

    def test_a_result_of_an_earlier_version_is_refused(self, folder, tmp_path, capsys):
        for path in folder.iterdir():
            if path.name != "preemptions.parquet":
                (tmp_path / path.name).write_bytes(path.read_bytes())
        before = sorted(tmp_path.iterdir())
        places = ["--perfetto", str(tmp_path / "run.pftrace"), "--out", str(tmp_path / "report.html")]
        assert status(["report", str(tmp_path), *places]) == MISTAKE
        assert "has no preemptions.parquet; make it again by fragmeter simulate --out" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
