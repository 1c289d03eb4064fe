"""The three seminar questions of docs/teaching.md have the answers that the page gives."""

from __future__ import annotations

import re

import pytest

import fragmeter as fm
from paths import ROOT

PAGE = (ROOT / "docs" / "teaching.md").read_text("utf-8")
#: The load and the pool of the page of ``explore``, where its sliders begin.
BASE = {"num_prompts": 300, "input_len": 128, "random_range_ratio": 0.9, "request_rate": 5.0}
POOL = 15_360
WASTE = ("reserved", "over_estimate", "block_tail", "finished_hold", "round_up", "stranded")


def summary(policy: str, *, pool: int = POOL, block_size: int = 16, output_len: int = 128, **changed: float) -> dict:
    settings = BASE | {"block_size": block_size, "num_gpu_blocks_override": pool // block_size} | changed
    return fm.simulate(policy=policy, output_len=output_len, **settings).as_dict()


def buckets(found: dict) -> dict[str, float]:
    return found["waste"]["mean_over_iterations_pct"]["buckets"]


def answer(question: str) -> list[float]:
    """The numbers of the last cell of a question's row, thousands without commas."""
    [cell] = re.findall(rf"^\| {re.escape(question)} \| .* \| (.+) \|$", PAGE, re.MULTILINE)
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


@pytest.mark.slow
def test_why_orca_wastes():
    found = [summary("orca", max_tokens=tokens) for tokens in (512, 1024, 2048)]
    shares = [round(buckets(each)["over_estimate"]) for each in found]
    batches = [round(each["mean_batch"], 1) for each in found]
    waits = [round(each["mean_ttft_ms"] / 1e3, 1) for each in found]
    assert answer("Why does Orca (Max) waste?") == pytest.approx([*shares, *batches, *waits], abs=0.051)


@pytest.mark.slow
def test_what_the_block_size_does():
    sizes = (16, 64, 256)
    light = [summary("vllm-sosp23", block_size=size) for size in sizes]
    full = [summary("vllm-sosp23", block_size=size, output_len=256, request_rate=10.0) for size in sizes]
    waste = [sum(buckets(each)[name] for name in WASTE) for each in light]
    [throughput] = {round(each["output_throughput"]) for each in light}
    numbers = answer("What does the block size do?")
    assert numbers[:4] == pytest.approx([*waste, throughput], abs=0.051)
    assert numbers[-3:] == [round(each["output_throughput"]) for each in full]


@pytest.mark.slow
def test_when_vllm_preempts():
    load = {"output_len": 256}
    rates = [summary("vllm-sosp23", request_rate=rate, **load) for rate in (2.0, 5.0, 10.0)]
    pools = [summary("vllm-sosp23", request_rate=10.0, pool=pool, **load) for pool in (7_680, 30_720)]
    preempted = [sum(each["preemptions"].values()) for each in (*rates, *pools)]
    numbers = answer("When does vLLM preempt?")
    assert [*numbers[:3], *numbers[-2:]] == preempted
    assert numbers[3:6] == pytest.approx([each["mean_ttft_ms"] / 1e3 for each in rates], abs=0.051)
