"""The page: how near the figures come, and then every figure that is done."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

from ..reports.page import Section, write_page
from .comparison import Payload
from .sections import joined, stories
from .telling import SUMMARY_NOTE, summary_lines, summary_rows

PAGE = "reproduction.html"
TITLE = "The PagedAttention paper, rerun"
_LEAD = (
    "Every figure of Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,"
    " SOSP 2023, that a simulation can rerun: published beside simulated. No GPU was used; requests are served by"
    " simulated schedulers, and every slot of the KV pool is accounted for in every iteration."
)
_SUMMARY = "How near it comes"


class Page:
    """What is finished so far, section by section.

    Args:
        with_stories: Whether the textbook stories stand at the end.
    """

    def __init__(self, with_stories: bool) -> None:
        self._last = [stories()] if with_stories else []
        self._documents: list[Payload] = []
        self._sections: list[Section] = []

    def __bool__(self) -> bool:
        """Whether any figure is on it."""
        return bool(self._documents)

    def add(self, document: Payload, sections: Iterable[Section]) -> None:
        """Take in a figure's document and what is shown of it."""
        self._documents.append(document)
        self._sections = joined([*self._sections, *sections])

    def write(self, path: str | PathLike[str]) -> None:
        """Write the sections so far, whole or not at all."""
        rows = summary_lines(summary_rows(self._documents))
        summary = [Section(_SUMMARY, SUMMARY_NOTE, rows=rows)] if rows else []
        write_page(path, TITLE, _LEAD, [*summary, *self._sections, *self._last])
