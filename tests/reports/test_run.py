"""The figures of a run's report, held to the run; and the whole page in a real browser."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench_files import benchmark
from browser import as_new, poor_texts, requested_urls, saved_csv, show, texts, wait
from engine_runs import settings_of, workload_of
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured.report import read_measured
from fragmeter.reports.blockmap.palette import KIND_LABELS, KINDS
from fragmeter.reports.data.answer import sentence
from fragmeter.reports.data.results import Result, read_result
from fragmeter.reports.figures.figures import (
    block_map,
    data_of,
    free_run_histogram,
    largest_free_run,
    ledger_over_time,
    request_timeline,
)
from fragmeter.reports.figures.timeline import MOST_REQUESTS, request_spans
from fragmeter.reports.page.run_report import SECTIONS, PageInputs, write_report
from fragmeter.reports.page.serving_sections import latencies
from fragmeter.reports.page.sweep_report import Sweep, write_sweep_report
from fragmeter.sim import simulate
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory.accounting.worths import HOST_WORTHS
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.result import memory_table, requests_table
from fragmeter.sim.recording.blocks import NO_SEQUENCE, BlockMap, record
from fragmeter.sim.types.ticks import PER_SECOND
from plan_cases import swapping_case
from strategies import Case, crowded_cases, medium_cases


class Watched(Observer):
    """Records the state of every sequence in every step."""

    every_step = True

    def __init__(self):
        self.seen: dict[int, dict[str, set[int]]] = {}

    def run_started(self, engine, refused):
        self.state = engine.state

    def step_started(self, now, ticks, leap, plan):
        queues = ("running", "prefilling", "waiting", "swapped", "stalled")
        self.seen[now] = {name: {one.index for one in getattr(self.state, name)} for name in queues}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "orca-max", "fastgen"])
@hypothesis_settings(max_examples=5)
@given(case=st.one_of(crowded_cases(), medium_cases()))
def test_spans_say_where_every_request_is(policy, case: Case):
    settings = settings_of(policy, case.pool, case.limits)
    workload = workload_of(case.requests, case.limits.max_model_len)
    watched = Watched()
    simulate(settings, workload, case.cost, observers=[watched])
    run = simulate(settings, workload, case.cost)
    requests = requests_table(run)
    spans = request_spans(requests, residencies_table(run))
    ran: set[int] = set()
    for now, queues in watched.seen.items():
        middle = (now + 0.5) / PER_SECOND
        covering = spans[(spans["start_s"] <= middle) & (middle < spans["end_s"])]
        states = dict(zip(covering["request"], covering["state"]))
        assert len(states) == len(covering)
        for name in queues["running"]:
            assert states[name] in ("prefill", "decode")
        for name in queues["waiting"]:
            flushed = ("stalled",) if policy == "fastgen" else ()
            assert states[name] in (("queued",) if name not in ran else ("preempted", "prefill", *flushed))
        for away in ("swapped", "stalled"):
            assert all(states[name] == away for name in queues[away])
        ran |= queues["running"] | queues["prefilling"]
    for request, own in spans.groupby("request"):
        assert own["start_s"].min() == pytest.approx(requests["arrival_ticks"][request] / PER_SECOND)
        assert own["end_s"].max() == pytest.approx(requests["finish_ticks"][request] / PER_SECOND)
        # One state after the other, without gaps.
        assert own["start_s"].tolist()[1:] == own["end_s"].tolist()[:-1]


@pytest.mark.slow
def test_a_timeline_of_many_requests_draws_some_and_says_so():
    count = 3 * MOST_REQUESTS
    requests = requests_table(simulate(*swapping_case())).iloc[np.zeros(count, dtype=int)].reset_index(drop=True)
    requests["arrival_ticks"] = np.arange(count)
    residencies = residencies_table(simulate(*swapping_case())).iloc[np.zeros(count, dtype=int)].reset_index(drop=True)
    residencies = residencies.assign(
        request=np.arange(count), sequence=np.arange(count), start_ticks=10**9 + np.arange(count)
    )
    figure = request_timeline(requests, residencies.assign(first_token_ticks=2 * 10**9, end_ticks=3 * 10**9), "Many")
    decode = next(trace for trace in figure.data if trace.name == "decode")
    drawn = np.unique(decode.y[np.isfinite(decode.y)])
    assert len(drawn) == MOST_REQUESTS and {0, count - 1} <= set(drawn)
    assert f"Drawn: {MOST_REQUESTS:,} of {count:,} requests" in figure.layout.title.subtitle.text


@pytest.fixture(scope="module")
def swapped() -> BlockMap:
    return record(*swapping_case())[1]


def test_free_blocks_and_their_longest_run(swapped):
    free, longest = largest_free_run(swapped, "Free").data
    held = (swapped.sequence != NO_SEQUENCE) | (swapped.references > 0)
    assert free.y.tolist() == (~held).sum(axis=1).tolist()
    assert longest.y.tolist() == swapped.largest_free_blocks.tolist()
    assert (longest.y <= free.y).all() and (longest.y < free.y).any()


def test_the_histogram_of_free_runs_adds_up(swapped):
    (bars,) = free_run_histogram(swapped, "Runs").data
    assert [*bars.x[:3]] == ["1", "2–3", "4–7"]
    assert sum(bars.y) == pytest.approx(swapped.free_runs.sum() / swapped.num_columns)


def test_the_pointer_shows_what_was_recorded(swapped):
    _, work = swapping_case()
    requests = np.repeat(np.arange(len(work)), work.num_sequences)
    figure = block_map(swapped, "Blocks", requests)
    layer = next(trace for trace in figure.data if trace.name == "blocks")
    columns = {at: column for column, at in enumerate((swapped.at_ticks / PER_SECOND).tolist())}
    for row, block in enumerate(layer.y):
        for place, at in enumerate(layer.x):
            column, said = columns[at], layer.text[row][place]
            holder = int(swapped.sequence[column, block])
            if holder == NO_SEQUENCE:
                assert "request" not in said
            else:
                tokens, references = swapped.live_slots[column, block], swapped.references[column, block]
                assert said.startswith(f"request {requests[holder]}: ")
                assert f"{tokens} of 4 slots hold tokens, {references} reference" in said


def test_marks_of_preemptions_name_the_request(swapped):
    _, work = swapping_case()
    requests = np.repeat(np.arange(len(work)), work.num_sequences)
    marks = next(trace for trace in block_map(swapped, "Blocks", requests).data if trace.name.startswith("preemption"))
    assert marks.name == f"preemption ({len(swapped.preempted_ticks)})"
    fates = ("its blocks freed", "to the host")
    assert [(preempted, fate) for preempted, fate in marks.customdata] == [
        (str(requests[sequence]), fates[swapped])
        for sequence, swapped in zip(swapped.preempted_sequence, swapped.preempted_swapped)
    ]


def test_the_watermark_is_drawn_where_there_is_one():
    run = simulate(*swapping_case())
    table = memory_table(run).assign(start_s=lambda each: each["start_ticks"] / PER_SECOND)
    assert not any("watermark" in (trace.name or "") for trace in ledger_over_time(table, "Without").data)
    (line,) = (trace for trace in ledger_over_time(table, "With", 8).data if "watermark" in (trace.name or ""))
    assert set(line.y) == {18 * 4 - 8}


GOAL = ["ttft:500", "tpot:50"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A run of each kind on one load, with all that can be recorded."""
    folder = tmp_path_factory.mktemp("results")
    load = ["--num-prompts", "12", "--request-rate", "4", "--num-gpu-blocks-override", "300", "--n", "2"]
    for policy in ("orca-max", "vllm-sosp23"):
        recorded = ["--record-blocks", "--record-plan", "--record-steps", "0:200"]
        assert status(["simulate", "--policy", policy, *load, "--out", str(folder / policy), *recorded]) == DONE
    benchmark(folder / "bench.json", read_result(folder / "orca-max").requests)
    arguments = ["--goodput", *GOAL, "--measured", str(folder / "bench.json"), "--out", str(folder / "report.html")]
    assert status(["report", str(folder / "orca-max"), str(folder / "vllm-sosp23"), *arguments]) == DONE
    return folder


@pytest.fixture(scope="module")
def driver(chromium):
    with as_new(chromium, 1400, 1300) as driver:
        yield driver


def look(driver, results: Path, scheme: str = "light") -> None:
    show(driver, results / "report.html", scheme, 1400)
    wait(driver, "return [...document.querySelectorAll('.player, .tables')].every((one) => one.dataset.ready)")


def test_every_section_is_there_and_every_figure_has_marks(driver, results):
    look(driver, results)
    assert driver.get_log("browser") == []
    assert [url for url in requested_urls(driver) if not url.startswith(("data:", "file:"))] == []
    titles = driver.execute_script("return [...document.querySelectorAll('h2')].map((title) => title.textContent)")
    assert titles == [
        "Summary",
        "The block map",
        "Memory over time",
        "Use of the memory",
        "Runs of free blocks",
        "Latency",
        "Batch and throughput over time",
        "Requests over time",
        "Simulated against measured",
        "Block tables",
    ]
    marks = """return [...document.querySelectorAll(".plot")].map((plot) => plot.querySelectorAll(
      ".barlayer .point path, .scatterlayer .js-fill, .scatterlayer .js-line, .scatterlayer .point, image").length)"""
    found = driver.execute_script(marks)
    assert len(found) == 2 + 2 + 2 + 4 + 4 + 3 + 2 + 3 and min(found) >= 1
    assert len(driver.find_elements("css selector", ".tables")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_of_the_report_has_a_contrast_of_4_5(driver, results, scheme):
    look(driver, results, scheme)
    assert poor_texts(texts(driver)) == []


@pytest.mark.slow
def test_every_figure_saves_what_it_draws(driver, results, tmp_path):
    look(driver, results)
    shown = [read_result(results / name, name) for name in ("orca-max", "vllm-sosp23")]
    inputs = PageInputs(shown, None, objectives(GOAL), read_measured(results / "bench.json", shown))
    made = [section for make in SECTIONS if (section := make(inputs)) is not None]
    figures = [figure for section in made for figure in section.figures]
    names, buttons = [], len(driver.find_elements("css selector", ".csv"))
    assert buttons == len(shown) + len(figures) == 22
    for place, figure in enumerate(figures, start=len(shown)):
        name, (head, *lines) = saved_csv(driver, place)
        wanted = data_of(figure)
        assert head == list(wanted.columns)
        assert len(lines) == len(wanted) > 0
        for column, cells in zip(head, zip(*lines)):
            numeric = pd.api.types.is_numeric_dtype(wanted[column])
            assert list(map(float, cells) if numeric else cells) == wanted[column].tolist(), (name, column)
        names.append(name)
    assert names[0] == "orca-max-kv-slots-by-bucket.csv" and len(set(names)) == len(names)
    for place, result in enumerate(shown):
        name, (head, *lines) = saved_csv(driver, place)
        assert (name, head) == (f"{result.name}.csv", ["Block", "From (s)", "To (s)", "State", "Request", "Sample"])
        hold_to_map(lines, result)


def hold_to_map(lines: list[list[str]], result: Result) -> None:
    """The rows of a saved block map say of every block and moment what was recorded, in as few rows as can be."""
    found, request = result.blocks, result.request_of_sequence
    start_s, seen = (found.start_ticks / PER_SECOND).tolist(), np.zeros(found.bucket.T.shape, dtype=int)
    row_of, last = {str(block): row for row, block in enumerate(found.block_ids)}, [""]
    for block, *span, kind, holder, sample in lines:
        begin = bisect_left(start_s, float(span[0]))
        end = bisect_left(start_s, float(span[1])) if float(span[1]) < start_s[-1] else len(start_s)
        row = row_of[block]
        seen[row, begin:end] += 1
        assert {KIND_LABELS[KINDS[bucket]] for bucket in found.bucket[begin:end, row]} == {kind}
        holders = found.sequence[begin:end, row]
        assert {str(request[one]) if one != NO_SEQUENCE else "" for one in holders} == {holder}
        first = {
            str(one - np.flatnonzero(request == request[one])[0] + 1) if one != NO_SEQUENCE else "" for one in holders
        }
        assert first == {sample}
        assert last[0] != block or (last[2] == span[0] and last[3:] != [kind, holder, sample])
        last = [block, *span, kind, holder, sample]
    assert (seen == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_sweep_can_be_read(driver, tmp_path, scheme):
    rates = {"series": ["a", "a", "b", "b"], "request_rate": [1.0, 2, 1, 2], "seed": 0, "request_throughput": 0.9}
    rates |= {"request_goodput": [0.8, 1.1, 0.9, 0.2], "p99_ttft_ms": [20.0, 900, 30, 4000], "p99_tpot_ms": 30.0}
    speeds = {"tokens_per_s_per_user": [40.0, 30, 35, 20], "tokens_per_s_per_gpu": [90.0, 150, 80, 190]}
    sweep = Sweep("small", pd.DataFrame(rates | speeds), ["policy"], "ttft:500", 0)
    show(driver, write_sweep_report(tmp_path / "sweep.html", sweep), scheme, 400)
    assert driver.get_log("browser") == [] and poor_texts(texts(driver)) == []
    marks = "return [...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.point').length)"
    # Two series at two rates, of which the TPOT is the same and one line; the Pareto front also has a ring around each of its
    # three points.
    assert driver.execute_script(marks) == [4, 4, 2, 4 + 3]
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1] == 400


@pytest.mark.slow
def test_each_section_is_made_alone(results, tmp_path):
    """Of a run without recordings those that need one are left out."""
    plain = replace(read_result(results / "orca-max"), blocks=None, plan=None)
    made = [make(PageInputs([plain])) for make in SECTIONS]
    titles = [section.title for section in made if section is not None]
    served = ["Latency", "Batch and throughput over time", "Requests over time"]
    always = ["Summary", "Memory over time", "Use of the memory", *served, "Simulated against measured"]
    assert titles == always
    # The first screen of a single run has its numbers, and pictures follow.
    inputs = PageInputs([plain])
    page = write_report(tmp_path / "one.html", inputs).read_text()
    headings = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert headings == [*always[1:], "Summary"]
    found, first = plain.summary, sentence(plain.summary, plain.about["settings"])
    assert f'<p class="answer">{escape(first, quote=False)}</p>' in page
    assert f"<h1>How does opt-13b on 1 x a100-40gb serve {plain.about['workload']['name']} under orca-max?</h1>" in page
    values = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert [label for label, _ in values] == [
        "Median TTFT", "Median TPOT", "Requests/s", "Preemptions", "Waste of the KV cache",
    ]  # fmt: skip
    buckets = found["waste"]["mean_over_time_pct"]["buckets"]
    waste = 100 - buckets["live"] - buckets["free"] - buckets["cached"]
    assert dict(values)["Waste of the KV cache"] == f"{waste:.1f} %"
    assert dict(values)["Requests/s"] == f"{found['request_throughput_while_arriving']:,.2f}"
    # An earlier version kept no gaps between tokens.
    assert [len(latencies([each]).figures) for each in (plain, replace(plain, gaps=None))] == [4, 3]


def test_the_summary_has_a_row_a_run_and_columns_for_what_happened(results):
    shown = [read_result(results / name) for name in ("orca-max", "vllm-sosp23")]
    rows = SECTIONS[0](PageInputs(shown)).rows
    assert [row["Run"] for row in rows] == ["orca-max", "vllm-sosp23"]
    for row, result in zip(rows, shown, strict=True):
        assert row["Output tokens/s"] == round(result.summary["output_throughput"], 1)
        assert row["Requests in a batch"] == round(result.summary["mean_batch"], 2)
    assert "Refused (pool too small)" not in rows[0] and "Replicas" not in rows[0]
    summary = shown[0].summary | {"refused": 3, "sharing": {"saved_pct": 27.08, "mean_saved_blocks": 1.0}}
    [row] = SECTIONS[0](PageInputs([replace(shown[0], summary=summary)])).rows
    assert (row["Refused (pool too small)"], row["Saved by sharing (%)"]) == (3, 27.1)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [[], ["--num-replicas", "2"]], ids=["server", "fleet"])
def test_hits_of_an_offloading_run_are_shown_by_tier(tmp_path, replicas):
    """Conversations on a small pool find on the host what the GPU has evicted; the page has the numbers of summary.json."""
    load = tmp_path / "mooncake.jsonl"
    turns = [
        {"timestamp": 3000 * turn + 200 * each, "input_length": 512 * (turn + 2), "output_length": 16,
         "hash_ids": [0, *range(10 * each + 1, 10 * each + turn + 2)]}
        for turn in range(4)
        for each in range(12)
    ]  # fmt: skip
    load.write_text("".join(json.dumps(each) + "\n" for each in turns))
    flags = ["--policy", "vllm-v1", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--trace", str(load)]
    flags += ["--num-gpu-blocks-override", "300", "--max-model-len", "4096"]
    outs = {}
    for name, more in (("offloading", ["--kv-offloading-size", "4"]), ("plain", [])):
        outs[name] = tmp_path / name
        assert status(["simulate", *flags, *replicas, *more, "--out", str(outs[name])]) == DONE
    shown = [read_result(outs[name]) for name in outs]
    [section] = [
        made for make in SECTIONS if (made := make(PageInputs(shown))) and made.title == "Prefix cache by tier"
    ]
    assert [row["Tier"] for row in section.rows] == ["GPU", "host", "GPU"]
    summary = json.loads((outs["offloading"] / "summary.json").read_text())
    for row, key in zip(section.rows, ("prefix_cache", "kv_offloading"), strict=False):
        tier = summary[key]
        assert tier["hit_tokens"] > 0
        names = {"Tokens looked up": "queried_tokens", "Tokens hit": "hit_tokens", "Evicted blocks": "evicted_blocks"}
        assert {name: row[name] for name in names} == {name: tier[each] for name, each in names.items()}
        assert row["Hit rate (%)"] == round(100 * tier["hit_tokens"] / tier["queried_tokens"], 1)
    host = summary["kv_offloading"]
    assert (
        section.rows[1]["Tokens looked up"]
        == summary["prefix_cache"]["queried_tokens"] - summary["prefix_cache"]["hit_tokens"]
    )
    assert (section.rows[1]["Blocks loaded"], section.rows[1]["Blocks stored"]) == (
        host["loaded_blocks"],
        host["stored_blocks"],
    )
    hits, worth = section.figures
    (found,) = hits.layout.meta["numbers"]["rows"]
    looked_up = summary["prefix_cache"]["queried_tokens"]
    assert found[2:4] == [100 * summary[key]["hit_tokens"] / looked_up for key in ("prefix_cache", "kv_offloading")]
    assert sum(found[2:]) == pytest.approx(100)
    (found,) = worth.layout.meta["numbers"]["rows"]
    assert found[2:-1] == [summary["cache_worth"]["host"]["pool_pct"][name] for name in HOST_WORTHS]
    assert sum(found[2:]) == pytest.approx(100)
    assert "Prefix cache by tier" in write_report(tmp_path / "both.html", PageInputs(shown)).read_text()
    assert "Prefix cache by tier" not in write_report(tmp_path / "plain.html", PageInputs(shown[1:])).read_text()


@pytest.mark.slow
def test_runs_of_different_loads_are_said_to_be(results, tmp_path):
    same = replace(read_result(results / "orca-max"), blocks=None, plan=None)
    load = {**same.about["workload"], "sha256": "another"}
    other = replace(same, about={**same.about, "workload": load})
    warning = "These runs served different requests"
    assert warning not in write_report(tmp_path / "same.html", PageInputs([same, same])).read_text()
    assert warning in write_report(tmp_path / "other.html", PageInputs([same, other])).read_text()
