"""The page: how near the figures come, and then every figure that is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike

from ...reports.page.page import Section, write_page
from ..paper.comparison import Payload
from .sections import joined, stories
from .telling import SUMMARY_NOTE, summary_lines, summary_rows

PAGE = "reproduction.html"
TITLE = "The PagedAttention paper, rerun"
_LEAD = (
    "Every figure of Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,"
    " SOSP 2023, that a simulation can rerun: published beside simulated. No GPU was used; requests are served by"
    " simulated schedulers, and every slot of the KV pool is accounted for in every iteration."
)
_SUMMARY = "Accuracy against the paper"


class Page:
    """What is finished so far, section by section.

    Args:
        names: The figures in the order in which they stand on it.
        with_stories: Whether the textbook stories stand at the end.
    """

    def __init__(self, names: Sequence[str], with_stories: bool) -> None:
        self._last = [stories()] if with_stories else []
        self._names = names
        self._done: dict[str, tuple[Payload, list[Section]]] = {}

    def __bool__(self) -> bool:
        """Whether any figure is on it."""
        return bool(self._done)

    def add(self, name: str, document: Payload, sections: Iterable[Section]) -> None:
        """Take in a figure's document and what is shown of it."""
        self._done[name] = document, list(sections)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the sections so far, whole or not at all."""
        done = [self._done[name] for name in self._names if name in self._done]
        rows = summary_lines(summary_rows(document for document, _ in done))
        summary = [Section(_SUMMARY, SUMMARY_NOTE, rows=rows)] if rows else []
        shown = joined(section for _, sections in done for section in sections)
        write_page(path, TITLE, _LEAD, [*summary, *shown, *self._last])
