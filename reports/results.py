"""The results of a run, read from the folder in which ``simulate --out`` left them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import ArrowInvalid

from ..sim import blocks, plan
from ..sim import frames as pd
from ..sim.errors import UserError
from ..sim.folders import restore
from ..sim.memory import BUCKETS
from ..sim.ticks import PER_SECOND

#: The tables, and columns of theirs without which there is no page.
_TABLES = {
    "requests": {"arrival_ticks", "finish_ticks"},
    "stays": {"request", "sequence", "start_ticks", "first_token_ticks", "end_ticks", "begun", "ended"},
    "steps": {"start_ticks", "ticks", "growing", "prefill_tokens"},
    "memory": {"start_ticks", *BUCKETS},
}


@dataclass(frozen=True, eq=False)
class Result:
    """A run, as its tables tell it.

    Attributes:
        name: What it is called beside others.
        summary, about: ``summary.json`` and ``run.json``.
        requests, stays, steps, memory: The tables; times are in ticks.
        preemptions, gaps: Tables too; None of a run that an earlier version wrote.
        blocks, plan: What was recorded besides, if it was.
    """

    name: str
    summary: Mapping[str, Any]
    about: Mapping[str, Any]
    requests: pd.DataFrame
    stays: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    preemptions: pd.DataFrame | None = None
    gaps: pd.DataFrame | None = None
    blocks: blocks.BlockMap | None = None
    plan: plan.Plan | None = None

    @property
    def policy(self) -> str:
        """What decided who runs."""
        return self.about["settings"]["policy"]

    @cached_property
    def request_of_sequence(self) -> np.ndarray:
        """The request of each of the workload's sequences, int64."""
        count = self.requests["n"].to_numpy() if "n" in self.requests else 1
        return np.repeat(np.arange(len(self.requests)), count)

    @property
    def num_replicas(self) -> int:
        """How many served the run, each with a pool of its own."""
        asked = self.about.get("cluster", {})
        apart = (asked.get("prefill_replicas"), asked.get("decode_replicas"))
        return asked.get("num_replicas", 1) if None in apart else sum(apart)

    @property
    def end_s(self) -> float:
        """When the last request was done."""
        return self.stays["end_ticks"].max() / PER_SECOND if len(self.stays) else 0.0


def read_result(folder: str | PathLike[str], name: str = "") -> Result:
    """Read a result folder.

    Args:
        name: What to call it; by default its policy.

    Raises:
        UserError: It is none, or one of another version, or damaged.
    """
    place = Path(folder)
    restore(place)
    try:
        summary, about = (json.loads((place / f"{part}.json").read_bytes()) for part in ("summary", "run"))
        tables = {part: _table(place / f"{part}.parquet") for part in _TABLES}
        recorded = {part.stem: load(part) for part, load in _recorded(place) if part.is_file()}
        result = Result(name or about["settings"]["policy"], summary, about, **tables, **recorded)
        _check_of_one_run(result)
        return result
    except OSError as error:
        # Parquet's own errors have no number.
        why = error.strerror or "damaged"
        which = f": {Path(error.filename).name}" if error.filename else ""
        raise UserError(f"{place}: is no result folder ({why}{which}); make one by fragmeter simulate --out") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArrowInvalid):
        raise UserError(f"{place}: holds a damaged result; make it again by fragmeter simulate --out") from None


def _check_of_one_run(result: Result) -> None:
    """Raise KeyError where what every page says is missing, ValueError where files are of different runs."""
    load, load_sha256 = result.about["workload"]["requests"], result.about["workload"]["sha256"]
    if load != len(result.requests) or load != result.summary["completed"] + result.summary["refused"]:
        raise ValueError("requests")
    if not result.memory["start_ticks"].equals(result.steps["start_ticks"]):
        raise ValueError("memory")
    if len(result.stays) and result.stays["request"].max() >= load:
        raise ValueError("stays")
    for recorded in (result.blocks, result.plan):
        if recorded is not None and recorded.meta["trace_sha256"] != load_sha256:
            raise ValueError("recorded")


def _table(path: Path) -> pd.DataFrame:
    table = pd.read_parquet(path)
    for missing in sorted(_TABLES[path.stem] - set(table)):
        remedy = "another version wrote it; make it again by fragmeter simulate --out"
        raise UserError(f"{path}: has no column {missing}; {remedy}")
    return table


def _recorded(place: Path) -> list[tuple[Path, Any]]:
    return [
        (place / "preemptions.parquet", pd.read_parquet),
        (place / "gaps.parquet", pd.read_parquet),
        (place / "blocks.npz", blocks.load),
        (place / "plan.npz", plan.load),
    ]
