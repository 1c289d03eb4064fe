"""``fragmeter diagnose`` for models with states, and for a server without CUDA graphs."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.causes import CAUSES, Case
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.log import read_log
from fragmeter.sim.spec.startup.capacity import capacity, capture_blocks, users

LOAD = ("--input-len", "1024", "--output-len", "256", "--max-concurrency", "16")
#: A sequence of 1,280 tokens has 2 blocks of 1,040 tokens in the layers with attention, and up to 12 states.
LINE = "vllm serve nemotron-h-8b --max-model-len 8K --num-gpu-blocks-override 120 --max-num-seqs 100"


def diagnose(folder, line: str, *load: str) -> dict:
    out = folder / "diagnosis.json"
    draws = ("--num-prompts", "100", "--seeds", "1", "--jobs", "1")
    assert status(["diagnose", "--serve", line, "--gpu", "h100-80gb", "--json", str(out), *load, *draws]) == DONE
    return json.loads(out.read_text())


@pytest.mark.slow
def test_states_at_ends_of_blocks_are_a_cause(tmp_path, capsys):
    found = diagnose(tmp_path, f"{LINE} --enforce-eager", *LOAD)
    changes = {tuple(each["change"].items()): each for each in found["changes"]}
    without = changes[(("enable-prefix-caching", False),)]
    assert without["causes"] == ["states"]
    assert without["seen"]["preemptions"] < found["as_served"]["preemptions"] / 2
    launch = server_of(parse_serve(LINE), "h100-80gb", None, None).launch
    assert found["sequences_that_fit"] == users(launch, 120, 1280, 1024) < 16
    # The time without graphs is not known, which the report of an eager server alone says.
    assert "launch kernels" in capsys.readouterr().out


@pytest.mark.parametrize("seqs", [70, 100])
def test_max_num_seqs_is_raised_to_the_blocks_for_states_at_most(seqs):
    server = server_of(parse_serve(LINE.replace("seqs 100", f"seqs {seqs}")), "h100-80gb", None, None)
    assert capture_blocks(server.launch) == 120
    few = next(cause for cause in CAUSES if cause.name == "max-num-seqs too low")
    assert [*few.changes(Case(server, None, None, None))] == [{"max-num-seqs": "120"}]
    assert server.changed({"max-num-seqs": "121"}) is None


def test_without_states_blocks_are_no_bound():
    server = server_of(parse_serve("vllm serve llama-3.1-8b --max-num-seqs 100"), "h100-80gb", None, None)
    few = next(cause for cause in CAUSES if cause.name == "max-num-seqs too low")
    assert [each["max-num-seqs"] for each in few.changes(Case(server, None, None, None))] == ["200", "400", "800"]


def test_a_change_asks_for_no_memory_that_the_log_has_in_use():
    log = read_log(
        "Free memory on device (70.00/79.19 GiB) on startup. Desired GPU memory utilization is (0.85, 67.31 GiB).\n"
        "Available KV cache memory: 48.00 GiB"
    )
    line = parse_serve("vllm serve llama-3.1-8b --max-model-len 8192 --gpu-memory-utilization 0.85")
    server = server_of(line, "h100-80gb", None, log)
    more, too_much = (server.changed({"gpu-memory-utilization": share}) for share in ("0.88", "0.92"))
    assert more is not None and capacity(more.launch).num_blocks > capacity(server.launch).num_blocks
    assert too_much is None
