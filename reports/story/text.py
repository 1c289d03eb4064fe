"""Frames of a story as text: a block of lines for each, for a terminal and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...sim.metrics.views import SLOTS_VIEW
from .frames import BlockView, Cell, Frame, SequenceView


def frame_lines(frame: Frame) -> Iterator[str]:
    """The lines of a frame: what happens, each sequence and its table, each block in use, slots by bucket.

    A word in parentheses has no slot yet, ``*`` marks a word that the frame writes, ``_`` is an empty slot.
    """
    yield frame.label if frame.label == "end" else f"step {frame.label}"
    yield from (f"  {event}" for event in frame.events)
    yield from (f"  {_sequence(view)}" for view in frame.sequences)
    yield from _blocks("block", frame.blocks)
    yield from _blocks("host block", frame.host)
    yield f"  slots: {_counts(frame.buckets)}"


def _sequence(view: SequenceView) -> str:
    words = " ".join((*view.words[: view.stored], *(f"({word})" for word in view.words[view.stored :])))
    return f"{view.name} {view.state}{_place(view)}: {words}"


def _place(view: SequenceView) -> str:
    if view.first_slot is None:
        kind = "host blocks" if view.state == "swapped" else "block table"
        return f", {kind} {list(view.table)}" if view.table else ""
    empty = Counter(cell.bucket for cell in view.cells if not cell.word)
    rest = f", {_counts(empty)}" if empty else ""
    return f", slots {view.first_slot} to {view.first_slot + len(view.cells) - 1}{rest}"


def _blocks(kind: str, blocks: Sequence[BlockView]) -> Iterator[str]:
    """Blocks with tokens or holders; a piece of contiguous memory is in the line of its sequence."""
    for view in blocks:
        if view.references is not None and any(cell.bucket != "free" for cell in view.cells):
            holders = f"{' '.join(view.holders)}, references {view.references}" if view.holders else "cached"
            yield f"  {kind} {view.number}: {' '.join(map(_slot, view.cells))} ({holders})"


def _slot(cell: Cell) -> str:
    return (cell.word or "_") + ("*" if cell.is_new else "")


def _counts(buckets: dict[str, int]) -> str:
    return ", ".join(f"{count} {SLOTS_VIEW.categories[bucket].label}" for bucket, count in buckets.items())


def definitions(frames: Iterable[Frame]) -> list[tuple[str, str]]:
    """Label and definition of each bucket that any slot of the frames is in."""
    used = {bucket for frame in frames for bucket in frame.buckets}
    return SLOTS_VIEW.definitions(bucket for bucket in SLOTS_VIEW.categories if bucket in used)
