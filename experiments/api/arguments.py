"""Keyword arguments of ``fragmeter.simulate``: the flags of ``fragmeter simulate``, with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from inspect import Parameter, Signature
from os import PathLike
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import ValidationError

from ...sim.cluster import Cluster
from ...sim.engine.settings import Settings, default_of, setting_error
from ...sim.policy.registry import declaring, options_by_policy, policy
from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ...traces import Pacing, Reading, Trace, is_frame, trace_of_frame
from ..runs.inputs import Inputs, Requests

#: The parts of a command line, by their names in ``Inputs``.
_PARTS = {"settings": Settings, "requests": Requests, "reading": Reading, "pacing": Pacing, "cluster": Cluster}
_PART_OF = {field.name: part for part, kind in _PARTS.items() for field in fields(kind) if field.name != "options"}
#: What only the command line has, and what to do in its place.
_ELSEWHERE = {
    "out": "is a flag of the command line; call save(folder) of what simulate returns",
    "json": "is a flag of the command line; summary and as_dict() of what simulate returns have the data",
    "record_plan": "is a flag of the command line; use fragmeter simulate --record-plan",
    "record_steps": "is of a recorded plan; use fragmeter simulate --record-plan",
    "shuffle_ids": "is of a recorded plan; use fragmeter simulate --record-plan",
}
_TRACES = "a path, a pandas DataFrame, a Trace or a Workload"
_SINGLE = (str, bool, int, float, tuple, list, PathLike)


class Arguments(NamedTuple):
    """What ``simulate`` was called with.

    Attributes:
        inputs, cluster: As of a command line.
        given: Requests that are in memory; None where the inputs name them.
    """

    inputs: Inputs
    cluster: Cluster
    given: Trace | Workload | None


def arguments(keywords: Mapping[str, Any]) -> Arguments:
    """Read keyword arguments.

    Raises:
        SettingError: An unknown keyword, or a value that cannot be.
        TraceError: A data frame that is no trace.
    """
    if isinstance(chosen := keywords.get("policy"), str):
        # One of another package declares its options when it is imported.
        policy(chosen)
    values = {name: _plain(name, value) for name, value in keywords.items()}
    given = _given(values)
    by_part: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in values.items():
        by_part[_part_of(name) or ""][name] = value
    try:
        made = {part: kind(**by_part[part]) for part, kind in _PARTS.items()}
    except ValidationError as error:
        raise setting_error(error) from None
    return Arguments(Inputs(**{part: made[part] for part in made if part != "cluster"}), made["cluster"], given)


def _part_of(name: str) -> str | None:
    """The part that has a keyword, options of policies included; None where there is no such keyword."""
    return _PART_OF.get(name) or ("settings" if name in options_by_policy() else None)


def signature(*more: Parameter) -> Signature:
    """The signature of ``simulate``: every keyword with its default.

    Args:
        more: Parameters of its own.
    """
    keywords = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for kind in _PARTS.values()
        for field in fields(kind)
        if field.name in _PART_OF
    ]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default_of(name), annotation=_types(name)[0])
        for name in options_by_policy()
    ]
    return Signature([*keywords, *options, *more])


def _plain(name: str, value: Any) -> Any:
    """The value of a keyword as a command line could have it: numpy's numbers become Python's.

    Raises:
        SettingError: There is no such keyword, or the value is of no type that any takes.
    """
    if _part_of(name) is None:
        raise SettingError(name, _shown(value), _ELSEWHERE.get(name) or _nearest(name))
    if name == "trace":
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, _SINGLE):
        raise SettingError(name, _shown(value), "must be a number, a text, True or False")
    kinds = _types(name)
    if isinstance(value, bool) and bool not in kinds:
        raise SettingError(name, value, "is no switch; give a value")
    if name == "max_tokens" and isinstance(value, int):
        # The flag takes a rule or a number, and is a text.
        return str(value)
    return value


def _shown(value: Any) -> Any:
    """A value for an error of one line."""
    return value if isinstance(value, str | bool | int | float | None) else type(value).__name__


def _nearest(name: str) -> str:
    """What to do about a keyword that there is none of."""
    near = get_close_matches(name, [*_PART_OF, *options_by_policy(), "record_blocks"], n=3)
    found = f"did you mean {' or '.join(near)}?" if near else "help(fragmeter.simulate) has them all"
    return f"is no keyword of simulate; {found}"


@cache
def _types(name: str) -> tuple[Any, ...]:
    """The types of a keyword's values."""
    part = _PART_OF.get(name)
    declared = declaring(name) if part is None else _PARTS[part]
    hint = get_type_hints(declared)[name]
    return (hint, *get_args(hint))


def _given(values: dict[str, Any]) -> Trace | Workload | None:
    """Take a trace that is in memory out of the values.

    Raises:
        SettingError: It is nothing that can be served, or stands beside what is only of a file.
        TraceError: A data frame that is no trace.
    """
    trace = values.get("trace")
    if trace is None or isinstance(trace, str | PathLike):
        return None
    if not (isinstance(trace, Trace | Workload) or is_frame(trace)):
        raise SettingError("trace", _shown(trace), f"must be {_TRACES}")
    kind = type(trace).__name__
    apart = {"reading": "is of a file", "requests": "is settled by a Workload", "pacing": "is settled by a Workload"}
    for name in values:
        part = _part_of(name) or ""
        if name == "dataset" or part == "reading" or (isinstance(trace, Workload) and part in apart):
            if name == "trace" or values[name] == getattr(_PARTS[part], name):
                continue
            why = "excludes trace" if name == "dataset" else apart[part]
            raise SettingError(name, _shown(values[name]), f"{why}, and trace is a {kind}; leave it out")
    del values["trace"]
    return trace_of_frame(trace) if is_frame(trace) else trace
