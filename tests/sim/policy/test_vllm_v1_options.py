"""Options of ``vllm-v1`` that change admission: what is refused, and that priorities come from traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.runs.run import Run
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


def test_priorities_need_a_column():
    plain = Workload("plain", WORK.arrival_ticks, WORK.prompt_tokens, WORK.output_tokens)
    with pytest.raises(SettingError, match="no request has a priority"):
        simulate(options(scheduling_policy="priority"), plain)


def begun(run: Run) -> list[int]:
    """Requests in the order in which they got blocks."""
    return run.log.residencies["index"][np.argsort(run.log.residencies["start_ticks"], kind="stable")].tolist()


def test_the_lowest_priority_goes_first():
    assert begun(simulate(options(scheduling_policy="priority", max_num_active_seqs=1), WORK)) == [1, 2, 0]


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens"])
def test_each_replica_has_its_own_order_of_priorities(router: str):
    """Two replicas take every second request; the third of the first replica is its last by priority."""
    work = Workload("six", np.zeros(6), np.full(6, 40), np.full(6, 5), priority=np.array([2, 3, -1, 5, 0, 4]))
    chosen = options(scheduling_policy="priority", max_num_active_seqs=1)
    found = simulate_cluster(chosen, work, cluster(num_replicas=2, router=router))
    assert [rows.tolist() for rows in found.rows] == [[0, 2, 4], [1, 3, 5]]
    assert [begun(run) for run in found.runs] == [[1, 2, 0], [0, 2, 1]]
    assert [run.workload.priority.tolist() for run in found.runs] == [[2, -1, 0], [3, 5, 4]]


def test_a_decode_replica_orders_what_arrives_by_priority():
    """While the first of eight is decoded alone, the others arrive; equal priorities go in their order of arrival."""
    priority = np.array([0, 3, 3, 3, 1, 1, 0, 0])
    work = Workload("eight", np.zeros(8), np.full(8, 40), np.full(8, 60), priority=priority)
    chosen = options(scheduling_policy="priority", max_num_active_seqs=1)
    found = simulate_cluster(chosen, work, cluster(prefill_replicas=1, decode_replicas=1))
    decoded = [found.rows[1].tolist()[each] for each in begun(found.runs[1])]
    assert decoded == [0, 6, 7, 4, 5, 1, 2, 3]


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
