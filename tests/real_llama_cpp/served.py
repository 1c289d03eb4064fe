"""What a server did with a case, in terms that llama.cpp's and ours share."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The end of one request.

    Attributes:
        slot: Slot that served it.
        found: Tokens of its prompt that the slot kept.
        computed: Tokens of its prompt that were computed.
        generated: Tokens of its output; fewer than it asked for where its slot was full.
        kept: Tokens that the slot keeps of it.
        error: The type of an error, without the other fields.
    """

    slot: int = -1
    found: int = 0
    computed: int = 0
    generated: int = 0
    kept: int = 0
    error: str = ""


class Served(NamedTuple):
    """A case, served.

    Attributes:
        steps: Of each step its start in ticks, and the (slot, tokens) of its batch in order.
        answers: By request; empty if ``exceeded``.
        purged: Tokens that idle slots kept and lost, as a batch lacked cells.
        exceeded: Whether a batch lacked cells and no idle slot kept any. Nothing is known of later steps.
    """

    steps: list[tuple[int, tuple[tuple[int, int], ...]]]
    answers: list[Answer]
    purged: int
    exceeded: bool


def first_difference(real: Served, ours: Served) -> str:
    """Where ``ours`` first differs from ``real``; empty if nowhere."""
    for number in range(max(len(real.steps), len(ours.steps))):
        theirs, mine = (served.steps[number] if number < len(served.steps) else None for served in (real, ours))
        if theirs != mine:
            return f"step {number}: real {theirs}, ours {mine}"
    for field in ("exceeded", "purged"):
        theirs, mine = getattr(real, field), getattr(ours, field)
        if theirs != mine:
            return f"{field}: real {theirs}, ours {mine}"
    for index, (answer, known) in enumerate(zip(real.answers, ours.answers, strict=True)):
        if answer != known:
            return f"request {index}: real {answer}, ours {known}"
    return ""
