"""A reader of timelines that knows the schema only: what a file says, as Perfetto's trace processor takes it.

Packets are taken in order of time, those of one time in the order of the file. An end closes the slice of its track
that began last. Numbers stand for the texts that an earlier packet has explained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent


@dataclass
class Slice:
    """A slice or an instant of a track; ``depth`` counts the slices around it."""

    track: str
    category: str
    name: str
    begin_ns: int
    depth: int
    values: dict[str, int]
    end_ns: int | None = None
    within: Slice | None = None


@dataclass
class Timeline:
    """Tracks are named by their path, joined by slashes; counters are ``[(ns, value), ...]``."""

    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    def of(self, category: str, below: str = "") -> list[Slice]:
        return [one for one in self.slices if one.category == category and one.track.startswith(below)]


def read_timeline(path: Path) -> Timeline:
    """What a file holds; fails where it is no sound timeline."""
    packets = Trace.FromString(path.read_bytes()).packet
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}
    texts = _texts(packets[0])
    found, paths = Timeline(), {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid and track.uuid not in paths
            above = f"{paths[track.parent_uuid]}/" if track.HasField("parent_uuid") else ""
            paths[track.uuid] = above + track.name
            found.order[paths[track.uuid]] = track.sibling_order_rank
            if track.HasField("counter"):
                found.counters[paths[track.uuid]] = []
    assert len(set(paths.values())) == len(paths)
    events = [packet for packet in packets if packet.HasField("track_event")]
    assert all(packet.HasField("timestamp") for packet in events)
    open_slices: dict[str, list[Slice]] = {path: [] for path in paths.values()}
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        _take(found, open_slices, paths[packet.track_event.track_uuid], packet, texts)
    assert not any(open_slices.values())
    return found


def _texts(first: TracePacket) -> dict[str, dict[int, str]]:
    assert first.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    kinds = ("event_names", "event_categories", "debug_annotation_names")
    return {kind: {entry.iid: entry.name for entry in getattr(first.interned_data, kind)} for kind in kinds}


def _take(
    found: Timeline, opened: dict[str, list[Slice]], track: str, packet: TracePacket, texts: dict[str, Any]
) -> None:
    event, stack = packet.track_event, opened[track]
    assert (track in found.counters) == (event.type == TrackEvent.TYPE_COUNTER)
    if event.type == TrackEvent.TYPE_COUNTER:
        found.counters[track].append((packet.timestamp, event.counter_value))
    elif event.type == TrackEvent.TYPE_SLICE_END:
        stack.pop().end_ns = packet.timestamp
    else:
        assert packet.sequence_flags & TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        (category,) = event.category_iids
        name = texts["event_names"][event.name_iid] if event.HasField("name_iid") else event.name
        values = {texts["debug_annotation_names"][one.name_iid]: one.int_value for one in event.debug_annotations}
        here = Slice(track, texts["event_categories"][category], name, packet.timestamp, len(stack), values)
        here.within = stack[-1] if stack else None
        if event.type == TrackEvent.TYPE_INSTANT:
            found.instants.append(here)
        else:
            assert event.type == TrackEvent.TYPE_SLICE_BEGIN
            found.slices.append(here)
            stack.append(here)
