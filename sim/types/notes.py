"""What an answer rests on and its reader has to know: said by the code that assumes it, shown by the command that answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Collect the notes of this block, each once, in the order in which they are said."""
    found: list[str] = []
    before = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(before)


def note(text: str) -> None:
    """Say what is assumed; without effect outside of a block that collects notes."""
    found = _collected.get()
    if found is not None and text not in found:
        found.append(text)


def notes() -> tuple[str, ...]:
    """The notes so far."""
    return tuple(_collected.get() or ())
