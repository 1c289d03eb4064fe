"""The table of docs/policies.md on which options of ``vllm-v1`` combine, beside runs of every pair."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

_DOCS = Path(__file__).parents[3] / "docs" / "policies.md"
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
#: Settings that ask for each column of the table.
_ASKED: dict[str, dict[str, Any]] = {
    "windows, states": {"model": "gpt-oss-120b", "tensor_parallel_size": 2},
    "drafts": {"speculative_config": json.dumps(_DRAFTS | {"synthetic_acceptance_length": 2})},
    "offloading": {"kv_offloading_size": 1},
    "priority": {"scheduling_policy": "priority"},
    "interval": {"prefill_schedule_interval": 3},
    "n": {},
    "disaggregation": {},
    "data parallel": {"data_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
#: Rows of the table.
_ROWS = tuple(_ASKED)[:5]


def _outcome(*asked: str) -> str:
    # Engines share experts.
    shape = "qwen3-30b-a3b" if "data parallel" in asked else "llama-3.1-8b"
    given: dict[str, Any] = {"model": shape, "enable_prefix_caching": True, "max_model_len": 4096}
    for feature in asked:
        given |= _ASKED[feature]
    facts: dict[str, Any] = {"content": PromptContent.of_sessions(np.zeros(4, dtype=np.int64))}
    if "priority" in asked:
        facts["priority"] = np.arange(4)
    if "n" in asked:
        facts["n"] = np.full(4, 2)
    work = Workload("four", np.zeros(4), np.array([40, 60, 80, 100]), np.full(4, 12), **facts)
    chosen = settings(policy="vllm-v1", gpu="h200", **given)
    try:
        if "disaggregation" in asked:
            simulate_cluster(chosen, work, Cluster(prefill_replicas=1, decode_replicas=1))
        elif "data parallel" in asked:
            simulate_cluster(chosen, work, Cluster(num_replicas=2))
        else:
            simulate(chosen, work)
    except SettingError:
        return "refused"
    return "apart" if "n" in asked else "yes"


def _table() -> dict[frozenset[str], str]:
    section = _DOCS.read_text("utf-8").split("Of the options of vllm-v1 these pairs combine.")[1]
    lines = [line for line in section.splitlines()[:12] if line.startswith("|") and not line.startswith("|-")]
    columns, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        frozenset((row[0], column)): cell
        for row in rows
        for column, cell in zip(columns[1:], row[1:], strict=True)
        if cell
    }


@pytest.mark.slow
def test_the_table_of_option_pairs_is_that_of_runs():
    pairs = [pair for pair in combinations_with_replacement(_ASKED, 2) if pair[0] in _ROWS]
    assert {frozenset(pair): _outcome(*pair) for pair in pairs} == _table()
