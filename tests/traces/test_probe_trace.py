"""The file of a probe as a trace."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cli_runs import run
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import read, read_with_content
from paths import ROOT

PROBE = ROOT / "tests" / "data" / "probe" / "turns.jsonl"


def test_every_finished_request_is_a_row_with_its_lengths():
    trace, requests = read(PROBE), read_probe(PROBE).requests
    assert trace.content is None and len(trace) == len(requests)
    by_row = {row: place for place, row in enumerate(trace.rows.lines.tolist())}
    for number, request in enumerate(requests, 1):
        place = by_row[number]
        assert trace.prompt_tokens[place] == request.prompt_tokens
        assert trace.output_tokens[place] == request.output_tokens
        assert trace.max_tokens[place] == request.max_tokens
        assert trace.arrival_ticks[place] == (request.arrival_ns - requests[0].arrival_ns) * 1000


def test_contents_are_the_blocks_that_requests_share():
    trace, probe = read_with_content(PROBE), read_probe(PROBE)
    content = trace.content
    named = np.split(content.ids, content.offsets[1:-1])
    chains = [probe.requests[row - 1].contents for row in trace.rows.lines]
    for one, first in zip(named, chains, strict=True):
        for other, second in zip(named, chains, strict=True):
            if first is not second:
                same = sum(a == b for a, b in zip(first, second))
                assert sum(a == b for a, b in zip(one.tolist(), other.tolist())) == same
    assert len(content.ids) > 0 and set(content.tokens.tolist()) == {probe.block_size}


def test_a_request_that_has_not_finished_is_left_out(tmp_path):
    lines = PROBE.read_text().splitlines(keepends=True)
    path = tmp_path / "killed.jsonl"
    path.write_text("".join(lines[: len(lines) // 2]))
    trace, requests = read(path), read_probe(path).requests
    unfinished = [each for each in requests if each.reason is None]
    assert unfinished and trace.left_out.failed == len(unfinished)
    assert len(trace) == len(requests) - len(unfinished)


def test_a_file_without_a_finished_request_is_refused(tmp_path):
    path = tmp_path / "young.jsonl"
    path.write_text("".join(PROBE.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(TraceError, match="has no finished request"):
        read(path)


@pytest.mark.slow
def test_hits_of_the_server_are_found_in_the_simulator(tmp_path):
    """On the command line: the answers that later prompts continue are found, too."""
    probe = read_probe(PROBE)
    found = run(
        *("simulate", "--trace", str(PROBE), "--policy", "vllm-v1", "--block-size", str(probe.block_size)),
        *("--num-gpu-blocks-override", "2000", "--json", "-"),
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    cache = json.loads(found.stdout)["prefix_cache"]
    assert cache["hit_tokens"] > 0
