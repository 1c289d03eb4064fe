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
    # SGLang's states are in no KV group.
    held = STATE in kinds or getattr(memory, "states", None) is not None
    assert ("states" not in asked or held) and ("prefix caching" not in asked or memory.cache_log)
    if "parents" in asked and memory.cache_log is None and run.replica.policy.name not in KEEPING:
        return "computed anew"
    if "samples" in asked and not serves_groups(POLICIES[policy]):
        return "apart"
    return "yes"


def _section(heading: str) -> list[list[str]]:
    """Rows of the table below a heading of the page, without its head."""
    text = re.split(r"^#+ ", DOCS.read_text("utf-8").split(f"### {heading}\n")[1], flags=re.M)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[:1] + rows[2:]]


def _listed(heading: str, policy: str) -> dict[frozenset[str], str]:
    """Third cells of a policy's rows, by each of the sets of features in the second one."""
    return {
        frozenset(features.split(", ")): cell
        for names, sets, cell in _section(heading)[1:]
        if policy in names.split(", ")
        for features in sets.split("; ")
    }


PAIRED = ("vllm-v1", "vllm-sosp23", "vllm-v0")
ASKED = [
    asked
    for asked in map(frozenset, [*((one,) for one in FEATURES), *combinations(FEATURES, 2)])
    if asked not in EXCLUSIVE
]


@pytest.mark.parametrize("policy", PAIRED)
def test_the_tables_of_pairs_are_those_of_runs(policy):
    """Refused alone or as a pair, served in another way, or served; and no refusal is listed that follows from another."""
    refused, otherwise = _listed("Refusals", policy), _listed("vLLM's schedulers", policy)
    alone = {feature for feature in FEATURES if frozenset((feature,)) in refused}
    assert not [asked for asked in refused if len(asked) > 1 and asked & alone]

    def stated(asked: frozenset[str]) -> str:
        return "refused" if asked & alone or asked in refused else otherwise.get(asked, "yes")

    assert {asked: stated(asked) for asked in ASKED} == {asked: outcome(policy, *asked) for asked in ASKED}


@pytest.mark.slow
def test_the_table_of_single_features_is_that_of_runs():
    wanted = {
        (policy, feature): outcome(policy, feature)
        for policy in POLICIES
        if policy not in PAIRED
        for feature in FEATURES
    }
    head, *rows = _section("Other policies")
    cells = {
        (policy, feature): cell
        for names, *found in rows
        for policy in names.split(", ")
        for feature, cell in zip(head[1:], found, strict=True)
    }
    assert cells == wanted
