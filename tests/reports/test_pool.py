"""Memory over time, held to the sums of the run: of every span nothing is missing, nothing is counted twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.reports.data.pool_over_time import keeps_over_idle_spans, pool_over_time
from fragmeter.reports.data.results import Result, read_result
from fragmeter.reports.page.run_report import SECTIONS, PageInputs
from fragmeter.sim.memory import BUCKETS

#: Slots of a pool; vllm-v1 keeps one of its blocks for padding.
SLOTS, SLOTS_V1 = 300 * 16, 299 * 16
#: With a row a step, rows in force are all that there is to know: slots in all, and flags.
STEPPED = {
    "idling": (SLOTS, "--policy vllm-sosp23 --request-rate 0.2"),
    "contiguous": (SLOTS, "--policy orca-max --request-rate 2"),
    "replicas": (3 * SLOTS_V1, "--policy vllm-v1 --no-enable-prefix-caching --num-replicas 3 --request-rate 1"),
    "idle-replicas": (9 * SLOTS_V1, "--policy vllm-v1 --no-enable-prefix-caching --num-replicas 9 --request-rate 0.5"),
    "apart": (
        3 * SLOTS_V1,
        "--policy vllm-v1 --no-enable-prefix-caching --prefill-replicas 1 --decode-replicas 2 --request-rate 2",
    ),
}


def result_of(folder: Path, flags: str) -> Result:
    load = "--num-prompts 8 --num-gpu-blocks-override 300"
    assert status(["simulate", *load.split(), *flags.split(), "--out", str(folder)]) == DONE
    return read_result(folder)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> Result:
    return result_of(tmp_path_factory.mktemp("replicas") / "run", f"{STEPPED['replicas'][1]} --no-leap")


def shares_pct(table: pd.DataFrame, end_ticks: int) -> dict[str, float]:
    """Each bucket's share of the drawn area, up to the end."""
    spans = np.diff(np.append(table["start_ticks"], end_ticks)).astype(float)
    slots = table[list(BUCKETS)].sum(axis=1).iloc[0]
    return {bucket: 100 * float(table[bucket] @ spans) / spans.sum() / slots for bucket in BUCKETS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPPED)
def test_what_is_drawn_has_the_means_of_the_summary(kind, tmp_path):
    slots, flags = STEPPED[kind]
    result = result_of(tmp_path / kind, f"{flags} --no-leap")
    table = pool_over_time(result)
    end_ticks = (result.steps["start_ticks"] + result.steps["ticks"]).max()
    assert shares_pct(table, end_ticks) == pytest.approx(result.summary["waste"]["mean_over_time_pct"]["buckets"])
    assert set(table[list(BUCKETS)].sum(axis=1)) == {slots}
    assert table["start_ticks"].is_monotonic_increasing and table["start_ticks"].iloc[0] == 0


@pytest.mark.slow
def test_of_a_map_the_moments_are_drawn(tmp_path):
    """Of a run that leaps they count tokens that come within a leap, too."""
    result = result_of(tmp_path / "run", "--policy orca-max --request-rate 2 --record-blocks")
    table = pool_over_time(result)
    assert table["start_ticks"].tolist() == result.blocks.at_ticks.tolist()
    assert (table[list(BUCKETS)].to_numpy() == result.blocks.census_slots).all()
    end_ticks = (result.steps["start_ticks"] + result.steps["ticks"]).max()
    drawn, rows = (shares_pct(each, end_ticks)["live"] for each in (table, result.memory))
    truth = result.summary["waste"]["mean_over_time_pct"]["buckets"]["live"]
    assert drawn == pytest.approx(truth, rel=0.01) and rows < 0.95 * truth


@pytest.mark.slow
def test_the_page_says_what_is_added_up(replicas):
    section = next(
        made for make in SECTIONS if (made := make(PageInputs([replicas]))) and made.title == "Memory over time"
    )
    (figure,) = section.figures
    assert "KV slots of 3 replicas" in figure.layout.title.text
    capacity = next(trace for trace in figure.data if trace.name == "capacity")
    assert set(capacity.y) == {3 * SLOTS_V1} and list(capacity.x) == sorted(capacity.x)
    assert not any("watermark" in trace.name for trace in figure.data)


@pytest.mark.slow
def test_runs_beside_each_other_are_on_one_clock(replicas, tmp_path):
    short = result_of(tmp_path / "short", "--policy vllm-v1 --request-rate 99 --record-blocks")
    assert short.end_s < replicas.end_s
    wanted = ("Memory over time", "Runs of free blocks", "Requests over time")
    sections = [made for make in SECTIONS if (made := make(PageInputs([short, replicas]))) and made.title in wanted]
    overs = [figure for made in sections for figure in made.figures if figure.layout.xaxis.title.text == "time"]
    assert len(overs) == 2 + 1 + 2
    assert {tuple(figure.layout.xaxis.range) for figure in overs} == {(0, replicas.end_s)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, keeps", [("vllm-v0", False), ("vllm-v0 --shared-prefix-tokens 8 --block-size 8", True), ("sglang", True)]
)
def test_blocks_kept_while_no_sequence_runs_are_not_invented(flags, keeps, tmp_path):
    result = result_of(tmp_path / "run", f"--request-rate 0.2 --policy {flags}")
    assert keeps_over_idle_spans(result) == keeps
    drawn = pool_over_time(result)
    idle = drawn[drawn["free"] == drawn[list(BUCKETS)].sum(axis=1)]
    assert (len(idle) > 1) == (not keeps)


@pytest.mark.slow
def test_a_run_that_refused_every_request_has_a_page(tmp_path):
    """An address-contiguous policy reserves the model's maximum for every request, and the pool is too small."""
    refused, page, timeline = tmp_path / "refused", tmp_path / "page.html", tmp_path / "page.pftrace"
    flags = ["--policy", "orca-max", "--num-gpu-blocks-override", "40", "--num-prompts", "3", "--request-rate", "1"]
    assert status(["simulate", *flags, "--out", str(refused)]) == DONE
    assert status(["report", str(refused), "--out", str(page), "--perfetto", str(timeline)]) == DONE
    sections = [made for make in SECTIONS if (made := make(PageInputs([read_result(refused)])))]
    assert [section.title for section in sections] == ["Summary", "Simulated against measured"]
    assert sections[0].rows[0]["Refused (pool too small)"] == 3 and "Refused (pool too small)" in page.read_text()
