"""The tree of errors, with exit statuses.

FragmeterError
├── UserError             a mistake of the user: one line, exit status 2
│   ├── SettingError      a flag or a setting
│   │   ├── MissingSetting
│   │   └── NotSimulated   valid in the simulated system
│   ├── TraceError        a row or a column of a trace file
│   ├── PluginError       a policy, memory or cost of another package
│   └── MissingExtra      an optional package that the command needs
├── SimulationFault       a defect of fragmeter: exit status 1
│   └── Overdrawn         more blocks or slots are taken than are free
└── KernelFault           a GPU kernel that fails on the CPU: exit status 1
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOMEM
from os import PathLike, fspath

#: Characters of a value in an error.
_MOST_SHOWN = 400


class FragmeterError(Exception):
    """Base of every error that fragmeter raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled with its text, for worker processes: the default would call the class with the text as argument.
        newobj = copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed leaves it out
        return newobj, (type(self), *self.args), vars(self)


class UserError(FragmeterError):
    """A mistake of the user. The text is one line with a remedy."""


class SettingError(UserError):
    """An invalid setting. The text has the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        shown = repr(fspath(value) if isinstance(value, PathLike) else value)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}..."
        super().__init__(f"{field} = {shown}: {remedy}")


class MissingSetting(SettingError):
    """A setting that is necessary and was not given. The text has the field and the remedy."""

    def __init__(self, field: str, remedy: str) -> None:
        self.field, self.value, self.remedy = field, None, remedy
        UserError.__init__(self, f"{field}: {remedy}")


class NotSimulated(SettingError):
    """A setting that the simulated system may well have, and that is not simulated: it is no reason why a server would not
    start. The text has the field, the value, the reason and the remedy.
    """

    def __init__(self, field: str, value: object, reason: str, remedy: str = "leave it out") -> None:
        self.reason = reason
        super().__init__(field, value, f"{reason}; {remedy}")


class TraceError(UserError):
    """An invalid trace. The text has the file, line, field, value and remedy.

    ``line`` counts from 1, and the header is line 1, as in an editor; ``None`` refers to the whole file.
    For formats without lines (Parquet, pickle) it is the row, from 1, and ``unit`` is "row".
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


class PluginError(UserError):
    """A policy, memory or cost that is not of this package breaks a rule or raises an exception, which is the ``__cause__``.

    The text has file, line, class, step and what is wrong.

    Args:
        what: What is wrong, and the remedy.

    Attributes:
        path, line: In its code.
        owner: "policy", "memory" or "cost", and its class; empty if what is wrong says it all.
        rule: The rule that it breaks, of docs/extending.md; None for an exception.
        step: Decode step of the run; None outside of one.
    """

    def __init__(
        self,
        what: str,
        owner: str = "",
        path: str = "",
        line: int = 0,
        rule: str | None = None,
        step: int | None = None,
    ) -> None:
        self.what, self.owner, self.path, self.line, self.rule, self.step = what, owner, path, line, rule, step
        where = f"{path}, line {line}: {owner}" if owner else ""
        breaks = "" if rule is None else f" breaks the rule {rule!r}"
        when = "" if step is None else f" in decode step {step}"
        super().__init__(f"{where}{breaks}{when}{'' if rule is None else ':'} {what}" if owner else what)

    def at_step(self, step: int) -> PluginError:
        """The same error in a decode step, unless it has one."""
        if self.step is not None or not self.owner:
            return self
        return PluginError(self.what, self.owner, self.path, self.line, self.rule, step)


class MissingExtra(UserError):
    """A missing optional package that the command needs; the text names the extra to install."""


def install(extra: str = "") -> str:
    """The command that installs fragmeter, or one of its extras. No package index has it, so its name alone installs nothing."""
    target = f"'.[{extra}]'" if extra else "."
    return f"pip install -e {target} in the checkout"


class SimulationFault(FragmeterError):
    """A violated invariant of the simulator: a defect of fragmeter."""


class Overdrawn(SimulationFault):
    """More blocks or slots are taken than are free: the policy granted them."""


class KernelFault(FragmeterError):
    """A kernel on the CPU deadlocks or accesses memory outside its arrays: a defect, or wrong block ids."""


@contextmanager
def user_paths(wanted: str | PathLike[str]) -> Iterator[None]:
    """Convert an ``OSError`` to a ``UserError`` with a remedy; lack of memory to a ``MemoryError``."""
    try:
        yield
    except BrokenPipeError:
        # The reader has closed the pipe, as in ``| head``.
        raise
    except OSError as error:
        if error.errno == ENOMEM:
            raise MemoryError from error
        raise UserError(f"{fspath(wanted)}: cannot be written ({error.strerror}); choose another place") from None
