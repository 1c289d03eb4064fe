"""The command and the line of Python that make a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import join
from typing import Any

from ..runs.inputs import Inputs
from ..runs.unread import given

#: Written even at their defaults, so that a line says what is served by what.
_ALWAYS = ("policy", "model", "gpu")


def command(inputs: Inputs) -> str:
    """``fragmeter simulate`` with the flags of these inputs, as a shell reads it."""
    words = [word for name, value in _named(inputs) for word in _flag(name, value)]
    return join(["fragmeter", "simulate", *words])


def python(inputs: Inputs) -> str:
    """The call of ``fragmeter.simulate``, imported as ``fm``, with the same inputs."""
    arguments = (f"{name}={_plain(value)!r}" for name, value in _named(inputs))
    return f"fm.simulate({', '.join(arguments)})"


def _named(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(inputs.settings, name)) for name in _ALWAYS)
    yield from ((name, value) for name, value in given(inputs) if name not in _ALWAYS)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple | list) else [value]
    return [f"--{flag}", *(str(_plain(each)) for each in values)]


def _plain(value: Any) -> Any:
    """A number without a fraction of zero, a path as text."""
    if isinstance(value, Path):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
