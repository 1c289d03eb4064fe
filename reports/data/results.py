"""The results of a run, read from the folder of ``simulate --out``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.memory import BUCKETS
from ...sim.metrics.result import FORMER_COLUMNS, FORMER_TABLES, READABLE_VERSIONS, SCHEMA_VERSION
from ...sim.metrics.views import nine_buckets
from ...sim.output import frames as pd
from ...sim.output.files import as_utf8
from ...sim.output.folders import restore
from ...sim.recording import blocks
from ...sim.recording import plans as plan
from ...sim.types.errors import UserError
from ...sim.types.ticks import PER_SECOND
from .declared import (
    CACHE_BOUNDS,
    CACHE_PARTS,
    CACHE_WORTH,
    MOST_TICKS,
    RUN,
    SUMMARY,
    TABLES,
    Damaged,
    check_document,
    is_count,
    read_json,
)

#: Tables that earlier versions did not write.
_LATER = ("preemptions", "gaps")


@dataclass(frozen=True, eq=False)
class Result:
    """The tables and documents of a run.

    Attributes:
        name: Its label beside other runs.
        summary, about: ``summary.json`` and ``run.json``.
        requests, residencies, steps, memory: The tables; times are in ticks.
        preemptions, gaps: Further tables; None for a run of an earlier version.
        blocks, plan: The recordings, if any.
    """

    name: str
    summary: Mapping[str, Any]
    about: Mapping[str, Any]
    requests: pd.DataFrame
    residencies: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    preemptions: pd.DataFrame | None = None
    gaps: pd.DataFrame | None = None
    blocks: blocks.BlockMap | None = None
    plan: plan.Plan | None = None

    @property
    def policy(self) -> str:
        """The scheduling policy."""
        return self.about["settings"]["policy"]

    @property
    def is_probed(self) -> bool:
        """Whether a live server was recorded, and nothing simulated."""
        return "probe" in self.about

    @cached_property
    def request_of_sequence(self) -> np.ndarray:
        """The request of each of the workload's sequences, int64."""
        return sequences_of(self.requests)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, each with a pool of its own."""
        return num_replicas(self.about)

    @property
    def end_s(self) -> float:
        """Finish time of the last request, in seconds."""
        return self.residencies["end_ticks"].max() / PER_SECOND if len(self.residencies) else 0.0


def sequences_of(requests: pd.DataFrame) -> np.ndarray:
    """The request of each of the workload's sequences, int64, from the table of requests."""
    count = requests["n"].to_numpy() if "n" in requests else 1
    return np.repeat(np.arange(len(requests)), count)


def num_replicas(about: Mapping[str, Any]) -> int:
    """Number of replicas of a run, from its ``run.json``."""
    about_cluster = about.get("cluster", {})
    apart = (about_cluster.get("prefill_replicas"), about_cluster.get("decode_replicas"))
    return about_cluster.get("num_replicas", 1) if None in apart else sum(apart)


def read_result(folder: str | PathLike[str], name: str = "") -> Result:
    """Read a result folder.

    Args:
        name: Label of the run; by default its policy.

    Raises:
        UserError: The folder is not a result, is of another version, or is damaged.
    """
    place = Path(folder)
    summary, about = read_documents(place)
    with _user_errors(place):
        tables = _tables(place, about)
        recorded = {part.stem: load(part) for part, load in _recorded(place) if part.is_file()}
        result = Result(as_utf8(name or about["settings"]["policy"]), summary, about, **tables, **recorded)
        _check_of_one_run(result)
        return result


def read_documents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``summary.json`` and ``run.json`` of a result folder.

    Raises:
        UserError: The folder is not a result, is of another version, or is damaged.
    """
    restore(folder)
    with _user_errors(folder):
        _check_version(folder, read_json(folder / "run.json", {}))
        summary, about = read_json(folder / "summary.json", SUMMARY), read_json(folder / "run.json", RUN)
        _check_replicas(about)
        if "cache_worth" in summary:
            _check_cache_worth(summary["cache_worth"])
        for mean in summary["waste"].values():
            if isinstance(mean, dict):
                mean["buckets"] = nine_buckets(mean["buckets"])
        return summary, about


def _check_cache_worth(found: dict[str, Any]) -> None:
    where = "summary.json: cache_worth"
    parts = {name: declared for name, declared in CACHE_PARTS.items() if name in found}
    check_document(found, CACHE_WORTH | parts | (CACHE_BOUNDS if "asked_blocks" in found else {}), where)


def _check_version(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a result of a schema version that this fragmeter does not read.

    Raises:
        UserError: Names both versions.
    """
    version = about.get("schema_version", SCHEMA_VERSION)
    if version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        remedy = "read it with the fragmeter that wrote it, or make it again by fragmeter simulate --out"
        raise UserError(f"{folder}: run.json: schema_version = {version}: this fragmeter reads {readable}; {remedy}")


@contextmanager
def _user_errors(folder: Path) -> Iterator[None]:
    """Convert an error of a result folder to a user error.

    Raises:
        UserError: The folder is not a result, or is damaged.
    """
    try:
        yield
    except OSError as error:
        which = f": {as_utf8(Path(error.filename).name)}" if error.filename else ""
        remedy = f"is not a result folder ({error.strerror}{which}); make one by fragmeter simulate --out"
        raise UserError(f"{folder}: {remedy}") from None
    except Damaged as damaged:
        remedy = "make it again by fragmeter simulate --out"
        raise UserError(f"{folder}: holds a damaged result, or another version's ({damaged}); {remedy}") from None


def _check_replicas(about: Mapping[str, Any]) -> None:
    """Refuse a cluster without a valid number of replicas."""
    about_cluster = about.get("cluster", {})
    check_document(about_cluster, {}, "run.json: cluster")
    numbers = [about_cluster.get(name) for name in ("num_replicas", "prefill_replicas", "decode_replicas")]
    wrong = [number for number in numbers if number is not None and not (is_count(number) and number)]
    if wrong or about.get("cluster") and numbers[0] is None:
        raise Damaged("run.json: cluster has no number of replicas")
    watermark = about["replica"].get("watermark_blocks", 0)
    if not is_count(watermark):
        raise Damaged("run.json: replica.watermark_blocks is not a whole number, 0 or more")


def _tables(place: Path, about: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """All tables of a folder by name; tables added by later versions only if present."""
    sizes = {"requests": about["workload"]["requests"], "replicas": num_replicas(about)}
    tables = {}
    for name, declared in TABLES.items():
        path = _table_file(place, name)
        if name in _LATER and not path.is_file():
            continue
        tables[name] = declared.read(path, sizes, FORMER_COLUMNS)
        if name == "memory":
            # Pages draw nine buckets.
            for bucket, drawn in (("state", "live"), ("rejected", "reserved")):
                if bucket in tables[name]:
                    tables[name][drawn] += tables[name].pop(bucket)
        if name == "requests":
            if len(tables[name]) != sizes["requests"]:
                raise Damaged(f"{path.name}: has {len(tables[name])} rows, and run.json {sizes['requests']} requests")
            sizes["sequences"] = len(sequences_of(tables[name]))
    return tables


def _table_file(place: Path, name: str) -> Path:
    """The file of a table, under its name or its name in the previous schema version."""
    path = place / f"{name}.parquet"
    if name in FORMER_TABLES and not path.is_file():
        former = place / f"{FORMER_TABLES[name]}.parquet"
        return former if former.is_file() else path
    return path


def _check_of_one_run(result: Result) -> None:
    """Refuse files that do not belong to one run.

    Raises:
        Damaged: They are of different runs, or of none.
    """
    for text, holds in _agreements(result):
        if not holds:
            raise Damaged(text)


def _agreements(result: Result) -> Iterator[tuple[str, bool]]:
    """Agreements between the files of one run, each with the message for a mismatch; an earlier one may cause later ones."""
    requests, residencies, steps, memory = result.requests, result.residencies, result.steps, result.memory
    refused, summary = requests["refused"].to_numpy(), result.summary
    rejected = requests["rejected"].to_numpy() if "rejected" in requests else np.zeros_like(refused)
    unserved = refused | rejected
    counts = summary["completed"], summary["refused"], summary.get("rejected", 0)
    found = len(requests) - unserved.sum(), refused.sum(), rejected.sum()
    yield "summary.json: belongs to another run than requests.parquet", counts == found
    for name in ("first_scheduled_ticks", "first_token_ticks", "finish_ticks", "recomputed", "swapped"):
        yield f"requests.parquet: {name} is not of those that were served", (requests[name].isna() == unserved).all()
    tables = (requests, residencies, steps, memory)
    yield "replica is in some tables and not in others", len({"replica" in table for table in tables}) == 1
    for name in ("start_ticks", *(["replica"] if "replica" in steps else [])):
        yield "memory.parquet: belongs to another run than steps.parquet", memory[name].equals(steps[name])
    yield "steps.parquet: does not end", (steps["start_ticks"] <= MOST_TICKS - steps["ticks"]).all()
    iterations = steps["iterations"].sum()
    yield "steps.parquet: iterations are not the num_steps of summary.json", iterations == summary["num_steps"]
    for rows in _of_each_replica(steps):
        yield "steps.parquet: start_ticks are not in order", rows["start_ticks"].is_monotonic_increasing
    for rows in _of_each_replica(memory):
        yield "memory.parquet: the pool changes its size", rows[list(BUCKETS)].sum(axis=1).nunique() == 1
    request_of_each = result.request_of_sequence[residencies["sequence"]]
    yield (
        "residencies.parquet: sequences are of other requests",
        (request_of_each == residencies["request"].to_numpy()).all(),
    )
    yield "steps.parquet: has no steps of those that were served", len(steps) > 0 or not len(residencies)
    if result.gaps is not None:
        last = result.gaps["first_ticks"] + result.gaps["slope_ticks"].astype(float) * (result.gaps["count"] - 1)
        yield "gaps.parquet: slope_ticks lead below 0, or beyond all time", last.between(0, MOST_TICKS).all()
    if result.blocks is not None:
        sequences = np.append(result.blocks.preempted_sequence, result.blocks.sequence)
        yield "run.json: the block map belongs to another run", _is_of(result, result.blocks.meta, sequences)
    if result.plan is not None:
        yield "run.json: the plan belongs to another run", _is_of(result, result.plan.meta, result.plan.sequence)


def _is_of(result: Result, meta: Mapping[str, Any], sequences: np.ndarray) -> bool:
    """Whether a recording belongs to the requests of a run."""
    same = meta.get("trace_sha256") == result.about["workload"]["sha256"]
    return same and sequences.max(initial=-1) < len(result.request_of_sequence)


def _of_each_replica(table: pd.DataFrame) -> list[pd.DataFrame]:
    return [rows for _, rows in table.groupby("replica")] if "replica" in table else [table] * bool(len(table))


def _recorded(place: Path) -> list[tuple[Path, Any]]:
    return [(place / "blocks.npz", blocks.load), (place / "plan.npz", plan.load)]
