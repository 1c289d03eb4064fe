"""The tables of docs/policies.md on what policies combine, beside runs of every combination."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.kv_groups import SLIDING, STATE
from fragmeter.sim.policy.registry import POLICIES, serves_groups
from fragmeter.sim.recording.blocks import record
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.workload import Workload

DOCS = Path(__file__).parents[3] / "docs" / "policies.md"
#: Settings that ask for each feature.
FEATURES: dict[str, dict[str, Any]] = {
    "windows": {"model": "gemma-3-27b"},
    "states": {"model": "nemotron-h-8b"},
    "prefix caching": {"enable_prefix_caching": True},
    "swapping": {"preemption_mode": "swap"},
    "samples": {},
    "beams": {"use_beam_search": True},
    "pinned prefix": {"shared_prefix_tokens": 16},
    "parents": {},
    "disaggregation": {},
    "block maps": {},
}
#: Policies that keep the tokens of parents without a prefix cache.
KEEPING = {"vllm-sosp23", "vllm-v0", "orca", "orca-max", "orca-pow2", "orca-oracle"}
#: What cannot be asked for at once.
EXCLUSIVE = {frozenset(("windows", "states"))}


def _workload(asked: set[str]) -> Workload:
    prompts, outputs, times = np.array([40, 60, 80, 100]), np.full(4, 12), np.zeros(4)
    facts: dict[str, Any] = {}
    if "parents" in asked:
        facts["dialogue"] = Dialogue(np.array([NO_PARENT, 0, 1, 2]), np.array([0, 40, 60, 80]), np.zeros(4, dtype=bool))
    elif "prefix caching" in asked:
        facts["content"] = PromptContent.of_sessions(np.zeros(4, dtype=np.int64))
    if asked & {"samples", "beams"}:
        facts["n"] = np.full(4, 2)
    return Workload("four", times, prompts, outputs, **facts)


def outcome(policy: str, *asked: str) -> str:
    """What a run with these features comes to: "yes", "refused", or what it does in their place."""
    given: dict[str, Any] = {"model": "llama-3.1-8b", "enable_prefix_caching": None}
    if "prefix caching" not in asked and POLICIES[policy].caches_prefixes:
        given["enable_prefix_caching"] = False
    for feature in asked:
        given |= FEATURES[feature]
    pool = None if policy == "sglang" else 4000
    try:
        work = _workload(set(asked))
        chosen = settings(policy=policy, gpu="h200", max_model_len=8192, num_gpu_blocks_override=pool, **given)
        if "disaggregation" in asked:
            simulate_cluster(chosen, work, Cluster(prefill_replicas=1, decode_replicas=1))
            return "yes"
        run = record(chosen, work)[0] if "block maps" in asked else simulate(chosen, work)
    except SettingError:
        return "refused"
    memory = run.replica.memory
    kinds = memory.groups.kinds
    if "windows" in asked and SLIDING not in kinds:
        return "every token is kept"
    assert ("states" not in asked or STATE in kinds) and ("prefix caching" not in asked or memory.cache_log)
    if "parents" in asked and memory.cache_log is None and run.replica.policy.name not in KEEPING:
        return "computed anew"
    if "samples" in asked and not serves_groups(POLICIES[policy]):
        return "apart"
    return "yes"


def _tables() -> dict[str, dict[frozenset[str], str]]:
    """Cells of the tables under "What policies combine", by policy."""
    section = re.split(r"^## ", DOCS.read_text("utf-8").split("## What policies combine")[1], flags=re.M)[0]
    found: dict[str, dict[frozenset[str], str]] = {}
    policies: list[str] = []
    columns: list[str] = []
    for line in section.splitlines():
        if line.startswith("### "):
            policies, columns = [name for name in line[4:].split(", ") if name in POLICIES] or [line[4:]], []
        elif line.startswith("|") and not line.startswith("|-"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not columns:
                columns = cells[1:]
                continue
            for column, cell in zip(columns, cells[1:], strict=True):
                for policy in policies:
                    for row in cells[0].split(", "):
                        if cell:
                            found.setdefault(policy, {})[frozenset((row, column))] = cell
    return found


PAIRED = ("vllm-v1", "vllm-sosp23", "vllm-v0")


@pytest.mark.parametrize("policy", PAIRED)
def test_the_tables_of_pairs_are_those_of_runs(policy):
    asked = [*((one,) for one in FEATURES), *combinations(FEATURES, 2)]
    wanted = {frozenset(features): outcome(policy, *features) for features in asked if {*features} not in EXCLUSIVE}
    assert _tables()[policy] == wanted


@pytest.mark.slow
def test_the_table_of_single_features_is_that_of_runs():
    wanted = {
        frozenset((policy, feature)): outcome(policy, feature)
        for policy in POLICIES
        if policy not in PAIRED
        for feature in FEATURES
    }
    assert _tables()["Other policies"] == wanted


@pytest.mark.parametrize("policy", PAIRED)
def test_every_refusal_is_explained(policy):
    """A feature that is refused alone, or two of which neither is."""
    table = _tables()[policy]
    alone = {feature for feature in FEATURES if table[frozenset((feature,))] == "refused"}
    refused = {one for one, cell in table.items() if cell == "refused" and (len(one) == 1 or not one & alone)}
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", DOCS.read_text("utf-8").split("### Refusals")[1], re.M)
    assert {frozenset(row.split(", ")) for names, row in rows if policy in names.split(", ")} == refused
