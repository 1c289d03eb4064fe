"""The result folder of a run: tables and a summary, enough to describe the run and to repeat it.

    summary.json      metrics of the run (``summary``)
    requests.parquet  a row per request
    residencies.parquet     a row per residency of a sequence on the device, with its end
    preemptions.parquet   a row per preemption of a request
    steps.parquet     a row per leap
    memory.parquet    the ledger at the start of every leap, in slots
    gaps.parquet      all inter-token latencies, a row per arithmetic progression (``gaps.Gaps``)
    run.json          all settings, versions, seed and the trace's hash
    plan.npz          the recorded block tables, if any (``plans.Plan.save``)
    blocks.npz        the recorded block map, if any (``blocks.BlockMap.save``)

Columns of ticks have seconds or milliseconds beside them (``time_columns``). The same settings give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..config.settings import Settings
from ..output import frames as pd
from ..output.files import as_json, write_whole
from ..output.folders import Claim, FolderKind, check_folder, claim_beside, replace_folder
from ..runs.replica import Replica
from ..runs.run import Run
from ..types.columns import column_of, slices
from ..types.once import once
from ..workload.workload import Workload
from .cache_worth import worth_at_rows
from .gaps import Gaps
from .host_pool import host_held_at_rows
from .kv_groups import group_buckets_at_rows
from .kv_offloading import offloaded_tokens
from .prefix_cache import cached_tokens
from .requests import RequestTimes, preemptions, request_times
from .residencies import preemptions_table, residencies_table
from .summary import summary
from .time_columns import with_time_columns

#: Written into run.json; raised when a column or a key changes its meaning or goes away. New ones leave it as it is.
SCHEMA_VERSION = 2
#: Versions that are read, and replaced as results: this one and the one before.
READABLE_VERSIONS = (1, SCHEMA_VERSION)
#: What version 1 called tables and columns, by today's names.
FORMER_TABLES = {"residencies": "stays"}
FORMER_COLUMNS = {"batch_size": "width"}
#: Rows of a group in a Parquet file, as pyarrow's default.
ROW_GROUP = 1 << 20
#: The tables of a result, and what may be recorded beside them.
TABLES = ("requests", "residencies", "preemptions", "steps", "memory", "gaps")
RECORDINGS = ("plan", "blocks")


def _is_ours(run: Any) -> bool:
    """Whether a ``run.json`` belongs to a result: other programs write files with this name, too."""
    return run["schema_version"] in READABLE_VERSIONS and "policy" in run["settings"] and "fragmeter" in run["versions"]


#: The folder of a result, which ``write`` replaces as a whole.
RESULT = FolderKind(
    "simulation result",
    (
        "summary.json",
        *(f"{name}.parquet" for name in (*TABLES, *FORMER_TABLES.values())),
        *(f"{name}.npz" for name in RECORDINGS),
    ),
    marker="run.json",
    recognises=_is_ours,
)
_STEP_COLUMNS = (
    "start_ticks", "steps", "ticks", "first_ticks", "next_ticks", "slope_ticks", "batch_size", "decodes",
    "prefill_tokens", "swap_ticks", "waiting", "growing", "iterations",
)  # fmt: skip


def requests_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """A row per request, or for some of them, in the workload's order; times in ticks, null for refused and rejected requests."""
    table = requested_and_served(run.workload, run.refused, request_times(run), part)
    log, tier = run.replica.cache_log, run.replica.memory.transfers
    found = {} if log is None else {"cached_tokens": _cached_tokens(run)}
    if tier is not None:
        found["offloaded_tokens"] = offloaded_tokens(run, tier)
    unserved = run.refused[part] if run.rejected is None else (run.refused | run.rejected)[part]
    for name, tokens in found.items():
        table[name] = pd.array(tokens[part], dtype="Int64")
        table.loc[unserved, name] = pd.NA
    # The smallest pool that could serve it says why a request was refused.
    table["smallest_pool_blocks"] = run.smallest_pool_blocks[part]
    if run.rejected is not None:
        table["rejected"] = run.rejected[part]
    return table


@once
def _cached_tokens(run: Run) -> np.ndarray:
    """Prompt tokens of each request that the prefix cache had, computed once for all parts of the table of requests."""
    assert run.replica.cache_log is not None
    return column_of([cached_tokens(run, run.replica.cache_log)])


def requested_and_served(
    work: Workload, refused: np.ndarray, times: RequestTimes, part: slice = slice(None)
) -> pd.DataFrame:
    """Lengths, times and preemptions of each request, or of some: the first columns of ``requests_table``."""
    start, stop, _ = part.indices(len(work))
    table = pd.DataFrame(
        {
            "arrival_ticks": work.arrival_ticks[part],
            "prompt_tokens": work.prompt_tokens[part],
            "output_tokens": work.output_tokens[part],
            "refused": refused[part],
        }
    )
    for name in ("max_tokens", "n"):
        if name in work.columns():
            table[name] = getattr(work, name)[part]
    served = slice(*np.searchsorted(times.index, [start, stop]))
    for name in ("first_scheduled_ticks", "first_token_ticks", "finish_ticks", "recomputed", "swapped"):
        table[name] = known_of(stop - start, times.index[served] - start, getattr(times, name)[served])
    return table


def served_times(requests: pd.DataFrame) -> RequestTimes:
    """The times of served requests from a requests table; the same as ``request_times`` of the run."""
    served = requests[requests["finish_ticks"].notna()]
    names = (each.name for each in fields(RequestTimes) if each.name != "index")
    return RequestTimes(index=served.index.to_numpy(), **{name: served[name].to_numpy(np.int64) for name in names})


def known_of(requests: int, index: np.ndarray, values: np.ndarray) -> pd.Series:
    """An integer column with values for some requests, null for the others."""
    filled, unknown = np.zeros(requests, dtype=np.int64), np.ones(requests, dtype=bool)
    filled[index], unknown[index] = values, False
    return pd.Series(pd.arrays.IntegerArray(filled, unknown))


def steps_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """A row per leap, or for some of them: start, number of steps, their durations and tokens."""
    return pd.DataFrame(steps_columns(run, part), copy=False)


def steps_columns(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """The columns of ``steps_table``."""
    return {name: run.log.rows[name][part] for name in _STEP_COLUMNS}


def gaps_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """All inter-token latencies, a row per progression, or some of these rows; see ``Gaps.as_table``."""
    return Gaps.of(run.log).as_table(part)


def memory_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """The ledger at the start of every leap, or of some, in slots, with the longest free run and the swap space in use.

    With KV groups also the ledger of each; its columns are named by group and bucket. ``cached`` by worth as ``cache_worth`` has it.
    """
    return pd.DataFrame(memory_columns(run, part) | worth_at_rows(run, part), copy=False)


def memory_columns(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """The columns of ``memory_table`` that each replica of several has, too."""
    buckets = run.accounts.at_rows(part)
    anywhere = buckets["free"] + buckets["stranded"]
    longest = anywhere if run.log.paged else run.log.rows["largest_free"][part]
    columns = {"start_ticks": run.log.rows["start_ticks"][part], **buckets, "largest_free_run": longest}
    columns["host_held"] = host_held_at_rows(run, part)
    return columns | group_buckets_at_rows(run, part)


def table_of(run: Run, name: str, part: slice = slice(None)) -> pd.DataFrame:
    """One of ``TABLES`` as in a result folder, or some of its rows: ticks, with seconds and milliseconds beside them."""
    tables: dict[str, Callable[[Run, slice], pd.DataFrame]] = {
        "requests": requests_table,
        "residencies": residencies_table,
        "preemptions": preemptions_table,
        "steps": steps_table,
        "memory": memory_table,
        "gaps": gaps_table,
    }
    return with_time_columns(name, tables[name](run, part))


def _rows_of(run: Run, name: str) -> int:
    """Rows of one of ``TABLES``."""
    if name == "requests":
        return len(run.workload)
    if name == "gaps":
        return len(Gaps.of(run.log).first)
    if name == "preemptions":
        return len(preemptions(run).ticks)
    return len(run.log.residencies["index"] if name == "residencies" else run.log.row_step)


def _table_alone(run: Run, name: str) -> Iterator[pd.DataFrame]:
    """``table_of`` in parts, in the room that columns of the summary and of other tables took."""
    run.log.forget()
    if not _rows_of(run, name):
        yield table_of(run, name, slice(0, 0))
    for part in slices(_rows_of(run, name), ROW_GROUP):
        yield table_of(run, name, part)


def check_target(directory: str | Path) -> Claim | None:
    """Refuse a directory that ``write`` would not replace, or that another process is about to replace; call it before a long run.

    Returns:
        The claim of this process, which ends with the object.

    Raises:
        UserError: As ``folders.check_folder`` and ``folders.claim_beside``.
    """
    check_folder(directory, RESULT)
    return claim_beside(directory)


class Recording(Protocol):
    """A recording of a run, such as ``plans.Plan`` or ``blocks.BlockMap``."""

    def save(self, path: Path) -> None:
        """Write it to a file."""


def write(
    run: Run,
    directory: str | Path,
    request: Mapping[str, Any],
    recordings: Mapping[str, Recording] | None = None,
    content: Mapping[str, Any] | None = None,
) -> Path:
    """Write the result directory, whole or not at all.

    Args:
        directory: Must not exist, or be empty, or hold an earlier result, which is replaced.
        request: How the workload was made (trace, rate, seed, ...), for ``run.json``.
        recordings: Recordings of the run, by the names in ``RECORDINGS``.
        content: ``summary(run, divided=True)``, where it is known.

    Raises:
        SettingError: The directory holds something else.
        UserError: It cannot be written.
    """
    return write_whole_folder(
        directory,
        {name: partial(_table_alone, run, name) for name in TABLES},
        {"summary": content or summary(run, divided=True), "run": _described(run, request)},
        recordings,
    )


def write_whole_folder(
    directory: str | Path,
    tables: Mapping[str, Callable[[], Iterable[pd.DataFrame]]],
    documents: Mapping[str, Mapping[str, Any]],
    recordings: Mapping[str, Recording] | None = None,
) -> Path:
    """Write tables (as Parquet), documents (as JSON) and recordings (as ``.npz``) by their names, whole or not at all.

    Args:
        tables: Functions that make them, in parts of ``ROW_GROUP`` rows or whole: one part is in memory at a time.

    Raises:
        UserError: As ``folders.replace_folder``.
    """
    writers: dict[str, Callable[[Path], object]] = {
        f"{name}.parquet": partial(_write_table, make) for name, make in tables.items()
    }
    for name, content in documents.items():
        writers[f"{name}.json"] = partial(write_whole, content=as_json(content))
    for name, recording in (recordings or {}).items():
        writers[f"{name}.npz"] = recording.save
    return replace_folder(directory, RESULT, writers)


def _write_table(make: Callable[[], Iterable[pd.DataFrame]], path: Path) -> None:
    """As ``DataFrame.to_parquet`` of the whole table, to the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for part in make():
        found = pa.Table.from_pandas(part, preserve_index=False)
        del part
        writer = writer or pq.ParquetWriter(path, found.schema, compression="snappy")
        writer.write_table(found, ROW_GROUP)
        del found
    if writer is not None:
        writer.close()


def _described(run: Run, request: Mapping[str, Any]) -> dict[str, Any]:
    """``run.json``, with why the run was served in Python, if the compiled core could not."""
    document = describe(run.settings, run.replica, run.workload, request)
    return document if run.in_python is None else document | {"in_python": run.in_python}


def describe(settings: Settings, replica: Replica, workload: Workload, request: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a run, as stored in ``run.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": {name: version(name) for name in ("fragmeter", "simpy", "numpy")},
        "settings": settings.as_dict(),
        "replica": replica.describe(),
        "cost": replica.cost.describe(),
        "workload": {
            "name": workload.name,
            "requests": len(workload),
            "sha256": workload.sha256(),
            **request,
        },
    }
