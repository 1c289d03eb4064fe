"""The tables of a cluster: those of its replicas, one after the other."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from cluster_runs import serve_apart, serve_cluster
from fragmeter.sim.cluster import ClusterRun
from fragmeter.sim.cluster.result import cluster_table_of
from fragmeter.sim.metrics.result import table_of
from strategies import Case, crowded_cases

TABLES = ("residencies", "preemptions", "steps", "memory")


def table_by_table(run: ClusterRun, name: str) -> pd.DataFrame:
    """What pandas makes of the table of each replica."""
    tables = []
    for number, (rows, part) in enumerate(zip(run.rows, run.runs, strict=True)):
        table = table_of(part, name)
        table.insert(0, "replica", number)
        if "request" in table:
            table["request"] = rows[table["request"]]
        if "sequence" in table:
            table["sequence"] = run.sequence_rows(number)[table["sequence"]]
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def require_tables(run: ClusterRun) -> None:
    for name in TABLES:
        pd.testing.assert_frame_equal(cluster_table_of(run, name), table_by_table(run, name))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "fastgen", "orca-max"])
@hypothesis_settings(max_examples=5)
@given(case=crowded_cases())
def test_have_the_rows_of_every_replica(policy: str, case: Case):
    """More replicas than some cases have requests: tables without rows are among them."""
    require_tables(serve_cluster(policy, case, 4, "least-outstanding-tokens"))


@pytest.mark.slow
@hypothesis_settings(max_examples=5)
@given(case=crowded_cases())
def test_have_the_rows_of_prefill_and_decode_replicas(case: Case):
    require_tables(serve_apart("vllm-v1", case, 2, 2))
