"""The flags of a replica: the settings that all policies share, and the options that policies declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter
from docstring_parser.google import parse

from ...sim.config.settings import SHARED, Settings, default_of, settings
from ...sim.cost import COST_NAMES
from ...sim.policy.options import help_of, type_of
from ...sim.policy.registry import declaring, options_by_policy, policies, policy
from ...sim.spec import gpu_names, model_names

#: Settings with flags of their own on verbs that need to know which settings were given.
OWN = ("model", "seed")
#: Note of ``validate``, which refuses several engines.
_OF_ONE = {
    "data_parallel_size": "Only 1: one engine is compared with its benchmark, and more are refused. ",
    "kv_cache_dtype": "On a device auto or fp8; by default the calibration's. ",
}


@dataclass(frozen=True)
class _Flags:
    """Base of generated flags."""

    def given(self) -> dict[str, Any]:
        """The settings that the user named and their values, for flags without defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def settings(self) -> Settings:
        """The settings, for flags with defaults.

        Raises:
            SettingError: An invalid value.
        """
        return settings(**{field.name: getattr(self, field.name) for field in fields(self)})


def _shared_help() -> dict[str, str]:
    """Help of the shared settings, with the names that a flag takes."""
    described = {each.arg_name: each.description or "" for each in parse(Settings.__doc__ or "").params}
    names = {"policy": policies(), "model": model_names(), "gpu": gpu_names(), "cost": COST_NAMES}
    # Without docstrings (PYTHONOPTIMIZE=2) there is no help.
    described = {name: described.get(name, "") for name in SHARED}
    return described | {name: f"{described[name]} One of {', '.join(values)}." for name, values in names.items()}


@cache
def _declared() -> Mapping[str, tuple[Any, str]]:
    """Type and help of every flag by name."""
    types, helps = get_type_hints(Settings), _shared_help()
    found = {name: (types[name], helps[name]) for name in SHARED}
    for name, readers in options_by_policy().items():
        declared = declaring(name)
        assert declared is not None
        text = f"{help_of(declared, name)} {_defaults(name, readers)} Policies: {', '.join(readers)}."
        found[name] = type_of(declared, name), text
    return found


def _defaults(name: str, readers: Sequence[str]) -> str:
    """The default of an option, which may differ between policies."""
    by_value: dict[Any, list[str]] = {}
    for reader in readers:
        by_value.setdefault(default_of(name, policy(reader)), []).append(reader)
    (first, _), *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
    also = "".join(f", and {value} under {' and '.join(names)}" for value, names in others)
    return "" if first is None and not others else f"The default is {first}{also}."


def _flags(
    name: str, has_defaults: bool, without: tuple[str, ...] = (), notes: Mapping[str, str] = MappingProxyType({})
) -> type:
    """A dataclass of all flags.

    Args:
        has_defaults: Whether the value of an absent flag of a shared setting is its default; otherwise it is None. An
            absent option of a policy is always None, because its default depends on the policy.
        notes: Sentences in front of the help of a flag.
    """
    made: list[tuple[str, Any, Any]] = []
    for field, (kind, text) in _declared().items():
        if field not in without:
            has_default = has_defaults and field in SHARED
            hint = kind if has_default else kind | None
            default = default_of(field) if has_default else None
            made.append((field, Annotated[hint, Parameter(help=notes.get(field, "") + text)], default))
    namespace = {"__doc__": "The replica.", "__module__": __name__}
    return make_dataclass(name, made, bases=(_Flags,), namespace=namespace, frozen=True)


if TYPE_CHECKING:
    SettingsFlags = _Flags

    class ReplicaFlags(_Flags):
        gpu: str | None
        kv_cache_dtype: str | None
else:
    SettingsFlags = _flags("SettingsFlags", has_defaults=True)
    ReplicaFlags = _flags("ReplicaFlags", has_defaults=False, without=OWN, notes=_OF_ONE)
SETTINGS = Annotated[SettingsFlags, Parameter(name="*", negative_iterable="", group=Group("Replica", sort_key=0))]
REPLICA = Annotated[
    ReplicaFlags, Parameter(name="*", negative_iterable="", group=Group("Replica, with --against", sort_key=3))
]
