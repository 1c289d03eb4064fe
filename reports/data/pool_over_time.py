"""The ledger over the whole of a run, from its tables: also while no sequence runs, and of several replicas together.

``memory.parquet`` has a row for each leap of ``steps.parquet``, which says when that leap starts and how long it takes:

    a replica   |  leap  |leap|  (idle)  |    leap    |  (idle)  |
    memory      row 0    row 1           row 2                   end of the run
    drawn       row 0    row 1  all free row 2         all free

Between two leaps a replica idles, and then all slots of the ledger are free: such rows are inserted. The blocks that a prefix
cache or a shared prefix keeps over such a span are in no table, so with one of these the previous row remains in force.

Replicas leap each at its own times. At every time that is some replica's, the rows in force of all are added up.

Within a leap tokens come that only the next row counts: drawn as steps, the rows of a run that leaps far show too few.
A block map looked at the pool in the middle of leaps too, at evenly spaced moments; where there is one, it is drawn.
"""

from __future__ import annotations

import numpy as np

from ...sim.memory import BUCKETS
from ...sim.output import frames as pd
from .results import Result

_COLUMNS = ["start_ticks", *BUCKETS]


def pool_over_time(result: Result) -> pd.DataFrame:
    """``start_ticks`` (ascending) and the slots of each bucket from then to the next row, of all replicas.

    A run that refused every request has no rows.
    """
    if result.blocks is not None:
        census = pd.DataFrame(result.blocks.census_slots, columns=list(BUCKETS))
        return census.assign(start_ticks=result.blocks.at_ticks)[_COLUMNS]
    memory, keeps, last = result.memory, keeps_over_idle_spans(result), _ends(result.steps).max()
    replica = memory["replica"] if "replica" in memory else np.zeros(len(memory), dtype=np.int64)
    parts = [replica_over_time(rows, result.steps.loc[rows.index], keeps, last) for _, rows in memory.groupby(replica)]
    if not parts:
        return memory[_COLUMNS]
    return parts[0] if result.num_replicas == 1 else _added(parts, result.num_replicas)


def keeps_over_idle_spans(result: Result) -> bool:
    """Whether slots may be taken while no sequence runs; the tables do not show them."""
    settings, replica = result.about["settings"], result.about["replica"]
    shared = settings.get("shared_prefix_tokens") or replica.get("enable_prefix_caching")
    return bool(shared) or settings["policy"] == "sglang"


def replica_over_time(memory: pd.DataFrame, steps: pd.DataFrame, keeps: bool, end_ticks: int) -> pd.DataFrame:
    """The rows of ``memory`` and one for each span in which the replica idles; columns as of ``pool_over_time``.

    Args:
        memory, steps: The tables of one replica, a row a leap in both.
        keeps: See ``keeps_over_idle_spans``.
        end_ticks: When the whole run is over.
    """
    if not len(memory):
        return memory[_COLUMNS]
    starts, ends = memory["start_ticks"].to_numpy(), _ends(steps).to_numpy()
    idle_from = ends[:0] if keeps else ends[ends < np.append(starts[1:], end_ticks)]
    if starts[0] > 0:
        idle_from = np.append(0, idle_from)
    capacity = int(memory.iloc[0][list(BUCKETS)].sum())
    free = pd.DataFrame({"start_ticks": idle_from, **dict.fromkeys(BUCKETS, 0)}).assign(free=capacity)
    whole = pd.concat([memory[_COLUMNS], free], ignore_index=True)
    return whole.sort_values("start_ticks", kind="stable", ignore_index=True)


def _ends(steps: pd.DataFrame) -> pd.Series:
    return steps["start_ticks"] + steps["ticks"]


def _added(parts: list[pd.DataFrame], replicas: int) -> pd.DataFrame:
    """The sum of the rows in force; every part has one from 0 on. Replicas without rows were sent nothing."""
    times = np.unique(np.concatenate([part["start_ticks"] for part in parts]))
    slots = sum(
        part[list(BUCKETS)].to_numpy()[np.searchsorted(part["start_ticks"], times, side="right") - 1] for part in parts
    )
    total = pd.DataFrame(slots, columns=list(BUCKETS)).assign(start_ticks=times)[_COLUMNS]
    return total.assign(free=total["free"] + (replicas - len(parts)) * int(slots[0].sum()) // len(parts))
