"""Flags that a command was given and that nothing it runs reads: refused before anything runs.

What runs read of their settings ``sim.engine.unread`` says. Here are the other parts of a command line: how a trace is read,
when requests come, and what clients tell. In a sweep or a comparison it is enough that one of the runs that a flag was
given for reads it; so a sweep over policies may have an axis that some of them lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from ...sim.engine.unread import is_given, why_unread
from ...sim.policy.options import LEAVE_OUT, either
from ...sim.policy.registry import POLICIES, policy
from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ...traces import Pacing, Reading
from ...traces.readers.readers import fields_read
from .inputs import Inputs, Requests


class Unread:
    """What was given for some runs, and whether any of those reads it.

    Args:
        names: Fields that are looked at; None is all.

    Attributes:
        read: Fields that some run was given and reads.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self.read: set[str] = set()
        self._unread: dict[str, SettingError] = {}
        self._fields_read = cache(fields_read)

    def see(self, inputs: Inputs, work: Workload) -> None:
        """A run that is to come, and what it serves.

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
        """Refuse what no run reads.

        Raises:
            SettingError: Names the first such flag, why it is not read, and what to do.
        """
        for name, error in self._unread.items():
            if name not in self.read:
                raise error

    def _why(self, name: str, inputs: Inputs, work: Workload) -> str | None:
        if name in _READING:
            return self._why_not_of_trace(name, inputs.requests.trace)
        if name == "max_tokens":
            chosen = inputs.settings.policy
            if not policy(chosen).reads_max_tokens:
                able = [name for name, kind in POLICIES.items() if kind.reads_max_tokens]
                return f"{chosen} reserves nothing by it; use {either(able)}, {LEAVE_OUT}"
        if name == "burstiness" and inputs.pacing.request_rate == inf:
            return f"at an infinite rate all requests come at once; use a finite one, {LEAVE_OUT}"
        return None if name in LOAD_FIELDS else why_unread(name, inputs.settings, work)

    def _why_not_of_trace(self, name: str, trace: Path | None) -> str | None:
        if trace is None:
            return f"is of a trace; use --trace, {LEAVE_OUT}"
        if name in self._fields_read(trace):
            return None
        return f"{trace.name} {_NEEDED[name]}; leave it out"


#: Fields of a command line that are not of the replica.
LOAD_FIELDS = tuple(field.name for part in (Requests, Reading, Pacing) for field in fields(part))
_READING = tuple(field.name for field in fields(Reading))
#: What a trace is not where it does not read a field.
_NEEDED = {
    "skip_bad": "is a load, which has no rows",
    "tokenizer": "holds no ShareGPT texts",
    "timed_trace_chunk_hash_size": "has no hash_ids of unknown block size",
    "timed_trace_sec_multiplier": "has no timestamp without a unit",
    "max_inflated_bytes": "is not compressed",
}


def given(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Fields of all parts, by name, that ask for more than their defaults."""
    for name, value in inputs.settings.given().items():
        if is_given(name, value):
            yield name, value
    for part, default in ((inputs.requests, Requests()), (inputs.reading, Reading()), (inputs.pacing, Pacing())):
        for name, value in vars(part).items():
            if value != getattr(default, name):
                yield name, str(value) if isinstance(value, Path) else value


def refuse_unread(runs: Iterable[tuple[Inputs, Workload]], names: Iterable[str] | None = None) -> None:
    """Refuse what was given for some runs and none of those reads.

    Args:
        names: As for ``Unread``.

    Raises:
        SettingError: As ``Unread.refuse``.
    """
    found = Unread(names)
    for run in runs:
        found.see(*run)
    found.refuse()
