"""What must be true of every frame of a story, and a short log of its tables and reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fragmeter.reports.story.cast import Cast
from fragmeter.reports.story.frames import Frame


def log_line(frame: Frame) -> str:
    """``2b: A1 decode 8 [0 2]; A2 decode 8 [0 1] | 0:2 1:1 2:1``: stored tokens and table (or slots), then references."""
    views = "; ".join(
        f"{view.name} {view.state} {view.stored}"
        + (f" [{' '.join(map(str, view.table))}]" if view.table else "")
        + (f" {view.first_slot}+{len(view.cells)}" if view.first_slot is not None else "")
        for view in frame.sequences
    )
    references = " ".join(f"{block.number}:{block.references}" for block in frame.blocks if block.references)
    return f"{frame.label}: {views}{f' | {references}' if references else ''}"


def walk(frames: Sequence[Frame], cast: Cast, has_beams: bool = False) -> None:
    """Raises AssertionError at the first frame that contradicts itself.

    Args:
        cast: Names and words of the story.
        has_beams: Whether a sequence may go on from the words of another.
    """
    whole = {name: prompt + output for name, prompt, output in zip(cast.names, cast.prompts, cast.outputs)}
    prompts = dict(zip(cast.names, map(len, cast.prompts)))
    most: Counter[str] = Counter()
    for frame in frames:
        _walk_slots(frame)
        if frame.blocks[0].references is None:
            _walk_pieces(frame)
        else:
            _walk_tables(frame)
        for view in frame.sequences:
            # A step that stores all known tokens generates the next one; a preemption loses none of them.
            most[view.name] = max(most[view.name], view.stored)
            number = len(view.words)
            assert prompts[view.name] <= number <= max(prompts[view.name], most[view.name] + 1), frame.label
            assert view.state != "decode" or number == view.stored + 1, (frame.label, view.name)
            assert has_beams or view.words == whole[view.name][:number], (frame.label, view.name)
    last = frames[-1]
    assert last.label == "end" and not last.sequences and not last.host
    assert set(last.buckets) <= {"free", "cached"}


def _walk_slots(frame: Frame) -> None:
    cells = [cell for block in frame.blocks for cell in block.cells]
    assert Counter(cell.bucket for cell in cells) == Counter(frame.buckets)
    for cell in cells:
        if cell.bucket == "live":
            assert cell.word, frame.label
        elif cell.bucket not in ("finished_hold", "cached"):
            assert not cell.word, frame.label


def _walk_tables(frame: Frame) -> None:
    """References are table entries; what a table says is in its blocks is there, for all that share a block."""
    size = len(frame.blocks[0].cells)
    on_device = [view for view in frame.sequences if view.table and view.state != "swapped"]
    entries = Counter(block for view in on_device for block in view.table)
    assert {block.number: block.references for block in frame.blocks if block.references} == entries
    for view in on_device:
        assert len(set(view.table)) == len(view.table) and len(view.cells) == size * len(view.table)
        words = [frame.blocks[block].cells[at].word for block in view.table for at in range(size)]
        assert words[: view.stored] == list(view.words[: view.stored]), (frame.label, view.name)
        assert all(view.name in frame.blocks[block].holders for block in view.table)
    for view in on_device:
        if view.state == "decode":
            # What a decode writes is in a block of its own.
            written = frame.blocks[view.table[(view.stored - 1) // size]]
            assert written.references == 1 or not written.cells[(view.stored - 1) % size].is_new, frame.label
    for block in frame.blocks:
        if not block.references:
            assert {cell.bucket for cell in block.cells} <= {"free", "cached"}
    for view in frame.sequences:
        if view.state == "swapped":
            host = {block.number: block for block in frame.host}
            words = [host[block].cells[at].word for block in view.table for at in range(size)]
            assert words[: view.stored] == list(view.words[: view.stored]) and not any(words[view.stored :])


def _walk_pieces(frame: Frame) -> None:
    """Pieces do not overlap, and each has the words of its sequence."""
    cells = [cell for block in frame.blocks for cell in block.cells]
    taken: Counter[int] = Counter()
    for view in frame.sequences:
        if view.first_slot is None:
            continue
        slots = range(view.first_slot, view.first_slot + len(view.cells))
        taken.update(slots)
        assert [cells[slot].word for slot in slots[: view.stored]] == list(view.words[: view.stored])
        assert not any(cells[slot].word for slot in slots[view.stored :])
    assert max(taken.values(), default=0) <= 1
    assert set(taken) == {slot for slot, cell in enumerate(cells) if cell.bucket not in ("free", "stranded", "cached")}
