"""What can go wrong, and at which fault.

FragmeterError
├── UserError             the user's mistake: one line, exit status 2
│   ├── SettingError      a flag or a setting
│   ├── TraceError        a row or a column of a trace file
│   └── MissingExtra      an optional package that the command needs
├── SimulationFault       a fault of ours: exit status 1
└── KernelFault           a GPU kernel that fails on the CPU: exit status 1
"""

from __future__ import annotations

import copyreg
from os import PathLike, fspath


class FragmeterError(Exception):
    """Base of every error that fragmeter raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # As it is, from a worker process too: the arguments that made it are not the text that it has.
        newobj = copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed leaves it out
        return newobj, (type(self), *self.args), vars(self)


class UserError(FragmeterError):
    """The user's mistake. Its text is one line and says what to do."""


class SettingError(UserError):
    """A setting that cannot be: names the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field} = {value!r}: {remedy}")


class TraceError(UserError):
    """A trace that cannot be true: names file, line, field, value and remedy.

    ``line`` counts from 1 with the header as line 1, as an editor shows it; ``None`` where the
    whole file is meant. For formats without lines (Parquet, pickle) it is the row, from 1, and
    ``unit`` says so.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        line: int | None,
        field: str | None,
        value: object,
        remedy: str,
        unit: str = "line",
    ) -> None:
        self.path, self.line, self.field, self.value, self.remedy = fspath(path), line, field, value, remedy
        where = self.path if line is None else f"{self.path}, {unit} {line}"
        what = "" if field is None else f" {field} = {value!r}:"
        super().__init__(f"{where}:{what} {remedy}")


class MissingExtra(UserError):
    """An optional package that the command needs; the text names the extra to install."""


class SimulationFault(FragmeterError):
    """An invariant of the simulator does not hold: a fault of ours."""


class KernelFault(FragmeterError):
    """A kernel, run on the CPU, deadlocks or reaches outside its arrays: a fault of ours, or wrong block ids."""
