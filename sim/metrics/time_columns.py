"""Seconds and milliseconds beside the ticks in the tables of a result.

A point in simulated time is in seconds, a duration in milliseconds: ``start_ticks`` has ``start_s`` beside it, and
``first_ticks``, the duration of a leap's first step, ``first_ms``. Requests also have their latencies under vLLM's
names. The ticks remain: they are exact, and fragmeter itself reads them.
"""

from __future__ import annotations

import numpy as np

from ..output import frames as pd
from ..types.ticks import PER_MS, PER_SECOND

#: Times, in seconds from the start of the run.
_TIMES = {
    f"{name}_ticks": f"{name}_s" for name in ("arrival", "first_scheduled", "first_token", "finish", "start", "end")
}
#: Durations.
_DURATIONS = {f"{name}_ticks": f"{name}_ms" for name in ("first", "next", "slope", "swap", "transfer")}
#: The column ``ticks`` of two tables.
_BARE = {"steps": ("duration_ms", PER_MS), "preemptions": ("time_s", PER_SECOND)}


def with_time_columns(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """The table ``name`` of a result with a float64 column behind each column of ticks; NaN where there is no time.

    Requests get ``queue_time_ms`` (arrival to first scheduled), ``ttft_ms``, ``tpot_ms`` (NaN of one output token) and
    ``e2el_ms`` besides, by the formulas of ``RequestTimes``.
    """
    columns = {}
    for column in table.columns:
        columns[column] = table[column]
        renamed = _renamed(name, column)
        if renamed is not None:
            target, unit_ticks = renamed
            columns[target] = _floats(table[column]) / unit_ticks
    if name == "requests":
        columns |= _latencies(table)
    return pd.DataFrame(columns, index=table.index, copy=False)


def _renamed(table: str, column: str) -> tuple[str, int] | None:
    """Name and unit (in ticks) of the float column beside a column of ticks."""
    if column == "ticks":
        return _BARE.get(table)
    if column in _TIMES:
        return _TIMES[column], PER_SECOND
    return (_DURATIONS[column], PER_MS) if column in _DURATIONS else None


def _latencies(requests: pd.DataFrame) -> dict[str, np.ndarray]:
    """Latencies of each request in ms, float64 [n]; NaN for refused requests."""
    names = ("arrival_ticks", "first_scheduled_ticks", "first_token_ticks", "finish_ticks")
    served = requests["finish_ticks"].notna().to_numpy()
    arrival, scheduled, first, finish = (requests[name].fillna(0).to_numpy(np.int64) for name in names)
    later_tokens = requests["output_tokens"].to_numpy() - 1
    ticks = {
        "queue_time_ms": scheduled - arrival,
        "ttft_ms": first - arrival,
        # In the order of the divisions in RequestTimes, which decides the last bit.
        "tpot_ms": np.divide(finish - first, later_tokens, where=later_tokens > 0, out=np.full(len(served), np.nan)),
        "e2el_ms": finish - arrival,
    }
    return {name: np.where(served, value / PER_MS, np.nan) for name, value in ticks.items()}


def _floats(values: pd.Series) -> np.ndarray:
    """A nullable integer column as float64."""
    return values.to_numpy(np.float64, na_value=np.nan)
