"""The ledger over a whole run, from its tables: with idle spans, and summed over replicas.

``memory.parquet`` has a row for each leap; ``steps.parquet`` has the start and the duration of each leap:

    a replica   |  leap  |leap|  (idle)  |    leap    |  (idle)  |
    memory      row 0    row 1           row 2                   end of the run
    drawn       row 0    row 1  all free row 2         all free

A replica may idle between two leaps, and then all slots of the ledger are free: rows for idle spans are inserted. The
blocks that a prefix cache or a shared prefix keeps over an idle span are in no table, so with either of them the
previous row remains in force.

Each replica leaps at its own times. At every start of a row of any replica, the current rows of all replicas are summed.

Tokens produced within a leap are counted by the next row, so rows drawn as steps show too few tokens for long leaps. A
block map also samples the pool within leaps, at evenly spaced moments; if one is recorded, it is drawn instead.
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
    """Whether slots may be in use while no sequence runs; the tables do not show them."""
    settings, replica = result.about["settings"], result.about["replica"]
    shared = settings.get("shared_prefix_tokens") or replica.get("enable_prefix_caching")
    return bool(shared) or settings["policy"] == "sglang"


def replica_over_time(memory: pd.DataFrame, steps: pd.DataFrame, keeps: bool, end_ticks: int) -> pd.DataFrame:
    """The rows of ``memory`` and a row for each idle span of the replica; columns as in ``pool_over_time``.

    Args:
        memory, steps: The tables of one replica, one row per leap in both.
        keeps: See ``keeps_over_idle_spans``.
        end_ticks: End of the whole run.
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
    """The sum of the current rows; every part has one from 0 on. Replicas without rows received no request."""
    times = np.unique(np.concatenate([part["start_ticks"] for part in parts]))
    slots = sum(
        part[list(BUCKETS)].to_numpy()[np.searchsorted(part["start_ticks"], times, side="right") - 1] for part in parts
    )
    total = pd.DataFrame(slots, columns=list(BUCKETS)).assign(start_ticks=times)[_COLUMNS]
    return total.assign(free=total["free"] + (replicas - len(parts)) * int(slots[0].sum()) // len(parts))
