"""Refusal of flags that no run of a command reads, before anything runs.

``sim.config.unread`` covers the settings of a replica. This module covers the other parts of a command line: the
reading of a trace, the arrivals, and the clients' declarations. In a sweep or a comparison one run that reads the flag
is enough, so a sweep over policies may have an axis that some of them do not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ...sim.config.unread import is_given, why_unread
from ...sim.policy.options import LEAVE_OUT, either
from ...sim.policy.registry import POLICIES, policy
from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ...traces import Pacing, Reading
from ...traces.readers.readers import fields_read
from .inputs import Inputs, Requests


class Unread:
    """Fields given for some runs, and whether any of the runs reads them.

    Args:
        names: Fields to check; None checks all.

    Attributes:
        read: Fields that some run was given and reads.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self.read: set[str] = set()
        self._unread: dict[str, SettingError] = {}
        self._fields_read = cache(fields_read)

    def see(self, inputs: Inputs, work: Workload) -> None:
        """Add a planned run and its workload.

        Raises:
            UserError: An unknown model, or a trace that cannot be read.
        """
        for name, value in given(inputs):
            if name not in self.read and (self._names is None or name in self._names):
                why = self._why(name, inputs, work)
                if why is None:
                    self.read.add(name)
                else:
                    self._unread.setdefault(name, SettingError(name, value, why))

    def refuse(self) -> None:
        """Refuse fields that no run reads.

        Raises:
            SettingError: Names the first such field, the reason, and the remedy.
        """
        for name, error in self._unread.items():
            if name not in self.read:
                raise error

    def _why(self, name: str, inputs: Inputs, work: Workload) -> str | None:
        if name in _READING:
            return _why_not_of_trace(name, inputs.requests.trace, inputs.reading, self._fields_read)
        if name == "max_tokens":
            chosen = inputs.settings.policy
            if not policy(chosen).reads_max_tokens:
                able = [name for name, kind in POLICIES.items() if kind.reads_max_tokens]
                return f"{chosen} reserves nothing by it; use {either(able)}, {LEAVE_OUT}"
        if name == "burstiness" and inputs.pacing.rate == inf:
            return f"at an infinite rate all requests arrive at once; use a finite rate, {LEAVE_OUT}"
        return None if name in LOAD_FIELDS else why_unread(name, inputs.settings, work)


def _why_not_of_trace(
    name: str, trace: Path | None, reading: Reading, fields_of: Callable[[Path, str | None], frozenset[str]]
) -> str | None:
    if trace is None:
        return f"applies only to a trace; use --trace, {LEAVE_OUT}"
    if name in fields_of(trace, reading.columns):
        return None
    return f"{trace.name} {_NEEDED[name]}; leave it out"


def refuse_flags(remedy: str, **flags: Any) -> None:
    """Refuse flags that were given where nothing reads them.

    Args:
        remedy: Why, and what to do.
        flags: Values by name; None and False are not given.

    Raises:
        SettingError: Names the first that was given.
    """
    for name, value in flags.items():
        if value is not None and value is not False:
            raise SettingError(name, str(value) if isinstance(value, Path) else value, remedy)


def refuse_unread_reading(reading: Reading, trace: Path | None) -> None:
    """Refuse options of a reader that a trace, or no trace, does not use.

    Raises:
        UserError: There is one, or the trace cannot be read.
    """
    for name, value in vars(reading).items():
        if value != getattr(Reading(), name):
            why = _why_not_of_trace(name, trace, reading, fields_read)
            if why is not None:
                raise SettingError(name, str(value) if isinstance(value, Path) else value, why)


#: Fields of a command line outside of the replica.
LOAD_FIELDS = tuple(field.name for part in (Requests, Reading, Pacing) for field in fields(part))
_READING = tuple(field.name for field in fields(Reading))
#: The reason why a trace does not read a field.
_NEEDED = {
    "skip_bad": "is a load, which has no rows",
    "tokenizer": "holds no ShareGPT texts",
    "columns": "has columns that it is known by",
    "time_unit": "has no times",
    "timed_trace_chunk_hash_size": "has no hash_ids of unknown block size",
    "timed_trace_sec_multiplier": "has no timestamp without a unit",
    "max_inflated_bytes": "is not compressed",
}


def given(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Fields of all parts, by name, with values other than their defaults."""
    for name, value in inputs.settings.given().items():
        if is_given(name, value):
            yield name, value
    for part, default in ((inputs.requests, Requests()), (inputs.reading, Reading()), (inputs.pacing, Pacing())):
        for name, value in vars(part).items():
            if value != getattr(default, name):
                yield name, str(value) if isinstance(value, Path) else value


def refuse_unread(runs: Iterable[tuple[Inputs, Workload]], names: Iterable[str] | None = None) -> None:
    """Refuse fields that are given for some runs and that none of those runs reads.

    Args:
        names: As for ``Unread``.

    Raises:
        SettingError: As ``Unread.refuse``.
    """
    found = Unread(names)
    for run in runs:
        found.see(*run)
    found.refuse()
