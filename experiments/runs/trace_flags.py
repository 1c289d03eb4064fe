"""Flags of all commands that read a trace, and the report of skipped rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from cyclopts import Group, Parameter

from ...traces import Reading, Trace

#: Options for reading a trace.
READING = Annotated[Reading, Parameter(name="*", group=Group("Reading a trace", sort_key=3))]


def left_out_lines(trace: Trace | None) -> Iterator[str]:
    """The number of rows of a file that are not in its trace, and the reasons."""
    if trace is not None and trace.left_out.failed:
        yield f"Left out: {trace.left_out.failed:,} requests that were not answered, as the file says itself."
    if trace is not None and trace.left_out.bad:
        yield f"Skipped: {trace.left_out.bad:,} bad rows. The first: {trace.left_out.first_bad}"
