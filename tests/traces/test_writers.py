"""What is written is read back bit for bit, whole or not at all; and a trace in a few numbers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fragmeter.traces as traces
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.cli.traces import arrival_rows, length_rows
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, UserError
from fragmeter.sim.workload.content import NO_SESSION, PromptContent
from fragmeter.sim.workload.dialogue import Dialogue
from fragmeter.traces import Trace, read, read_with_content, stats, write
from fragmeter.traces.stats.stats import reused

ENDINGS = [".csv", ".csv.gz", ".csv.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]
COLUMNS = ("prompt_tokens", "output_tokens", "arrival_ticks", "max_tokens")
FULL = Trace("full", [3, 1, 4], [1, 5, 9], [0, 123_456_789_000, 8_388_607_999_999_999_000], [1, 6, 16])


def as_lists(trace: Trace) -> list:
    return [None if getattr(trace, name) is None else getattr(trace, name).tolist() for name in COLUMNS]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("trace", [FULL, Trace("bare", [3, 1], [1, 5])], ids=["full", "bare"])
def test_what_is_written_is_read_back(tmp_path, trace, ending):
    path = tmp_path / f"{trace.name}{ending}"
    write(trace, path)
    again = read(path)
    assert as_lists(again) == as_lists(trace) and again.name == trace.name
    first = path.read_bytes()
    write(again, path)
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == [path.name]


def test_csv_is_in_our_own_columns(tmp_path):
    write(FULL, tmp_path / "full.csv")
    assert (tmp_path / "full.csv").read_text() == (
        "arrival_s,prompt_tokens,output_tokens,max_tokens\n0.0,3,1,1\n0.123456789,1,5,6\n8388607.999999999,4,9,16\n"
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2**23 * 10**9 - 1), min_size=1, max_size=30).map(sorted), st.sampled_from(ENDINGS))
def test_no_nanosecond_is_lost(tmp_path_factory, arrivals_ns, ending):
    ones, path = np.ones(len(arrivals_ns)), tmp_path_factory.getbasetemp() / f"exact{ending}"
    write(Trace("exact", ones, ones, [ns * 1000 for ns in arrivals_ns]), path)
    assert read(path).arrival_ticks.tolist() == [(ns - arrivals_ns[0]) * 1000 for ns in arrivals_ns]


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_nanosecond_is_lost_in_the_last_weeks(tmp_path, ending):
    # Above 2**22 s a float64 holds seconds to 0.93 ns, and careless rounding shows.
    arrivals_ns = np.sort(np.random.default_rng(0).integers(2**22 * 10**9, 2**23 * 10**9, 1000))
    write(Trace("late", np.ones(1000), np.ones(1000), arrivals_ns * 1000), tmp_path / f"late{ending}")
    assert (read(tmp_path / f"late{ending}").arrival_ticks == (arrivals_ns - arrivals_ns[0]) * 1000).all()


def test_zipped_files_carry_no_clock(tmp_path):
    write(FULL, tmp_path / "full.csv.gz")
    assert (tmp_path / "full.csv.gz").read_bytes()[4:8] == bytes(4)  # RFC 1952: MTIME


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "full.csv"
    path.write_text("before")

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError) as caught:
        write(FULL, path)
    assert str(caught.value) == f"{path}: cannot be written (No space left on device); choose another place"
    assert (os.listdir(tmp_path), path.read_text()) == (["full.csv"], "before")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(FULL, tmp_path / "full.csv")
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(SettingError) as caught:
        write(FULL, tmp_path / "full.xlsx")
    assert str(caught.value) == (f"path = '{tmp_path}/full.xlsx': must end in one of {', '.join(ENDINGS)}")
    with pytest.raises(UserError) as caught:
        write(FULL, tmp_path / "none" / "full.csv")
    assert str(caught.value).endswith("cannot be written (No such file or directory); choose another place")


def test_stats_by_hand():
    times = [0, 1, 2, 5]
    trace = Trace("hand", [1, 2, 3, 10], [10, 10, 10, 10], [second * ticks.PER_SECOND for second in times])
    found = stats(trace)
    assert (found["name"], found["rows"]) == ("hand", 4)
    assert found["prompt_tokens"]["mean"] == 4 and found["prompt_tokens"]["p50"] == 2.5
    assert found["prompt_tokens"]["std"] == pytest.approx(12.5**0.5)
    assert (found["prompt_tokens"]["min"], found["prompt_tokens"]["max"]) == (1, 10)
    assert found["prompt_tokens"]["p90"] == pytest.approx(7.9)
    assert found["output_tokens"]["std"] == 0 and found["total_tokens"]["mean"] == 14
    assert (found["duration_s"], found["request_rate"]) == (5.0, 0.6)
    assert found["gap_cv"] == pytest.approx((8 / 9) ** 0.5 / (5 / 3))


@pytest.mark.parametrize("arrivals", [None, [7, 7]])
def test_without_gaps_there_is_no_rate(arrivals):
    found = stats(Trace("still", [1, 2], [3, 4], arrivals))
    assert found["duration_s"] is found["request_rate"] is found["gap_cv"] is None


class TestReuse:
    def test_by_blocks_that_an_earlier_prompt_began_with(self):
        # Of the third, the first block; of the fourth both; block 2 alone begins nothing that was there.
        content = PromptContent([0, 2, 3, 5, 7], [1, 2, 2, 1, 3, 1, 2], [10, 5, 5, 10, 9, 10, 4])
        by, tokens, source = reused(Trace("hand", [15, 5, 20, 14], [1] * 4, content=content))
        assert (by, tokens.tolist(), source.tolist()) == ("hash_ids", [0, 0, 10, 14], [-1, -1, 0, 0])

    def test_by_what_was_said_before(self):
        content = PromptContent.of_sessions(np.array([1, 2, 1, NO_SESSION, 1]))
        by, tokens, source = reused(Trace("hand", [10, 10, 30, 99, 8], [5, 5, 5, 5, 5], content=content))
        assert (by, tokens.tolist(), source.tolist()) == ("session_id", [0, 0, 15, 0, 8], [-1, -1, 0, -1, 2])

    def test_in_a_tree(self):
        tree = Dialogue(np.array([-1, 0]), np.array([0, 7]), np.array([False, False]))
        trace = Trace("hand", [10, 10], [5, 5], dialogue=tree)
        assert stats(trace)["reuse"] == {"by": "parent", "prompt_tokens": 7, "share": 0.35}

    def test_of_prompts_of_which_nothing_is_known(self):
        assert stats(FULL)["reuse"] is None

    def test_of_prompts_without_a_block(self):
        content = PromptContent([0, 0, 0], [], [])
        assert reused(Trace("hand", [5, 5], [3, 3], content=content)) is None

    @pytest.mark.slow
    @pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
    def test_mooncakes_is_what_a_public_simulator_says(self):
        found = stats(read_with_content(Path(os.environ["FRAGMETER_TRACES"]) / "mooncake_conversation.jsonl.gz"))
        assert found["reuse"]["prompt_tokens"] == 54_098_411  # of an endless cache: facts/prefix_cache.json


def test_the_page_of_a_trace(tmp_path, capsys):
    write(FULL, tmp_path / "full.csv")
    assert status(["traces", "stats", str(tmp_path / "full.csv"), "--out", str(tmp_path / "page.html")]) == DONE
    page = (tmp_path / "page.html").read_text()
    assert "Lengths of requests" in page and "Arrivals over time" in page and "Reuse" not in page
    assert "page.html" in capsys.readouterr().out
    rows = length_rows(FULL)
    assert [rows[place] for place in (0, 34, 100)] == [
        {"share": 0.0, "prompt": 1, "output": 1},
        {"share": 0.34, "prompt": 3, "output": 5},
        {"share": 1.0, "prompt": 4, "output": 9},
    ]
    spans = arrival_rows(FULL)
    assert sum(row["requests_per_s"] * (row["end_s"] - row["start_s"]) for row in spans) == pytest.approx(len(FULL))


@pytest.mark.parametrize(("count", "spans"), [(1, 1), (19, 1), (20, 2), (1_199, 119), (1_200, 120), (5_000, 120)])
def test_arrivals_are_drawn_over_spans_of_ten_requests_or_more(count, spans):
    rng = np.random.default_rng(0)
    ones = np.ones(count, dtype=int)
    rows = arrival_rows(Trace("poisson", ones, ones, np.sort(rng.integers(0, 10**15, count))))
    assert len(rows) == spans
    counts = [row["requests_per_s"] * (row["end_s"] - row["start_s"]) for row in rows]
    assert sum(counts) == pytest.approx(count)
    assert count < 10 or np.mean(counts) >= 10 - 1e-9


@pytest.mark.slow
def test_the_public_face():
    assert traces.__all__ == sorted(traces.__all__)
    assert all(hasattr(traces, name) for name in traces.__all__)
