"""Metrics of SGLang and of llama.cpp: what is read of them, and where they are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.server_metrics import read_metrics

RECORDED = Path(__file__).parents[2] / "data" / "real_server" / "1" / "ample" / "random-medium.metrics.txt"
#: SGLang's names (0.5.23, metrics_collector.py) of vLLM's.
SGLANG = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "num_preemptions_total": "num_retracted_requests_total",
    "prefix_cache_queries_total": "prompt_tokens_total",
    "prefix_cache_hits_total": "cached_tokens_total",
}
LLAMA_CPP = """\
1700000000
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 100
llamacpp:kv_cache_usage_ratio 0.25
llamacpp:requests_processing 3
llamacpp:requests_deferred 1
1700000002
llamacpp:prompt_tokens_total 200
llamacpp:kv_cache_usage_ratio 0.75
llamacpp:requests_processing 4
llamacpp:requests_deferred 0
"""


def as_sglang(text: str) -> str:
    """A recording of vLLM as SGLang would write it."""
    text = re.sub(
        r"^vllm:cache_config_info.*$", 'sglang:max_total_num_tokens{engine="0"} 19200', text, flags=re.MULTILINE
    )
    for ours, theirs in SGLANG.items():
        text = re.sub(rf"^vllm:{ours}\{{", f"sglang:{theirs}{{", text, flags=re.MULTILINE)
    return text.replace("vllm:", "sglang:").replace('engine="0"', 'tp_rank="0",pp_rank="0",dp_rank="0"')


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "metrics.txt"
    path.write_text(text)
    return path


def test_sglangs_metrics_are_read_as_vllms_of_the_same_values(tmp_path):
    ours = read_metrics(RECORDED)
    theirs = read_metrics(written(tmp_path, as_sglang(RECORDED.read_text())))
    # Its prompt tokens are those that its cache looks up.
    rates = {"prompt_rate": theirs.prompt_rate}
    assert theirs == replace(ours, server="SGLang", num_gpu_blocks=19_200, block_size=1, config={}, **rates)
    assert ours.hit_rate and ours.ttft_s and ours.running


def test_following_pipeline_stages_are_not_counted_again(tmp_path):
    text = as_sglang(RECORDED.read_text())
    lines = text.splitlines()
    twice = "\n".join(
        each for line in lines for each in dict.fromkeys((line, line.replace('pp_rank="0"', 'pp_rank="1"')))
    )
    once = read_metrics(written(tmp_path, text))
    assert read_metrics(written(tmp_path, twice)) == once


def test_llama_cpps_have_requests_and_use_and_no_latencies(tmp_path):
    seen = read_metrics(written(tmp_path, LLAMA_CPP))
    assert (seen.server, seen.running, seen.waiting, seen.kv_usage, seen.elapsed_s) == (
        "llama.cpp",
        3.5,
        0.5,
        (0.5, 0.75),
        2,
    )
    assert seen.num_gpu_blocks is seen.hit_rate is seen.ttft_s is seen.finished is None


def test_metrics_of_two_servers_are_those_of_the_first(tmp_path):
    seen = read_metrics(written(tmp_path, LLAMA_CPP + RECORDED.read_text()))
    assert (seen.server, seen.running) == ("llama.cpp", 3.5)


@pytest.mark.parametrize("text", [LLAMA_CPP, as_sglang(RECORDED.read_text())])
def test_a_vllm_server_is_not_diagnosed_by_them(text, tmp_path, capsys):
    line = ["diagnose", "--metrics", str(written(tmp_path, text))]
    assert status([*line, "--serve", "vllm serve llama-3.1-8b"]) == MISTAKE
    assert re.search(
        r"are of SGLang, not of the vLLM server .*leave --serve out|are of llama.cpp, not of .*validate --policy",
        capsys.readouterr().err,
    )
    # What they measure is shown all the same.
    assert status(line) == DONE
    assert "Not simulated: " in capsys.readouterr().out
