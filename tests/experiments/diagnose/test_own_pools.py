"""``fragmeter diagnose`` for SGLang's pools of states and of windows beside the KV cache."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import numpy as np
import pytest

from fragmeter.experiments.capacity.detail import waiting_shares, waits_for_windows
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.run import observation
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.sglang_server.start import parse_line
from fragmeter.sim import settings, simulate
from fragmeter.sim.engine.replica import build
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Trace, write

STATES = "sglang serve qwen3-next-80b-a3b --tp-size 2"
WINDOWS = "sglang serve gpt-oss-20b"


def diagnose(folder, line: str, gpu: str, load: str) -> dict:
    out = folder / "found.json"
    words = f"diagnose --gpu {gpu} --serve '{line}' {load} --seeds 3 --jobs 1 --json {out}"
    assert status(shlex.split(words)) == DONE
    return json.loads(out.read_text())


LENGTHS = "--input-len 1000 --output-len 300 --request-rate 8 --num-prompts 120"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "gpu", "cause", "flag"),
    [
        (f"{STATES} --max-mamba-cache-size 40", "h200", "pool of states", "max-mamba-cache-size"),
        (f"{STATES} --mamba-full-memory-ratio 0.01", "h200", "pool of states", "mamba-full-memory-ratio"),
        (f"{WINDOWS} --swa-full-tokens-ratio 0.001", "h100-80gb", "pool of windows", "swa-full-tokens-ratio"),
    ],
)
def test_a_pool_that_is_too_small_is_the_cause(line, gpu, cause, flag, tmp_path, capsys):
    found = diagnose(tmp_path, line, gpu, LENGTHS)
    assert (found["causes"], [*found["advised"]]) == ([cause], [flag])
    assert found["changes"][0]["gain"] > 0.5
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The {cause} (" in shown and f"that of {cause.removeprefix('pool of ')} has" in shown
    # What it costs is KV cache: a number for each pool, with its sign.
    assert "-" in found["changes"][0]["costs"] and "tokens of KV cache, +" in found["changes"][0]["costs"]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "gpu"), [(STATES, "h200"), (WINDOWS, "h100-80gb")])
def test_a_server_with_both_pools_is_healthy(line, gpu, tmp_path):
    found = diagnose(tmp_path, line, gpu, LENGTHS)
    assert (found["state"], found["causes"]) == ("healthy", [])


@pytest.mark.slow
def test_a_full_pool_of_states_loses_prefixes(tmp_path, capsys):
    """50 prefixes of 3,072 tokens in turn, over 60 states, some of which the requests have; the KV cache holds all."""
    count, turn = 600, np.arange(600)
    prompts = np.full(count, 3200)
    content = PromptContent(np.arange(count + 1), turn % 50, np.full(count, 3072))
    trace = Trace("load", prompts, np.full(count, 30), turn * 10**12 // 8, content=content)
    write(trace, tmp_path / "load.parquet")
    line = f"{STATES} --max-mamba-cache-size 60"
    found = diagnose(tmp_path, line, "h200", f"--trace {tmp_path / 'load.parquet'} --num-prompts 600")
    assert found["causes"] == ["pool of states"] and found["as_served"]["wait_seqs"] < 0.05
    assert "in common and 1% are found" in found["changes"][0]["symptoms"][0]
    assert found["changes"][0]["seen"]["hit_rate"] > 0.5


def test_requests_that_states_bound_wait_for_no_flag_of_requests():
    """40 states are for 8 requests: the line's own limit is a cause where it is the lower one, and is raised up to that."""
    at_bound, below = (
        server_of(parse_line(f"{STATES} --max-mamba-cache-size 40 --max-running-requests {seqs}"), "h200", None, None)
        for seqs in (8, 3)
    )
    assert at_bound.started.most_seqs() == below.started.most_seqs() == 8
    assert [each.launch.max_num_seqs for each in (at_bound, below)] == [8, 3]
    # Changes of the pool: each has more states than the one before.
    larger = [at_bound.changed(each).started.own_pool().slots for each in at_bound.started.larger_own_pools()]
    assert larger == sorted(set(larger)) and larger[:3] == [80, 160, 320]


def test_a_smaller_pool_of_windows_is_a_larger_kv_cache():
    """In the order of the windows that it leaves; each has more slots of the other layers."""
    server = server_of(parse_line(f"{WINDOWS} --swa-full-tokens-ratio 1.0"), "h100-80gb", None, None)
    changes = [each for each in server.started.larger_pools() if "swa-full-tokens-ratio" in each]
    assert [each["swa-full-tokens-ratio"] for each in changes] == [None, "0.5", "0.25"]
    sizes = [server.pool.num_tokens, *(server.changed(each).pool.num_tokens for each in changes)]
    assert sizes == sorted(set(sizes))


def test_no_change_is_tried_with_which_a_request_may_wait_for_ever():
    """A request of a whole chunk asks for 8,192 windows, beside 127 of its prefix; fewer are not tried, nor larger chunks over as many."""
    server = server_of(parse_line(f"{WINDOWS} --swa-full-tokens-ratio 0.01"), "h100-80gb", None, None)
    slots = {
        ratio: server.started.changed({"swa-full-tokens-ratio": ratio}).own_pool().slots for ratio in ("0.004", "0.003")
    }
    assert slots["0.003"] < 8192 + 2 * 127 < slots["0.004"]
    assert [server.changed({"swa-full-tokens-ratio": ratio}) is None for ratio in slots] == [False, True]
    few = server.changed({"swa-full-tokens-ratio": "0.004"})
    assert few.changed({"max-num-batched-tokens": "16384"}) is None
    assert few.changed({"max-num-batched-tokens": "4096"}) is not None


def test_windows_that_lack_are_memory():
    """A request of 100 and 16 tokens asks for 116 windows and a page; one of 1,000 for what is beyond a window, too."""
    chosen = {"policy": "sglang", "model": "gpt-oss-20b", "gpu": "h100-80gb"}
    policy = build(settings(**chosen, max_num_batched_tokens=2048)).policy

    def asked(prompt: int) -> int:
        columns = {"prompt_tokens": np.array([prompt]), "output_tokens": np.array([16])}
        load = Workload("one", np.zeros(1, dtype=np.int64), **columns, max_tokens=columns["output_tokens"])
        return policy.windows_to_admit(load, 1)

    assert (asked(100), asked(1000), asked(5000)) == (117, 1000 - 127 + 127 + 1, 2048 - 127 + 127 + 1)
    rows = {
        "ticks": [10, 20, 30],
        "waiting": [1, 1, 0],
        "batch_size": [2, 2, 2],
        "held": [0, 0, 0],
        "held.1": [0, 84, 84],
    }
    log = SimpleNamespace(
        rows={name: np.array(column) for name, column in rows.items()}, end_ticks=60, block_size=1, capacity_slots=10_000,
        second_pool=SimpleNamespace(capacity_slots=200),
    )  # fmt: skip
    lengths = {"prompt_tokens": np.array([100]), "output_tokens": np.array([16]), "max_tokens": np.array([16])}
    load = Workload("one", np.zeros(1, dtype=np.int64), **lengths)
    run = SimpleNamespace(log=log, replica=SimpleNamespace(policy=policy), workload=load)
    # Of 200 windows 116 are free in the second row: one less than is asked for.
    assert waits_for_windows(run) == pytest.approx(1 / 3)
    assert waiting_shares(run) == pytest.approx({"max_num_seqs": 0, "memory": 1 / 3, "steps": 1 / 6})


def test_use_of_a_pool_of_states():
    """Three requests that run alone have three of six states each: half of the pool in use, and its rest is cached after the first."""
    chosen = settings(
        policy="sglang", model="qwen3-next-80b-a3b", gpu="h200", tensor_parallel_size=2, max_mamba_cache_size=6
    )
    prompts, outputs = np.full(3, 640), np.full(3, 20)
    load = Workload("alone", np.arange(3) * 10**13, prompt_tokens=prompts, output_tokens=outputs)
    seen = observation(simulate(chosen, load), None)
    assert seen.own_max == pytest.approx(4 / 6) and 3 / 6 <= seen.own_usage <= 4 / 6
    assert 0 < seen.own_full < 1 and seen.wait_windows == 0
    plain = observation(simulate(settings(policy="sglang", model="qwen3-8b", gpu="h200"), load), None)
    assert (plain.own_usage, plain.own_max, plain.own_full) == (0, 0, 0)
