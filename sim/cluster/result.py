"""The result folder of a cluster run: the files of a single replica, with tables that name the replica of each row.

summary.json      ``cluster_summary``: metrics over all requests, and a row per replica
requests.parquet  a row per request, with its ``replica``
residencies.parquet, preemptions.parquet, steps.parquet, memory.parquet
                  the tables of all replicas, one after the other, with their ``replica``
gaps.parquet      the inter-token latencies of all replicas
run.json          all settings, those of the cluster included, versions, seed and the trace's hash
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..metrics.prefix_cache import cached_tokens
from ..metrics.residencies import preemptions_columns, residencies_columns, with_names
from ..metrics.result import (
    TABLES,
    describe,
    known_of,
    memory_columns,
    requested_and_served,
    steps_columns,
    write_whole_folder,
)
from ..metrics.time_columns import with_time_columns
from ..output import frames as pd
from ..runs.cluster_run import ClusterRun
from ..runs.run import Run
from .summary import cluster_gaps, cluster_summary, cluster_times


def cluster_requests_table(run: ClusterRun) -> pd.DataFrame:
    """A row a request, in the workload's order, as of one replica; with the ``replica`` that it was done on.

    Where prefill and decode are on different ones, also with its ``prefill_replica`` and ``transfer_ticks``: from its
    first token to the arrival of its KV, null where that token was all.
    """
    requests = len(run.workload)
    table = requested_and_served(run.workload, run.refused, cluster_times(run))
    arrived = run.rows[: run.num_arriving]
    rows = np.concatenate(arrived)
    logs = [(part, part.replica.cache_log) for part in run.runs[: run.num_arriving]]
    found = [cached_tokens(part, log) for part, log in logs if log is not None]
    if found:
        table["cached_tokens"] = known_of(requests, rows, np.concatenate(found))
    table["smallest_pool_blocks"] = run.smallest_pool_blocks
    at = known_of(requests, rows, np.repeat(np.arange(len(arrived)), [len(own) for own in arrived]))
    table["replica"] = at
    if run.cluster.disaggregated:
        moved = run.transfers
        table["replica"] = known_of(requests, moved["row"], moved["replica"]).fillna(at)
        table["prefill_replica"] = at
        table["transfer_ticks"] = known_of(requests, moved["row"], moved["end_ticks"] - moved["ready_ticks"])
    return table


def cluster_residencies_table(run: ClusterRun) -> pd.DataFrame:
    """As ``residencies_table``, of all replicas; requests are rows of the workload."""
    return with_names(_of_each(run, residencies_columns))


def cluster_preemptions_table(run: ClusterRun) -> pd.DataFrame:
    """As ``preemptions_table``, of all replicas; requests are rows of the workload."""
    return with_names(_of_each(run, preemptions_columns))


def cluster_table_of(run: ClusterRun, name: str) -> pd.DataFrame:
    """As ``result.table_of``, of all replicas."""
    tables: dict[str, Callable[[], pd.DataFrame]] = {
        "requests": partial(cluster_requests_table, run),
        "residencies": partial(cluster_residencies_table, run),
        "preemptions": partial(cluster_preemptions_table, run),
        "steps": lambda: pd.DataFrame(_of_each(run, steps_columns), copy=False),
        "memory": lambda: pd.DataFrame(_of_each(run, memory_columns), copy=False),
        "gaps": lambda: cluster_gaps(run).as_table(),
    }
    return with_time_columns(name, tables[name]())


def write_cluster(
    run: ClusterRun, directory: str | Path, request: Mapping[str, Any], content: Mapping[str, Any] | None = None
) -> Path:
    """Write the result directory, whole or not at all; see ``result.write``."""
    tables = {name: partial(_whole, run, name) for name in TABLES}
    document = describe(run.settings, run.runs[0].replica, run.workload, request)
    documents = {
        "summary": content or cluster_summary(run, divided=True),
        "run": document | {"cluster": run.cluster.as_dict()},
    }
    return write_whole_folder(directory, tables, documents)


def _whole(run: ClusterRun, name: str) -> Iterator[pd.DataFrame]:
    yield cluster_table_of(run, name)


def _of_each(run: ClusterRun, columns_of: Callable[[Run], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The columns of every replica, one after the other, with the replica's number before; requests and sequences are rows of
    the workload."""
    parts = [columns_of(part) for part in run.runs]
    numbers = np.repeat(np.arange(len(parts)), [len(next(iter(part.values()))) for part in parts])
    for number, part in enumerate(parts):
        if "request" in part:
            part["request"] = run.rows[number][part["request"]]
        if "sequence" in part:
            part["sequence"] = run.sequence_rows(number)[part["sequence"]]
    return {"replica": numbers} | {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
