"""Files that an editor wrote with a byte order mark are read as those without one."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from fragmeter.experiments.capacity.loads import read_loads
from fragmeter.experiments.capacity.prices import prices
from fragmeter.experiments.measured.server_metrics import read_metrics
from fragmeter.experiments.story import reading as stories
from fragmeter.experiments.vllm_serve.line import parse_serve, pasted
from fragmeter.experiments.vllm_serve.log import read_log
from fragmeter.sim.spec import gpu, model

SHEET = {
    "name": "x", "memory_bytes": 1 << 36, "memory_gb_per_s": 1000, "fp16_tflops": 100, "pcie_gb_per_s": 32, "source": "made up",
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024,
    "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip

LOAD = """
[[load]]
name = "x"
request_rate = 5
goodput = ["ttft:500"]
"""
STORY = files("fragmeter.experiments.story").joinpath("stories/first-prompt.toml").read_text("utf-8")

FILES = {
    "loads.toml": (LOAD, read_loads),
    "own.toml": (STORY, lambda path: stories.story(str(path)).requests),
    "prices.toml": ("[per_gpu_hour]\nh200 = 3\n", lambda path: prices(path).per_gpu_hour),
    "prices.json": ('{"per_gpu_hour": {"h200": 3}}', lambda path: prices(path).per_gpu_hour),
    "line.txt": ("vllm serve opt-13b -tp 2\n", lambda path: parse_serve(pasted(str(path)))),
    "start.log": ("GPU KV cache size: 123,456 tokens\n", lambda path: read_log(str(path))),
    "metrics.txt": ("vllm:num_requests_running 3\n", read_metrics),
    "config.json": (json.dumps(CONFIG), lambda path: model(str(path))),
    "card.json": (json.dumps(SHEET), lambda path: gpu(str(path))),
}


@pytest.mark.parametrize(("name", "text", "read"), [(name, *row) for name, row in FILES.items()], ids=FILES)
def test_a_byte_order_mark_is_skipped(name, text, read, tmp_path):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    plain = read(path)
    path.write_text(text, "utf-8-sig")
    assert read(path) == plain
