"""Plans of a few steps, written by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from fragmeter.sim.recording.plans import SCHEMA_VERSION, Plan

BLOCK_SIZE = 4
Pairs = list[tuple[int, int]]


@dataclass
class Row:
    """A sequence in a step: its tokens up to now, the last ``new`` of which are computed; its table or first slot."""

    sequence: int
    new: int
    tokens: list[int]
    held_in: list[int] | int
    #: Tokens that it begins with without having computed them.
    found: int = 0

    def slots(self) -> list[int]:
        places = range(len(self.tokens) - self.new, len(self.tokens))
        if isinstance(self.held_in, int):
            return [self.held_in + place for place in places]
        return [self.held_in[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]


@dataclass
class Step:
    """Rows, and what moves before them."""

    rows: list[Row]
    swap_outs: Pairs = field(default_factory=list)
    swap_ins: Pairs = field(default_factory=list)
    copies: Pairs = field(default_factory=list)
    copied_slots: list[int] = field(default_factory=list)


def plan(
    layout: str,
    steps: list[Step],
    num_blocks: int = 8,
    host_blocks: int = 2,
    before: dict[int, list[int]] | None = None,
    before_on_host: dict[int, list[int]] | None = None,
) -> Plan:
    """The steps as they would be recorded.

    ``before`` is what lies in the pool, and on the host, before the first one: tokens by their first slot.
    """
    rows = [row for step in steps for row in step.rows]
    tables = [row.held_in if layout == "paged" else [] for row in rows]
    meta = {
        "schema_version": SCHEMA_VERSION,
        "policy": "by hand",
        "model": "toy-llama",
        "layout": layout,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "host_blocks": host_blocks,
        "num_slots": num_blocks * BLOCK_SIZE,
    }
    arrays = initial("initial", before or {}) | initial("initial_host", before_on_host or {})
    arrays |= {
        "start_ticks": range(len(steps)),
        "ticks": [1] * len(steps),
        "prefill_tokens": [sum(row.new for row in step.rows if row.new > 1) for step in steps],
        "decodes": [sum(row.new == 1 for row in step.rows) for step in steps],
        "padding_tokens": [0] * len(steps),
        "row_offsets": offsets([step.rows for step in steps]),
        "sequence": [row.sequence for row in rows],
        "query_tokens": [row.new for row in rows],
        "context_lens": [len(row.tokens) for row in rows],
        "table_offsets": offsets(tables),
        "block_ids": sum(tables, []),
        "slot_starts": [] if layout == "paged" else [row.held_in for row in rows],
        "slot_offsets": offsets([row.slots() for row in rows]),
        "slot_mapping": sum((row.slots() for row in rows), []),
        "token_ids": sum((row.tokens[-row.new :] for row in rows), []),
        "held_offsets": offsets([row.tokens[: row.found] for row in rows]),
        "held_token_ids": sum((row.tokens[: row.found] for row in rows), []),
        "copied_slots": sum((step.copied_slots or [BLOCK_SIZE] * len(step.copies) for step in steps), []),
    }
    integers = {name: np.array(values, np.int64) for name, values in arrays.items()}
    integers["block_ids"] = integers["block_ids"].astype(np.int32)
    return Plan(meta, **integers, **moves(steps))


def initial(name: str, pieces: dict[int, list[int]]) -> dict[str, list[int]]:
    """The arrays of what lies somewhere before the first step; tokens are named by their places, plus hundreds."""
    return {
        f"{name}_slots": [first + place for first, tokens in pieces.items() for place in range(len(tokens))],
        f"{name}_token_ids": sum(pieces.values(), []),
        f"{name}_positions": [token % 100 for token in sum(pieces.values(), [])],
    }


def moves(steps: list[Step]) -> dict[str, np.ndarray]:
    """Swaps and copies of all steps."""
    found = {}
    for one, many in (("swap_out", "swap_outs"), ("swap_in", "swap_ins"), ("copy", "copies")):
        of_steps = [getattr(step, many) for step in steps]
        found[f"{one}_offsets"] = np.array(offsets(of_steps), np.int64)
        found[many] = np.array(sum(of_steps, []), np.int64).reshape(-1, 2)
    return found


def offsets(lists: list[list]) -> list[int]:
    return np.cumsum([0, *map(len, lists)]).tolist()


def changed(given: Plan, name: str, places: list[int], values: list[int]) -> Plan:
    """The plan with other values in one array."""
    array = getattr(given, name).copy()
    array[places] = values
    return replace(given, **{name: array})


A, B, C = (list(range(first, first + 12)) for first in (100, 200, 300))
#: A and B are served; A is swapped out and comes back elsewhere; B's last block is copied before it is written; C
#: finds the first block of B's prompt.
_LAST = Step(
    [
        Row(0, 1, A[:7], [2, 7], found=6),
        Row(1, 1, B[:6], [6, 3], found=5),
        Row(2, 2, B[:4] + C[:2], [6, 5], found=4),
    ],
    swap_ins=[(0, 2), (1, 7)],
    copies=[(0, 3)],
)
_STEPS = [
    Step([Row(0, 5, A[:5], [3, 1]), Row(1, 3, B[:3], [6])]),
    Step([Row(0, 1, A[:6], [3, 1]), Row(1, 1, B[:4], [6])]),
    Step([Row(1, 1, B[:5], [6, 0])], swap_outs=[(3, 0), (1, 1)]),
    replace(_LAST, rows=[Row(0, 1, A[:7], [2, 7]), Row(1, 1, B[:6], [6, 3]), _LAST.rows[2]]),
]
PAGED = plan("paged", _STEPS)
#: The last of these steps by itself; what was held before is said.
LAST_STEP = plan("paged", [_LAST], before={24: B[:4], 0: B[4:5]}, before_on_host={0: A[:6]})
#: A is served; B goes on as a copy of its first three tokens.
CONTIGUOUS = plan(
    "contiguous",
    [
        Step([Row(0, 5, A[:5], 8)]),
        Step([Row(0, 1, A[:6], 8), Row(1, 2, A[:3] + B[:2], 17, found=3)], copies=[(8, 17)], copied_slots=[3]),
        Step([Row(0, 1, A[:7], 8), Row(1, 1, A[:3] + B[:3], 17)]),
    ],
    host_blocks=0,
)
