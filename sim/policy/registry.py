"""Finds policies by name: policies of this package, of installed packages, and any class that can be imported.

vllm-v1                      a name in POLICIES, or in OPTIONAL
my-policy                    an entry point of the group "fragmeter.policies"
package.module:ClassName     a class, also of a file in the current directory
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ..types.errors import SettingError
from ..types.plugins import described, is_plugin, know, where_raised
from ..types.user_code import imported_files, note_loaded
from .base import AnyPolicy, Policy
from .fastgen import FastGen
from .lightllm import LightLLM
from .llama_cpp import LlamaCpp
from .options import Options, option_names
from .orca import OrcaMax, OrcaOracle, OrcaPaper, OrcaPow2
from .sarathi import Sarathi
from .server import Pool
from .sglang import SGLang
from .sharing import SharingSosp23, SharingV0
from .static import FasterTransformer, StaticBatching
from .tgi import Tgi
from .trtllm import TrtllmMaxUtil, TrtllmNoEvict
from .vattention import VAttention
from .vllm_real import VllmReal
from .vllm_sosp23 import VllmSosp23
from .vllm_v0 import VllmV0
from .vllm_v1 import VllmV1

_KINDS: tuple[type[AnyPolicy], ...] = (
    *(StaticBatching, FasterTransformer, OrcaPaper, OrcaMax, OrcaPow2, OrcaOracle, VllmSosp23),
    *(VllmV0, VllmV1, Sarathi, Tgi, TrtllmNoEvict, TrtllmMaxUtil, LightLLM, FastGen, VAttention, SGLang, LlamaCpp),
)
#: Every policy of the package by its name on the command line: those of the SOSP'23 paper first, from the most wasteful
#: kind to the least.
POLICIES: dict[str, type[AnyPolicy]] = {policy.name: policy for policy in _KINDS}
#: Policies of the package that need a package that it does not install.
OPTIONAL: dict[str, type[AnyPolicy]] = {VllmReal.name: VllmReal}
#: The same schedulers where sequences share blocks.
SHARING: dict[type[AnyPolicy], type[AnyPolicy]] = {VllmSosp23: SharingSosp23, VllmV0: SharingV0}
#: Entry points of other packages.
POLICY_GROUP, ALLOCATOR_GROUP = "fragmeter.policies", "fragmeter.allocators"


def policy(name: str) -> type[AnyPolicy]:
    """The class of a policy.

    Args:
        name: A policy of the package, an entry point, or ``package.module:ClassName``.

    Raises:
        SettingError: Nothing has this name, or it is no ``Policy``.
    """
    built_in = POLICIES.get(name) or OPTIONAL.get(name)
    return _imported_policy(name) if built_in is None else built_in


def serves_groups(kind: type[AnyPolicy]) -> bool:
    """Whether a policy admits the sequences of a request together; other policies serve them as separate requests."""
    return kind.groups_sequences or kind in SHARING


def serving(kind: type[AnyPolicy], options: Options, grouped: bool) -> type[AnyPolicy]:
    """The class that serves with these options.

    Args:
        grouped: Whether the sequences of a request share blocks; False copies the tokens that they would share.
    """
    return SHARING.get(kind, kind) if grouped else kind.variant(options)


def policies() -> dict[str, type[AnyPolicy]]:
    """All policies with a name: those of the package, then those of installed packages.

    Raises:
        SettingError: A policy of an installed package cannot be imported.
    """
    own = POLICIES | OPTIONAL
    return own | {name: policy(name) for name in installed() if name not in own}


def installed() -> list[str]:
    """Names of the policies of installed packages."""
    return sorted(_entry_points(POLICY_GROUP))


def allocator(name: str) -> Callable[[Pool], object]:
    """The memory class of an allocator of another package.

    Args:
        name: An entry point of the group "fragmeter.allocators", or ``package.module:ClassName``.

    Raises:
        SettingError: It cannot be imported, or is not callable.
    """
    found = imported("allocator", name, ALLOCATOR_GROUP)
    if not callable(found):
        raise SettingError("allocator", name, "cannot be called with a Pool; name a class of a memory")
    return found


@cache
def _imported_policy(name: str) -> type[AnyPolicy]:
    found = imported("policy", name, POLICY_GROUP, POLICIES | OPTIONAL)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise SettingError("policy", name, "is not a subclass of fragmeter.sim.policy.Policy; derive it from that")
    if found.schedule is Policy.schedule or found.memory is Policy.memory:
        raise SettingError("policy", name, "must define schedule and memory; docs/extending.md has an example")
    if not (is_dataclass(found.options_type) and issubclass(found.options_type, Options)):
        raise SettingError(
            "policy", name, "its options_type must be a dataclass derived from fragmeter.sim.policy.Options"
        )
    unset = [each.name for each in fields(found.options_type) if each.default is MISSING]
    if unset:
        raise SettingError("policy", name, f"its option {unset[0]} has no default; give it one")
    _KNOWN[name] = found
    return found


def imported(field: str, name: str, group: str, others: Iterable[str] = ()) -> object:
    """Import ``package.module:Name``, or the object of an entry point.

    Args:
        field: Name of the setting, for errors.
        group: Group of the entry points.
        others: Further valid names, for errors.

    Raises:
        SettingError: It cannot be imported.
    """
    module, attribute = _located(field, name, group, others)
    # As ``python -m`` does: a file beside one's own data is found without installing it.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    before = set(sys.modules)
    try:
        found: object = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # another package's module may raise anything
        place = where_raised(error)
        text = described(error) + (f" in {place[0]}, line {place[1]}" if place else "")
        raise SettingError(field, name, f"cannot be imported ({text}); check the name and the module") from error
    note_loaded(module, sys.modules.keys() - before)
    know(field, found)
    return found


def _located(field: str, name: str, group: str, others: Iterable[str] = ()) -> tuple[str, str]:
    """Module and attribute that ``package.module:Name``, or an entry point, names; see ``imported``."""
    module, colon, attribute = name.partition(":")
    if colon:
        return module, attribute
    point = _entry_points(group).get(name)
    if point is None:
        known = [*others, *_entry_points(group)]
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        listed = f"one of {', '.join(known)}, or package.module:ClassName" if known else "package.module:ClassName"
        raise SettingError(field, name, f"{listed}{hint}")
    return point.module, point.attr


def plugin_of(chosen: str, allocator_name: str | None = None) -> type | None:
    """The policy class of another package, else its allocator class; None if both are of this package.

    Args:
        chosen, allocator_name: See ``plugin_files``.
    """
    parts = [
        *([] if chosen in POLICIES else [policy(chosen)]),
        *([allocator(allocator_name)] if allocator_name else []),
    ]
    kinds = (part if isinstance(part, type) else type(part) for part in parts)
    return next((kind for kind in kinds if is_plugin(kind)), None)


def plugin_files(chosen: str, allocator_name: str | None = None) -> dict[str, Path]:
    """Files of the user's code that a policy and an allocator consist of, by module name.

    Args:
        chosen: The setting ``policy``.
        allocator_name: The setting ``allocator``.

    Raises:
        SettingError: One of them cannot be imported.
    """
    found: dict[str, Path] = {}
    if chosen not in POLICIES | OPTIONAL:
        policy(chosen)
        found |= imported_files(_located("policy", chosen, POLICY_GROUP)[0])
    if allocator_name is not None:
        allocator(allocator_name)
        found |= imported_files(_located("allocator", allocator_name, ALLOCATOR_GROUP)[0])
    return found


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


#: Policies of other packages that have been named in this process.
_KNOWN: dict[str, type[AnyPolicy]] = {}


def declaring(name: str, chosen: type[AnyPolicy] | None = None) -> type[Options] | None:
    """The options class that declares ``name``: that of the chosen policy, else the first one found."""
    for kind in (*(() if chosen is None else (chosen,)), *POLICIES.values(), *_KNOWN.values()):
        if name in option_names(kind.options_type):
            return kind.options_type
    return None


def options_by_policy(policies: Mapping[str, type[AnyPolicy]] | None = None) -> dict[str, list[str]]:
    """For each option, the names of the policies that have it.

    Args:
        policies: Policies by name; None takes all known ones.
    """
    found: dict[str, list[str]] = {}
    for name, kind in (POLICIES | _KNOWN if policies is None else policies).items():
        for option in option_names(kind.options_type):
            found.setdefault(option, []).append(name)
    return found


def readers(option: str) -> list[str]:
    """Names of the policies that have an option; policies of other packages only if none of this package has it."""
    return options_by_policy(POLICIES).get(option) or options_by_policy()[option]
