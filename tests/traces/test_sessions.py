"""Sessions with turns that wait for the previous response: delays in traces, and the runs of such sessions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import Pacing, Reading, Trace, read_with_content, users, write

ROWS = (
    {"timestamp": 0, "session_id": "a", "input_length": 100, "output_length": 20},
    {"timestamp": 500, "session_id": "b", "input_length": 50, "output_length": 30, "delay": 7},
    {"delay": 1500, "session_id": "a", "input_length": 200, "output_length": 20},
    {"delay": 250.5, "session_id": "b", "input_length": 150, "output_length": 30},
    {"timestamp": 900, "input_length": 150, "output_length": 30},
    {"timestamp": 901, "delay": 0, "session_id": "a", "input_length": 300, "output_length": 20},
)
MS = ticks.PER_MS


def written(folder: Path, rows=ROWS) -> Path:
    path = folder / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_turn_with_a_delay_needs_no_time(tmp_path):
    trace = read_with_content(written(tmp_path))
    assert (trace.arrival_ticks // MS).tolist() == [0, 500, 500, 500, 900, 901]
    assert (trace.delay_ticks / MS).tolist() == [0, 7, 1500, 250.5, 0, 0]


@pytest.mark.parametrize("size", [1, 80, 150, 1000])
def test_where_the_file_is_cut_changes_nothing(tmp_path, monkeypatch, size):
    monkeypatch.setattr("fragmeter.traces.parsing.files.PIECE_BYTES", size)
    rows = [ROWS[0] | {"timestamp": 123.456789}, *ROWS[1:]]
    trace = read_with_content(written(tmp_path, rows))
    from_first = [round((at - 123.456789) * 1e6) * 1000 for at in (500, 500, 500, 900, 901)]
    assert trace.arrival_ticks.tolist() == [0, *from_first]
    assert (trace.delay_ticks / MS).tolist() == [0, 7, 1500, 250.5, 0, 0]


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_converting_keeps_delays(tmp_path, ending):
    before = read_with_content(written(tmp_path))
    write(before, tmp_path / f"new{ending}")
    after = read_with_content(tmp_path / f"new{ending}")
    for field in ("arrival_ticks", "delay_ticks"):
        assert getattr(after, field).tolist() == getattr(before, field).tolist()
    assert after.first(3).delay_ticks.tolist() == before.delay_ticks.tolist()[:3]


def test_delays_without_any_time(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "timestamp"} for row in ROWS]
    trace = read_with_content(written(tmp_path, rows))
    assert trace.arrival_ticks is None
    assert (trace.delay_ticks / MS).tolist() == [0, 7, 1500, 250.5, 0, 0]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"delay": -1}, "line 3: delay = -1: must be from 0 to 8388608000; correct the row"),
        ({"delay": 1e10}, "line 3: delay = 10000000000: must be from 0"),
        ({"delay": float("nan")}, "line 3: delay = nan: must be a time between a turn and the answer before it"),
        ({"delay": "soon"}, "line 3: delay = 'soon': must be a finite number"),
        ({"delay": None}, "line 3: timestamp = None: is missing"),
        (
            {"session_id": None},
            "line 3: delay = 1500: applies only to a turn of a session, and the row has no session_id; give one",
        ),
    ],
)
def test_delays_that_cannot_be(tmp_path, row, complaint):
    rows = [*ROWS[:2], ROWS[2] | row, *ROWS[4:]]
    with pytest.raises(TraceError) as caught:
        read_with_content(written(tmp_path, rows))
    assert complaint in str(caught.value)
    assert len(read_with_content(written(tmp_path, rows), Reading(skip_bad=True))) == 4


def test_the_first_time_must_be_there(tmp_path):
    with pytest.raises(TraceError, match="line 1: timestamp = None: is missing"):
        read_with_content(written(tmp_path, [ROWS[2], *ROWS[:2]]))


def test_think_time_of_each_turn(tmp_path):
    trace = read_with_content(written(tmp_path))
    sessions = users(Pacing(), trace)
    # What the trace says before a turn is what its user thinks after the one before; a first turn waits for nothing.
    assert (sessions.think_ticks / MS).tolist() == [1500, 250.5, 0, 0, 0, 0]
    assert sessions.max_concurrency is None
    drawn = users(Pacing(think_time=2.0, max_concurrency=3), trace, seed=1)
    assert len(set(drawn.think_ticks.tolist())) == 6
    assert drawn.session_id.tolist() == sessions.session_id.tolist()
    silent = Trace("silent", trace.prompt_tokens, trace.output_tokens, trace.arrival_ticks, content=trace.content)
    assert users(Pacing(), silent) is None
    assert users(Pacing(max_concurrency=2), silent).session_id is None
    assert users(Pacing(think_time=0.0), silent).think_ticks.tolist() == [0] * 6
    alone = Trace("alone", trace.prompt_tokens, trace.output_tokens, trace.arrival_ticks)
    with pytest.raises(
        SettingError, match="think_time = 0.0: applies only to users; give their number as max_concurrency, or"
    ):
        users(Pacing(think_time=0.0), alone)


@pytest.mark.slow
def test_the_program_serves_sessions(tmp_path, capsys):
    serve = ["simulate", "--trace", str(written(tmp_path)), "--policy", "vllm-v1", "--out", str(tmp_path / "out")]
    assert status(serve) == DONE
    table = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    sent, done = table["arrival_ticks"].tolist(), table["finish_ticks"].tolist()
    assert [sent[2] - done[0], sent[3] - done[1], sent[5] - done[2]] == [1500 * MS, 250.5 * MS, 0]
    # All of a session but the last token of each turn, in blocks of 16.
    assert table["cached_tokens"].tolist() == [0, 0, 112, 64, 0, 208]


def hit_rate(folder: Path, capsys, think_s: float) -> float:
    """Of forty sessions of three turns that begin every other second, in a pool that holds the text of four or so."""
    rows = [
        {"timestamp": 2000 * session, "session_id": session, "input_length": 400 * turn, "output_length": 9}
        for session in range(40)
        for turn in (1, 2, 3)
    ]
    serve = ["simulate", "--trace", str(written(folder, rows)), "--policy", "vllm-v1", "--think-time", str(think_s)]
    assert status([*serve, "--num-gpu-blocks-override", "300", "--json", "-"]) == DONE
    return json.loads(capsys.readouterr().out)["prefix_cache"]["hit_rate"]


@pytest.mark.slow
def test_longer_think_times_give_fewer_cache_hits(tmp_path, capsys):
    """A turn without think time hits all but a partial block; in longer think times more other requests arrive."""
    rates = [hit_rate(tmp_path, capsys, think_s) for think_s in (0, 2, 8, 1000)]
    assert rates[0] == (400 + 800) / 2400
    assert rates[0] > rates[1] > rates[2] > rates[3]


@pytest.mark.slow
@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
def test_fifty_users_have_mooncakes_conversations(capsys):
    trace = str(Path(os.environ["FRAGMETER_TRACES"]) / "mooncake_conversation.jsonl.gz")
    serve = ["simulate", "--trace", trace, "--policy", "vllm-v1", "--model", "llama-3.1-8b", "--gpu", "h200"]
    serve += ["--block-size", "512", "--max-concurrency", "50", "--think-time", "5", "--json", "-"]
    assert status(serve) == DONE
    results = json.loads(capsys.readouterr().out)
    assert results["completed"] + results["refused"] == 12_031
