"""The flags of a replica, for verbs that ask which of them were given: those of ``simulate``, without defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from ...sim.engine.settings import Settings

#: Settings that such verbs have flags of their own for.
OWN = ("model", "seed")
_TYPES = get_type_hints(Settings)


@dataclass(frozen=True)
class _Given:
    """What every such flag's holder can say."""

    def given(self) -> dict[str, Any]:
        """The settings that the user named, and their values."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


if TYPE_CHECKING:
    ReplicaFlags = _Given
else:
    ReplicaFlags = make_dataclass(
        "ReplicaFlags",
        [(field.name, _TYPES[field.name] | None, None) for field in fields(Settings) if field.name not in OWN],
        bases=(_Given,),
        namespace={"__doc__": Settings.__doc__, "__module__": __name__},
        frozen=True,
    )
REPLICA = Annotated[
    ReplicaFlags, Parameter(name="*", negative_iterable="", group=Group("Replica, with --against", sort_key=3))
]
