"""The page of a live server, from a small recording of vLLM's scheduler: no server runs here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim import Settings
from fragmeter.sim.recording.blocks import GIVEN_UP, record
from fragmeter.sim.recording.blocks.occupancy import CODES
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.errors import UserError
from paths import ROOT
from real_vllm import ours
from real_vllm.golden import STEP_NS, golden_case
from tools.live import page
from tools.live.decisions import compare_blocks
from tools.live.figures import OverTime, kv_use, measured_over_time, simulated_over_time
from tools.live.loads import Load, Session
from tools.live.page import same_blocks
from tools.live.prediction import settings_of
from tools.live.probed import probed_blocks
from tools.live.results import results

PROBE = ROOT / "tests" / "data" / "probe" / "turns.jsonl"
MODEL = ROOT / "tests" / "data" / "config.json"
#: The first load has the requests before this one.
SECOND = 11
SESSION = Session("ample", {}, (Load("ramp", SECOND, ()), Load("random-light", 12 - SECOND, ())))
#: Steps before the first one with tokens from the prefix cache, which the replay does not find without contents.
SAME_STEPS = 6


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    """The recording without the contents of its prompts: a replay refuses prompts that continue answers."""
    path = tmp_path_factory.mktemp("probe") / "probe.jsonl"
    lines = [json.loads(line) for line in PROBE.read_text().splitlines()]
    for line in lines[1:]:
        line["events"] = [event for event in line.get("events", []) if event[0] != "contents"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def chosen() -> Settings:
    return settings_of(read_probe(PROBE).header, MODEL)


@pytest.fixture(scope="module")
def out(probe, tmp_path_factory) -> Path:
    """A folder as the command leaves it."""
    folder = tmp_path_factory.mktemp("live")
    recording = folder / "1" / SESSION.name
    recording.mkdir(parents=True)
    (recording / "probe.jsonl.gz").write_bytes(probe.read_bytes())
    (recording / "session.json").write_text(json.dumps({"start_s": 1.0, "loads_s": {}}))
    requests = read_probe(probe).requests
    for load, own in zip(SESSION.loads, (requests[:SECOND], requests[SECOND:]), strict=True):
        seen = {
            "request_rate": 1.0,
            "duration": (own[-1].finish_ns - own[0].added_ns) / 1e9,
            "input_lens": [each.prompt_tokens for each in own],
            "output_lens": [each.output_tokens for each in own],
            "ttfts": [(each.token_ns[0] - each.added_ns) / 1e9 for each in own],
            "itls": [(np.diff(each.token_ns) / 1e9).tolist() for each in own],
            "start_times": [each.added_ns / 1e9 for each in own],
        }
        (recording / f"{load.name}.json").write_text(json.dumps(seen))
        (recording / f"{load.name}.metrics.txt").write_text(scrapes(own[0].added_ns / 1e9))
    return folder


def scrapes(start_s: float) -> str:
    """Two scrapes: half a step after a time, and one that says no time."""
    lines = ("vllm:num_requests_running 1.0", "vllm:num_requests_waiting 0.0", "vllm:kv_cache_usage_perc 0.5")
    scrape = "".join(f"{line}\n" for line in lines)
    return f"{start_s + STEP_NS / 2e9:.3f}\n{scrape}{scrape}"


@pytest.fixture(scope="module")
def found(out) -> dict:
    return results(out, 1, (SESSION,), MODEL)


@pytest.fixture(scope="module")
def loads(out, found) -> dict:
    """After ``results``, which writes the step times."""
    return page.load_pictures(out, (SESSION,), MODEL)


def test_the_server_and_the_simulator_have_the_same_blocks(probe, chosen):
    server, simulated = compare_blocks(probe, chosen, 0, SAME_STEPS)
    assert server.num_columns == simulated.num_columns == SAME_STEPS
    assert same_blocks(server, simulated) and same_blocks(simulated, server)
    # From the second step on.
    begin = read_probe(probe).steps[1].start_ns
    later, _ = maps = compare_blocks(probe, chosen, begin, SAME_STEPS - 1)
    assert same_blocks(maps[0], maps[1])
    assert later.at_ticks.tolist() == [*range(SAME_STEPS - 1)]
    assert np.array_equal(later.bucket, server.bucket[1:])


def test_a_difference_is_seen(probe, chosen):
    server, simulated = compare_blocks(probe, chosen, 0, SAME_STEPS + 1)
    assert not same_blocks(server, simulated)


def test_a_time_after_the_last_step_is_refused(probe, chosen):
    with pytest.raises(UserError, match="no step starts at"):
        compare_blocks(probe, chosen, 1 << 60, 10)


def test_the_map_of_the_probe_counts_what_the_probe_counts():
    steps = [step for step in read_probe(PROBE).steps if step.tokens]
    found = probed_blocks(PROBE, len(steps))
    for bucket, slots in zip(CODES, found.census_slots.T, strict=True):
        assert slots.tolist() == [step.buckets[bucket] for step in steps], bucket
    assert found.preempted_ticks.tolist() == [tick for tick, step in enumerate(steps) for _ in step.preempted] != []


def test_the_map_of_the_probe_is_that_of_vllm_v1_with_the_contents_of_answers():
    """The whole recording, preemptions included; a simulated moment is compared with the step in progress."""
    case = golden_case()
    work = ours.scaled(case.workload, 1000)
    _, simulated = record(ours.settings_of(case, leap=False), work, ours.ConstantCost(STEP_NS * 1000))
    steps = [step for step in read_probe(PROBE).steps if step.tokens]
    server = probed_blocks(PROBE, len(steps))
    place = {step.start_ns * 1000: column for column, step in enumerate(steps)}
    compared = 0
    for column, start in enumerate(simulated.start_ticks.tolist()):
        if (own := place.get(start)) is None:
            continue
        compared += 1
        for name in ("sequence", "live_slots", "references", "census_slots"):
            assert np.array_equal(getattr(simulated, name)[column], getattr(server, name)[own]), (name, own)
        # Which free blocks are marked depends on the moments before.
        kinds = [
            np.where(each == GIVEN_UP, CODES["free"], each) for each in (simulated.bucket[column], server.bucket[own])
        ]
        assert np.array_equal(*kinds), own
    assert compared > len(steps) / 2


def test_both_sides_are_averaged_over_time():
    spans_s = np.array([0.0, 1.0, 2.0, 4.0])
    held = OverTime(3.0, np.array([0.0, 1.5]), {"blocks": np.array([10.0, 20.0])}, held=True)
    assert held.means(spans_s)["blocks"].tolist() == [10, 15, 10]
    line = OverTime(4.0, np.array([0.0, 4.0]), {"blocks": np.array([0.0, 8.0])}, held=False)
    assert line.means(spans_s)["blocks"].tolist() == [1, 3, 6]


def test_what_is_drawn_over_time_is_what_was_recorded(loads):
    each = loads["ample/random-light"]
    measured, simulated = measured_over_time(each.load.steps), simulated_over_time(each.replayed.run)
    own = each.load.steps[:-1]
    capacity = sum(own[0].buckets.values())
    assert measured.values["tokens"] == pytest.approx([100 * step.buckets["live"] / capacity for step in own])
    held = capacity // 32 - np.array([step.free for step in own])
    assert measured.values["blocks"] == pytest.approx(100 * 32 * held / capacity)
    assert simulated.end_s == each.replayed.run.log.rows["ticks"].sum() / 1e12
    # At the end of the recording this request is alone, as in its simulation.
    for name in ("blocks", "tokens", "running", "waiting"):
        assert simulated.values[name][-1] == pytest.approx(measured.values[name][-1]), name
    ((at_s, share),) = each.gauge
    assert (at_s, share) == (pytest.approx(own[0].start_ns / 1e9 + STEP_NS / 2e9, abs=1e-3), 0.5)
    drawn = kv_use("light", (measured, simulated), [(at_s, 50.0)])
    assert [trace.name for trace in drawn.data][-1] == "vllm:kv_cache_usage_perc"
    assert [row[0] for row in drawn.layout.meta["numbers"]["rows"]] == ["Blocks held", "Tokens", "Seconds"]


@pytest.mark.slow
def test_the_page_says_whether_decisions_and_maps_are_equal(probe, out, found, loads, chosen, tmp_path):
    same = page.BlockPictures("ample/ramp", *compare_blocks(probe, chosen, 0, SAME_STEPS))
    text = page.write_live_page(tmp_path / "server.html", found, loads, same).read_text()
    for title in ("Decisions", "Time", "Over time: ample/random-light", "Steps and requests, one by one", "Block maps"):
        assert f"{title}</h2>" in text, title
    assert f"Both maps are identical in all {SAME_STEPS} steps" in text
    assert "1 of 1 recordings differ from the replay" in text and "step 6, scheduled: real" in text
    whole = page.block_pictures(out, (SESSION,), MODEL)
    assert whole is not None and whole.load == "ample/ramp"
    text = page.write_live_page(tmp_path / "other.html", found, loads, whole).read_text()
    assert "The maps differ within these" in text and "are identical" not in text


def test_sessions_that_are_not_drawn_leave_their_sections_out(out, found):
    other = Session("other", {}, ())
    assert page.load_pictures(out, (other,), MODEL) == {}
    assert page.block_pictures(out, (other,), MODEL) is None
    text = page.write_live_page(out / "bare.html", found, {}).read_text()
    assert "Decisions</h2>" in text and "Over time:" not in text and "Block maps" not in text
