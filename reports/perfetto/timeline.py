"""Runs as a Perfetto trace file for ui.perfetto.dev: requests, steps, preemptions, and memory over time.

    NAME                    a run, or one replica of a run with several
    ├── requests            lanes: a request takes the first free lane at its arrival and holds it to its end
    │   └── lane 1          one slice per request, from arrival to end; nested slices for its states (queued, prefill, ...)
    ├── steps               one slice per leap, with its row of ``steps.parquet``
    ├── preemptions         one instant each
    ├── memory              one counter per bucket of the ledger, in slots; all slots are free while no sequence runs
    └── sequences           counters: sequences on the device, and waiting requests

Each request has one slice of the category ``request``. Refused requests have slices of zero length. A request with
several sequences shows the states of the first. Ticks are rounded down to nanoseconds, Perfetto's unit. Rounding keeps
the order of events and the nesting of slices.

A trace file is a sequence of packets, and two concatenated files are one file. Packets are therefore serialized some
thousands at a time, and a long run needs no memory for them. The file has four kinds of tracks:

    group     a track without events, which holds other tracks in the order of their creation
    slices    begin and end, nested like brackets; events at the same time are in the order of the file
    instants  an event without a duration
    counters  a value that applies until the next one; an unchanged value is not written again

Repeated texts are numbers, which the first packet defines.
Source: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from ...sim.metrics.residencies import KINDS
from ...sim.metrics.views import SLOTS_VIEW
from ...sim.output import frames as pd
from ...sim.output.files import whole_file
from ...sim.types.errors import UserError
from ...sim.types.ticks import PER_SECOND
from ..data.pool_over_time import keeps_over_idle_spans, replica_over_time
from ..data.results import Result
from ..figures.timeline import request_spans_ticks
from ..style.palette import TIMELINE

_PACKETS_AT_A_TIME = 8192
#: All packets have one sequence id, so that they are read in the order in which they were written.
_SEQUENCE = 1
_NEW, _KNOWN = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED, TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class Tracks:
    """Tracks in a file that is being written; each track has a number.

    Args:
        file: Output file.
        names: Names of repeated events.
        categories: All categories of events.
        annotations: All names of values that events carry.
    """

    def __init__(
        self, file: BinaryIO, names: Sequence[str], categories: Sequence[str], annotations: Sequence[str]
    ) -> None:
        self._file, self._builder, self._packets = file, TraceProtoBuilder(), 0
        self._tracks = 0
        self._children: Counter[int | None] = Counter()
        first = self._packet(_NEW).interned_data
        self._names = _interned(first.event_names, names)
        self._categories = _interned(first.event_categories, categories)
        self._annotations = _interned(first.debug_annotation_names, annotations)

    def group(self, name: str, parent: int | None = None) -> int:
        """Make a track, below ``parent`` if one is given, and return its number."""
        return self._track(name, parent).uuid

    def counter(self, name: str, parent: int, unit: str) -> int:
        """Make a track of values; tracks of one unit below one parent share their axis."""
        track = self._track(name, parent)
        track.counter.unit_name, track.counter.y_axis_share_key = unit, unit
        return track.uuid

    def begin(self, track: int, at_ns: int, category: str, name: str, values: Mapping[str, int] | None = None) -> None:
        """Begin a slice, within the open one if there is one."""
        self._event(track, at_ns, TrackEvent.TYPE_SLICE_BEGIN, category, name, values)

    def end(self, track: int, at_ns: int) -> None:
        """End the slice that began last."""
        event = self._timed(at_ns).track_event
        event.type, event.track_uuid = TrackEvent.TYPE_SLICE_END, track

    def instant(self, track: int, at_ns: int, category: str, name: str, values: Mapping[str, int]) -> None:
        """Write an event without a duration."""
        self._event(track, at_ns, TrackEvent.TYPE_INSTANT, category, name, values)

    def value(self, track: int, at_ns: int, value: int) -> None:
        """Write a new value of a counter."""
        event = self._timed(at_ns).track_event
        event.type, event.track_uuid, event.counter_value = TrackEvent.TYPE_COUNTER, track, value

    def flush(self) -> None:
        """Write the buffered packets to the file."""
        self._file.write(self._builder.serialize())
        self._builder, self._packets = TraceProtoBuilder(), 0

    def _track(self, name: str, parent: int | None) -> TrackDescriptor:
        self._tracks += 1
        track = self._packet(_KNOWN).track_descriptor
        track.uuid, track.name, track.child_ordering = self._tracks, name, TrackDescriptor.EXPLICIT
        if parent is not None:
            track.parent_uuid = parent
        track.sibling_order_rank = self._children[parent]
        # Runs with the same name get separate tracks.
        track.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        self._children[parent] += 1
        return track

    def _event(
        self, track: int, at_ns: int, kind: int, category: str, name: str, values: Mapping[str, int] | None
    ) -> None:
        event = self._timed(at_ns).track_event
        event.type, event.track_uuid = kind, track
        event.category_iids.append(self._categories[category])
        if name in self._names:
            event.name_iid = self._names[name]
        else:
            event.name = name
        for annotation, value in (values or {}).items():
            event.debug_annotations.add(name_iid=self._annotations[annotation], int_value=value)

    def _timed(self, at_ns: int) -> TracePacket:
        packet = self._packet(_KNOWN)
        packet.timestamp = at_ns
        return packet

    def _packet(self, flags: int) -> TracePacket:
        if self._packets == _PACKETS_AT_A_TIME:
            self.flush()
        self._packets += 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id, packet.sequence_flags = _SEQUENCE, flags
        return packet


def _interned(entries: Any, texts: Sequence[str]) -> dict[str, int]:
    """Texts and their numbers, written into one of the lists of ``InternedData``."""
    numbers = {text: number for number, text in enumerate(texts, start=1)}
    for text, number in numbers.items():
        entries.add(iid=number, name=text)
    return numbers


_TICKS_PER_NS = PER_SECOND // 10**9
_PREFILL, _BOTH, _DECODE = "prefill", "prefill and decode", "decode"
#: Steps without a token of a request: they only move blocks, or only compute a token after an EOS (asynchronous scheduling).
_SWAP, _IN_VAIN = "swap", "in vain"
_NAMES = tuple(dict.fromkeys((*TIMELINE, _PREFILL, _BOTH, _DECODE, *KINDS)))
_CATEGORIES = ("request", "state", "step", "preemption")
_OF_REQUEST = ("prompt_tokens", "output_tokens", "recomputed", "swapped", "refused")
_OF_STEP = ("iterations", "decodes", "batch_size", "prefill_tokens", "waiting")
_ANNOTATIONS = ("request", *_OF_REQUEST, *_OF_STEP)


def write_timeline(path: str | PathLike[str], results: Sequence[Result]) -> Path:
    """Write the timelines of runs, below each other in one file, to ``path``, and return the path.

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
    """The tables of each replica, and the spans of its requests, by their numbers in the whole run."""
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
    for bucket, category in SLOTS_VIEW.categories.items():
        counter = tracks.counter(category.label, memory, "slots")
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
    """A lane for each interval, from 0, without overlaps in a lane: the lowest lane that is free at the start.

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
    alone = np.where(steps["batch_size"] > 0, _DECODE, np.where(steps["swap_ticks"] > 0, _SWAP, _IN_VAIN))
    names = np.where(prefilling, np.where(decoding, _BOTH, _PREFILL), alone).tolist()
    values = steps[list(_OF_STEP)].to_dict("records")
    for begin, end, name, own in zip(begin_ns, end_ns, names, values, strict=True):
        tracks.begin(track, begin, "step", name, own)
        tracks.end(track, end)


def _write_preemptions(tracks: Tracks, track: int, table: pd.DataFrame) -> None:
    columns = (_nanoseconds(table["ticks"]), table["kind"].tolist(), table["request"].tolist())
    for at, kind, request in zip(*columns, strict=True):
        tracks.instant(track, at, "preemption", kind, {"request": request})


def _running(residencies: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Number of sequences on the device, with the time of each change; ticks ascend."""
    comes = pd.Series(1, index=residencies["start_ticks"])
    goes = pd.Series(-1, index=residencies["end_ticks"])
    change = pd.concat([comes, goes]).groupby(level=0).sum()
    return change.index.to_series(), change.cumsum()


def _write_values(tracks: Tracks, track: int, ticks: pd.Series, values: pd.Series) -> None:
    """Write the changes of a counter only."""
    changes = values.diff().ne(0)
    for at, value in zip(_nanoseconds(ticks[changes.to_numpy()]), values[changes].tolist(), strict=True):
        tracks.value(track, at, value)


def _nanoseconds(ticks: pd.Series) -> list[int]:
    return (ticks // _TICKS_PER_NS).tolist()
