"""The requests of a story as readers know them: names and words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cast:
    """Names and words; every tuple but ``request_names`` has an item for each sequence (row of ``Workload.sequences``).

    Attributes:
        request_names: Name of each request.
        names: "A", or "A1" and "A2" where request A has two sequences.
        requests: Row of its request.
        prompts, outputs: Words of the prompt, and of the output.
    """

    request_names: tuple[str, ...]
    names: tuple[str, ...]
    requests: tuple[int, ...]
    prompts: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


def listed(items: Iterable[object]) -> str:
    """Items in a sentence: "1", "1 and 2", "1, 2 and 3"."""
    *most, last = [str(item) for item in items] or ["none"]
    return f"{', '.join(most)} and {last}" if most else last


def counted(items: Iterable[object], noun: str) -> str:
    """Numbered things in a sentence: "block 1", "blocks 1 and 2"."""
    found = list(items)
    return f"{noun}{'' if len(found) == 1 else 's'} {listed(found)}"
