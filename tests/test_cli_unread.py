"""Flags that nothing would read are refused, and those that are refused change nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fragmeter.experiments.cli import MISTAKE, status
from fragmeter.experiments.unread import OF_PREFIX_AFFINE, READ_BY, refuse_unread
from fragmeter.sim.cluster import cluster, cluster_summary, simulate_cluster
from fragmeter.sim.content import PromptContent
from fragmeter.sim.errors import SettingError
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.run import simulate
from fragmeter.sim.settings import Settings, settings
from fragmeter.sim.summary import summary
from fragmeter.sim.workload import Workload

#: Values that make a difference to CROWD where they are read.
TELLING = {
    "page_size": 128,
    "watermark": 0.5,
    "preemption_mode": "swap",
    "waiting_served_ratio": 9.0,
    "max_waiting_tokens": 1,
    "output_estimate": 0.2,
    "schedule_policy": "fcfs",
}
#: What it takes besides.
BESIDES = {
    ("vattention", "watermark"): {"num_gpu_blocks_override": 8},
    ("tgi", "max_waiting_tokens"): {"waiting_served_ratio": 9.0},
}
NUMBER = 24


def crowd() -> Workload:
    """More than the pool holds, in four sessions whose turns lie apart."""
    rows = np.arange(NUMBER)
    sessions = PromptContent.of_sessions(rows % 4)
    lengths = np.full(NUMBER, 40) + 30 * (rows // 4), np.full(NUMBER, 30) + 7 * (rows % 5)
    return Workload("crowd", rows * 2 * 10**9, *lengths, np.full(NUMBER, 300), content=sessions)


def served(chosen: Settings) -> dict:
    told = summary(simulate(chosen, crowd()))
    # Its size is that of the memory, which a setting may change though nobody uses it.
    return told | {"host_pool": None}


@cache
def plain(policy: str) -> dict:
    return served(base(policy))


def base(policy: str) -> Settings:
    # Of vattention the pages say how large the pool is.
    blocks = None if policy == "vattention" else 60 * (16 if policy in ("sglang", "lightllm") else 1)
    return settings(policy=policy, num_gpu_blocks_override=blocks)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_refused_changes_nothing_and_what_is_not_does(policy):
    for field, value in TELLING.items():
        chosen = replace(base(policy), **{field: value}, **BESIDES.get((policy, field), {}))
        if policy in READ_BY[field]:
            refuse_unread(chosen, cluster())
            assert served(chosen) != served(replace(chosen, **{field: getattr(Settings, field)})), field
        else:
            with pytest.raises(SettingError, match=f"^{field} = .*{policy} does not read it; take {READ_BY[field][0]}"):
                refuse_unread(chosen, cluster())
            assert served(chosen) == plain(policy), field


def test_what_is_as_it_is_by_default_asks_for_nothing():
    assert TELLING.keys() == READ_BY.keys()
    for policy in POLICIES:
        refuse_unread(settings(policy=policy), cluster())
        refuse_unread(settings(policy=policy, watermark=0), cluster())


@pytest.mark.parametrize("field", OF_PREFIX_AFFINE)
@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens", "kv-aware"])
def test_thresholds_are_prefix_affine_s(field, router):
    asked, other = cluster(num_replicas=2, router=router), cluster(num_replicas=2, router=router, **{field: 1})
    with pytest.raises(SettingError, match=f"^{field} = .*{router} does not read it; give --router prefix-affine"):
        refuse_unread(settings(), other)
    refuse_unread(settings(), replace(other, router="prefix-affine"))
    told = [cluster_summary(simulate_cluster(base("vllm-v1"), crowd(), chosen)) for chosen in (asked, other)]
    assert told[0] == told[1]


def test_the_program_refuses(capsys):
    for flags, told in (
        (["--policy", "vllm-v1", "--preemption-mode", "swap"], "preemption_mode = 'swap': vllm-v1 does not read it;"),
        (["--waiting-served-ratio", "0"], "waiting_served_ratio = 0.0: vllm-sosp23 does not read it; take tgi, or leave"),
        (["--beam-survival", "0.5"], "beam_survival = 0.5: is of beams; give --use-beam-search"),
        (["--num-replicas", "2", "--cache-threshold", "0.9"], "cache_threshold = 0.9: round-robin does not read it;"),
    ):
        assert status(["simulate", "--request-rate", "1", "--num-prompts", "1", *flags]) == MISTAKE
        assert told in capsys.readouterr().err
