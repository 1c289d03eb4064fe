"""Block tables of one request, frame by frame: the physical blocks in each table, and copies before writes.

A recorded plan has the tables at the time when attention runs, and the copies at the start of a step. Within a step
with copies the frames follow the order of its actions:

    shared     before a copy: the tables still name its source        references of block 7: 2
    copied     one frame per copy: the writer names the target        references of block 7: 1, of block 9: 1
    written    the new tokens are in their slots

A frame before a copy shows the recorded table with the target replaced by its source. References are entries of the
tables of all sequences that compute in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from ...sim.recording.plans import Plan
from ...sim.types.ticks import PER_SECOND
from ..style.palette import BUCKETS

MOST_FRAMES = 600


class Frame(NamedTuple):
    """One frame.

    Attributes:
        step: Number in the plan.
        start_s: Start of the step in seconds.
        text: Description of the action.
        tables: Block ids of each sample; empty for a sample that is not resident.
        tokens: Tokens in the table of each sample.
        references: References of each block that the tables name.
        copy: For a copy: the sample, source and target, and the references of the source before and after.
    """

    step: int
    start_s: float
    text: str
    tables: list[list[int]]
    tokens: list[int]
    references: dict[int, int]
    copy: tuple[int, int, int, int, int] | None = None


def chosen_request(plan: Plan, requests: np.ndarray) -> int | None:
    """The default request: the first that copies a block, else one with several sequences, else any.

    Args:
        requests: int64 [sequences], the request of each sequence.
    """
    if not plan.is_paged or not len(plan.sequence):
        return None
    targets = set(plan.copies[:, 1].tolist())
    for step in np.flatnonzero(np.diff(plan.copy_offsets)).tolist():
        for row in range(len(plan.step(step).sequence)):
            if targets & set(plan.block_table(step, row).tolist()):
                return int(requests[plan.step(step).sequence[row]])
    several = np.flatnonzero(np.bincount(requests)[requests[plan.sequence]] > 1)
    return int(requests[plan.sequence[several[0] if len(several) else 0]])


def table_frames(plan: Plan, sequences: Sequence[int]) -> Iterator[Frame]:
    """The frames of a request, in order of time.

    Args:
        sequences: The request's sequences, in order.
    """
    sample_of = {sequence: place for place, sequence in enumerate(sequences)}
    there: set[int] = set()
    for number in np.flatnonzero(_steps_with(plan, sequences)).tolist():
        step = plan.step(number)
        rows = {sample_of[name]: row for row, name in enumerate(step.sequence.tolist()) if name in sample_of}
        tables = [plan.block_table(number, rows[at]).tolist() if at in rows else [] for at in range(len(sequences))]
        tokens = [int(step.context_lens[rows[at]]) if at in rows else 0 for at in range(len(sequences))]
        new = [int(step.query_tokens[rows[at]]) if at in rows else 0 for at in range(len(sequences))]
        references = _references(plan, number)
        moment = number, step.start_ticks / PER_SECOND
        copies = [pair for pair in step.copies.tolist() if any(pair[1] in table for table in tables)]
        yield from _before_copies(moment, tables, [c - q for c, q in zip(tokens, new)], references, copies)
        shown = {block: references[block] for table in tables for block in table}
        yield Frame(*moment, _step_text(rows, new, there, step.decodes), tables, tokens, shown)
        there |= set(rows)


def _steps_with(plan: Plan, sequences: Sequence[int]) -> np.ndarray:
    """Whether each step computes any of the sequences, bool [steps]."""
    found = np.concatenate([[0], np.cumsum(np.isin(plan.sequence, sequences))])
    return np.diff(found[plan.row_offsets]) > 0


def _references(plan: Plan, step: int) -> Counter[int]:
    first, last = plan.table_offsets[plan.row_offsets[[step, step + 1]]]
    return Counter(plan.block_ids[first:last].tolist())


def _before_copies(
    moment: tuple[int, float],
    tables: list[list[int]],
    tokens: list[int],
    after: Mapping[int, int],
    copies: list[list[int]],
) -> Iterator[Frame]:
    """A frame of the shared state, then a frame for each copy."""
    if not copies:
        return
    source_of = {target: source for source, target in copies}
    now = [[source_of.get(block, block) for block in table] for table in tables]
    references = Counter(after)
    for source, target in copies:
        references[source] += 1
        references[target] -= 1
    shared = ", ".join(str(source) for source in dict.fromkeys(source for source, _ in copies))
    text = f"The step writes into block {shared}, which more than one table names."
    yield Frame(*moment, text, now, tokens, _named(now, references))
    for source, target in copies:
        sample = next(place for place, table in enumerate(tables) if target in table)
        place = tables[sample].index(target)
        now = [list(table) for table in now]
        now[sample][place] = target
        before = references[source]
        references[source] -= 1
        references[target] += 1
        text = (
            f"Copy on write: sample {sample + 1} takes block {target} in place of block {source}, and the"
            f" references of block {source} fall from {before} to {before - 1}."
        )
        yield Frame(*moment, text, now, tokens, _named(now, references), (sample, source, target, before, before - 1))


def _named(tables: list[list[int]], references: Mapping[int, int]) -> dict[int, int]:
    return {block: references[block] for table in tables for block in table}


def _step_text(rows: Mapping[int, int], new: list[int], there: set[int], decodes: int) -> str:
    """One sentence: the changes of a step to the tables."""
    prefilled = [sample for sample, row in rows.items() if row >= decodes]
    if prefilled:
        parts = [f"sample {sample + 1} prefills {new[sample]:,} tokens" for sample in sorted(prefilled)]
        return f"{'; '.join(parts)}.".capitalize()
    fresh = sorted(set(rows) - there)
    if fresh and there:
        names = ", ".join(str(sample + 1) for sample in fresh)
        return f"Sample {names} forks: its table names the blocks of sample 1, and each writes a token of its own."
    return "Each sample writes a token." if len(rows) > 1 else "A token is written."


class TableViewer:
    """The tables of a request on a page (a ``page.Widget``).

    Args:
        name: Name of the run.
        request: Number of the request.
        sequences: Its sequences, in order.
    """

    kind = "tables"
    figures: Sequence[go.Figure] = ()
    constants: Mapping[str, Any] = {
        "shared_hue": BUCKETS["finished_hold"].light,
        "new_hue": BUCKETS["over_estimate"].light,
        "fill_hue": BUCKETS["reserved"].light,
    }

    def __init__(self, name: str, plan: Plan, request: int, sequences: Sequence[int]) -> None:
        frames: list[Frame] = []
        for frame in table_frames(plan, sequences):
            if len(frames) == MOST_FRAMES:
                break
            frames.append(frame)
        whole = len(frames) < MOST_FRAMES
        self.data = {
            "name": name,
            "request": request,
            "samples": len(sequences),
            "block_size": plan.meta["block_size"],
            "is_whole": whole,
            "frames": [frame._asdict() | {"start_s": round(frame.start_s, 6)} for frame in frames],
        }
