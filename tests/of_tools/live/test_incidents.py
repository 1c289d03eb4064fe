"""What is kept of a recorded incident is what diagnose reads of it."""

from __future__ import annotations

import json
import shutil

import pytest

from fragmeter.experiments.measured.scrapes import readings_of
from fragmeter.experiments.measured.server_log import readings_of as readings_of_log
from fragmeter.experiments.measured.server_metrics import served_load
from paths import ROOT
from tools.live.incidents import PLANTED, _compact, _kept, judge, runs_of, table

INCIDENTS = ROOT / "tests" / "data" / "incidents"
RECORDED = ROOT / "tests" / "data" / "real_server" / "1" / "tight" / "random-saturated.metrics.txt"
LINE = "Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, CPU KV cache usage: 3.0%"


def test_compact_scrapes_are_read_as_all_of_them():
    whole = RECORDED.read_text()
    kept = _compact(whole)
    assert len(kept) < 0.8 * len(whole)
    assert _compact(kept) == kept
    of_kept, of_whole = (served_load(readings_of(name, text)) for name, text in (("kept", kept), ("whole", whole)))
    assert of_kept.finished == pytest.approx(of_whole.finished) and of_kept.e2el_s == pytest.approx(of_whole.e2el_s)
    assert (of_kept.running, of_kept.waiting, of_kept.kv_usage) == (
        of_whole.running,
        of_whole.waiting,
        of_whole.kv_usage,
    )


def test_lines_of_the_start_and_of_the_periods_are_kept_apart():
    log = f"INFO non-default args: {{}}\nINFO something else\nINFO {LINE}\n"
    assert _kept(log, starting=True) == ["INFO non-default args: {}"]
    assert _kept(log) == [f"INFO {LINE}"]
    assert len(readings_of_log("log", "\n".join(_kept(log))).scrapes) == 1


def test_five_causes_are_planted_four_times_and_ten_servers_are_healthy():
    runs = {}
    for each in PLANTED:
        runs[each.cause] = runs.get(each.cause, 0) + len(each.loads)
    assert runs.pop("healthy") == 10
    assert list(runs.values()) == [4] * 5


def test_the_page_has_the_table_of_the_recorded_incidents():
    page = (ROOT / "docs" / "results" / "diagnosis.md").read_text()
    assert "\n".join(table(INCIDENTS)) in page
    assert len(runs_of(INCIDENTS)) == 30


@pytest.mark.slow
def test_the_answers_are_those_of_todays_diagnose(tmp_path):
    known = json.loads((INCIDENTS / "answers.json").read_text())
    shutil.copytree(INCIDENTS, tmp_path / "incidents")
    judge(tmp_path / "incidents")
    found = json.loads((tmp_path / "incidents" / "answers.json").read_text())
    assert {name: (each["state"], each["causes"]) for name, each in found.items()} == {
        name: (each["state"], each["causes"]) for name, each in known.items()
    }
