"""Measured runs of the user: a JSON file in the form of ``facts/servers.json`` (docs/results/servers.md describes it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator, validate_call
from pydantic.dataclasses import dataclass

from ...sim.types.errors import SettingError
from ...sim.types.user_files import content_of
from ...sim.types.validation import complaint
from .server_loads import LOADS

#: ``class`` of these runs.
ADDED = "added"
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _Statistics:
    mean: _Positive | None = None
    median: _Positive | None = None
    p99: _Positive | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _Measured:
    output_throughput: _Positive | None = None
    ttft_ms: _Statistics | None = None
    tpot_ms: _Statistics | None = None
    e2el_ms: _Statistics | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _Run:
    """One run; see docs/results/servers.md."""

    name: _Text
    source: _Text
    settings: dict[str, Any]
    measured: _Measured
    endpoint: Literal["completions", "chat"] = "completions"
    first_used: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    published_errors: dict[str, dict[str, float]] = Field(default_factory=dict)
    requests_file: _Text | None = None
    shared_prefix: dict[str, Any] | None = None
    closed_loop: dict[str, Any] | None = None
    poisson: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    sharegpt: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Run:
        loads = [name for name in (*LOADS, "requests_file") if getattr(self, name) is not None]
        if len(loads) != 1:
            raise ValueError(f"a run has one load; give one of {', '.join((*LOADS, 'requests_file'))}")
        if not any(vars(self.measured).values()):
            raise ValueError("nothing is measured; give a figure")
        return self


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    runs: Annotated[list[_Run], Field(min_length=1)]


_FILE = TypeAdapter(_File)


def added_facts(path: Path) -> list[Mapping[str, Any]]:
    """The runs of a file, in the form of ``facts/servers.json``.

    Raises:
        UserError: It cannot be read or is damaged; names the run, the field, its value and the remedy.
    """
    try:
        found = _FILE.validate_json(content_of(path, "add"))
    except ValidationError as error:
        raise complaint(path.name, error, "file of measured runs") from None
    facts: list[Mapping[str, Any]] = [
        {"class": ADDED, **_without_empty(run)} for run in _FILE.dump_python(found)["runs"]
    ]
    for fact in facts:
        for load in LOADS:
            if load in fact:
                _require_load(f"{path.name}: {fact['name']}: {load}", load, fact[load])
    return facts


def _without_empty(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_empty(value) if isinstance(value, dict) else value
        for name, value in given.items()
        if value is not None and value != {}
    }


def _require_load(where: str, load: str, given: Mapping[str, Any]) -> None:
    """Raise SettingError for arguments that a load does not have, or that it cannot be drawn from."""
    try:
        validate_call(LOADS[load])(where, **given)
    except ValidationError as error:
        raise complaint(where, error, f"load {load}") from None
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise SettingError(
            where, str(dict(given)), f"cannot be drawn ({error}); docs/results/servers.md describes it"
        ) from None
