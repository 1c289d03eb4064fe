"""Frames of a story: a recorded run with its words, as a page and a terminal show it.

A word is a token. The record of a step (``sim.recording.steps``) says which positions it computes, in which slots, and
what it copies; the words of slots follow from these alone:

    a swap, a copy       the words of the source are in the target too
    a computed token     its word is in its slot
    a table              is only read: it says where a word should be, not where it is

A step is a frame. A step that copies a shared block is two: the tables as they are before the copy, where the shared
block has its references, then the copy and the new words. The first frame follows from the record: each target of a
copy stands for its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...sim.memory import BUCKETS
from ...sim.recording.steps import Held, Step
from .captions import Caption, present, state
from .cast import Cast

#: In ``Cell.request``: no sequence holds the slot.
NO_REQUEST = -1


class Cell(NamedTuple):
    """A slot.

    Attributes:
        word: Its token; empty without one.
        bucket: Bucket of the ledger.
        is_new: Whether the frame writes it.
        request: Request that holds it, or ``NO_REQUEST``; of several the first.
    """

    word: str
    bucket: str
    is_new: bool = False
    request: int = NO_REQUEST


@dataclass(frozen=True)
class SequenceView:
    """A sequence that has arrived and is not done.

    Attributes:
        name: "A", or "A1" for the first sequence of a request with several.
        request: Row of its request.
        state: "waiting", "prefill", "decode", "paused", "swapped" or "finished" (its slots are still held).
        words: Words so far. Those of the device or the host come first, see ``stored``.
        stored: How many words have a slot.
        table: Physical block of each logical block, on the host for a swapped sequence; empty in contiguous memory.
        new_entries: Logical blocks with a table entry that changes in this frame.
        cells: Its slots by position, to the end of what it holds.
        first_slot: Where they begin, in contiguous memory; None in blocks.
    """

    name: str
    request: int
    state: str
    words: tuple[str, ...]
    stored: int
    table: tuple[int, ...] = ()
    new_entries: tuple[int, ...] = ()
    cells: tuple[Cell, ...] = ()
    first_slot: int | None = None


@dataclass(frozen=True)
class BlockView:
    """A physical block, or as many slots of contiguous memory.

    Attributes:
        number: Its id.
        first_slot: Its first slot.
        references: Tables that name it; None in contiguous memory.
        was: References in the frame before; 0 before the first one.
        holders: Names of the sequences that hold it.
        cells: Its slots.
    """

    number: int
    first_slot: int
    references: int | None
    was: int | None
    holders: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Frame:
    """A moment of a run.

    Attributes:
        at: Ticks, and the part of the step: the order of frames of several runs.
        label: "4", or "4a" and "4b" for the parts of a step; "end" for the pool after the run.
        events: What happens, a sentence each.
        sequences: Those that have arrived and are not done.
        blocks, host: The pool, and the blocks of the swap space in use.
        buckets: Slots of each bucket of the ledger that has any.
    """

    at: tuple[int, int]
    label: str
    events: tuple[str, ...]
    sequences: tuple[SequenceView, ...]
    blocks: tuple[BlockView, ...]
    host: tuple[BlockView, ...] = ()
    buckets: dict[str, int] = field(default_factory=dict)


def frames_of(steps: Sequence[Step], cast: Cast, block_size: int) -> list[Frame]:
    """The frames of a recorded run.

    Args:
        steps: As ``sim.recording.steps.record`` returns them.
        cast: Names and words of the sequences.
        block_size: Slots of a block, or of a line of contiguous memory.
    """
    return [*_Replay(cast, block_size).frames(steps)]


class _Replay:
    """Follows the words from step to step."""

    def __init__(self, cast: Cast, block_size: int) -> None:
        self._cast, self._size = cast, block_size
        self._texts = [list(prompt) for prompt in cast.prompts]
        self._device: dict[int, str] = {}
        self._host: dict[int, str] = {}
        self._seen: set[int] = set()
        self._started: set[int] = set()
        self._before: Frame | None = None
        self._stored_on_host: dict[int, int] = {}

    def frames(self, steps: Sequence[Step]) -> Iterator[Frame]:
        last: Step | None = None
        for number, step in enumerate(steps, start=1):
            label = "end" if number == len(steps) else str(number)
            caption = Caption(self._cast, last, step, self._texts, self._seen, self._started)
            self._seen |= present(step)
            self._move(step)
            self._keep_swapped(last, step)
            self._branch(step)
            parts = "ab" if step.copies and step.references else ""
            if parts:
                yield self._frame(before_copies(step, self._size), 0, f"{label}a", caption.before_copies())
            new = self._write(step)
            events = caption.after_copies() if parts else caption.whole()
            yield self._frame(step, len(parts) // 2, label + parts[1:], events, new)
            self._started |= {each.sequence for each in step.computed}
            last = step

    def _move(self, step: Step) -> None:
        """Swaps, in the order of a step; copies follow when the frame before them is drawn."""
        size = self._size
        for source, target in step.swap_outs:
            _copy(self._device, source * size, self._host, target * size, size)
        for source, target in step.swap_ins:
            _copy(self._host, source * size, self._device, target * size, size)

    def _keep_swapped(self, last: Step | None, step: Step) -> None:
        held = {each.sequence: each.tokens for each in last.held} if last else {}
        self._stored_on_host |= {each: held[each] for each in step.swapped_out}

    def _branch(self, step: Step) -> None:
        """A sibling begins with the prompt and a word of its own; a dead beam has the words of its parent, and one of its own."""
        for sibling in step.forked:
            self._extend(sibling, len(self._cast.prompts[sibling]) + 1)
        for dead, parent in step.replaced:
            known = len(self._texts[dead])
            self._texts[dead] = self._texts[parent][: known - 1]
            self._extend(dead, known)

    def _extend(self, sequence: int, length: int) -> None:
        """Generate words of the sequence's own up to so many words in all, unless it has them since before a preemption."""
        text, prompt = self._texts[sequence], len(self._cast.prompts[sequence])
        text += self._cast.outputs[sequence][len(text) - prompt : max(length - prompt, 0)]

    def _write(self, step: Step) -> frozenset[int]:
        """Copy, and write the tokens that the step computes; the slots that it writes."""
        unit = self._size if step.references else 1
        for source, target, size in step.copies:
            _copy(self._device, source * unit, self._device, target * unit, size)
        new: set[int] = set()
        for each in step.computed:
            # A sibling that was preempted before it began has a word that it generated with its leader.
            self._extend(each.sequence, each.stop)
            slots = _slots_of(step, each.sequence)[each.first : each.stop]
            self._device |= zip(slots, self._texts[each.sequence][each.first : each.stop], strict=True)
            new |= {*slots}
            if each.decodes or each.sequence in step.admitted:
                self._extend(each.sequence, each.stop + 1)
        return frozenset(new)

    def _frame(
        self, step: Step, part: int, label: str, events: Sequence[str], new: frozenset[int] = frozenset()
    ) -> Frame:
        holders = _holders(step)
        cells = self._cells(step, holders, new)
        frame = Frame(
            (step.start_ticks, part),
            label,
            tuple(events),
            tuple(self._sequences(step, cells)),
            tuple(self._blocks(step, cells, holders)),
            tuple(self._host_blocks(step)),
            {bucket: count for bucket in BUCKETS if (count := step.buckets.count(bucket))},
        )
        self._before = frame
        return frame

    def _cells(self, step: Step, holders: dict[int, list[int]], new: frozenset[int]) -> tuple[Cell, ...]:
        """Every slot of the pool; what a sequence left behind in a slot is not shown, unless it is cached."""
        filled = {slot for each in step.held for slot in each.slots[: each.tokens]}
        return tuple(
            Cell(
                self._device.get(slot, "") if slot in filled or bucket == "cached" else "",
                bucket,
                slot in new,
                self._cast.requests[holders[slot][0]] if slot in holders else NO_REQUEST,
            )
            for slot, bucket in enumerate(step.buckets)
        )

    def _sequences(self, step: Step, cells: tuple[Cell, ...]) -> Iterator[SequenceView]:
        held = {each.sequence: each for each in step.held}
        before = {view.name: view for view in self._before.sequences} if self._before else {}
        for sequence in sorted({*held, *step.waiting, *step.swapped}):
            name, request, words = self._cast.names[sequence], self._cast.requests[sequence], self._texts[sequence]
            table = held[sequence].table if sequence in held else step.host.get(sequence, ())
            was = before[name].table if name in before else ()
            yield SequenceView(
                name,
                request,
                state(step, sequence),
                tuple(words),
                held[sequence].tokens if sequence in held else self._stored_on_host.get(sequence, 0) if table else 0,
                table,
                tuple(place for place, block in enumerate(table) if place >= len(was) or was[place] != block),
                self._cells_of(held.get(sequence), cells, step, sequence),
                held[sequence].slots[0] if sequence in held and not table else None,
            )

    def _cells_of(self, held: Held | None, cells: tuple[Cell, ...], step: Step, sequence: int) -> tuple[Cell, ...]:
        if held is not None:
            return tuple(cells[slot] for slot in held.slots)
        size, stored = self._size, self._stored_on_host.get(sequence, 0)
        slots = (block * size + at for block in step.host.get(sequence, ()) for at in range(size))
        request = self._cast.requests[sequence]
        return tuple(
            Cell(self._host[slot], "live", False, request) if place < stored else Cell("", "reserved", False, request)
            for place, slot in enumerate(slots)
        )

    def _blocks(self, step: Step, cells: tuple[Cell, ...], holders: dict[int, list[int]]) -> Iterator[BlockView]:
        size, names = self._size, self._cast.names
        before = self._before.blocks if self._before else ()
        for number in range(-(-len(cells) // size)):
            slots = range(number * size, min((number + 1) * size, len(cells)))
            mine = dict.fromkeys(sequence for slot in slots for sequence in holders.get(slot, ()))
            references = step.references[number] if step.references else None
            was = before[number].references if before else references and 0
            users = tuple(names[each] for each in mine)
            yield BlockView(number, slots.start, references, was, users, cells[slots.start : slots.stop])

    def _host_blocks(self, step: Step) -> Iterator[BlockView]:
        size = self._size
        holders: dict[int, list[str]] = {}
        contents: dict[int, tuple[Cell, ...]] = {}
        for sequence, table in step.host.items():
            cells = self._cells_of(None, (), step, sequence)
            for place, block in enumerate(table):
                holders.setdefault(block, []).append(self._cast.names[sequence])
                contents[block] = cells[place * size : (place + 1) * size]
        for block, names in sorted(holders.items()):
            yield BlockView(block, block * size, len(names), len(names), tuple(names), contents[block])


def _holders(step: Step) -> dict[int, list[int]]:
    """Sequences that hold each slot."""
    holders: dict[int, list[int]] = {}
    for each in step.held:
        for slot in each.slots:
            holders.setdefault(slot, []).append(each.sequence)
    return holders


def _slots_of(step: Step, sequence: int) -> tuple[int, ...]:
    return next(each.slots for each in step.held if each.sequence == sequence)


def _copy(source: dict[int, str], first: int, target: dict[int, str], to: int, slots: int) -> None:
    for at in range(slots):
        target.pop(to + at, None)
        if first + at in source:
            target[to + at] = source[first + at]


def before_copies(step: Step, size: int) -> Step:
    """The step before it copies: tables name the sources, nothing is written, and targets are free."""
    source_of = {target: source for source, target, _ in step.copies}
    written = {each.sequence: each.stop - each.first for each in step.computed}
    held = []
    for each in step.held:
        table = tuple(source_of.get(block, block) for block in each.table)
        slots = tuple(block * size + at for block in table for at in range(size))
        held.append(each._replace(table=table, slots=slots, tokens=each.tokens - written.get(each.sequence, 0)))
    references, buckets = list(step.references), list(step.buckets)
    for new in step.computed:
        for slot in _slots_of(step, new.sequence)[new.first : new.stop]:
            buckets[slot] = "reserved"
    for target, source in source_of.items():
        references[source] += references[target]
        references[target] = 0
        buckets[target * size : (target + 1) * size] = ["free"] * size
    return replace(step, held=tuple(held), references=tuple(references), buckets=tuple(buckets), copies=())
