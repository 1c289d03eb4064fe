"""Of every setting a value unlike its default, and the flags that give it, from its declaration.

A switch or a choice says by its type what else it may be, a number or a text by ``Tried``: bounds do not say which value shows in a
small run.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fragmeter.sim.config.settings import SHARED, Settings, default_of
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.policy.registry import declaring, options_by_policy, readers
from fragmeter.sim.types.bounds import AlwaysTaken, Tried

#: Settings, and the options of the package's policies.
NAMES = (*SHARED, *options_by_policy(POLICIES))


def other_values(name: str) -> tuple[Any, ...]:
    """Values unlike the default: both of a switch that has none, one of any other setting."""
    default, kind = default_of(name), _kind(name)
    if tried := _marks(name, Tried):
        return (tried[0].value,)
    if kind is bool:
        return tuple(value for value in (False, True) if value is not default)
    if get_origin(kind) is Literal:
        return next((value,) for value in get_args(kind) if value != default)
    raise LookupError(f"{name}: neither a switch nor a choice; declare Tried(value) beside its type")


def exempt() -> dict[str, str]:
    """Settings that are refused in no run, and why."""
    return {name: marks[0].why for name in NAMES if (marks := _marks(name, AlwaysTaken))}


def _marks(name: str, kind: type) -> list[Any]:
    """What stands beside the declared type."""
    hint = get_type_hints(Settings if name in SHARED else declaring(name), include_extras=True)[name]
    return [each for each in get_args(hint) if isinstance(each, kind)] if get_origin(hint) is Annotated else []


def flags_of(name: str, value: Any) -> list[str]:
    """What sets a value on the command line, with a policy that reads it."""
    flag = f"--{name.replace('_', '-')}"
    chosen = [] if name in SHARED or Settings().policy in readers(name) else ["--policy", readers(name)[0]]
    if isinstance(value, bool):
        return [*chosen, flag if value else f"--no-{flag[2:]}"]
    return [*chosen, flag, *map(str, value if isinstance(value, tuple) else [value])]


def _kind(name: str) -> Any:
    """The declared type, without bounds and None."""
    kind = get_type_hints(Settings if name in SHARED else declaring(name))[name]
    while get_origin(kind) is Annotated or get_origin(kind) in (Union, UnionType):
        inner = [each for each in get_args(kind) if each is not NoneType]
        if len(inner) > 1 and get_origin(kind) is not Annotated:
            return kind
        kind = inner[0]
    return kind
