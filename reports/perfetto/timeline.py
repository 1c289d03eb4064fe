"""A run as a timeline for ui.perfetto.dev: requests, steps, preemptions, and memory over time.

    NAME                    a run; of several replicas each is one
    ├── requests            lanes: a request takes the first that is free when it arrives, until it ends
    │   └── lane 1          a slice a request, from arrival to end; within it what it did (queued, prefill, decode, ...)
    ├── steps               a slice a leap, with what ``steps.parquet`` says of it
    ├── preemptions         an instant each
    ├── memory              a counter a bucket of the ledger, in slots, all free where no sequence runs
    └── sequences           counters: those on the device, and requests that wait

There are as many slices of the category ``request`` as requests, refused ones included, which take no time. Of one
of several sequences the first tells what it did. Ticks are rounded down to nanoseconds, Perfetto's unit: what was
in order stays in order, and what lay within something else stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from os import PathLike
from pathlib import Path

import numpy as np

from ...sim.memory import BUCKETS
from ...sim.metrics.residencies import KINDS
from ...sim.output import frames as pd
from ...sim.output.files import whole_file
from ...sim.types.errors import UserError
from ...sim.types.ticks import PER_SECOND
from ..data.pool_over_time import keeps_over_idle_spans, replica_over_time
from ..data.results import Result
from ..figures.timeline import request_spans_ticks
from ..style.palette import TIMELINE
from .tracks import Tracks

_TICKS_PER_NS = PER_SECOND // 10**9
_PREFILL, _BOTH, _DECODE = "prefill", "prefill and decode", "decode"
_NAMES = tuple(dict.fromkeys((*TIMELINE, _PREFILL, _BOTH, _DECODE, *KINDS)))
_CATEGORIES = ("request", "state", "step", "preemption")
_OF_REQUEST = ("prompt_tokens", "output_tokens", "recomputed", "swapped", "refused")
_OF_STEP = ("iterations", "decodes", "batch_size", "prefill_tokens", "waiting")
_ANNOTATIONS = ("request", *_OF_REQUEST, *_OF_STEP)


def write_timeline(path: str | PathLike[str], results: Sequence[Result]) -> Path:
    """Write the timelines of runs, below each other in one file, to ``path``, and return that.

    The file appears whole or not at all; the same runs give the same bytes.

    Raises:
        UserError: It cannot be written, or a run has no table of preemptions.
    """
    for result in results:
        if result.preemptions is None:
            raise UserError(f"{result.name}: has no preemptions.parquet; make it again by fragmeter simulate --out")
    with whole_file(path) as file:
        tracks = Tracks(file, _NAMES, _CATEGORIES, _ANNOTATIONS)
        for result in results:
            for part, spans in _replicas(result):
                _write_run(tracks, part, spans)
        tracks.flush()
    return Path(path)


def _replicas(result: Result) -> Iterator[tuple[Result, pd.DataFrame]]:
    """What each replica did, and the spans of its requests, by their numbers in the whole run."""
    spans = request_spans_ticks(result.requests, result.residencies)
    if "replica" not in result.steps:
        yield result, spans
        return
    # A refused request has no replica.
    replica_of = result.requests["replica"].fillna(0).to_numpy(dtype=np.int64)
    for replica in range(int(result.steps["replica"].max()) + 1):
        names = ("residencies", "steps", "memory", "preemptions")
        own = {name: (table := getattr(result, name))[table["replica"] == replica] for name in names}
        own["requests"] = result.requests[replica_of == replica]
        part = replace(result, name=f"{result.name}, replica {replica}", **own)
        yield part, spans[replica_of[spans["request"]] == replica]


def _write_run(tracks: Tracks, result: Result, spans: pd.DataFrame) -> None:
    run = tracks.group(result.name)
    _write_requests(tracks, tracks.group("requests", run), result.requests, spans)
    _write_steps(tracks, tracks.group("steps", run), result.steps)
    _write_preemptions(tracks, tracks.group("preemptions", run), result.preemptions)
    memory, sequences = tracks.group("memory", run), tracks.group("sequences", run)
    never = np.iinfo(np.int64).max
    table = replica_over_time(result.memory, result.steps, keeps_over_idle_spans(result), never)
    for bucket in BUCKETS:
        counter = tracks.counter(bucket.replace("_", " "), memory, "slots")
        _write_values(tracks, counter, table["start_ticks"], table[bucket])
    _write_values(tracks, tracks.counter("running", sequences, "sequences"), *_running(result.residencies))
    waiting = tracks.counter("waiting", sequences, "requests")
    _write_values(tracks, waiting, result.steps["start_ticks"], result.steps["waiting"])


def _write_requests(tracks: Tracks, group: int, requests: pd.DataFrame, spans: pd.DataFrame) -> None:
    table = requests.assign(end_ticks=requests["finish_ticks"].fillna(requests["arrival_ticks"]).astype(np.int64))
    table = table.sort_values("arrival_ticks", kind="stable")
    begin_ns, end_ns = _nanoseconds(table["arrival_ticks"]), _nanoseconds(table["end_ticks"])
    taken = lanes(begin_ns, end_ns)
    of_lane = [tracks.group(f"lane {number}", group) for number in range(1, max(taken, default=-1) + 2)]
    states = spans["state"].tolist()
    from_ns, to_ns = _nanoseconds(spans["start_ticks"]), _nanoseconds(spans["end_ticks"])
    numbers = table.index.to_numpy()
    first, last = (np.searchsorted(spans["request"], numbers, side).tolist() for side in ("left", "right"))
    values = table[list(_OF_REQUEST)].astype("Int64").fillna(0).astype(np.int64).to_dict("records")
    for place, number in enumerate(numbers.tolist()):
        lane = of_lane[taken[place]]
        tracks.begin(lane, begin_ns[place], "request", f"request {number}", values[place])
        for span in range(first[place], last[place]):
            tracks.begin(lane, from_ns[span], "state", states[span])
            tracks.end(lane, to_ns[span])
        tracks.end(lane, end_ns[place])


def lanes(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """A lane for each interval, from 0, so that none overlap in a lane: the lowest that is free when it begins.

    ``begin`` ascends; a lane is free from the end of an interval on.
    """
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    taken = []
    for comes, goes in zip(begin, end, strict=True):
        while busy and busy[0][0] <= comes:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (goes, lane))
        taken.append(lane)
    return taken


def _write_steps(tracks: Tracks, track: int, steps: pd.DataFrame) -> None:
    begin_ns, end_ns = _nanoseconds(steps["start_ticks"]), _nanoseconds(steps["start_ticks"] + steps["ticks"])
    later = steps["batch_size"].where(steps["iterations"] > 1, 0)
    decoding, prefilling = (steps["decodes"] + later > 0), steps["prefill_tokens"] > 0
    names = np.where(prefilling, np.where(decoding, _BOTH, _PREFILL), _DECODE).tolist()
    values = steps[list(_OF_STEP)].to_dict("records")
    for begin, end, name, own in zip(begin_ns, end_ns, names, values, strict=True):
        tracks.begin(track, begin, "step", name, own)
        tracks.end(track, end)


def _write_preemptions(tracks: Tracks, track: int, table: pd.DataFrame) -> None:
    columns = (_nanoseconds(table["ticks"]), table["kind"].tolist(), table["request"].tolist())
    for at, kind, request in zip(*columns, strict=True):
        tracks.instant(track, at, "preemption", kind, {"request": request})


def _running(residencies: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """How many sequences are on the device, from when on; ticks ascend."""
    comes = pd.Series(1, index=residencies["start_ticks"])
    goes = pd.Series(-1, index=residencies["end_ticks"])
    change = pd.concat([comes, goes]).groupby(level=0).sum()
    return change.index.to_series(), change.cumsum()


def _write_values(tracks: Tracks, track: int, ticks: pd.Series, values: pd.Series) -> None:
    """Only what changes is written."""
    changes = values.diff().ne(0)
    for at, value in zip(_nanoseconds(ticks[changes.to_numpy()]), values[changes].tolist(), strict=True):
        tracks.value(track, at, value)


def _nanoseconds(ticks: pd.Series) -> list[int]:
    return (ticks // _TICKS_PER_NS).tolist()
