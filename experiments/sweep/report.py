"""The points of a sweep's report, from its Parquet file: series, and results of each point."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np

from ...reports.data.declared import MOST_NUMBER, MOST_TICKS, Column, Damaged, Declaration
from ...reports.page.sweep_report import Sweep
from ...sim.metrics.objectives import NAMES
from ...sim.output import frames as pd
from ...sim.output.files import as_utf8
from ...sim.types.errors import UserError
from ..measured.evidence import READ, distinct, recorded_text
from ..runs.grid import PART_OF
from ..runs.points import POINTS, TABLE

#: Most series that remain distinguishable.
MOST_SERIES = 12
#: Settings that do not separate series: those on the axes of the figures, and those averaged over.
_NO_AXES = ("request_rate", "seed")
_RESULTS = ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_tpot_ms", "median_tpot_ms")
_GOAL = "goodput."
#: Mean TTFT with shorter and longer steps, of points near saturation.
_NEAR = tuple(f"near_saturation.{end}.mean_ttft_ms" for end in ("shorter", "longer"))
#: Columns that a page needs. Other settings and limits may hold any single value.
_TABLE = Declaration(
    {
        "policy": Column("text"),
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), Column(least=1)),
        "seed": Column(most=MOST_TICKS),
        **dict.fromkeys(_RESULTS, Column("number", most=MOST_NUMBER, nulls=True)),
        "request_goodput": Column("number", most=MOST_NUMBER, optional=True, nulls=True),
        "load": Column("text", optional=True, nulls=True),
        **dict.fromkeys(_NEAR, Column("number", most=MOST_NUMBER, optional=True, nulls=True)),
        "request_rate": Column("number", most=inf, optional=True, nulls=True),
        **{f"{_GOAL}{name}": Column("number", most=MOST_NUMBER, optional=True, nulls=True) for name in NAMES},
        "error": Column("text", optional=True, nulls=True),
    },
    others=True,
)


def is_sweep(folder: Path) -> bool:
    """Whether a sweep, finished or not, wrote the folder."""
    return (folder / TABLE).is_file() or (folder / POINTS).is_dir()


def read_sweep(folder: Path) -> Sweep:
    """Read the points of a sweep from its folder.

    Raises:
        UserError: The sweep is not finished, or its points are damaged, of another version, or none could be run.
    """
    path = folder / TABLE
    if not path.is_file():
        raise UserError(f"{folder}: is a sweep that has not come to its end; run the same fragmeter sweep again")
    try:
        rows = _TABLE.read(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give another folder") from None
    except Damaged as damaged:
        remedy = "no point was run, or it is damaged: run fragmeter sweep again, which keeps what is finished"
        raise UserError(f"{folder}: {damaged}; {remedy}") from None
    done = rows[rows["error"].isna()] if "error" in rows else rows
    done = done.dropna(subset=list(_RESULTS)).reset_index(drop=True)
    if done.empty:
        raise UserError(f"{path}: no point could be run; its column error says why")
    axes = _axes(done)
    name, failed = as_utf8(folder.resolve().name), len(rows) - len(done)
    return Sweep(name, _points(done, axes), axes, _objectives(done), failed, _step_times(done))


def _step_times(rows: pd.DataFrame) -> list[str]:
    """What the step times of the points rest on."""
    settings = rows[[name for name in READ if name in rows]].drop_duplicates()
    points = ({name: value for name, value in row.items() if value == value} for row in settings.to_dict("records"))
    return distinct(map(recorded_text, points))


def _axes(rows: pd.DataFrame) -> list[str]:
    """Settings that distinguish the series, policy first; one that adds no distinction or too many series is left out."""
    names = ["policy", *(name for name in PART_OF if name not in ("policy", *_NO_AXES) and name in rows)]
    chosen: list[str] = []
    for name in names:
        before = _series(rows, chosen).nunique()
        if before < _series(rows, [*chosen, name]).nunique() <= MOST_SERIES:
            chosen.append(name)
    return chosen


def _series(rows: pd.DataFrame, axes: list[str]) -> pd.Series:
    if not axes:
        alike = rows["policy"].nunique() == 1
        return pd.Series(rows["policy"].iloc[0] if alike else "all", index=rows.index)
    labels = [rows[name].map(_label) if name == "policy" else rows[name].map(_label).radd(f"{name} ") for name in axes]
    return pd.Series([", ".join(each) for each in zip(*labels)], index=rows.index)


def _label(value: object) -> str:
    if value is None or value != value:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _points(rows: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    gpus = rows["tensor_parallel_size"] * rows["pipeline_parallel_size"]
    tpot_ms = rows["median_tpot_ms"].to_numpy(np.float64)
    columns = {
        "series": _series(rows, axes),
        "request_rate": rows["request_rate"] if "request_rate" in rows else np.nan,
        "seed": rows["seed"],
        "request_throughput": rows["request_throughput"],
        "p99_ttft_ms": rows["p99_ttft_ms"],
        "p99_tpot_ms": rows["p99_tpot_ms"],
        # Without a second token in any output there is no speed.
        "tokens_per_s_per_user": np.divide(1e3, tpot_ms, out=np.full(len(rows), np.nan), where=tpot_ms > 0),
        "tokens_per_s_per_gpu": rows["output_throughput"] / gpus,
    }
    if "request_goodput" in rows:
        columns["request_goodput"] = rows["request_goodput"]
    if "load" in rows:
        columns["load"] = rows["load"]
    if set(_NEAR) <= set(rows):
        ends = zip(*(rows[name] for name in _NEAR), strict=True)
        columns["near_saturation"] = ["" if low != low else f"{low:,.0f} to {high:,.0f}" for low, high in ends]
    return pd.DataFrame(columns)


def _objectives(rows: pd.DataFrame) -> str:
    limits = {name: rows[name].iloc[0] for name in rows if name.startswith(_GOAL)}
    return " ".join(f"{name.removeprefix(_GOAL)}:{limit:g}" for name, limit in limits.items())
