"""The start of a trace's own times, and their unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """When a trace begins by its own clock. Simulated time begins at its first request.

    Attributes:
        written: The first time as in the file.
        unit: Name of the unit: "s", "ms", "us" or "ns", or seconds as a number; None for dates.
        date: The first time in UTC (dates without an offset: as written), where the times are dates or count from 1970.
        reason: Why the times have this unit; None if the format documents it.
    """

    written: str
    unit: str | None = "s"
    date: str | None = None
    reason: str | None = None

    @property
    def text(self) -> str | None:
        """One line on the start and the unit; None for times from 0 in the documented unit."""
        begins = f"begin at {self.written}{f' {self.unit}' if self.unit else ''}"
        if self.date is not None and self.unit is not None:
            begins += f" ({self.date} UTC)"
        starts_at_zero = self.unit is not None and not float(self.written)
        if self.reason is None:
            return None if starts_at_zero else f"times {begins}, which is 0 here"
        named = _NAMES.get(self.unit or "", f"units of {self.unit} s")
        remedy = "" if self.reason.startswith("--") else " (--time-unit sets another unit)"
        return f"times read as {named}, because {self.reason}{remedy}{'' if starts_at_zero else f'; they {begins}'}"


_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
