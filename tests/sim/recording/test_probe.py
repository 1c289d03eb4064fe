"""The file of ``fragmeter.probe``: read, counted, and refused where it is damaged. It was written by the real vLLM."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.reports.data.probed import read_probed
from fragmeter.sim import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import TraceError, UserError
from paths import ROOT
from real_vllm import ours
from real_vllm.golden import STEP_NS, golden_case

PROBE = ROOT / "tests" / "data" / "probe" / "turns.jsonl"
_TICKS_PER_NS = 1000


@pytest.fixture(scope="module")
def simulated() -> Run:
    """The recorded workload under ``vllm-v1``, a row a step."""
    case = golden_case()
    work = ours.scaled(case.workload, _TICKS_PER_NS)
    return simulate(ours.settings_of(case, leap=False), work, ours.ConstantCost(STEP_NS * _TICKS_PER_NS))


def test_every_bucket_of_every_step_is_that_of_vllm_v1(simulated):
    steps = [step for step in read_probe(PROBE).steps if step.tokens]
    computes = simulated.log.rows["iterations"] > 0
    for name, slots in simulated.accounts.at_rows().items():
        assert slots[computes].tolist() == [step.buckets[name] for step in steps], name


def test_the_summary_is_that_of_vllm_v1(simulated):
    measured, expected = read_probed(PROBE).summary, summary(simulated)
    assert measured.keys() <= expected.keys()
    for name, value in measured.items():
        wanted = expected[name]
        if name == "waste":
            assert {each: value[each] for each in ("num_steps", "window_s")} == {
                each: wanted[each] for each in ("num_steps", "window_s")
            }
            for mean in ("mean_over_iterations_pct", "mean_over_time_pct"):
                for view in wanted[mean]:
                    assert value[mean][view] == pytest.approx(wanted[mean][view], rel=1e-12), (mean, view)
        else:
            assert value == pytest.approx(wanted, rel=1e-12), name


def test_hits_evictions_and_preemptions_are_those_of_vllm_v1(simulated):
    run, cache = read_probe(PROBE), summary(simulated)["prefix_cache"]
    assert sum(each.hit_tokens[0] for each in run.requests) == cache["hit_tokens"] > 0
    assert sum(sum(each.hit_tokens[1:]) for each in run.requests) == cache["preempted_hit_tokens"]
    assert sum(step.evicted for step in run.steps) == cache["evicted_blocks"] > 0
    assert len(run.preemptions) == len(simulated.log.evictions["index"]) > 0


def test_a_recording_of_wrong_hashes_is_noticed(simulated, tmp_path):
    """A server that keeps no contents of finished requests."""
    changed = tmp_path / "probe.jsonl"
    changed.write_text("".join(_without_hashes(line) for line in PROBE.read_text().splitlines(keepends=True)))
    cached = [step.buckets["cached"] for step in read_probe(changed).steps if step.tokens]
    known = simulated.accounts.at_rows()["cached"][simulated.log.rows["iterations"] > 0]
    assert (known != np.array(cached)).sum() > 10


def _without_hashes(text: str) -> str:
    line = json.loads(text)
    for event in line.get("events", []):
        if event[0] == "finish":
            event[5:] = [[sum(run)] for run in event[5:]]
    return json.dumps(line) + "\n"


def test_a_compressed_file_is_read(tmp_path):
    packed = tmp_path / "probe.jsonl.gz"
    packed.write_bytes(gzip.compress(PROBE.read_bytes()))
    assert read_probe(packed).steps == read_probe(PROBE).steps


@pytest.mark.parametrize("packed", [False, True])
def test_the_file_of_a_killed_server_is_read_up_to_its_last_whole_line(packed, tmp_path):
    path, whole = tmp_path / "probe.jsonl", read_probe(PROBE)
    content = PROBE.read_bytes()
    content = gzip.compress(content)[:-900] if packed else content[: len(content) // 2]
    path.write_bytes(content)
    run = read_probe(path)
    assert run.cut and not whole.cut
    assert 10 < len(run.steps) < len(whole.steps)
    starts = [step.start_ns for step in whole.steps]
    assert [step.start_ns for step in run.steps] == starts[: len(run.steps)]
    result = read_probed(path)
    assert result.about["probe"] == {"unfinished": len(run.requests) - len(result.requests), "cut": True}


def test_a_request_that_has_not_finished_has_no_tail(tmp_path):
    """Its output is not known, so that the empty slots of its last block may all be filled."""
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(PROBE.read_text().splitlines(keepends=True)[:3]))
    step = read_probe(path).steps[-1]
    assert (step.buckets["live"], step.buckets["reserved"], step.buckets["block_tail"]) == (7, 25, 0)
    with pytest.raises(UserError, match="no request has finished in it; let the server finish some"):
        read_probed(path)


def _changed(number: int, change: Callable[[dict[str, Any]], object]) -> list[str]:
    lines = PROBE.read_text().splitlines(keepends=True)
    line = json.loads(lines[number - 1])
    change(line)
    lines[number - 1] = json.dumps(line) + "\n"
    return lines


def _set(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: line.update(fields)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "an empty file": ([], ": is empty; record"),
    "a line that was not finished": (["{"], ", line 1: is incomplete, and there is no other line; record"),
    "no JSON": (["{\n"], ", line 1: is no JSON; record"),
    "a list": (["[]\n"], ", line 1: is no JSON object; record"),
    "another file": (['{"a":1}\n'], ", line 1: is not the first line of a probe; record"),
    "another version": (_changed(1, _set(fragmeter_probe=9)), ", line 1: fragmeter_probe = 9: this version reads 1; rec"),
    "no pool": (_changed(1, _set(num_gpu_blocks=0)), ", line 1: num_gpu_blocks = 0: must be a whole number above 0; rec"),
    "no groups": (_changed(1, _set(groups=[])), ", line 1: groups = []: blocks of one size are supported"),
    "groups of two sizes": (
        _changed(1, _set(groups=[["FullAttentionSpec", 16], ["SlidingWindowSpec", 32]])),
        ", line 1: groups = [['FullAttentionSpec', 16], ['SlidingWindowSpec', 32]]: blocks of one size are supported",
    ),
    "an odd group": (_changed(1, _set(groups=[[1, 2]])), ", line 1: groups = [1, 2]: must be [name of a spec, block size]"),
    "no free blocks": (_changed(3, _set(free=-1)), ", line 3: free = -1: must be a whole number, 0 or more; record"),
    "other free blocks": (_changed(3, _set(free=1)), ", line 3: free = 1: the block tables leave 5; record"),
    "text as start": (_changed(3, _set(start="x")), ", line 3: start = 'x': must be a whole number, 0 or more; record"),
    "an early start": (_changed(4, _set(start=1)), ", line 4: start = 1: must not be before the step before"),
    "odd tokens": (_changed(3, _set(tokens=[0])), ", line 3: tokens = [0]: must be a list of requests and numbers"),
    "an unknown request": (_changed(3, _set(tokens=[7, 1])), ", line 3: tokens = 7: must be a request that was added"),
    "events as text": (_changed(3, _set(events="x")), ", line 3: events = 'x': must be a list; record"),
    "an unknown event": (_changed(3, _set(events=[["go"]])), ", line 3: events = ['go']: must be one of add, take, rel"),
    "an event without values": (_changed(3, _set(events=[["add"]])), ", line 3: events = ['add']: add has other values"),
    "an event in braces": (_changed(3, _set(events=[{}])), ", line 3: events = {}: must be one of add, take"),
    "a request out of turn": (
        _changed(3, _set(events=[["add", 5, "x", 0, 0, 1, 1]])),
        ", line 3: events = ['add', 5, 'x']: must be request 1, with a prompt",
    ),
    "a block beyond the pool": (
        _changed(3, _set(events=[["take", 0, 0, 99]])),
        ", line 3: events = ['take', 0, 0, 99]: must be a block up to 6",
    ),
    "an unknown group": (_changed(3, _set(events=[["take", 0, 4, 1]])), ", line 3: events = 4: must be one of 1 KV groups"),
    "a release of nothing": (
        _changed(3, _set(events=[["release", 0, 0, 8, 1]])),
        ", line 3: events = ['release', 0, 0, 8]: names no block",
    ),
    "runs of another table": (
        _changed(3, _set(events=[["preempt", 0, 9, [4]]])),
        ", line 3: events = [4]: must be run lengths of the 1 entries of request 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_damaged_line_is_named(lines, complaint, tmp_path):
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(lines))
    with pytest.raises(TraceError) as refused:
        read_probe(path)
    assert str(refused.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "probe.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1: is no UTF-8"):
        read_probe(path)
    packed = tmp_path / "probe.gz"
    packed.write_bytes(b"\x1f\x8bnothing of the kind")
    with pytest.raises(TraceError, match=r"is damaged; record it anew"):
        read_probe(packed)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\)"):
        read_probe(tmp_path / "nothing.jsonl")
