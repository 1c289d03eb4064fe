"""A file of Perfetto's: tracks, and events on them.

A file is a ``Trace``: packets one after the other. Two of them in one file are one, so that packets are serialised some
thousands at a time and a long run needs no memory for them. Times are nanoseconds.

    group     a track without events, which holds others in the order in which they were made
    slices    begin and end, nested like brackets; where times are equal the order in the file counts
    instants  a moment
    counters  a value that holds until the next one; one that stays as it is needs none

Texts that come again are numbers, which the first packet explains.
Source: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

_PACKETS_AT_A_TIME = 8192
#: All packets are of one sequence, so that they are read in the order in which they were written.
_SEQUENCE = 1
_NEW, _KNOWN = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED, TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class Tracks:
    """Tracks in a file that is being written; each track has a number.

    Args:
        file: Where packets go.
        names: Names of events that come again and again.
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
        """A new track, below ``parent`` if one is given."""
        return self._track(name, parent).uuid

    def counter(self, name: str, parent: int, unit: str) -> int:
        """A new track of values; those of one unit below one parent share their axis."""
        track = self._track(name, parent)
        track.counter.unit_name, track.counter.y_axis_share_key = unit, unit
        return track.uuid

    def begin(self, track: int, at_ns: int, category: str, name: str, values: Mapping[str, int] | None = None) -> None:
        """A slice begins, within the one that is open, if one is."""
        self._event(track, at_ns, TrackEvent.TYPE_SLICE_BEGIN, category, name, values)

    def end(self, track: int, at_ns: int) -> None:
        """The slice that began last is over."""
        event = self._timed(at_ns).track_event
        event.type, event.track_uuid = TrackEvent.TYPE_SLICE_END, track

    def instant(self, track: int, at_ns: int, category: str, name: str, values: Mapping[str, int]) -> None:
        """Something happens that takes no time."""
        self._event(track, at_ns, TrackEvent.TYPE_INSTANT, category, name, values)

    def value(self, track: int, at_ns: int, value: int) -> None:
        """A counter has another value from now on."""
        event = self._timed(at_ns).track_event
        event.type, event.track_uuid, event.counter_value = TrackEvent.TYPE_COUNTER, track, value

    def flush(self) -> None:
        """Write what was not written yet."""
        self._file.write(self._builder.serialize())
        self._builder, self._packets = TraceProtoBuilder(), 0

    def _track(self, name: str, parent: int | None) -> TrackDescriptor:
        self._tracks += 1
        track = self._packet(_KNOWN).track_descriptor
        track.uuid, track.name, track.child_ordering = self._tracks, name, TrackDescriptor.EXPLICIT
        if parent is not None:
            track.parent_uuid = parent
        track.sibling_order_rank = self._children[parent]
        # Runs of one name stay apart.
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
    """Texts and the numbers that stand for them, written into one of the lists of ``InternedData``."""
    numbers = {text: number for number, text in enumerate(texts, start=1)}
    for text, number in numbers.items():
        entries.add(iid=number, name=text)
    return numbers
