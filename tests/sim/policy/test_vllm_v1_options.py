"""Options of ``vllm-v1`` that change admission: what is refused, and that priorities come from traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import read, workload, write

WORK = Workload("three", np.zeros(3), np.full(3, 40), np.full(3, 5), priority=np.array([2, -1, 0]))


def options(**given: object):
    return settings(policy="vllm-v1", max_model_len=600, max_num_seqs=4, num_gpu_blocks_override=100, **given)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"long_prefill_token_threshold": 601},
            "long_prefill_token_threshold = 601: must be at most max_model_len = 600",
        ),
        ({"max_num_active_seqs": 5}, "max_num_active_seqs = 5: must be at most max_num_seqs = 4"),
        ({"long_prefill_token_threshold_adaptive": True}, "raises long_prefill_token_threshold, which is 0"),
    ],
)
def test_what_vllm_refuses_is_refused(given, line):
    with pytest.raises(SettingError, match=line):
        simulate(options(**given), WORK)


def test_priorities_need_a_column_and_a_single_replica():
    plain = Workload("plain", WORK.arrival_ticks, WORK.prompt_tokens, WORK.output_tokens)
    with pytest.raises(SettingError, match="no request has a priority"):
        simulate(options(scheduling_policy="priority"), plain)
    with pytest.raises(SettingError, match="^scheduling_policy = 'priority': needs a single replica"):
        simulate_cluster(options(scheduling_policy="priority"), WORK, cluster(num_replicas=2))


def test_the_lowest_priority_goes_first():
    run = simulate(options(scheduling_policy="priority", max_num_active_seqs=1), WORK)
    begun = run.log.residencies["index"][np.argsort(run.log.residencies["start_ticks"], kind="stable")]
    assert begun.tolist() == [1, 2, 0]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_traces_have_priorities(tmp_path: Path, suffix: str):
    source = tmp_path / "trace.csv"
    source.write_text("prompt_tokens,output_tokens,priority\n3,4,-1\n5,6,0\n")
    again = tmp_path / f"again.{suffix}"
    write(read(source), again)
    assert workload(read(again), request_rate=1).priority.tolist() == [-1, 0]
    source.write_text("prompt_tokens,output_tokens,priority\n3,4,0.5\n")
    with pytest.raises(TraceError, match=r"line 2: priority = 0\.5: must be a whole number"):
        read(source)
