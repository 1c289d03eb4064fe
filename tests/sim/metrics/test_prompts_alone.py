"""Prompts longer than ``max_num_batched_tokens``: counted, and said by ``simulate``."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim import settings, simulate
from fragmeter.sim.cluster import cluster, cluster_summary, simulate_cluster
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.workload.workload import Workload

#: Two of five prompts exceed 512 tokens.
WORK = Workload("long", np.arange(5) * 10**11, np.array([100, 900, 512, 700, 20]), np.full(5, 4), np.full(5, 4))
DIVIDES = {"vllm-v1", "sarathi", "fastgen", "sglang", "llama-cpp"}
NO_BUDGET = {"static", "fastertransformer"}


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy(policy):
    budget = {} if policy in NO_BUDGET else {"max_num_batched_tokens": 512}
    seqs = {} if policy in NO_BUDGET else {"max_num_seqs": 8}
    found = summary(simulate(settings(policy=policy, **budget, **seqs), WORK))
    assert found.get("prompts_alone", 0) == (0 if policy in DIVIDES | NO_BUDGET else 2)
    assert found["completed"] == 5


def test_of_a_cluster_they_add_up():
    chosen = settings(policy="trtllm-no-evict", max_num_batched_tokens=512, max_num_seqs=8)
    assert cluster_summary(simulate_cluster(chosen, WORK, cluster(num_replicas=2)))["prompts_alone"] == 2


def test_simulate_says_it_in_its_first_lines(capsys):
    line = [
        "simulate",
        "--policy",
        "tgi",
        "--input-len",
        "600",
        "--output-len",
        "3",
        "--num-prompts",
        "4",
        "--request-rate",
        "1",
    ]
    assert status([*line, "--max-num-batched-tokens", "512"]) == DONE
    said = capsys.readouterr().out
    assert "Alone: 4 prompts are longer than max_num_batched_tokens = 512" in " ".join(said.split())
    assert said.index("Alone:") < said.index("throughput ")
    assert status([*line, "--max-num-batched-tokens", "600"]) == DONE
    assert "Alone:" not in capsys.readouterr().out


def test_compare_says_it_of_the_side_that_has_them(capsys):
    line = "compare --set policy=vllm-v1 --set policy=tgi --input-len 600 --output-len 3 --num-prompts 4 --request-rate 1 --seeds 1"
    assert status([*line.split(), "--max-num-batched-tokens", "512"]) == DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "policy=tgi: 4 prompts of a run, in the mean, are longer than max_num_batched_tokens;" in said
    assert "policy=vllm-v1: 4 prompts" not in said
